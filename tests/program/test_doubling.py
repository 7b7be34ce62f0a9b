"""Doubling: how many rounds, and how much in each. That it is right is proved with all other builders."""

from __future__ import annotations

import math

import pytest

from sidelane.choice import Candidate, objection
from sidelane.choice.candidate import DMA
from sidelane.program.builders import Transport, build
from sidelane.program.builders.doubling import doubling
from sidelane.program.collective import Kind, all_gather, broadcast
from sidelane.program.ir import Copy, EngineKind
from sidelane.program.shape import CallShape
from sidelane.program.verify import verify


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 13])
def test_rounds_and_bytes(n: int, in_place: bool) -> None:
    program = build(all_gather([8] * n, in_place=in_place), "doubling")
    for rank in range(n):
        (queue,) = (each for each in program.queues_of(rank) if each.engine.kind is EngineKind.DMA)
        copies = [command for command in queue.commands if isinstance(command, Copy)]
        targets = list(dict.fromkeys(copy.dst.rank for copy in copies))
        assert targets == [(rank - 2**k) % n for k in range(math.ceil(math.log2(n)))]
        by_target = [sum(copy.src.nbytes for copy in copies if copy.dst.rank == target) for target in targets]
        assert by_target == [8 * min(2**k, n - 2**k) for k in range(len(targets))]
        assert len(copies) <= 3 * len(targets), "own shard, and the others in one or two pieces"
    verify(program)


def test_nothing_is_sent_of_ranks_that_have_nothing() -> None:
    program = build(all_gather([0, 8, 0, 0, 0]), "doubling")
    verify(program)
    copies = [command for queue in program.queues for command in queue.commands if isinstance(command, Copy)]
    assert sorted(copy.dst.rank for copy in copies) == [0, 1, 2, 3, 4]


def test_what_it_is_not_for() -> None:
    with pytest.raises(ValueError, match="value=broadcast, allowed=all_gather"):
        doubling(broadcast(8, 3, 0))
    with pytest.raises(ValueError, match="value=staged, allowed=push"):
        build(all_gather([8] * 3), "doubling", Transport.STAGED)
    found = Candidate(DMA, "doubling")
    assert "second round" in objection(CallShape(Kind.ALL_GATHER, 2, 64), found)
    assert not objection(CallShape(Kind.ALL_GATHER, 3, 64), found)
