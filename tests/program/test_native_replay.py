"""Repeated calls in C: what they run, and everything that keeps one from being repeated. No device, no ranks."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sidelane.collectives.repeat import MOST_TENSORS
from sidelane.execute.cuda.native import MOST_INTEGERS
from sidelane.memory.record import Record
from sidelane.native import Effect, load_replays

RING, PAYLOAD = 4, b"all_gather\0"
STREAM, DEVICE = 0x7F00_0000_1234, 3


@pytest.fixture(scope="module")
def module() -> ModuleType:
    found = load_replays()
    assert found.module is not None, f"this machine compiles no C: {found.words}"
    return found.module


class Host:
    """Everything around a replay, as a communicator has it."""

    def __init__(self, module: ModuleType) -> None:
        self.state = SimpleNamespace(closed=False, failure=None, last=STREAM)
        self.stream, self.device, self.captured = STREAM, DEVICE, False
        self.generation = [1000]
        self.numbers = itertools.count(1)
        self.module, self.memory = module, bytearray(RING * 64)
        self.begun = ctypes.c_uint64(0)
        self.posted: list[tuple[int, str]] = []
        self.unread = 0
        self.post_lock, self.lock = threading.Lock(), threading.Lock()
        self.tensors = (torch.zeros(8), torch.zeros(4))
        self.log: list[Any] = []
        self.failures: list[tuple[int, Any]] = []
        self.use([memoryview(self.memory)[64 * i : 64 * i + 64] for i in range(RING)])

    def use(self, views: list[memoryview]) -> None:
        """Make a replay that posts in these records."""
        self.records = [Record(view) for view in views]
        self.replay = self.module.Replay(
            ((self.state, "closed", False), (self.state, "failure", None)),
            *(lambda index: self.stream, lambda: self.captured, lambda: self.device, DEVICE),
            *(self.generation, (self.state, "last"), self.numbers),
            *(tuple(self.records), tuple(record.address for record in self.records), ctypes.addressof(self.begun)),
            *(self, self.post, self.post_lock, self.lock.acquire, self.lock.release),
            *(torch._C._increment_version, torch.Tensor),
        )

    def post(self, call: int, signature: str) -> None:
        self.posted.append((call, signature))
        self.records[call % RING].write(call, 0, PAYLOAD)

    def failed(self, index: int, error: Any) -> None:
        self.failures.append((index, error))
        raise RuntimeError("refused")

    def step(self, *values: Any) -> tuple[Callable[..., Any], tuple[Any, ...], None]:
        return self.log.append, values, None

    def remember(self, steps: Any = None, words: Any = (), notes: Any = (), **other: Any) -> None:
        tensors = other.get("tensors", self.tensors)
        identities = tuple((t.data_ptr(), t.nbytes, t.dtype) for t in tensors)
        parts = {"kind": "all_gather", "details": (), "variant": "auto", "beside": None, "turn": None, **other}
        steps = (self.step("ran"),) if steps is None else steps
        self.replay.remember(
            *(
                parts["kind"],
                identities,
                parts.get("lists", 0),
                parts["details"],
                parts["variant"],
                parts["beside"],
                self.generation[0],
            ),
            *(
                parts["turn"],
                STREAM,
                "all_gather",
                other.get("payload", PAYLOAD),
                steps,
                words,
                notes,
                self.failed,
                None,
            ),
        )

    def run(
        self,
        given: Any = None,
        *,
        kind: Any = "all_gather",
        details: Any = (),
        variant: Any = "auto",
        beside: Any = None,
    ) -> Any:
        return self.replay.run(kind, self.tensors if given is None else given, details, variant, beside)


@pytest.fixture
def host(module: ModuleType) -> Host:
    return Host(module)


def test_python_and_c_mean_the_same(module: ModuleType) -> None:
    assert {effect.name: effect.value for effect in Effect} == {
        name: value for name, value in vars(module).items() if name.isupper() and not name.startswith("MOST_")
    }
    assert (module.MOST_ARGUMENTS, module.MOST_TENSORS) == (MOST_INTEGERS, MOST_TENSORS)


def test_a_remembered_call_runs_again(host: Host) -> None:
    assert host.run() is False, "nothing is remembered"
    host.remember()
    versions = [tensor._version for tensor in host.tensors]
    assert [host.run() for _ in range(3)] == [True] * 3
    assert host.log == ["ran"] * 3
    assert next(host.numbers) == 4, "a number a call"
    assert [tensor._version for tensor in host.tensors] == [versions[0] + 3, versions[1]], "the output was written"
    assert not host.lock.locked()


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
    versions = [tensor._version for tensor in tensors]
    assert host.run(([a, b], [c, d])) and host.run(((a, b), [c, d]))
    assert [tensor._version - version for tensor, version in zip(tensors, versions, strict=True)] == [2, 2, 0, 0]
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


def test_calls_are_posted_for_the_peers(host: Host) -> None:
    host.remember()
    seen = []
    for number in range(1, 4 * RING):
        assert host.run()
        view = memoryview(host.memory)[64 * (number % RING) :]
        seen.append(Record(view[:64]).read())
        assert host.begun.value == number
    assert seen == [(number, 0, PAYLOAD) for number in range(1, 4 * RING)]
    assert host.posted == [], "all of it in C"


@pytest.mark.parametrize("change", ["another payload", "an equal payload", "a refusal", "a writer that died"])
def test_what_a_record_holds_otherwise_is_replaced(host: Host, change: str) -> None:
    host.remember()
    for _ in range(RING):
        host.run()
    payload = {"another payload": b"broadcast\0", "an equal payload": bytes(bytearray(PAYLOAD))}.get(change, PAYLOAD)
    record, view = host.records[1], memoryview(host.memory)[64:128]
    record.write(1, int(change == "a refusal"), payload)
    if change == "a writer that died":
        host.memory[64] += 1
        record.written = None
    assert host.run()
    assert Record(view).read() == (RING + 1, 0, PAYLOAD)
    assert (record.written, record.status) == (PAYLOAD, 0) and record.written is PAYLOAD
    record.write(RING + 2, 0, PAYLOAD)  # as one that repeats: number and tie alone
    assert Record(view).read() == (RING + 2, 0, PAYLOAD), "Python goes on where C left it"
    assert host.posted == []


def test_a_payload_that_no_record_has_room_for_is_refused(host: Host) -> None:
    with pytest.raises(ValueError, match=r"payload bytes .value=33, allowed=..32"):
        host.remember(payload=bytes(33))


def test_records_of_any_length_are_what_python_reads(module: ModuleType) -> None:
    host, draw = Host(module), random.Random(3)
    room = 32 + 2048
    memory = bytearray(RING * room)
    views = [memoryview(memory)[room * i : room * (i + 1)] for i in range(RING)]
    host.use(views)
    payloads = [draw.randbytes(length) for length in [*range(40), 255, 1000, 2047, 2048]]
    for call in range(1, 300):
        payload = draw.choice(payloads)
        host.remember(payload=payload)
        assert host.run()
        assert Record(views[call % RING]).read() == (call, 0, payload)


def test_what_peers_may_not_have_read_is_replaced_by_python(host: Host) -> None:
    host.remember()
    for _ in range(2 * RING):
        host.run()
    host.posted.clear()
    host.unread = 2 * RING + 2
    # Its post is replaced by that of call 3 * RING + 2 = 14: Python makes it, which waits for peers without a lock.
    assert [host.run() for _ in range(7)] == [True] * 5 + [None] * 2
    assert host.posted == []
    for _ in range(10):  # calls that some rank refused take numbers too
        next(host.numbers)
    host.begun.value = 2 * RING  # as if they were many
    assert host.run()
    assert len(host.posted) == 1, "Python posts, whatever begun says"


def test_python_posts_while_another_thread_does(host: Host) -> None:
    host.remember()
    for _ in range(RING):
        host.run()
    host.posted.clear()
    host.post_lock.acquire()  # which Python's post, a stub here, would wait for
    assert host.run()
    assert host.posted == [(RING + 1, "all_gather")]


def callback(returns: int, arguments: int, log: list[Any]) -> Any:
    def call(*values: int) -> int:
        log.append(values)
        return returns

    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * arguments)(call)


def c_step(function: Any, *arguments: int) -> tuple[int, tuple[int, ...], Any]:
    return ctypes.cast(function, ctypes.c_void_p).value or 0, arguments, function


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
    words = ((5, 2, (first, 12, 3)), (0xFFFF_FFFF, 1, (first + 4, 4, 1)), (1, 0xFFFF_FFFF, host.log.append))
    host.remember(((lambda: host.log.append(list(memory)), (), None),), words)
    assert host.run()
    assert host.run()
    # Call 1: 5 + 2, 2**32, 1 - 1 in a circle of 2**32; then call 2.
    first_call, second_call = [7, 0, 7, 7] + [7] * 8, [9, 1, 7, 9, 7, 7, 9, 7, 7, 7, 7, 7]
    assert host.log == [0, first_call, 0xFFFF_FFFF, second_call]


def test_notes_are_taken_after_the_steps(host: Host) -> None:
    target, pairs, tally = SimpleNamespace(), [], [41, "more"]
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


def test_turns(host: Host) -> None:
    turns = SimpleNamespace(next=0)
    for turn in (0, 1, 1, 0):  # to remember them once more changes nothing
        step = (lambda turn=turn: host.log.append((turn, turns.next)), (), None)
        host.remember((step,), turn=(turns, "next", turn, 1 - turn))
    assert host.replay.remembered == 2
    assert [host.run() for _ in range(5)] == [True] * 5
    assert host.log == [(0, 1), (1, 0), (0, 1), (1, 0), (0, 1)], "it is the next one's turn before the call runs"


# --- what keeps a call from being repeated ----------------------------------------------------------------------------


def _resize(host: Host) -> None:
    host.tensors[1].resize_(3)


def _move(host: Host) -> None:
    host.tensors[1].data = torch.zeros(4)


def _retype(host: Host) -> None:
    host.tensors = (host.tensors[0], host.tensors[1].view(torch.int32))


def _transpose(host: Host) -> None:
    whole = torch.zeros(2, 2)
    host.tensors = (host.tensors[0], whole)
    host.remember()
    host.tensors = (host.tensors[0], whole.t())


def _negate(host: Host) -> None:
    host.tensors = (host.tensors[0], torch._neg_view(host.tensors[1]))


def _swap(host: Host) -> None:
    host.tensors = (host.tensors[1], host.tensors[0])


def _set(name: str, value: Any) -> Callable[[Host], None]:
    return lambda host: setattr(host.state, name, value)


REASONS: dict[str, Callable[[Host], Any]] = {
    "the tensor is smaller": _resize,
    "the tensor lies elsewhere": _move,
    "another dtype": _retype,
    "not contiguous": _transpose,
    "a view that negates": _negate,
    "the other way round": _swap,
    "one tensor": lambda host: setattr(host, "tensors", host.tensors[:1]),
    "three tensors": lambda host: setattr(host, "tensors", (*host.tensors, host.tensors[0])),
    "no tensor": lambda host: setattr(host, "tensors", (host.tensors[0], None)),
    "lists": lambda host: setattr(host, "tensors", ([host.tensors[0]], [host.tensors[1]])),
    "a sparse tensor": lambda host: setattr(host, "tensors", (host.tensors[0], host.tensors[1].to_sparse())),
    "another stream": lambda host: setattr(host, "stream", STREAM + 16),
    "the default stream": lambda host: setattr(host, "stream", 0),
    "a capture": lambda host: setattr(host, "captured", True),
    "another device": lambda host: setattr(host, "device", DEVICE + 1),
    "the last call was on another stream": _set("last", STREAM + 16),
    "no call before": _set("last", None),
    "symmetric memory was allocated": lambda host: host.generation.__setitem__(0, 1001),
    "it is closed": _set("closed", True),
    "it has failed": _set("failure", OSError("peer")),
    "another thread submits": lambda host: host.lock.acquire(),
    "all is forgotten": lambda host: host.replay.forget(),
}


NOT_NOW = {
    "another stream",
    "the default stream",
    "a capture",
    "another device",
    "the last call was on another stream",
    "no call before",
    "it is closed",
    "it has failed",
    "another thread submits",
}
"""Reasons that pass, and do not make the call another one."""


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_not_as_it_was_is_left_to_python(host: Host, reason: str) -> None:
    host.remember()
    assert host.run() is True, "the test would prove nothing"
    before = bytes(host.memory)
    REASONS[reason](host)
    assert host.run() is (None if reason in NOT_NOW else False)
    assert (host.log, bytes(host.memory), next(host.numbers)) == (["ran"], before, 2), "something has happened"
    assert host.lock.locked() == (reason == "another thread submits")


@pytest.mark.parametrize(
    "asked",
    [{"kind": "all_to_all"}, {"variant": "b2b"}, {"beside": "compute"}, {"details": ("sum",)}],
    ids=lambda asked: next(iter(asked)),
)
def test_another_call_with_the_same_tensors(host: Host, asked: dict[str, Any]) -> None:
    host.remember()
    assert host.run(**asked) is False
    host.remember((host.step("other"),), **asked)
    assert (host.run(**asked), host.run()) == (True, True)
    assert host.log == ["other", "ran"]


def test_a_call_is_remembered_in_one_place(host: Host) -> None:
    for number in range(20):
        host.remember((host.step(number),))
    assert host.replay.remembered == 1
    assert host.run()
    assert host.log == [19]
    host.generation[0] = 2000
    host.remember((host.step("new"),))
    assert host.replay.remembered == 1, "the old one will never come again"
    assert host.run()


def test_ctrl_c_in_a_question_gets_out(host: Host) -> None:
    class Asking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    host.tensors = (host.tensors[0], host.tensors[1].as_subclass(Asking))
    with pytest.raises(KeyboardInterrupt):
        host.run()
    assert not host.lock.locked()


def test_many_sizes_and_ways_to_run_one_call_have_places(host: Host) -> None:
    """A study tries every variant with every size, at the same two addresses."""
    names, whole = [f"variant {number}" for number in range(12)], host.tensors
    hosts = [(name, (whole[0][: 2 * n], whole[1][:n])) for name in names for n in (1, 2, 3, 4)]
    for name, host.tensors in hosts:
        host.remember((host.step(name),), variant=name)
    for name, host.tensors in hosts:
        assert host.run(variant=name), name


def test_equal_words_are_the_same_words(host: Host) -> None:
    host.remember(variant="one_shot", details=("sum", 3))
    assert host.run(variant="".join(["one", "_shot"]), details=("".join(["su", "m"]), int("3")))


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["C", "Python"])
def test_a_refused_step_ends_the_call(host: Host, kind: str) -> None:
    refused = c_step(callback(719, 0, host.log)) if kind == "C" else ((lambda: 719), (), None)
    host.remember((c_step(callback(0, 0, host.log)), refused, host.step("late")), (), ((Effect.COUNT, [0], "", None),))
    version = host.tensors[0]._version
    with pytest.raises(RuntimeError, match="refused"):
        host.run()
    assert host.failures == [(1, 719)]
    assert "late" not in host.log
    assert host.tensors[0]._version == version
    assert not host.lock.locked()


def test_what_a_step_raises_is_told(host: Host) -> None:
    def step() -> None:
        raise KeyError("inside")

    host.remember(((step, (), None), host.step("late")))
    with pytest.raises(RuntimeError, match="refused"):
        host.run()
    ((index, error),) = host.failures
    assert (index, type(error), host.log) == (0, KeyError, [])
    assert error.__traceback__ is not None
    assert not host.lock.locked()


@pytest.mark.parametrize("where", ["post", "setter", "note", "version"])
def test_errors_around_the_steps_get_out(host: Host, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(*_: Any) -> None:
        raise KeyboardInterrupt

    words = ((0, 1, bad),) if where == "setter" else ()
    notes = ((Effect.APPEND_PAIR, bad, "", None),) if where == "note" else ()
    if where == "post":
        monkeypatch.setattr(Record, "write", bad)
        host.post_lock.acquire()  # so that Python posts
    if where == "version":
        with torch.inference_mode():
            host.tensors = (torch.zeros(8), host.tensors[1])
    host.remember(None, words, notes)
    if where == "version":
        assert host.run(), "tensors of inference have no version, which is no error"
    else:
        with pytest.raises(KeyboardInterrupt):
            host.run()
    assert not host.lock.locked()


# --- memory and threads -----------------------------------------------------------------------------------------------


class Kept:
    """Something that an entry holds."""


def test_the_table_is_bounded_and_lets_go(host: Host) -> None:
    whole = torch.zeros(40_000)
    pairs = [(whole[4 * i : 4 * i + 2], whole[4 * i + 2 : 4 * i + 4]) for i in range(10_000)]
    kept = []
    for pair in pairs:
        owner = Kept()
        kept.append(weakref.ref(owner))
        host.remember(((host.log.append, (len(kept),), owner),), tensors=pair)
    del owner
    alive = [index for index, owner in enumerate(kept) if owner() is not None]
    assert 3900 < len(alive) == host.replay.remembered <= 4096
    for index, pair in enumerate(pairs):
        host.tensors = pair
        assert host.run() == (index in alive)
    assert host.log == [index + 1 for index in alive]
    host.replay.forget()
    assert host.replay.remembered == 0
    assert not any(owner() for owner in kept)


def test_a_cycle_is_collected(module: ModuleType) -> None:
    host = Host(module)
    owner = Kept()
    owner.host = host
    host.remember(((host.log.append, (1,), owner),))
    found = weakref.ref(owner)
    del host, owner
    gc.collect()
    assert found() is None


def test_an_entry_that_is_dropped_while_it_runs_lives_until_its_end(host: Host) -> None:
    kept = []

    def drop() -> None:
        host.replay.forget()
        whole = torch.zeros(4096)
        for index in range(600):
            host.remember((host.step(index),), tensors=(whole[4 * index : 4 * index + 4], whole[:2]))
        gc.collect()

    owner = Kept()
    kept.append(weakref.ref(owner))
    host.remember(((drop, (), owner), c_step(callback(0, 1, host.log), 9), host.step("end")))
    del owner
    assert host.run()
    assert host.log == [(9,), "end"]
    assert kept[0]() is None


class Forgetting(str):
    """Compares by way of Python, which forgets everything."""

    host: Host

    def __eq__(self, other: object) -> bool:
        self.host.replay.forget()
        gc.collect()
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("turn", [None, (SimpleNamespace(next=0), "next", 0, 1)])
def test_entries_that_are_forgotten_while_they_are_compared(host: Host, turn: Any) -> None:
    variant = Forgetting("auto")
    variant.host = host
    for _ in range(5):
        host.remember(variant=variant, turn=turn)
        host.remember(variant="auto", turn=turn)
        assert host.run(variant=variant) in (False, True)
        assert host.replay.remembered <= 2


def test_a_blocked_driver_lets_other_threads_run(host: Host) -> None:
    entered, go = threading.Event(), threading.Event()

    def block() -> int:
        entered.set()
        assert go.wait(20)
        return 0

    host.remember((c_step(ctypes.CFUNCTYPE(ctypes.c_int)(block)),))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(host.run()))
    thread.start()
    assert entered.wait(20)
    assert host.run() is None, "the lock is held: Python waits for it"
    go.set()
    thread.join(20)
    assert answers == [True]
    assert next(host.numbers) == 2


def test_many_calls_in_any_order_leak_nothing(host: Host) -> None:
    randoms = random.Random(5)
    whole = torch.zeros(2048)
    pairs = [(whole[4 * i : 4 * i + 2], whole[4 * i + 2 : 4 * i + 4]) for i in range(400)]
    owner = Kept()
    before = None
    for turn in range(3000):
        host.tensors = randoms.choice(pairs)
        if not host.run():
            host.remember(((int, ("0",), owner),), ((0, 1, [].append),), ((Effect.COUNT, [0], "", None),))
        if turn == 1500:
            before = len(gc.get_objects())
    assert before is not None
    assert len(gc.get_objects()) < before + 2000
    host.replay.forget()
    assert len(gc.get_referrers(owner)) <= 1


# --- wrong arguments --------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "too many arguments": ({"steps": ((1, tuple(range(9)), None),)}, ValueError),
    "no function": ({"steps": ((0, (), None),)}, ValueError),
    "a negative argument": ({"steps": ((1, (-1,), None),)}, OverflowError),
    "a step of two": ({"steps": ((1, ()),)}, TypeError),
    "an unknown effect": ({"notes": ((9, [], "", None),)}, ValueError),
    "a tally that is no list": ({"notes": ((Effect.COUNT, (1,), "", None),)}, ValueError),
    "words nowhere": ({"words": ((0, 1),)}, TypeError),
    "no tensors": ({"tensors": ()}, ValueError),
    "a turn without a successor": ({"turn": (1, "next", 2)}, TypeError),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused(host: Host, what: str) -> None:
    arguments, error = WRONG[what]
    with pytest.raises(error):
        host.remember(**arguments)
    assert host.replay.remembered == 0


def test_a_replay_is_made_whole(module: ModuleType) -> None:
    with pytest.raises(TypeError):
        module.Replay()
    half = module.Replay.__new__(module.Replay)
    with pytest.raises(TypeError):
        half.run("all_gather", (), (), "auto", None)
    with pytest.raises(TypeError):
        half.remember()
    with pytest.raises(TypeError):
        Host(module).replay.run("all_gather", ())
