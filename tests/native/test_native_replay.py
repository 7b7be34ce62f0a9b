"""Repeated calls in C: what is remembered, and what runs. No device, no ranks."""

from __future__ import annotations

import ctypes
import gc
from types import ModuleType, SimpleNamespace

import pytest
import torch
from expected import versions_of
from replay_host import STREAM, Host, c_step, callback

from sidelane.collectives.repeat import MOST_TENSORS
from sidelane.execute.cuda.native import MOST_INTEGERS
from sidelane.native import Effect


def test_python_and_c_mean_the_same(module: ModuleType) -> None:
    assert {effect.name: effect.value for effect in Effect} == {
        name: value for name, value in vars(module).items() if name.isupper() and not name.startswith(("MOST_", "UNIT"))
    }
    assert (module.MOST_ARGUMENTS, module.MOST_TENSORS) == (MOST_INTEGERS, MOST_TENSORS)


def test_a_remembered_call_runs_again(host: Host) -> None:
    assert host.run() is False, "nothing is remembered"
    host.remember()
    versions = versions_of(host.tensors)
    assert [host.run() for _ in range(3)] == [True] * 3
    assert host.log == ["ran"] * 3
    assert next(host.numbers) == 4, "a number a call"
    assert versions_of(host.tensors) == [versions[0] + 3, versions[1]], "the output was written"
    assert not host.lock.locked()


def test_a_call_on_another_stream_than_the_callers(host: Host) -> None:
    """Without functions that order streams it is Python's, as is a capture; autograd is not told of what it writes."""
    host.remember()
    versions = versions_of(host.tensors)
    host.stream = STREAM + 1
    for aside in (0, STREAM, STREAM + 1):
        assert host.run(aside=aside) is None, "the last call was on another stream than the caller's"
    host.stream = STREAM
    assert host.run(aside=0) is True, "the caller's"
    assert versions_of(host.tensors) == versions
    assert host.log == ["ran"]
    with pytest.raises(TypeError, match="int"):
        host.run(aside="a stream")
    assert not host.lock.locked()


@pytest.fixture
def ordered(host: Host) -> Host:
    return Host(host.module, orders=True)


def test_a_call_is_ordered_behind_the_last_one_on_another_stream(ordered: Host) -> None:
    ordered.remember()
    ordered.state.last = STREAM + 8
    assert ordered.run() is True
    assert ordered.log == ["create", ("record", 100, STREAM + 8), ("wait", STREAM, 100), "ran"]
    assert ordered.state.last == STREAM
    ordered.log.clear()
    assert ordered.run() is True and ordered.log == ["ran"]
    for refused in ("record", "wait"):
        ordered.state.last, ordered.refuses = STREAM + 8, [refused]
        assert ordered.run() is None, "Python finds out why"
    ordered.refuses, ordered.capturing = [], [STREAM + 8]
    assert ordered.run() is None and "ran" not in ordered.log[1:], "a capture takes no part in it"
    assert next(ordered.numbers) == 3 and not ordered.lock.locked()


def test_a_call_aside_has_a_mark(ordered: Host) -> None:
    """It comes behind its caller and behind the last call; the mark is its end, whose event is used again."""
    side = STREAM + 64
    ordered.state.last = STREAM
    ordered.remember(stream=side)
    mark = ordered.run(aside=side)
    order = [("record", 100, STREAM), ("wait", side, 100), "ran", ("record", 100, side)]
    assert ordered.log == ["create", *order] and ordered.state.last == side
    ordered.log.clear()
    second = ordered.run(aside=side)
    order = [("record", 101, STREAM), ("wait", side, 101), "ran", ("record", 101, side)]
    assert ordered.log == ["create", *order], "the first event is in use"
    ordered.log.clear()
    assert mark.follow() is True and ordered.log.pop() == ("wait", STREAM, 100)
    ordered.stream = 0
    assert mark.follow() is False and ordered.log.pop() == ("wait", 0, 100)
    assert mark.query() is True
    ordered.reached = 600
    assert mark.query() is False
    ordered.device += 1
    assert mark.follow() is None, "another device is current"
    ordered.device -= 1
    ordered.state.failure = OSError("peer")
    assert mark.follow() is None and not ordered.log
    ordered.state.failure, ordered.stream, ordered.state.last = None, STREAM, STREAM + 8
    del mark
    third = ordered.run(aside=side)
    behind = [("record", 100, STREAM), ("wait", side, 100), ("record", 100, STREAM + 8), ("wait", side, 100)]
    assert ordered.log == [*behind, "ran", ("record", 100, side)] and third is not second
    ordered.reached, ordered.refuses = 700, ["wait"]
    with pytest.raises(RuntimeError, match="cuEventQuery: .*error 700"):
        third.query()
    with pytest.raises(RuntimeError, match="cuStreamWaitEvent: .*error 1"):
        third.follow()
    ordered.refuses, ordered.captured = [], True
    assert ordered.run(aside=side) is None, "a capture of the caller's stream is Python's"
    ordered.captured, ordered.capturing = False, [side]
    assert ordered.run(aside=side) is None
    assert ordered.run(aside=side + 1) is False, "not remembered there"
    assert next(ordered.numbers) == 4


def test_events_outlive_their_replay(ordered: Host) -> None:
    side = STREAM + 64
    ordered.remember(stream=side)
    marks = [ordered.run(aside=side) for _ in range(70)]
    del ordered.replay
    marks[0].follow()
    del marks
    gc.collect()
    destroyed = [each[1] for each in ordered.log if each[0] == "destroy"]
    assert sorted(destroyed) == list(range(100, next(ordered.events)))


def test_lists_are_remembered_as_lists_of_one_length(host: Host) -> None:
    a, b, c, d = tensors = tuple(torch.zeros(4) for _ in range(4))
    host.remember(tensors=tensors, lists=2)
    for others in (
        ([a, b], [d, c]),
        ([a, b, c], [d]),
        ([a], [b, c, d]),
        ([a, b, c, d],),
        ([a], [b], [c], [d]),
        tensors,
    ):
        assert host.run(others) is False, "the same tensors in other lists"
    for odd in (([a, b], c), (a, [b, c]), ([], []), ([a, 3], [c, d]), ([[a], b], [c, d]), ([a, b], None), ()):
        assert host.run(odd) is False
    assert host.log == []
    versions = versions_of(tensors)
    assert host.run(([a, b], [c, d])) and host.run(((a, b), [c, d]))
    assert [now - then for now, then in zip(versions_of(tensors), versions, strict=True)] == [2, 2, 0, 0]
    host.remember((host.step("alone"),), tensors=(a,), lists=1)
    assert host.run((a,)) is False
    assert host.run(([a],))
    assert host.log == ["ran", "ran", "alone"]
    assert not host.lock.locked()


def test_there_is_room_for_many_tensors_and_not_for_more(host: Host) -> None:
    many = tuple(torch.zeros(4) for _ in range(MOST_TENSORS))
    host.remember(tensors=many, lists=1)
    assert host.run((list(many),))
    assert host.run((list(many[1:]),)) is False
    assert host.run(([*many, many[0]],)) is False
    with pytest.raises(ValueError, match=f"tensors .value={MOST_TENSORS + 1}, allowed=1..{MOST_TENSORS}"):
        host.remember(tensors=(*many, many[0]), lists=1)


def test_lists_that_change_while_they_are_looked_at(host: Host) -> None:
    """A tensor whose questions change the list: what is asked about is a copy."""
    given: list[torch.Tensor] = []

    class Meddler(torch.Tensor):
        def is_neg(self) -> bool:
            given.clear()
            return False

    given += [torch.zeros(4).as_subclass(Meddler), torch.zeros(4)]
    host.remember(tensors=tuple(given), lists=1)
    assert host.run((given,))
    assert given == []


@pytest.mark.parametrize("count", range(MOST_INTEGERS + 1))
def test_c_functions_get_their_arguments(host: Host, count: int) -> None:
    arguments = tuple(0xFFFF_0000_0000_0001 + 7 * index for index in range(count))
    host.remember((c_step(callback(0, count, host.log), *arguments),) * 2)
    assert host.run()
    assert host.log == [arguments] * 2


def test_steps_run_in_order_in_c_and_in_python(host: Host) -> None:
    c = [c_step(callback(0, 1, host.log), value) for value in range(4)]
    host.remember((c[0], c[1], host.step("p"), c[2], host.step("q"), host.step("r"), c[3]))
    assert host.run()
    assert host.log == [(0,), (1,), "p", (2,), "q", "r", (3,)]


def test_words_follow_the_number_before_the_steps(host: Host) -> None:
    memory = (ctypes.c_uint32 * 12)(*[7] * 12)
    first = ctypes.addressof(memory)
    words = ((5, 2, (first, 12, 3)), (0xFFFF_FFFF, 1, (first + 4, 4, 1)), (1, 0xFFFF_FFFF, (first + 44, 0, 1)))
    host.remember(((lambda: host.log.append(list(memory)), (), None),), words)
    assert host.run()
    assert host.run()
    # Call 1: 5 + 2, 2**32, 1 - 1 in a circle of 2**32; then call 2.
    first_call, second_call = [7, 0, 7, 7] + [7] * 7 + [0], [9, 1, 7, 9, 7, 7, 9, 7, 7, 7, 7, 0xFFFF_FFFF]
    assert host.log == [first_call, second_call]


def test_notes_are_taken_after_the_steps(host: Host) -> None:
    pairs: list[object] = []
    target, tally = SimpleNamespace(), [41, "more"]
    notes = (
        (Effect.SET, target, "choice", "kept"),
        (Effect.SET_NUMBER, target, "last", None),
        (Effect.SET_PAIR, target, "kernel", "program"),
        (Effect.APPEND_PAIR, pairs.append, "", "subject"),
        (Effect.COUNT, tally, "", None),
    )
    host.remember((((lambda: host.log.append(dict(vars(target)))), (), None),), (), notes)
    assert host.run()
    assert host.log == [{}]
    assert vars(target) == {"choice": "kept", "last": 1, "kernel": (1, "program")}
    assert (pairs, tally) == ([(1, "subject")], [42, "more"])
