"""Programs that callers release in slices, between CPU processes."""

from __future__ import annotations

import pytest
import slices
from marks import long
from ranks import RankPool, crew


@pytest.mark.parametrize(("world_size", "seed"), [(1, 0), (2, 1), long(2, 2), (3, 3), long(3, 4), (4, 5)])
def test_slices_go_as_they_come(pool: RankPool, world_size: int, seed: int) -> None:
    pool.run(slices.gathered, world_size, seed, 60)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_are_read_as_they_come(pool: RankPool, world_size: int) -> None:
    for told in pool.run(slices.read_as_it_comes, world_size, 6):
        words = ["not under way", f"allowed={[*range(2 * (world_size - 1))]}", "cannot be captured"]
        assert len(told) == len(words) and all(word in text for word, text in zip(words, told, strict=True)), told


def test_triggers_that_are_fired_in_the_wrong_way(pool: RankPool) -> None:
    for told in pool.run(slices.misused, 2):
        words = [
            "never called",
            "allowed=async_op=True",
            "allowed=[0, 1]",
            "fired in this call",
            "triggers [0]",
            "closed",
        ]
        assert len(told) == len(words) and all(word in text for word, text in zip(words, told, strict=True)), told


@pytest.mark.parametrize("how", ["raises", "dies", "sleeps"])
def test_a_rank_that_does_not_fire(how: str) -> None:
    with crew(3) as own:
        own_end, *others = own.run(slices.left, None, how, dying=(0,) if how == "dies" else ())
    for kind, text, ranks in others:
        assert ranks == (0,), (kind, text, ranks)
        assert kind == ("PeerTimeoutError" if how == "sleeps" else "PeerError")
        assert "untriggered: RuntimeError: no more" in text or how != "raises", text
    if how != "dies":
        assert own_end[0] == ("RuntimeError" if how == "raises" else "PeerTimeoutError"), own_end
