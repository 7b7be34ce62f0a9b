"""Addresses that come again in calls of which all ranks hear later."""

from __future__ import annotations

import pytest

from sidelane.collectives.learning.knowledge import (
    CAUTION,
    LEAST_ALIKE,
    LONGEST,
    PATIENCE,
    PATIENCE_WITH_NEW,
    VAIN,
    Names,
    PeriodFinder,
)
from sidelane.collectives.learning.report import Sources

NAMES = frozenset({(0, "a"), (1, "b")})


def at(number: int) -> Sources:
    return (("a", 256 * number), ("b", 7))


def settle(finder: PeriodFinder, *numbers: int, names: Names = NAMES) -> None:
    for number in numbers:
        finder.settle(at(number), names)


def expected(finder: PeriodFinder, later: int = 0) -> Sources:
    return finder.period[(finder.next + later) % len(finder.period)]


@pytest.mark.parametrize("period", [1, 2, 32, LONGEST])
def test_what_comes_again_is_known(period: int) -> None:
    finder, calls = PeriodFinder(), 0
    while not finder.is_known(NAMES):
        settle(finder, calls % period)
        calls += 1
        assert calls < 2 * period + 4
    assert not finder.is_known({(0, "a")}), "somebody has not mapped it"
    assert [expected(finder, later) for later in range(2 * period)] == [
        at((calls + later) % period) for later in range(2 * period)
    ]
    settle(finder, calls % period)
    assert expected(finder) == at((calls + 1) % period), "it goes on"


def test_something_else_asks_for_more_of_the_same() -> None:
    finder = PeriodFinder()
    settle(finder, *[0] * (LEAST_ALIKE + 1), 5)
    assert not finder.is_known(NAMES)
    settle(finder, *[5] * (CAUTION * LEAST_ALIKE - 1))
    assert not finder.is_known(NAMES)
    settle(finder, 5)
    assert finder.is_known(NAMES)
    finder.settle(at(6), NAMES, may_wait=False)
    assert finder.given_up, "an asynchronous call may not wait a second time"


def test_outputs_must_be_mapped_as_well() -> None:
    finder = PeriodFinder()
    settle(finder, *[0] * (LEAST_ALIKE + 1))
    settle(finder, 0, names=NAMES | {(1, "new")})
    assert not finder.is_known(NAMES) and finder.is_known(NAMES | {(1, "new")})
    finder.drop(frozenset({(1, "new")}))
    assert not finder.is_known(NAMES | {(1, "new")})


def test_what_nobody_offers_is_given_up() -> None:
    finder, calls = PeriodFinder(), 0
    while not finder.given_up:
        finder.settle(None)
        calls += 1
    assert calls == PATIENCE // VAIN
    settle(finder, *[0] * 10)
    assert not finder.is_known(NAMES)


def test_what_never_comes_again_is_given_up_soon() -> None:
    finder, calls = PeriodFinder(), 0
    while not finder.given_up:
        settle(finder, calls)
        calls += 1
    assert calls == PATIENCE_WITH_NEW


def test_two_steps_of_the_longest_period_at_new_places_are_not_too_many() -> None:
    finder = PeriodFinder()
    settle(finder, *range(1000, 1000 + LONGEST), *range(LONGEST), *range(LONGEST))
    assert finder.is_known(NAMES) and len(finder.period) == LONGEST


@pytest.mark.parametrize("every", [2, 40])
def test_memory_that_is_freed_again_and_again_is_given_up(every: int) -> None:
    finder, calls = PeriodFinder(), 0
    while not finder.given_up:
        settle(finder, calls)
        calls += 1
        if calls % every == 0:
            finder.drop(frozenset({(1, "b")}))
    assert calls == PATIENCE, "no sooner, since what is dropped looks new"


def test_what_comes_again_now_and_then_is_given_up_later() -> None:
    finder, calls = PeriodFinder(), 0
    while not finder.given_up:
        settle(finder, calls // 3 * 7 % 50 if calls % 3 else calls)
        calls += 1
    assert calls == PATIENCE
