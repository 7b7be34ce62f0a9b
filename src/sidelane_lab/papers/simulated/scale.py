"""How the simulator's own time and memory grow with the number of commands.

``python -m sidelane_lab.papers.simulated.scale FILE`` records it.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidelane.cli import provenance
from sidelane_lab.machines.load import named
from sidelane_lab.model.scale import two_level_all_gather
from sidelane_lab.sim import simulate

RANKS = (64, 128, 256, 512, 1024)
PART = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleRow:
    """One size: seconds for the simulation alone, peak memory that it allocated on top of the program."""

    ranks: int
    commands: int
    simulated_us: float
    seconds: float
    peak_mb: float

    @property
    def us_per_command(self) -> float:
        return self.seconds * 1e6 / self.commands


def measure(ranks: Sequence[int] = RANKS) -> list[ScaleRow]:
    """Simulate two-level all_gathers on nodes of eight MI300X."""
    machine = named("mi300x8")
    rows = []
    for count in ranks:
        nodes = count // machine.gpus
        cluster = dataclasses.replace(machine, nodes=nodes)
        program = two_level_all_gather(nodes, machine.gpus, PART)
        gc.collect()
        began = time.perf_counter()
        run = simulate(program, cluster)
        seconds = time.perf_counter() - began
        tracemalloc.start()
        simulate(program, cluster)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append(ScaleRow(count, run.commands, run.time_us, seconds, peak / 1e6))
    return rows


def record(path: Path, rows: Sequence[ScaleRow]) -> None:
    """Write rows with where they come from. Seconds are of the machine at hand; all else is the same everywhere."""
    content: dict[str, Any] = {
        "study": "simulator_scale",
        "program": f"two-level all_gather on nodes of 8 MI300X, {PART} bytes a rank",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": f"python -m sidelane_lab.papers.simulated.scale {path.name}",
        "processor": provenance.processor_name(),
        "software": provenance.software_versions(),
        "rows": [
            {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}
            for row in rows
            for figures in [dataclasses.asdict(row) | {"us_per_command": row.us_per_command}]
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m sidelane_lab.papers.simulated.scale FILE")
    record(Path(sys.argv[1]), measure())
