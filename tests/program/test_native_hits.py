"""Repeated calls in C that go ahead: what they ask before they do, and what they leave."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from replay_host import RING, Host, Question

from sidelane.collectives.repeat import LOOK_EVERY

LAG, SINCE = 5, 40


class Ahead:
    """What a call that goes ahead needs besides a host: two ranks that speak, a pattern, Python that looks."""

    def __init__(self, host: Host, period: int = 1) -> None:
        self.host = host
        self.begun, self.wishes = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 2)()
        self.agreed = ctypes.c_uint64(0)
        self.pattern = SimpleNamespace(state="ahead", period=tuple(range(1000, 1000 + period)), next=0)
        self.is_seen, self.looks = False, 0
        self.appended: list[int] = []
        self.renewal = 10_000
        self.count_from(100)
        self.begun[:] = [1000, 1000]

    def count_from(self, number: int) -> None:
        self.host.numbers, self.host.renewal = iter(range(number, self.renewal)), self.renewal

    def look(self) -> bool:
        self.looks += 1
        return self.is_seen

    def condition(self) -> tuple[Any, ...]:
        guards = ((self.pattern, "state", self.pattern.state), (self.pattern, "period", self.pattern.period))
        words = [(ctypes.addressof(self.begun), ctypes.addressof(self.wishes))]
        words.append((words[0][0] + 8, words[0][1] + 8))
        return guards, self.look, LAG, SINCE, tuple(words), (ctypes.addressof(self.agreed), self.appended.append)

    def remember(self, turn: int = 0, **other: Any) -> None:
        after = (turn + 1) % len(self.pattern.period)
        host, pattern = self.host, self.pattern
        host.remember((host.step(turn),), turn=(pattern, "next", turn, after), ahead=self.condition(), **other)


@pytest.fixture
def ahead(host: Host) -> Ahead:
    return Ahead(host)


def test_a_hit_is_made_again_and_kept(ahead: Ahead) -> None:
    host = ahead.host
    ahead.remember()
    assert [host.run() for _ in range(3)] == [True] * 3
    assert (host.replay.hits, host.log, next(host.numbers)) == (3, [0] * 3, 103)
    # One in as many as are on record by a quarter is kept by Python, which looks who has read the others.
    assert (host.kept, ahead.appended) == ([100, 101, 102], [])
    host.unread = 103
    host.remember((host.step("other"),), kind="broadcast")
    assert host.run(kind="broadcast")
    assert host.replay.hits == 3, "others do not go ahead"


def test_what_is_kept_without_python(module: Any) -> None:
    host = Host(module)
    ring = 16
    host.memory = bytearray(ring * 64)
    host.use([memoryview(host.memory)[64 * i : 64 * i + 64] for i in range(ring)])
    ahead = Ahead(host)
    ahead.remember()
    host.unread = 98
    assert [host.run() for _ in range(3)] == [True] * 3
    assert (ahead.appended, ahead.agreed.value, host.kept) == ([100, 101], 101, [102])
    ahead.agreed.value = 500
    host.unread = 103
    assert host.run() and ahead.agreed.value == 500, "it never goes back"
    assert ring != RING


def test_a_period_of_three_with_the_same_tensors(host: Host) -> None:
    ahead = Ahead(host, period=3)
    for turn in (0, 1, 2):
        ahead.remember(turn)
    assert [host.run() for _ in range(7)] == [True] * 7
    assert host.log == [0, 1, 2, 0, 1, 2, 0] and host.replay.remembered == 3
    ahead.pattern.next = 2  # as an asynchronous call leaves it, which Python makes
    assert host.run() and host.log[-1] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_late_is_waited_for_by_python(ahead: Ahead, rank: int) -> None:
    ahead.remember()
    ahead.count_from(200)
    ahead.begun[:] = [200, 200]
    ahead.begun[rank] = 200 - LAG - 1
    assert ahead.host.run() is None
    assert (ahead.host.log, next(ahead.host.numbers)) == ([], 200), "nothing was done"
    ahead.count_from(200)
    ahead.begun[rank] = 200 - LAG
    assert ahead.host.run() is True


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("wish", "made"),
    [(0, True), (SINCE - 1, True), (SINCE, None), (100 - LAG, None), (100 - LAG + 1, True), (10_000, True)],
)
def test_a_wish_is_heard_in_its_call_by_python(ahead: Ahead, rank: int, wish: int, made: bool | None) -> None:
    ahead.remember()
    ahead.wishes[rank] = wish
    assert ahead.host.run() is made
    assert next(ahead.host.numbers) == (101 if made else 100)


def test_a_wish_is_heard_in_the_same_call_whoever_makes_it(ahead: Ahead) -> None:
    ahead.remember()
    ahead.wishes[1] = 120
    made = [ahead.host.run() for _ in range(40)]
    assert made.index(None) == 120 + LAG - 100 and set(made[120 + LAG - 100 :]) == {None}


CHANGES: dict[str, Callable[[Ahead], Any]] = {
    "somebody was heard": lambda ahead: setattr(ahead.pattern, "state", "watching"),
    "another period": lambda ahead: setattr(ahead.pattern, "period", (1001,)),
    "it begins again": lambda ahead: setattr(ahead.pattern, "period", ()),
    "another turn": lambda ahead: setattr(ahead.pattern, "next", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_expectation_is_another_call(ahead: Ahead, change: str) -> None:
    ahead.remember()
    assert ahead.host.run() is True
    CHANGES[change](ahead)
    assert ahead.host.run() is False
    assert next(ahead.host.numbers) == 101


def test_memory_that_was_freed(ahead: Ahead) -> None:
    question = Question(ahead.host)
    ahead.remember(standing=question.standing)
    assert ahead.host.run() is True
    question.number = 6
    assert ahead.host.run() is False, "it is made anew"
    question.number = 5
    assert ahead.host.run() is True


def test_what_is_forgotten_while_memory_is_asked_about(ahead: Ahead) -> None:
    question = Question(ahead.host, ahead.host.replay.forget)
    ahead.remember(standing=question.standing)
    assert ahead.host.run() is None
    assert (ahead.host.run(), next(ahead.host.numbers)) == (False, 100)


def test_python_looks_for_freed_memory(ahead: Ahead) -> None:
    ahead.remember()
    assert [ahead.host.run() for _ in range(3 * LOOK_EVERY)] == [True] * 3 * LOOK_EVERY
    assert ahead.looks == 2
    ahead.is_seen = True
    made = [ahead.host.run() for _ in range(LOOK_EVERY + 1)]
    assert made == [None] + [True] * LOOK_EVERY, "Python makes one"


def test_an_error_while_python_looks(ahead: Ahead) -> None:
    def look() -> bool:
        raise OSError("planted")

    ahead.look = look  # type: ignore[method-assign]
    ahead.remember()
    assert [ahead.host.run() for _ in range(LOOK_EVERY)] == [True] * LOOK_EVERY
    with pytest.raises(OSError, match="planted"):
        ahead.host.run()
    assert next(ahead.host.numbers) == 100 + LOOK_EVERY and not ahead.host.lock.locked()


def test_flags_are_renewed_by_python(ahead: Ahead) -> None:
    ahead.remember()
    ahead.renewal = 102
    ahead.count_from(100)
    assert [ahead.host.run() for _ in range(3)] == [True, True, None]


WRONG: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "no ranks": lambda given: (*given[:4], (), given[5]),
    "no lag": lambda given: (*given[:2], 0, *given[3:]),
    "a rank without a wish": lambda given: (*given[:4], ((1,),), given[5]),
    "a guard of four": lambda given: ((("a", "b", 1, 2),), *given[1:]),
    "nothing kept": lambda given: given[:5],
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_conditions_are_refused(ahead: Ahead, what: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        ahead.host.remember(ahead=WRONG[what](ahead.condition()))
    assert ahead.host.replay.remembered == 0
