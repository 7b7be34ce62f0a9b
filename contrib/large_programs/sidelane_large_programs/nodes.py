"""Predicted collectives on 1 to 128 nodes of eight H100s, and what the prediction itself takes.

``python -m sidelane_large_programs.nodes FILE`` records, by collective, bytes and ranks: the plans that a process group
runs, flat rings, a tree where there is one, and the floor; the seconds to build, verify and simulate each program, and
the peak memory of the process by then. ``verify`` takes programs of all ranks, of up to :data:`VERIFIED_RANKS` here.
Larger ones are proved at their own size by the ranks that stand for all others (``quotient.py``); where none do, or
the moves of ranks do not map their bytes by cells, with as many nodes as have :data:`VERIFIED_RANKS`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import gc
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sidelane.cli.output import write_json
from sidelane.integrations.nodes.topology import choose_steps
from sidelane.program.collective import Kind
from sidelane.program.ir import Program
from sidelane.program.verify import verify
from sidelane_lab.harness import provenance
from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.node_steps import nodes_of, pieces_of
from sidelane_lab.model.nodes import KINDS, least_us
from sidelane_lab.model.nodes_baselines import TREES, flat, tree
from sidelane_lab.model.nodes_program import planned
from sidelane_lab.model.world import NodesProgram
from sidelane_lab.sim import Fold
from sidelane_large_programs.action import Action, AsymmetryError, act
from sidelane_large_programs.quotient import prove

MACHINE = "h100x8x2"
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
SIZES = (64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
VERIFIED_RANKS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class NodesRow:
    """One program.

    Attributes:
        way: ``hierarchical``, ``flat`` or ``tree``.
        pieces: of the plan, by the rule of process groups; 0 for the others.
        us: predicted time; None where the program is not simulated.
        commands: of the ranks that are simulated.
        simulated_ranks: ranks that stand for all.
        verified_ranks: ranks of the program that was verified.
        proof: ``all ranks``; ``symmetry`` where those that stand for all others were verified.
        build_s, verify_s, simulate_s: seconds of a processor of the machine at hand.
        peak_mb: largest memory of the process by then.
    """

    collective: str
    bytes: int
    ranks: int
    way: str
    pieces: int
    us: float | None
    floor_us: float
    commands: int = 0
    simulated_ranks: int = 0
    verified_ranks: int = 0
    proof: str = ""
    build_s: float = 0.0
    verify_s: float = 0.0
    simulate_s: float = 0.0
    peak_mb: float = 0.0


def rows(ranks: Sequence[int] = RANKS, sizes: Sequence[int] = SIZES) -> Iterator[NodesRow]:
    """Yield the row of each program."""
    machine = named(MACHINE)
    for count in ranks:
        cluster = dataclasses.replace(machine, nodes=count // machine.gpus)
        for kind in KINDS:
            for nbytes in sizes:
                for way, pieces in ways(cluster, kind, nbytes):
                    gc.collect()
                    gc.disable()  # as in a proof: no object here refers to itself
                    try:
                        yield measure(cluster, kind, nbytes, way, pieces)
                    finally:
                        gc.enable()


def ways(machine: Machine, kind: Kind, nbytes: int) -> Iterator[tuple[str, int]]:
    """Yield the ways of a collective, with the pieces of each."""
    if machine.nodes > 1:
        choice = choose_steps(kind, nbytes, nodes_of([machine.gpus] * machine.nodes))
        yield "hierarchical", pieces_of(choice, nbytes)
    yield "flat", 0
    if kind in TREES:
        yield "tree", 0


def measure(machine: Machine, kind: Kind, nbytes: int, way: str, pieces: int) -> NodesRow:
    """Build, verify and simulate a program."""
    floor = least_us(machine, kind, nbytes)
    began = time.process_time()
    program = build(machine, kind, nbytes, way, pieces)
    built = time.process_time()
    row = NodesRow(str(kind), nbytes, machine.world_size, way, pieces, None, floor)
    if program is None:
        return row
    run = program.simulate()
    simulated = time.process_time()
    nodes = min(machine.nodes, max(1, VERIFIED_RANKS // machine.gpus))
    proved_s = _prove_s(machine, kind, nbytes, way, pieces, program) if nodes < machine.nodes else None
    by_all = proved_s is None
    return dataclasses.replace(
        row,
        us=run.time_us,
        commands=run.commands,
        simulated_ranks=len({queue.rank for queue in program.program.queues}),
        verified_ranks=nodes * machine.gpus if by_all else machine.world_size,
        proof="all ranks" if by_all else "symmetry",
        build_s=built - began,
        verify_s=_verify_s(nodes, kind, nbytes, way, pieces) if proved_s is None else proved_s,
        simulate_s=simulated - built,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    )


def build(
    machine: Machine, kind: Kind, nbytes: int, way: str, pieces: int, fold: Fold | None = None
) -> NodesProgram | None:
    """Build the program of a way, for the ranks of a fold; None as in the builder of flat rings."""
    if way == "hierarchical":
        return planned(machine, kind, nbytes, pieces, fold)
    return (flat if way == "flat" else tree)(machine, kind, nbytes, fold)


def symmetric(
    machine: Machine, kind: Kind, nbytes: int, way: str, pieces: int, *, alike: bool = True
) -> tuple[Program, Action]:
    """Return the queues of the ranks that stand for all others, and the moves that make the others of them.

    Args:
        machine, kind, nbytes, way, pieces: those of the program.
        alike: places of a node may stand for each other.

    Raises:
        AsymmetryError: there are none.
    """
    program = build(machine, kind, nbytes, way, pieces)
    if program is None or program.fold is None:
        raise AsymmetryError("no rank stands for another")
    fold = program.fold if alike else dataclasses.replace(program.fold, places=machine.gpus)

    def moved(by: tuple[int, int]) -> Program:
        built = build(machine, kind, nbytes, way, pieces, dataclasses.replace(fold, moved=by))
        assert built is not None
        return built.program

    return moved((0, 0)), act(moved, fold)


def _prove_s(machine: Machine, kind: Kind, nbytes: int, way: str, pieces: int, program: NodesProgram) -> float | None:
    """Prove a program by symmetry; return the seconds, None where that cannot be. Places that use scratch by the order
    of their ranks do not stand for each other in the proof: nodes do.
    """
    if program.fold is None:
        return None
    began = time.process_time()
    for alike in (True, False) if way == "hierarchical" else (True,):
        try:
            found, moves = symmetric(machine, kind, nbytes, way, pieces, alike=alike)
            prove(found, moves)
        except AsymmetryError:
            continue
        return time.process_time() - began
    return None


@functools.cache
def _verify_s(nodes: int, kind: Kind, nbytes: int, way: str, pieces: int) -> float:
    """Verify a program of all ranks; return the seconds. That of a larger group is the same, and is not repeated."""
    machine = dataclasses.replace(named(MACHINE), nodes=nodes)
    program = build(machine, kind, nbytes, way, pieces, Fold.whole(machine))
    began = time.process_time()
    if program is not None:
        verify(program.program)
    return time.process_time() - began


def record(path: Path, found: Sequence[NodesRow]) -> None:
    """Write rows with where they come from. Seconds and memory are of the machine at hand; all else is the same."""
    content: dict[str, Any] = {
        "study": "simulator_nodes",
        "program": f"collectives on nodes of {MACHINE}: what a process group runs, flat rings, trees",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": f"PYTHONPATH=contrib/large_programs python -m sidelane_large_programs.nodes {path.name}",
        "processor": provenance.processor_name(),
        "software": provenance.software_versions(),
        "rows": [
            {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in dataclasses.asdict(row).items()}
            for row in found
        ],
    }
    write_json(path, content)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m sidelane_large_programs.nodes FILE")
    record(Path(sys.argv[1]), list(rows()))
