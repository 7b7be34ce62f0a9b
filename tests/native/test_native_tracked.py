"""Tracked calls in C: what is asked before they are made, and who begins them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from replay_host import Host, Question

POST = b"where it lies"


class Tracked:
    """Python's part of tracked calls."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.learning = SimpleNamespace(is_quiet=True)
        self.signature = SimpleNamespace(now=None, turn=0)
        self.begun: list[tuple[Any, bytes]] = []
        self.meanwhile: Callable[[], Any] = lambda: None

    def begin(self, signature: Any, post: bytes) -> None:
        assert self.host.lock.locked()
        self.begun.append((signature, post))
        self.meanwhile()

    def remember(self, standing: Any = None, turn: Any = None, step: Any = "ran", more: Any = None) -> None:
        guards = ((self.learning, "is_quiet", True), (self.signature, "now", self.signature.now))
        tracked = guards, self.begin, self.signature, POST, turn is not None, standing
        self.host.remember((self.host.step(step),), turn=turn, tracked=tracked, standing=more)

    def run(self, times: int = 1) -> list[Any]:
        return [self.host.run() for _ in range(times)]


@pytest.fixture
def tracked(host: Host) -> Tracked:
    return Tracked(host)


def test_python_begins_each_call(tracked: Tracked) -> None:
    tracked.remember()
    assert tracked.run(2) == [True] * 2
    assert tracked.host.log == ["ran"] * 2 and tracked.begun == [(tracked.signature, POST)] * 2
    assert (tracked.host.replay.tracked, tracked.host.replay.hits) == (2, 0)


CHANGES: dict[str, Callable[[Tracked], Any]] = {
    "it goes ahead from now on": lambda tracked: setattr(tracked.signature, "now", (1,)),
    "there is no use in it": lambda tracked: setattr(tracked.signature, "now", False),
    "there are news": lambda tracked: setattr(tracked.learning, "is_quiet", False),
}

BEGUN = {
    **CHANGES,
    "it is forgotten": lambda tracked: tracked.host.replay.forget(),
    "a rank has failed": lambda tracked: setattr(tracked.host.state, "failure", OSError()),
}


@pytest.mark.parametrize("what", BEGUN)
def test_a_call_that_has_begun_is_left_to_python_to_make(tracked: Tracked, what: str) -> None:
    tracked.remember()
    tracked.meanwhile = lambda: BEGUN[what](tracked)
    assert tracked.run() == [None] and len(tracked.begun) == 1
    assert not tracked.host.log and next(tracked.host.numbers) == 1, "no number was taken"


@pytest.mark.parametrize("change", CHANGES)
def test_another_state_is_another_call(tracked: Tracked, change: str) -> None:
    tracked.remember()
    assert tracked.run() == [True]
    CHANGES[change](tracked)
    assert tracked.run() == [False]
    assert len(tracked.begun) == 1 and next(tracked.host.numbers) == 2


def test_an_error_while_a_call_begins(tracked: Tracked) -> None:
    def fail() -> None:
        raise OSError("planted")

    tracked.remember()
    tracked.meanwhile = fail
    with pytest.raises(OSError, match="planted"):
        tracked.run()
    assert not tracked.host.lock.locked() and next(tracked.host.numbers) == 1


def test_memory_that_was_freed(tracked: Tracked) -> None:
    one, other = Question(tracked.host), Question(tracked.host)
    tracked.remember(other.standing, more=one.standing)
    assert tracked.run() == [True] and (one.asked, other.asked) == (2, 2), "that of the steps, and that of the post"
    for question in (one, other):
        question.number = 6
        assert tracked.run() == [False] and len(tracked.begun) == 1
        question.number = 5
    assert tracked.run() == [True]


def test_what_is_forgotten_while_memory_is_asked_about(tracked: Tracked) -> None:
    question = Question(tracked.host, tracked.host.replay.forget)
    tracked.remember(question.standing)
    assert tracked.run() == [None]
    assert not tracked.begun and next(tracked.host.numbers) == 1


def test_one_that_goes_ahead_and_a_staged_one_with_the_same_tensors(tracked: Tracked) -> None:
    signature, period = tracked.signature, ("a", "b")
    tracked.remember(step="staged")
    signature.now = period
    for turn in (0, 1):
        tracked.remember(turn=(signature, "turn", turn, 1 - turn), step=turn)
    assert tracked.run(3) == [True] * 3 and tracked.host.log == [0, 1, 0] and signature.turn == 1
    signature.now = None
    assert tracked.run(2) == [True] * 2 and tracked.host.log[3:] == ["staged"] * 2 and signature.turn == 1
    signature.now = period
    assert tracked.run() == [True] and tracked.host.log[-1] == 1
    assert (tracked.host.replay.tracked, tracked.host.replay.hits) == (6, 4)


def test_turns_may_change_as_a_call_begins(tracked: Tracked) -> None:
    signature = tracked.signature
    signature.now = ("a", "b")
    for turn in (0, 1):
        tracked.remember(turn=(signature, "turn", turn, 1 - turn), step=turn)
    assert tracked.run(3) == [True] * 3
    tracked.meanwhile = lambda: setattr(signature, "turn", 0)
    assert tracked.run() == [None] and len(tracked.begun) == 4


def test_a_guard_is_three_things(tracked: Tracked) -> None:
    with pytest.raises(TypeError, match="guard"):
        tracked.host.remember(tracked=(((1, 2),), tracked.begin, tracked.signature, POST, False, None))
