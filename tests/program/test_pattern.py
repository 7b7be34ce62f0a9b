"""What comes again in calls that are alike."""

from __future__ import annotations

import random

import pytest

from sidelane.collectives.pattern import LONGEST, PATIENCE, Pattern, Sources, State


def at(*numbers: int) -> Sources:
    return tuple((f"a{number}", 256 * number) for number in numbers)


@pytest.mark.parametrize("period", [1, 2, 3, 32, LONGEST])
def test_what_comes_again_is_expected(period: int) -> None:
    pattern, calls = Pattern(), 0
    while not pattern.settled(at(calls % period, 7)):
        calls += 1
        assert pattern.state is State.LEARNING and calls < 2 * period + 4
    assert [pattern.expected() for _ in range(2 * period)] == [
        at((calls + 1 + step) % period, 7) for step in range(2 * period)
    ]


def test_a_period_is_the_shortest_that_has_come_twice() -> None:
    pattern = Pattern()
    assert [pattern.settled(at(number)) for number in (0, 0, 1, 0, 0, 1)] == [False] * 5 + [True]
    assert [pattern.expected() for _ in range(4)] == [at(0), at(0), at(1), at(0)]


def test_nothing_comes_again() -> None:
    pattern, draw = Pattern(), random.Random(1)
    for call in range(PATIENCE):
        assert pattern.state is State.LEARNING
        assert not pattern.settled(at(call, draw.randrange(3)))
    assert pattern.state is State.GIVEN_UP
    assert not pattern.settled(at(1)) and not pattern.settled(at(1))
    pattern.drop(0, "a1")
    assert pattern.state is State.GIVEN_UP


def test_a_rank_that_wishes_to_be_heard_is_heard_once() -> None:
    pattern = Pattern()
    for call in range(5):
        pattern.settled(at(call % 2))
    assert pattern.state is State.AHEAD and pattern.expected() == at(1)
    pattern.pause()
    assert pattern.settled(at(0)), "the period goes on where it was"
    assert pattern.expected() == at(1)
    pattern.pause()
    assert not pattern.settled(at(5)) and pattern.state is State.LEARNING


def test_what_is_mapped_no_more_is_not_expected() -> None:
    pattern = Pattern()
    for _ in range(4):
        pattern.settled(at(3, 4))
    pattern.drop(1, "a3"), pattern.drop(0, "a4")
    assert pattern.state is State.AHEAD, "other ranks have names of their own"
    pattern.drop(1, "a4")
    assert pattern.state is State.LEARNING
    assert not pattern.settled(at(3, 4)), "it is learnt anew"
