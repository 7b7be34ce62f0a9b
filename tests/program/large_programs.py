"""All-gathers for large groups, among several nodes: a ring, and rings of nodes with copies inside them."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, build, build_batch, registry
from sidelane.program.collective import (
    Buffer,
    Collective,
    ReduceOp,
    Reduction,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
)
from sidelane.program.ir import EPOCH, Command, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.verify import verify

SUM = Reduction(ReduceOp.SUM, "bfloat16")


def _example() -> Callable[[Collective, Transport], Program]:
    """Take the ring of ``examples/own_algorithm.py``, which registers itself, without leaving it registered."""
    with mock.patch.dict(registry.registered):
        builder: Callable[[Collective, Transport], Program] = runpy.run_path(str(EXAMPLE))["ring"]
    return builder


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_algorithm.py"
example_ring = _example()


def ring(world_size: int, nbytes: int = 64) -> Program:
    """In place; every rank passes on to the next one what it has got from the one before, a shard at a time."""
    return example_ring(all_gather((nbytes,) * world_size, in_place=True), Transport.PUSH)


def hierarchical(nodes: int, ranks_a_node: int, nbytes: int = 64) -> Program:
    """In place; ranks of equal number on their nodes form rings, and give to the others of their node what comes.

    Flag s of a rank says that it has what came in step s; flag ``nodes - 1``, that the next node may be written to.
    From ``nodes`` on: entries, then exits, of the node.
    """
    m, n = ranks_a_node, nodes * ranks_a_node
    queues = []
    for rank in range(n):
        node, local = divmod(rank, m)
        behind, before = (node + 1) % nodes * m + local, (node - 1) % nodes * m + local
        peers = [node * m + (local + k) % m for k in range(1, m)]
        commands: list[Command] = [Signal(Flag(before, nodes - 1), EPOCH)]
        commands += [Signal(Flag(peer, nodes + local), EPOCH) for peer in peers]
        commands.append(Wait(Flag(rank, nodes - 1), EPOCH))
        commands += [Wait(Flag(rank, nodes + peer % m), EPOCH) for peer in peers]
        for step in range(nodes):
            if step:
                commands.append(Wait(Flag(rank, step - 1), EPOCH))
            offset = ((node - step) % nodes * m + local) * nbytes
            to = [behind, *peers] if step < nodes - 1 else peers
            for target in to:
                commands.append(
                    Copy(Span(target, Buffer.OUTPUT, offset, nbytes), Span(rank, Buffer.OUTPUT, offset, nbytes))
                )
                if target == behind and step < nodes - 1:
                    commands.append(Signal(Flag(behind, step), EPOCH))
        commands += [Signal(Flag(peer, nodes + m + local), EPOCH) for peer in peers]
        commands += [Wait(Flag(rank, nodes + m + peer % m), EPOCH) for peer in peers]
        queues.append(Queue(rank, Engine(EngineKind.DMA), tuple(commands)))
    return Program(all_gather((nbytes,) * n, in_place=True), "hierarchical", tuple(queues), (0,) * n, nodes + 2 * m)


def _measure() -> None:
    """Print how long it takes to verify large programs."""
    cases: dict[str, Callable[[], Program]] = {
        "all_gather b2b, 64 ranks": lambda: build(all_gather([64] * 64), "b2b"),
        "all_gather pcpy, 64 ranks": lambda: build(all_gather([64] * 64), "pcpy"),
        "all_to_all staged, 64 ranks": lambda: build(all_to_all([[64] * 64] * 64), "b2b", Transport.STAGED),
        "all_reduce b2b, 64 ranks": lambda: build(all_reduce([64] * 64, SUM), "b2b"),
        "all_reduce pcpy staged, 64 ranks": lambda: build(all_reduce([64] * 64, SUM), "pcpy", Transport.STAGED),
        "list of 10 all_gathers, 64 ranks": lambda: build_batch(
            Batch("all_gather", 64, (all_gather([64] * 64),) * 10), "b2b", [Transport.PUSH] * 10
        ),
        "ring, 256 ranks": lambda: ring(256),
        "hierarchical, 128 nodes of 8": lambda: hierarchical(128, 8),
        "ring, 1024 ranks": lambda: ring(1024),
    }
    for name, make in cases.items():
        verification = verify(make())
        print(f"{name:34} {verification.commands:9,} commands {verification.seconds:6.2f} s", flush=True)


if __name__ == "__main__":
    _measure()
