"""DDP whose gradients Sidelane averages, between CPU processes, against Gloo."""

from __future__ import annotations

import ddp_cases
import pytest
from ranks import RankPool


def test_loss_and_gradients_are_those_of_the_group(pool: RankPool) -> None:
    for told in pool.run(ddp_cases.as_without, 3, 3):
        for name, calls in told.items():
            assert calls >= (3 if name in ("one bucket", "frozen") else 5), name


@pytest.mark.long
@pytest.mark.parametrize("n", [2, 3])
def test_a_hundred_steps_are_those_of_the_group(pool: RankPool, n: int) -> None:
    for calls, first, last in pool.run(ddp_cases.curves, n, 100):
        assert calls >= 199 and last < 0.7 * first, "it learns"


def test_what_sidelane_does_not_add_goes_to_the_group(pool: RankPool) -> None:
    for told in pool.run(ddp_cases.elsewhere, 2):
        assert told["float64"] == (0, {("gloo", "avg of float64")})
        assert told["sparse"] == (2, {("gloo", "a sparse bucket"), ("sidelane", "a communication hook")})


def test_all_averages_are_waited_for_whoever_makes_the_last(pool: RankPool) -> None:
    for told in pool.run(ddp_cases.waited_for, 2):
        assert told == [(3, 0, 3), (3, 0, 3)]


def test_inputs_that_end_earlier_on_some_ranks(pool: RankPool) -> None:
    """Bit by bit; but a divisor that no hook is told is refused on every rank before its first average."""
    for told in pool.run(ddp_cases.joined, 2):
        assert told == ["ddp.enable: Join with divide_by_initial_world_size (value=False, allowed=True)"] * 2


def test_what_fails_in_the_middle_leaves_nothing(pool: RankPool) -> None:
    pool.run(ddp_cases.comes_to_nothing, 2)


def test_on_and_off(pool: RankPool) -> None:
    for hooked, other in pool.run(ddp_cases.on_and_off, 2):
        assert "one with a communication hook" in hooked
        assert "value=a Linear" in other
