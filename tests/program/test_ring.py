"""The ring: who writes where, and how much. That it is right is proved with all other builders."""

from __future__ import annotations

import pytest

from sidelane.choice import Candidate, objection
from sidelane.choice.candidate import DMA
from sidelane.program.builders import Transport, build
from sidelane.program.builders.ring import ring
from sidelane.program.collective import Kind, all_gather, broadcast
from sidelane.program.ir import Copy, EngineKind
from sidelane.program.shape import CallShape
from sidelane.program.verify import verify


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", [2, 3, 6, 16])
def test_every_rank_writes_to_the_next_one_only(n: int, in_place: bool) -> None:
    shards = [8 * (rank % 3) for rank in range(n)]
    program = build(all_gather(shards, in_place=in_place), "ring")
    for rank in range(n):
        (queue,) = (each for each in program.queues_of(rank) if each.engine.kind is EngineKind.DMA)
        copies = [command for command in queue.commands if isinstance(command, Copy)]
        assert {copy.dst.rank for copy in copies} <= {(rank + 1) % n}
        assert sum(copy.src.nbytes for copy in copies) == sum(shards) - shards[(rank + 1) % n]
    assert program.staging_bytes == (0,) * n
    verify(program)


def test_what_it_is_not_for() -> None:
    with pytest.raises(ValueError, match="value=broadcast, allowed=all_gather"):
        ring(broadcast(8, 3, 0))
    with pytest.raises(ValueError, match="value=pull, allowed=push"):
        build(all_gather([8] * 3), "ring", Transport.PULL)
    found = Candidate(DMA, "ring")
    assert "third rank" in objection(CallShape(Kind.ALL_GATHER, 2, 64), found)
    assert "ordinary memory" in objection(CallShape(Kind.ALL_GATHER, 4, 64, symmetric=False), found)
    assert "one tensor" in objection(CallShape(Kind.ALL_GATHER, 4, 64, listed=True), found)
    assert not objection(CallShape(Kind.ALL_GATHER, 4, 64), found)
