"""How the simulator's own time and memory grow with the number of commands."""

from __future__ import annotations

import dataclasses
import gc
import time
import tracemalloc
from collections.abc import Sequence

from sidelane.execute.sim import simulate
from sidelane.machine.load import named
from sidelane.model.scale import two_level_all_gather

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
