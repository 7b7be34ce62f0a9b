"""The proxy without an operator: threads are the ranks, and Python writes the words that a kernel would write."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from marks import long
from torch.utils._python_dispatch import TorchDispatchMode

from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.ops.scale_out.connections import Gone, InterNodeConnections
from sidelane.ops.scale_out.proxy import InterNodeCall, Proxy
from sidelane.ops.scale_out.transport import WINDOW, GroupTransport
from sidelane.ops.scale_out.words import OPENED, OVER, READY, Arriving, HandleWords, Outgoing, Slices
from sidelane.program.wraparound import as_int32

CPU = torch.device("cpu")
STRIDE, ROWS, COLUMNS, SLICES = 5, 3, 4, 6


Key = tuple[str, int, int, int]
"""Name of a transfer: "sent" or "received", its source, its target, and its number among those of this pair."""


@dataclasses.dataclass
class Late:
    """Transfers that end when the test lets them: bytes are read, and put down, no earlier than that.

    Attributes:
        ends: tells whether a transfer may end; it may raise.
        begun: transfers that have begun, by all ranks.
    """

    ends: Callable[[Key], bool]
    begun: list[Key] = dataclasses.field(default_factory=list)
    wire: dict[tuple[int, ...], torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class LateTransfer:
    late: Late
    key: Key
    values: torch.Tensor

    def is_done(self) -> bool:
        return self.late.ends(self.key) and (self.key[0] == "sent" or self.key[1:] in self.late.wire)

    def finish(self) -> None:
        if self.key[0] == "sent":
            self.late.wire[self.key[1:]] = self.values.clone()
        else:
            self.values.copy_(self.late.wire.pop(self.key[1:]).view(self.values.shape))


class LateTransport:
    def __init__(self, rank: int, late: Late) -> None:
        self._rank, self._late = rank, late
        self._numbers = {kind: [itertools.count() for _ in range(8)] for kind in ("sent", "received")}

    def attach(self) -> None:
        pass

    def make_ready(self, values: torch.Tensor) -> None:
        pass

    def send(self, target: int, values: torch.Tensor) -> LateTransfer:
        return self._begin(("sent", self._rank, target, next(self._numbers["sent"][target])), values)

    def receive(self, source: int, values: torch.Tensor) -> LateTransfer:
        return self._begin(("received", source, self._rank, next(self._numbers["received"][source])), values)

    def _begin(self, key: Key, values: torch.Tensor) -> LateTransfer:
        self._late.begun.append(key)
        return LateTransfer(self._late, key, values)

    def exchange(self, *_: object) -> LateTransfer:
        raise AssertionError("slices only")

    def close(self) -> None:
        pass


def meeting(store: dist.Store, rank: int, size: int) -> Callable[[object], list[object]]:
    """An exchange between the ranks of a test."""

    def meet(own: object) -> list[object]:
        store.set(f"at/{rank}", json.dumps(own))
        return [json.loads(store.get(f"at/{other}")) for other in range(size)]

    return meet


class Rank:
    """A rank on a node of its own, with as many slices for each other one; its transfers end when ``late`` says so."""

    def __init__(self, rank: int, size: int, store: dist.Store, slices: int, timeout_s: float, late: Late) -> None:
        self.rank, self.remote_ranks, self.slices = rank, [far for far in range(size) if far != rank], slices
        self.links = InterNodeConnections(rank, self.remote_ranks, meeting(store, rank, size), timeout_s)
        self.errors: list[PeerError] = []
        transport: Any = LateTransport(rank, late)
        self.proxy = Proxy(
            *(rank, self.remote_ranks, self.links, transport, CPU), timeout_s=timeout_s, failed=self.errors.append
        )
        part, place = ROWS * COLUMNS, ROWS * STRIDE
        sent = [Outgoing(far, n, (far * slices + n) * part, part) for far in self.remote_ranks for n in range(slices)]
        came = {
            far: tuple(Arriving((far * slices + n) * place, ROWS, COLUMNS) for n in range(slices))
            for far in self.remote_ranks
        }
        self.handle = HandleWords(Slices(tuple(sent), came, STRIDE), CPU)
        words = {OPENED: 1, READY: len(sent), OVER: 1}
        self.words = {
            index: np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(self.handle.addresses()[index]))
            for index, count in words.items()
        }
        self.source = torch.zeros(size * slices * part)
        self.landing = torch.zeros(size * slices * place)
        self.proxy.start()

    def begin(self, epoch: int) -> None:
        self.call = InterNodeCall(epoch, self.handle, self.source, self.landing)
        self.proxy.begin(self.call)

    def open(self, epoch: int) -> None:
        self.words[OPENED][0] = as_int32(epoch)

    def put(self, epoch: int, target: int, *numbers: int) -> None:
        """Do as ``send_release`` does, with some slices for a target, or all."""
        for number in numbers or range(self.slices):
            self.words[READY][self.remote_ranks.index(target) * self.slices + number] = as_int32(epoch)

    def came(self, source: int) -> int:
        """Return the number of slices that have come from a rank in this call."""
        return self.slices - self.call.missing.get(source, 0)

    @property
    def over(self) -> int:
        return int(self.words[OVER][0])

    def wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 20
        while not condition():
            assert self.proxy.failure is None, self.proxy.failure
            assert time.monotonic() < until
            time.sleep(1e-4)

    def launch(self, epoch: int, draws: random.Random) -> None:
        """Do as a kernel does in a call: slices in any order; they are read when the call is over."""
        size = len(self.remote_ranks) + 1
        self.source.copy_(torch.arange(self.source.numel()) + 1000.0 * self.rank + 1e5 * (epoch % 100))
        self.begin(epoch)
        time.sleep(draws.choice((0, 0, 2e-3)))
        self.open(epoch)
        slices = [(target, number) for target in self.remote_ranks for number in range(self.slices)]
        draws.shuffle(slices)
        for target, number in slices:
            self.put(epoch, target, number)
        self.wait(lambda: self.over == as_int32(epoch))
        for sender, number in slices:
            first = (self.rank * self.slices + number) * ROWS * COLUMNS + 1000.0 * sender + 1e5 * (epoch % 100)
            came = self.landing.view(-1, ROWS, STRIDE)[sender * self.slices + number]
            assert came[:, :COLUMNS].equal(first + torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)), (epoch, sender)
            assert not came[:, COLUMNS:].any(), "what lies between rows was written"
        assert self.call.over.wait(20) and size == 1 + len(self.remote_ranks)

    def close(self) -> None:
        self.proxy.close()


@contextlib.contextmanager
def ranks(size: int, slices: int = SLICES, timeout_s: float = 10.0, late: Late | None = None) -> Iterator[list[Rank]]:
    store, made, others = dist.HashStore(), {}, {*threading.enumerate()}
    late = late or Late(lambda key: True)

    def make(rank: int) -> None:
        made[rank] = Rank(rank, size, store, slices, timeout_s, late)

    each(size, make)
    found = [made[rank] for rank in range(size)]
    try:
        yield found
    finally:
        for one in found:
            one.proxy.close(time.monotonic())
        left = {thread for thread in threading.enumerate() if thread.name.startswith("sidelane-")} - others
        assert not left
        assert all(made.fileno() == -1 for one in found for made in one.links.sockets.values())


def die(one: Rank) -> None:
    """End its connections without a word, as when a process is killed."""
    one.links.send = lambda *_: None  # type: ignore[method-assign]  # its threads still run
    for made in one.links.sockets.values():
        made.shutdown(2)


def each(size: int, function: Callable[[int], None]) -> None:
    """Call it in a thread for each rank, and raise what the first one raised."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            function(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("slices", "is_late"), [(1, False), (SLICES, False), (3 * WINDOW, False), (SLICES, True)])
def test_calls_back_to_back(slices: int, is_late: bool) -> None:
    """Through the wrap-around of the generations, whose words are signed."""
    late = Late(lambda key: random.random() < 0.2)
    with ranks(3, slices, late=late if is_late else None) as found:
        epochs = [*range(1, 9), 2**31 - 1, 2**31, 2**32 - 1, 2, 3]

        def run(rank: int) -> None:
            for epoch in epochs:
                found[rank].launch(epoch, random.Random(100 * rank + epoch))

        each(3, run)
        assert not any(one.errors for one in found)


def test_slices_that_a_rank_does_not_have_are_not_waited_for() -> None:
    """A rank with fewer samples gets fewer slices, whose words lie where those of the others do."""
    sent = Outgoing(1, 0, 0, 4), Outgoing(1, 1, 4, 0)
    came = {1: (Arriving(0, 1, 4), Arriving(4, 0, 4)), 2: (Arriving(8, 0, 4),)}
    call = InterNodeCall(1, HandleWords(Slices(sent, came, 8), CPU), torch.zeros(4), torch.zeros(16))
    assert call.leaving == 1 and call.missing == {1: 1}
    with pytest.raises(PeerError, match=r"rank 1 sent slice 1 \(allowed=0\.\.1"):
        call.target(1, 1)


def test_nothing_is_put_down_before_the_output_is_open() -> None:
    with ranks(3) as found:
        first, second, third = found
        for one in found:
            one.begin(1)
        second.open(1), third.open(1)
        for one in (first, third):
            one.source.fill_(one.rank + 1)
            one.put(1, 1 - one.rank if one.rank < 2 else 0, 0)
        second.wait(lambda: second.came(0) == 1)  # of those that are open
        assert second.landing[:COLUMNS].eq(1).all()
        time.sleep(0.05)
        assert not first.landing.any() and not first.came(2)
        first.open(1)
        first.wait(lambda: first.came(2) == 1)
        assert first.landing[2 * SLICES * ROWS * STRIDE :][:COLUMNS].eq(3).all()


def test_sources_are_out_of_step_and_each_is_in_order() -> None:
    """No slice is counted, and no call ends, in front of what is still under way."""
    allowed: set[Key] = set()
    late = Late(lambda key: key in allowed or len(allowed) > 50)
    with ranks(3, 3, late=late) as found:
        target, *senders = found
        for one in found:
            one.begin(1), one.open(1)
        for one in senders:
            one.source.copy_(torch.arange(one.source.numel()) + 1000.0 * one.rank)
            one.put(1, 0)
        target.wait(lambda: len(late.begun) == 12)

        def came() -> list[int]:
            return [target.came(one.rank) for one in senders]

        allowed |= {(kind, 2, 0, number) for kind in ("sent", "received") for number in (1, 2)}
        time.sleep(0.05)
        assert came() == [0, 0] and not target.landing.any()
        assert [one.call.leaving for one in senders] == [6, 6]
        senders[1].source[:COLUMNS] += 1  # it has not been read
        allowed.add(("sent", 2, 0, 0))
        senders[1].wait(lambda: senders[1].call.leaving == 3)
        assert came() == [0, 0]
        allowed.add(("received", 2, 0, 0))
        target.wait(lambda: target.came(2) == 3)
        assert came()[0] == 0 and senders[0].call.leaving == 6
        allowed |= {(kind, 1, 0, number) for kind in ("sent", "received") for number in (0, 2)}
        target.wait(lambda: came()[0] == 1)
        assert senders[0].call.leaving == 5
        allowed |= {(kind, 1, 0, 1) for kind in ("sent", "received")}
        target.wait(lambda: came()[0] == 3)
        for one, more in ((1, 0), (2, 1)):
            found_here = target.landing.view(-1, ROWS, STRIDE)[one * 3 : one * 3 + 3, :, :COLUMNS]
            want = torch.arange(3 * ROWS * COLUMNS).view(3, ROWS, COLUMNS) + 1000.0 * one
            want[0, 0] += more
            assert found_here.equal(want)
        assert not any(one.over for one in found)
        allowed |= {("", number, 0, 0) for number in range(50)}  # from now on, all
        target.put(1, 1), target.put(1, 2), senders[0].put(1, 2)
        target.wait(lambda: target.over == 1)
        senders[1].wait(lambda: len(senders[1].call.missing) == 0)
        assert [one.over for one in senders] == [0, 0], "one has no slices of the other, whose own have not left"
        senders[1].put(1, 1)
        for one in senders:
            one.wait(lambda one=one: one.over == 1)  # type: ignore[misc]


def test_a_window_bounds_the_transfers_of_each_direction() -> None:
    allowed: list[bool] = []
    late, each_sends = Late(lambda key: bool(allowed)), WINDOW - 2
    with ranks(3, WINDOW + 5, late=late) as found:
        target, *senders = found
        for one in found:
            one.begin(1), one.open(1)
            if one is target:
                one.put(1, 1)
            else:
                one.put(1, 0, *range(each_sends))
        time.sleep(0.3)
        begun = [key[0] + str(key[2]) for key in late.begun]
        assert begun.count("sent0") == 2 * each_sends and begun.count("received0") == WINDOW
        assert begun.count("sent1") == begun.count("received1") == WINDOW and not target.came(1)
        allowed.append(True)
        target.wait(lambda: [target.came(one.rank) for one in senders] == [each_sends] * 2)
        senders[0].wait(lambda: senders[0].came(0) == WINDOW + 5)
        assert not late.wire and len(late.begun) == 2 * (2 * each_sends + WINDOW + 5)


@pytest.mark.parametrize("how", ["late", "told", "arrival breaks", "send breaks", "dies", "closes"])
def test_failures_with_transfers_under_way(how: str) -> None:
    broken: list[str] = []

    def ends(key: Key) -> bool:
        if key[0] in broken:
            raise Gone(key[1] if key[0] == "received" else key[2])
        return False

    late = Late(ends)
    with ranks(2, 3, timeout_s=0.5 if how in ("late", "closes", "send breaks") else 10.0, late=late) as found:
        first, second = found
        for one in found:
            one.begin(1), one.open(1)
            one.put(1, 1 - one.rank)
        wait_for(lambda: len(late.begun) == 12)
        if how == "told":
            second.proxy.fail(PeerError("rank 1 is of no use", (1,)))
        elif how == "dies":
            die(second)
        elif how == "closes":
            second.proxy.close(time.monotonic())
        elif "breaks" in how:
            broken.append("received" if "arrival" in how else "sent")
        wait_for(lambda: bool(first.errors))
        assert not first.landing.any() and not first.over and not first.came(1) and first.call.leaving == 3
        if how in ("told", "dies", "arrival breaks"):
            wait_for(lambda: not any(thread.is_alive() for thread in first.proxy._threads))
            assert len(first.errors[0].ranks) == 1
        if how in ("late", "closes", "send breaks"):
            assert isinstance(first.errors[0], PeerTimeoutError)


def test_what_copies_rows_that_lie_apart_is_loaded_ahead() -> None:
    """Even if the rows that the operator shows do not lie apart: those of ranks with fewer tables do."""
    copied: list[bool] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                copied.append(args[0].is_contiguous())
            return func(*args, **(kwargs or {}))

    with Copies():
        transport = GroupTransport.__new__(GroupTransport)
        transport._slots = {}
        transport.make_ready(torch.zeros(2, 4))
    assert False in copied


def test_a_proxy_that_is_stuck_is_noticed_by_its_rank() -> None:
    """Its threads may be in a call of the driver that does not return: the rank looks at the time, too."""
    stuck = threading.Event()

    def ends(key: Key) -> bool:
        stuck.wait()
        return False

    with ranks(2, timeout_s=0.5, late=Late(ends)) as (first, second):
        try:
            for one in (first, second):
                one.begin(1), one.open(1)
                one.put(1, 1 - one.rank, 0)
            wait_for(lambda: second.proxy.watch() or bool(second.errors))
            assert isinstance(second.errors[0], PeerTimeoutError)
        finally:
            stuck.set()


def test_a_rank_that_does_not_come_is_named() -> None:
    with ranks(3, timeout_s=0.5) as found:
        for one in found[:2]:
            one.begin(1), one.open(1)
        for one in found:
            wait_for(lambda one=one: bool(one.errors))  # type: ignore[misc]
            (error,) = one.errors
            assert isinstance(error, PeerTimeoutError) and error.ranks == (2,), error
            assert "which have not come" in str(error) and one.proxy.stop[0] == 1


def say_nothing(stranger: socket.socket) -> None:
    """Wait until rank 0 hangs up."""
    with contextlib.suppress(OSError):
        stranger.recv(1)


def drip(stranger: socket.socket) -> None:
    """Say a byte at a time, each in time."""
    with contextlib.suppress(OSError):
        while True:
            stranger.sendall(b"0")
            time.sleep(0.3)


def lie(stranger: socket.socket) -> None:
    """Say a whole hello without the token."""
    with contextlib.suppress(OSError):
        stranger.sendall(bytes(40))
        say_nothing(stranger)


def leave(stranger: socket.socket) -> None:
    """Hang up in the middle of a hello."""
    stranger.sendall(b"0" * 10)


@pytest.mark.parametrize(
    ("behave", "number"), [(say_nothing, 8), (drip, 4), (lie, 40), (leave, 40), long(say_nothing, 300)]
)
def test_strangers_keep_no_rank_from_the_meeting(behave: Callable[[socket.socket], None], number: int) -> None:
    store, found = dist.HashStore(), dict[int, InterNodeConnections]()

    def be(stranger: socket.socket) -> None:
        with stranger:
            behave(stranger)

    def meet(rank: int) -> None:
        if rank == 2:  # who comes before rank 1
            store.wait(["at/0"])
            port = json.loads(store.get("at/0"))[1]
            strangers = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(number)]
            for stranger in strangers:
                threading.Thread(target=be, args=(stranger,), daemon=True).start()
            came.set()
        else:
            found[rank] = InterNodeConnections(rank, [1 - rank], lambda own: late(rank, own), 10.0)

    def late(rank: int, own: object) -> list[object]:
        heard = meeting(store, rank, 2)(own)
        assert rank == 0 or came.wait(20)
        return heard

    came = threading.Event()
    each(3, meet)
    found[0].send([1], {"begun": 1})
    assert next(notes for _ in range(1000) if (notes := found[1].notes(0)) or time.sleep(0.01)) == [{"begun": 1}]
    for links in found.values():
        links.close()


def test_a_rank_that_stops_is_named() -> None:
    with ranks(2, timeout_s=0.5) as found:
        for one in found:
            one.begin(1), one.open(1)
        found[0].put(1, 1)
        wait_for(lambda: all(one.errors for one in found))
        texts = ("for slices of ranks [1], which have come", "for its own slices to leave")  # whoever comes first
        assert all(one.errors[0].ranks == (1,) and str(one.errors[0]).endswith(texts) for one in found)


def test_a_rank_that_stops_in_the_middle_of_a_slice_is_named() -> None:
    with ranks(2, timeout_s=0.5) as (first, second):
        for one in (first, second):
            one.begin(1), one.open(1)
        first.put(1, 1)  # so that the second one waits for none
        second.links.send([0], {"slice": [1, 0]})
        wait_for(lambda: bool(first.errors))
        assert isinstance(first.errors[0], PeerTimeoutError) and first.errors[0].ranks == (1,)


def test_what_a_rank_sent_before_it_closed_counts() -> None:
    with ranks(2) as (first, second):
        for one in (first, second):
            one.begin(1)
        second.open(1)
        first.put(1, 1)
        second.put(1, 0)
        assert second.call.over.wait(20)
        closes = threading.Thread(target=second.close)
        closes.start()
        closes.join(0.5)
        assert closes.is_alive(), "the first rank has not got the end of the call, and the second one has left"
        first.open(1)
        closes.join(5)
        assert not closes.is_alive() and first.call.over.is_set()
        time.sleep(0.2)
        assert not first.errors


def test_a_rank_that_closes_waits_for_its_own_calls() -> None:
    with ranks(2) as (first, second):
        for one in (first, second):
            one.begin(1), one.open(1)
        second.put(1, 0)
        closes = threading.Thread(target=first.close)
        closes.start()
        closes.join(0.5)
        assert closes.is_alive() and not second.errors
        first.put(1, 1)
        closes.join(5)
        assert not closes.is_alive()
        assert second.call.over.wait(20)
        assert not second.errors


def test_a_rank_that_closes_does_not_wait_for_ever() -> None:
    with ranks(2, timeout_s=1.0) as (_, second):
        second.begin(1), second.open(1)
        second.put(1, 0)
        wait_for(lambda: not second.call.leaving)
        began = time.monotonic()
        second.close()  # the first rank never calls
        assert time.monotonic() < began + 10


def test_a_rank_that_dies_is_named() -> None:
    """Its connections end without a word, as when a process is killed; between calls, too."""
    with ranks(3) as found:
        found[0].begin(1), found[0].open(1)
        die(found[1])
        for one in (found[0], found[2]):
            wait_for(lambda one=one: bool(one.errors))  # type: ignore[misc]
            assert one.errors[0].ranks == (1,) and "died" in str(one.errors[0])


def test_the_first_failure_is_that_of_all() -> None:
    with ranks(3) as found:
        found[2].proxy.fail(PeerError("rank 1 is of no use", (1,)))
        found[2].proxy.fail(PeerError("another one", (0,)))
        for one in found:
            wait_for(lambda one=one: bool(one.errors))  # type: ignore[misc]
            assert str(one.errors[0]) == "rank 1 is of no use" and one.errors[0].ranks == (1,)


def test_notes_do_not_act_on_terminals() -> None:
    with ranks(2) as (first, second):
        second.links.send([0], {"ranks": [1], "why": "\x1b[2J\x9b31m\rred\nblue", "late": False})
        wait_for(lambda: bool(first.errors))
        assert str(first.errors[0]) == "\\x1b[2J\\x9b31m\\rred\nblue"


def test_a_rank_that_closes_is_missed_by_calls_only() -> None:
    with ranks(2) as (first, second):
        second.close()
        time.sleep(0.5)
        assert not first.errors
        first.begin(1), first.open(1)
        wait_for(lambda: bool(first.errors))
        assert first.errors[0].ranks == (1,) and "have closed" in str(first.errors[0])


def test_slices_beyond_the_output_are_refused() -> None:
    with ranks(2) as (first, second):
        for one in (first, second):
            one.begin(1), one.open(1)
        first.links.send([1], {"slice": [1, SLICES]})
        wait_for(lambda: bool(second.errors))
        assert f"rank 0 sent slice {SLICES} (allowed=0..{SLICES - 1})" in str(second.errors[0])


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(1e-3)
