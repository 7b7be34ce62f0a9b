"""``verify`` and large groups: what it looks at grows with the commands, and no faster."""

from __future__ import annotations

import dataclasses

import pytest
from large_programs import example_ring, hierarchical, ring
from marks import long
from refusals import refused

from sidelane.program.builders import Transport, build
from sidelane.program.collective import ReduceOp, Reduction, all_gather, all_reduce, all_to_all
from sidelane.program.ir import Copy, Program, Wait
from sidelane.program.verify import verify

SUM = Reduction(ReduceOp.SUM, "bfloat16")


@pytest.mark.parametrize("make", [ring, lambda n: hierarchical(n // 4, 4)], ids=["ring", "hierarchical"])
def test_pairs_grow_with_the_commands(make: object) -> None:
    """Four times the ranks are sixteen times the commands of an all-gather, and sixteen times the pairs."""
    small, large = verify(make(8)), verify(make(32))
    assert large.pairs < 2 * small.pairs * large.commands / small.commands


@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in"])
def test_an_algorithm_of_ones_own_is_right_for_all_shards(in_place: bool) -> None:
    """``examples/own_algorithm.py``: in each step every rank writes one shard, to the next rank only."""
    for shards in ([16], [0, 0], [0, 8], [8, 0, 16], [8 * (rank % 3) for rank in range(16)]):
        program = example_ring(all_gather(shards, in_place=in_place), Transport.PUSH)
        assert verify(program).commands == sum(len(queue.commands) for queue in program.queues)
        sent = [(c.src.rank, c.dst.rank) for q in program.queues for c in q.commands if isinstance(c, Copy)]
        assert {(there - here) % len(shards) for here, there in sent} <= {0, 1}


@pytest.mark.parametrize("variant", ["b2b", long("pcpy")])
def test_sixty_four_ranks(variant: str) -> None:
    """A tenth of a second to four, where it took a minute; ``python tests/program/large_programs.py`` says how long."""
    for program in (
        build(all_gather([64] * 64), variant),
        build(all_to_all([[64] * 64] * 64), variant, Transport.STAGED),
        build(all_reduce([64] * 64, SUM), variant),
    ):
        assert verify(program).commands > 64 * 63 * 3


@pytest.mark.parametrize("program", [ring(24), hierarchical(6, 4)], ids=["ring", "hierarchical"])
def test_one_mistake_among_many_ranks(program: Program) -> None:
    """It is found and named, wherever it is."""
    rank = program.queues[17]
    waits = [index for index, command in enumerate(rank.commands) if isinstance(command, Wait)]
    copies = [index for index, command in enumerate(rank.commands) if isinstance(command, Copy)]
    without_wait = _edited(program, 17, [c for k, c in enumerate(rank.commands) if k != waits[-2]])
    refused(without_wait, words=("rank 17",))
    without_copy = _edited(program, 17, [c for k, c in enumerate(rank.commands) if k != copies[5]])
    refused(without_copy, words=("wrong bytes",))


def _edited(program: Program, number: int, commands: list[object]) -> Program:
    queue = dataclasses.replace(program.queues[number], commands=tuple(commands))
    queues = (*program.queues[:number], queue, *program.queues[number + 1 :])
    return dataclasses.replace(program, queues=queues)
