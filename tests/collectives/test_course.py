"""What comes again in calls of which all ranks hear later."""

from __future__ import annotations

import pytest

from sidelane.collectives.course import (
    CAUTION,
    LEAST_ALIKE,
    LONGEST,
    PATIENCE,
    PATIENCE_WITH_NEW,
    VAIN,
    Course,
    Names,
    Sources,
)

NAMES = frozenset({(0, "a"), (1, "b")})


def at(number: int) -> Sources:
    return (("a", 256 * number), ("b", 7))


def settle(course: Course, *numbers: int, names: Names = NAMES) -> None:
    for number in numbers:
        course.settled(at(number), names)


def expected(course: Course, later: int = 0) -> Sources:
    return course.period[(course.next + later) % len(course.period)]


@pytest.mark.parametrize("period", [1, 2, 32, LONGEST])
def test_what_comes_again_is_known(period: int) -> None:
    course, calls = Course(), 0
    while not course.is_known(NAMES):
        settle(course, calls % period)
        calls += 1
        assert calls < 2 * period + 4
    assert not course.is_known({(0, "a")}), "somebody has not mapped it"
    assert [expected(course, later) for later in range(2 * period)] == [
        at((calls + later) % period) for later in range(2 * period)
    ]
    settle(course, calls % period)
    assert expected(course) == at((calls + 1) % period), "it goes on"


def test_something_else_asks_for_more_of_the_same() -> None:
    course = Course()
    settle(course, *[0] * (LEAST_ALIKE + 1), 5)
    assert not course.is_known(NAMES)
    settle(course, *[5] * (CAUTION * LEAST_ALIKE - 1))
    assert not course.is_known(NAMES)
    settle(course, 5)
    assert course.is_known(NAMES)
    course.settled(at(6), NAMES, may_wait=False)
    assert course.given_up, "an asynchronous call may not wait a second time"


def test_outputs_must_be_mapped_as_well() -> None:
    course = Course()
    settle(course, *[0] * (LEAST_ALIKE + 1))
    settle(course, 0, names=NAMES | {(1, "new")})
    assert not course.is_known(NAMES) and course.is_known(NAMES | {(1, "new")})
    course.drop(1, "new")
    assert not course.is_known(NAMES | {(1, "new")})


def test_what_nobody_offers_is_given_up() -> None:
    course, calls = Course(), 0
    while not course.given_up:
        course.settled(None)
        calls += 1
    assert calls == PATIENCE // VAIN
    settle(course, *[0] * 10)
    assert not course.is_known(NAMES)


def test_what_never_comes_again_is_given_up_soon() -> None:
    course, calls = Course(), 0
    while not course.given_up:
        settle(course, calls)
        calls += 1
    assert calls == PATIENCE_WITH_NEW


def test_two_steps_of_the_longest_period_at_new_places_are_not_too_many() -> None:
    course = Course()
    settle(course, *range(1000, 1000 + LONGEST), *range(LONGEST), *range(LONGEST))
    assert course.is_known(NAMES) and len(course.period) == LONGEST


@pytest.mark.parametrize("every", [2, 40])
def test_memory_that_is_freed_again_and_again_is_given_up(every: int) -> None:
    course, calls = Course(), 0
    while not course.given_up:
        settle(course, calls)
        calls += 1
        if calls % every == 0:
            course.drop(1, "b")
    assert calls == PATIENCE, "no sooner, since what is dropped looks new"


def test_what_comes_again_now_and_then_is_given_up_later() -> None:
    course, calls = Course(), 0
    while not course.given_up:
        settle(course, calls // 3 * 7 % 50 if calls % 3 else calls)
        calls += 1
    assert calls == PATIENCE
