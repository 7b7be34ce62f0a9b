"""How the simulator's own time and memory grow with the number of commands: an all-gather in two levels, in place.

The ranks of a node exchange their shards directly; then every rank takes part in a ring over the nodes with its
namesakes, which passes on whole nodes' shards. ``python -m sidelane_large_programs.scale FILE`` records the growth.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from sidelane.cli.output import write_json
from sidelane.program.collective import Buffer, Collective, Kind, Span
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane_lab.harness import provenance
from sidelane_lab.machines.load import named
from sidelane_lab.sim.simulate import simulate

RANKS = (64, 128, 256, 512, 1024)
PART = 1 << 20


def two_level_all_gather(nodes: int, gpus: int, part: int) -> Program:
    """Build it: direct inside nodes of ``gpus`` ranks (1: a ring alone), then a ring. ``part``: bytes of a shard."""
    ranks, block = nodes * gpus, gpus * part
    arrived = nodes  # flags behind those of the ring: one for each peer inside the node
    queues = []
    for rank in range(ranks):
        node, local = divmod(rank, gpus)
        inside: list[Command] = []
        for step in range(1, gpus):
            peer = node * gpus + (local + step) % gpus
            inside.append(Copy(_output(peer, rank * part, part), _output(rank, rank * part, part)))
            inside.append(Signal(Flag(peer, arrived + local), EPOCH))
        waits: list[Command] = [Wait(Flag(rank, arrived + other), EPOCH) for other in range(gpus) if other != local]
        queues.append(Queue(rank, Engine(EngineKind.DMA, 0), tuple(inside)))
        if nodes > 1:
            right = ((node + 1) % nodes) * gpus + local
            offsets = [((node - step) % nodes) * block for step in range(nodes - 1)]
            waits += _ring_steps(rank, right, nodes, offsets, block)
        queues.append(Queue(rank, Engine(EngineKind.DMA, 1), tuple(waits)))
    return Program(_collective(ranks, part), "two levels", tuple(queues), (0,) * ranks, nodes + gpus)


def _ring_steps(rank: int, right: int, length: int, offsets: list[int], nbytes: int) -> list[Command]:
    """Pass on the own bytes, then what came from the left; at last wait for the last that comes."""
    commands: list[Command] = []
    for step, offset in enumerate(offsets):
        if step:
            commands.append(Wait(Flag(rank, step - 1), EPOCH))
        commands.append(Copy(_output(right, offset, nbytes), _output(rank, offset, nbytes)))
        commands.append(Signal(Flag(right, step), EPOCH))
    commands.append(Wait(Flag(rank, length - 2), EPOCH))
    return commands


def _output(rank: int, offset: int, nbytes: int) -> Span:
    return Span(rank, Buffer.OUTPUT, offset, nbytes)


def _collective(ranks: int, part: int) -> Collective:
    row = (part,) * ranks
    return Collective(Kind.ALL_GATHER, ranks, (row,) * ranks, in_place=True)


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
    figures = [dataclasses.asdict(row) | {"us_per_command": row.us_per_command} for row in rows]
    content = {
        "study": "simulator_scale",
        "program": f"two-level all_gather on nodes of 8 MI300X, {PART} bytes a rank",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": f"PYTHONPATH=contrib/large_programs python -m sidelane_large_programs.scale {path.name}",
        "processor": provenance.processor_name(),
        "software": provenance.software_versions(),
        "rows": [{k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()} for row in figures],
    }
    write_json(path, content)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m sidelane_large_programs.scale FILE")
    record(Path(sys.argv[1]), measure())
