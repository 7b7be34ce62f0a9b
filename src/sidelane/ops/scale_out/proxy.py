"""Proxy of a rank's kernels: a thread that sends the slices of the ring, and one that puts down what arrives.

A slice from one node to another::

    rank a   kernel: slice, descriptor -> ring | sending thread: header, bytes ------. (later) moves the tail
    rank b   kernel: opens its output ............ | receiving thread: waits for that | bytes | flag | kernel: sees it

Both threads have many transfers under way. The sending thread begins one for each descriptor, in the order of the ring,
and moves the tail in the same order as they end. The receiving thread begins one for each header, in the order of each
source, and raises their flags in that order as they end; sources do not wait for each other.

The receiving thread puts down no byte of a call that the kernel of its own rank has not opened yet: earlier work may
still use the output. Until then it leaves the bytes to the transport, and reads what other ranks send. The flag is a
word in host memory, which the thread writes when the bytes are in place: this is the remote fence. The end of a call
comes behind all of its slices, and raises a word of its sender in the same way: its header travels at once, its entry
of the ring and its word wait for the transfers in front of it.

A rank tells the others of each call that it begins. So a rank that waits in vain can tell one that has not come from
one that waits itself. The first failure that a rank learns of ends all of its calls, and it tells the others, who name
the same ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import selectors
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sidelane import forks
from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.memory import ending
from sidelane.memory.ordering import full_fence
from sidelane.ops.scale_out.connections import STEP_S, FarConnections, Gone, Header
from sidelane.ops.scale_out.ring import END, HostRing
from sidelane.ops.scale_out.transport import WINDOW, SliceTransport, Transfer
from sidelane.program.wraparound import WORD_MASK, as_int32

_LOOK_S = {"cuda": 20e-6, "cpu": 500e-6}
"""Seconds between two looks at what is under way, or not open yet: CPU ranks need the processor."""

_SPIN_S = {"cuda": 50e-6, "cpu": 0.0}
"""Seconds in which a thread that finds nothing looks again at once: a sleep takes longer than a small transfer."""

_LAST_WORDS_S = 0.3
"""Seconds in which the note of a rank that is gone may arrive behind the end of its connection for data."""

OPENED, DONE = 0, 1
"""Indices of a handle's words in host memory; from ``DONE`` on there is one for each rank, then one for each slice."""


@dataclasses.dataclass(slots=True, eq=False)
class FarCall:
    """A call under way.

    Attributes:
        handle: number of the operator's handle.
        epoch: generation of its launch.
        words: the handle's words in host memory.
        first_flag: index of the first slice's flag among them.
        source: elements that are sent, one-dimensional.
        landing: elements that arrive, one-dimensional.
        stride: distance of a slice's rows there, in elements.
        missing: ranks whose end has not come.
        is_sent: all slices of this rank have left.
        since: time at which it was first seen to be open.
        number: number of the call among all of this rank, from 1.
        over: set once nothing of the call is left to do.
    """

    handle: int
    epoch: int
    words: npt.NDArray[np.int32]
    first_flag: int
    source: torch.Tensor
    landing: torch.Tensor
    stride: int
    missing: set[int]
    is_sent: bool = False
    since: float | None = None
    number: int = 0
    over: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def is_open(self) -> bool:
        """True once the kernel lets others write."""
        return int(self.words[OPENED]) & WORD_MASK == self.epoch

    def target(self, header: Header) -> torch.Tensor | None:
        """Return the elements of a slice that arrives, [rows, columns]; None if there are none such."""
        place, rows, columns = header.place, header.rows, header.columns
        last = place + (rows - 1) * self.stride + columns
        if min(place, rows - 1, columns - 1) < 0 or last > self.landing.numel():
            return None
        start = self.landing.storage_offset() + place
        return self.landing.as_strided((rows, columns), (self.stride, 1), start)


@dataclasses.dataclass(frozen=True, slots=True)
class _UnderWay:
    """A slice that is sent or that arrives, or the end of a call behind such ones.

    Attributes:
        call: its call.
        transfer: transfer of its bytes; None for an end.
        flag: number of the flag that it raises here; -1 for none.
    """

    call: FarCall
    transfer: Transfer | None
    flag: int = -1

    def is_done(self) -> bool:
        """Return True once :meth:`Transfer.finish` need not wait."""
        return self.transfer is None or self.transfer.is_done()


class _Pause:
    """Pauses of a thread that finds nothing to do: it looks again at once for a while, and sleeps between looks then.

    Args:
        device: device of the kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._spin_s, self._look_s, self._since = _SPIN_S[device.type], _LOOK_S[device.type], 0.0

    def end(self) -> None:
        """Look at once the next times: something was found."""
        self._since = 0.0

    def take(self) -> None:
        """Let other threads run, and return when it is time for the next look."""
        now = time.monotonic()
        self._since = self._since or now
        time.sleep(self._look_s if now - self._since >= self._spin_s else 0)


class Proxy:
    """The two threads of a rank; see the module. They begin with the first call.

    Args:
        rank: number of this rank in the group.
        fars: ranks on other nodes.
        links: connections with them.
        transport: moves the bytes.
        ring: ring of this rank's kernels.
        device: device of the kernels.
        timeout_s: time-out of a call, from the time when its kernel opens its output.
        failed: function that is called once, with the error that ends everything.

    Attributes:
        failure: the error that has ended everything; None if there is none.
    """

    def __init__(
        self,
        rank: int,
        fars: Sequence[int],
        links: FarConnections,
        transport: SliceTransport,
        ring: HostRing,
        device: torch.device,
        timeout_s: float,
        failed: Callable[[PeerError], None],
    ) -> None:
        self._rank, self._fars, self._links, self._transport, self._ring = rank, tuple(fars), links, transport, ring
        self._timeout_s, self._failed, self._look_s = timeout_s, failed, _LOOK_S[device.type]
        self._device = device
        self.failure: PeerError | None = None
        self._owner = forks.Owner("proxy of a rank of several nodes")
        self._failing = forks.rlock()
        self._calls: dict[tuple[int, int], FarCall] = {}
        self._to_send: collections.deque[FarCall] = collections.deque()
        self._comes = threading.Condition(forks.lock())
        self._begun = dict.fromkeys(fars, 0)  # number of calls that each has told of
        self._count = self._sent = 0  # number of calls of this rank, and of those that have left
        self._leaving: collections.deque[_UnderWay] = collections.deque()
        self._arriving: dict[int, collections.deque[_UnderWay]] = {far: collections.deque() for far in fars}
        self._broken: list[collections.deque[_UnderWay]] = []  # what arrived from ranks that are gone
        self._held: dict[int, Header] = {}  # of calls that are not open yet, or beyond the window
        self._closed: dict[int, int] = {}  # ranks that have said so, and how many calls they have sent all slices of
        self._acknowledged_by: set[int] = set()  # ranks that have what this one has sent
        self._acknowledged_to: set[int] = set()  # ranks that know that this one has what they have sent
        self._lost: set[int] = set()  # ranks whose notes have ended
        self._drained: set[int] = set()  # ranks of which all data has been read
        self._watched = 0.0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        links.gives_up = transport.gives_up = self._gives_up

    def start(self) -> None:
        """Start the threads, if there are other nodes."""
        if not self._fars or self._threads:
            return
        ending.at_exit(self)
        for name, run in (("proxy", self._send), ("arrivals", self._receive)):
            thread = threading.Thread(
                target=self._guarded, args=(run,), name=f"sidelane-{name}-{self._rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def begin(self, call: FarCall) -> None:
        """Register a call whose kernel is launched next."""
        if not self._fars:
            call.over.set()
            return
        call.number = self._count + 1
        self._calls[call.handle, call.epoch] = call
        self._count = call.number  # behind the call, which it lets others wait for
        with self._comes:
            self._to_send.append(call)
            self._comes.notify()
        self._links.note(self._fars, {"begun": self._count})

    def fail(self, error: PeerError, *, tells: bool = True) -> PeerError:
        """End everything, if nothing has before; return the error that has. ``tells``: the other nodes hear of it."""
        with self._failing:
            if self.failure is not None:
                return self.failure
            self.failure = error
        self._ring.give_up()
        if tells:
            is_late = isinstance(error, PeerTimeoutError)
            self._links.note(self._fars, {"ranks": list(error.ranks), "why": str(error)[:2000], "late": is_late})
        self._failed(error)
        with self._comes:
            self._comes.notify()
        return error

    def close(self, until: float | None = None) -> None:
        """End the threads, and close the connections, once this rank's calls are over and the others have what it has
        sent: the end of a connection, and of NCCL's communicators, takes what is under way with it. Idempotent.

        Args:
            until: time of ``time.monotonic`` at which it waits no longer; None for the time-out of a call.
        """
        if self._stop.is_set():
            return
        until = time.monotonic() + self._timeout_s if until is None else until
        while self._calls and self._is_waiting(until):
            time.sleep(self._look_s)
        self._links.note(self._fars, {"closed": self._sent})
        while set(self._fars) - self._acknowledged_by - self._lost and self._is_waiting(until):
            time.sleep(self._look_s)
        self._stop.set()
        if self._calls:
            self._ring.give_up()
        with self._comes:
            self._comes.notify()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)
        self._transport.close()
        self._links.close()
        self._leaving.clear()  # only now, as the transport used their memory
        self._arriving.clear()
        self._broken.clear()
        self._calls.clear()
        self._to_send.clear()
        self._failed = lambda error: None  # these refer to objects that refer to this one
        self._links.gives_up = self._transport.gives_up = _always

    def end(self, until: float) -> None:
        """End at exit of the interpreter; a forked copy leaves the connections to the process that made them."""
        if not self._owner.is_copied:
            self.close(until)

    def _is_waiting(self, until: float) -> bool:
        """Return True if the others may still answer before ``until``."""
        runs = bool(self._threads) and self._threads[1].is_alive()
        return runs and self.failure is None and time.monotonic() < until

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            self._transport.attach()
            run()
        except Exception as error:
            if not self._stop.is_set():
                text = f"scale-out: rank {self._rank}: its proxy failed: {type(error).__name__}: {error}"
                self.fail(PeerError(text, (self._rank,)))

    def _gives_up(self) -> bool:
        """Return True once nothing should wait any more. The receiving thread also looks at the time-out, wherever it
        waits.
        """
        now = time.monotonic()
        if len(self._threads) > 1 and threading.current_thread() is self._threads[1] and now > self._watched + STEP_S:
            self._watched = now
            self.watch()
        return self._stop.is_set() or self.failure is not None

    # --- the sending thread -------------------------------------------------------------------------------------------

    def _send(self) -> None:
        pause = _Pause(self._device)
        while not self._gives_up():
            if not self._leaving and not self._to_send:
                self._wait_for_a_call()
                continue
            try:
                began, ended = self._begin_next(), self._release_ended()
            except Gone:
                return  # the receiving thread sees it, too, or the time-out ends the call
            if began or ended:
                pause.end()
            else:
                pause.take()

    def _wait_for_a_call(self) -> None:
        with self._comes:
            while not self._to_send and not self._gives_up():
                self._comes.wait(10 * STEP_S)

    def _begin_next(self) -> bool:
        """Begin to send the next descriptor of the ring; return False if there is none, or no room in the window."""
        if not self._to_send or len(self._leaving) >= WINDOW or (found := self._ring.take()) is None:
            return False
        call = self._to_send[0]
        assert (found.handle, found.epoch) == (call.handle, call.epoch), (found, call)
        if found.target == END:
            for far in self._fars:
                self._links.send_header(far, Header(found.handle, found.epoch, -1, 0, 0, 0))
            self._to_send.popleft()
            self._leaving.append(_UnderWay(call, None))
        else:
            header = Header(found.handle, found.epoch, found.flag, found.place, found.rows, found.columns)
            self._links.send_header(found.target, header)
            values = call.source[found.source : found.source + found.rows * found.columns]
            self._leaving.append(_UnderWay(call, self._transport.send(found.target, values)))
        return True

    def _release_ended(self) -> bool:
        """Give entries back whose slices have left, in the order of the ring; return False if there were none."""
        ended = False
        while self._leaving and self._leaving[0].is_done():
            left, ended = self._leaving[0], True
            if left.transfer is not None:
                left.transfer.finish()
            self._leaving.popleft()
            self._ring.release()
            if left.transfer is None:
                left.call.is_sent = True
                self._sent = left.call.number
                self._forget_if_over(left.call)
        return ended

    # --- the receiving thread -----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        pause = _Pause(self._device)
        with selectors.DefaultSelector() as selector:
            for far in self._fars:
                selector.register(self._links.data[far], selectors.EVENT_READ, (far, True))
                selector.register(self._links.control[far], selectors.EVENT_READ, (far, False))
            while not self._gives_up():
                looks = bool(self._held) or any(self._arriving.values())
                found = selector.select(0 if looks else STEP_S)
                for key, _ in found:
                    far, is_data = key.data
                    try:
                        if not is_data:
                            self._read_notes(far)
                        elif (header := self._links.receive_header(far)) and not self._begin_arrival(far, header):
                            self._held[far] = header
                            selector.unregister(key.fileobj)
                    except Gone as gone:
                        selector.unregister(key.fileobj)
                        if not is_data:
                            self._lost.add(far)
                        self._lose(gone.rank, is_data=is_data)
                ended = [far for far in self._fars if self._end_arrivals(far)]
                for far, header in list(self._held.items()):
                    if self._begin_arrival(far, header):
                        del self._held[far]
                        selector.register(self._links.data[far], selectors.EVENT_READ, (far, True))
                if found or ended:
                    pause.end()
                elif looks:
                    pause.take()
                self._acknowledge()

    def _begin_arrival(self, source: int, header: Header) -> bool:
        """Begin to receive a slice, or note the end of a call behind those under way; return False if the call is not
        open yet, or there is no room in the window.
        """
        call = self._calls.get((header.handle, header.epoch))
        if call is None or not call.is_open:
            return False
        if not header.rows:
            self._arriving[source].append(_UnderWay(call, None))
            return True
        values = call.target(header)
        if values is None or not -1 <= header.flag < len(call.words) - call.first_flag:
            raise PeerError(f"scale-out: rank {source} sent {header}, beyond what this rank has", (source,))
        if sum(map(len, self._arriving.values())) >= WINDOW:
            return False
        try:
            self._arriving[source].append(_UnderWay(call, self._transport.receive(source, values), header.flag))
        except Gone as gone:
            self._lose_arrivals(gone.rank)
        return True

    def _end_arrivals(self, source: int) -> bool:
        """Raise the flags of what has arrived from a rank, in the order of its headers; return False if there was
        nothing.
        """
        arriving, ended = self._arriving[source], False
        try:
            while arriving and arriving[0].is_done():
                came, ended = arriving[0], True
                if came.transfer is not None:
                    came.transfer.finish()
                arriving.popleft()
                full_fence()  # the bytes are in place before the flag
                if came.flag >= 0:
                    came.call.words[came.call.first_flag + came.flag] = as_int32(came.call.epoch)
                if came.transfer is None:
                    came.call.words[DONE + source] = as_int32(came.call.epoch)
                    came.call.missing.discard(source)
                    self._forget_if_over(came.call)
        except Gone as gone:
            self._lose_arrivals(gone.rank)
        return ended

    def _lose_arrivals(self, source: int) -> None:
        """Learn that a transfer has failed: no end of a call comes behind it."""
        self._broken.append(self._arriving[source])  # whose memory the transport may still use
        self._arriving[source] = collections.deque()
        self._lose(source, is_data=True)

    def _acknowledge(self) -> None:
        """Tell ranks that close once this one has all that they have sent."""
        for far, sent in self._closed.items():
            if far in self._acknowledged_to or self._count < sent:
                continue
            if all(far not in call.missing for call in list(self._calls.values()) if call.number <= sent):
                self._acknowledged_to.add(far)
                self._links.note([far], {"acknowledged": True})

    def _forget_if_over(self, call: FarCall) -> None:
        if call.is_sent and not call.missing:
            self._calls.pop((call.handle, call.epoch), None)
            call.over.set()

    def _read_notes(self, far: int) -> None:
        for note in self._links.notes(far):
            if "begun" in note:
                self._begun[far] = int(note["begun"])
            elif "closed" in note:
                self._closed[far] = int(note["closed"])
            elif "acknowledged" in note:
                self._acknowledged_by.add(far)
            else:
                kind = PeerTimeoutError if note.get("late") else PeerError
                self.fail(kind(str(note.get("why")), tuple(map(int, note.get("ranks", ())))))

    def _lose(self, far: int, *, is_data: bool) -> None:
        """Learn that a connection has ended: its rank has told why, or has died."""
        if is_data:
            self._drained.add(far)
        until = time.monotonic() + _LAST_WORDS_S
        while far not in self._closed and self.failure is None and time.monotonic() < until:
            try:
                self._read_notes(far)
            except Gone:
                break
            time.sleep(self._look_s)
        if self._stop.is_set() or self.failure is not None:
            return
        if far not in self._closed:
            self.fail(PeerError(f"scale-out: rank {far} died: its connection with rank {self._rank} ended", (far,)))

    def watch(self) -> None:
        """End a call whose peers have closed, or do not come in time. Any thread may look: those of the proxy may be in
        a call of the driver that does not return.
        """
        now = time.monotonic()
        for call in list(self._calls.values()):
            if not call.is_open and call.since is None:
                continue
            call.since = now if call.since is None else call.since
            ended = {far for far in self._drained & self._closed.keys() if not self._arriving[far]}
            if gone := sorted(call.missing & ended):
                self.fail(PeerError(f"scale-out: ranks {gone} have closed, and a call waits for them", gone))
            elif now - call.since > self._timeout_s:
                self.fail(self._late(call, now - call.since))

    def _late(self, call: FarCall, waited_s: float) -> PeerTimeoutError:
        absent = [far for far in sorted(call.missing) if self._begun[far] < call.number]
        text = f"scale-out: rank {self._rank} waited {waited_s:.1f} s"
        if absent:
            return PeerTimeoutError(f"{text} for ranks {absent} of other nodes, which have not come", absent)
        ranks = sorted(call.missing)
        if ranks:
            return PeerTimeoutError(f"{text} for slices of ranks {ranks}, which have come", ranks)
        return PeerTimeoutError(f"{text} for its own slices to leave", (self._rank,))


def _always() -> bool:
    return True
