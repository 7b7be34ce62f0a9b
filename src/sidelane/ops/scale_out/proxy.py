"""Proxy of a rank's kernels: a thread that sends the slices that are ready, and one that puts down what arrives.

A slice from one node to another::

    rank a   kernel: slice, its word (READY) | sending thread: note, bytes -----. (later) the call may be over
    rank b   kernel: opens its output ........... | receiving thread: waits for that | bytes | end of the call (OVER)

Both threads have many transfers under way. The sending thread begins one for each slice that is ready. The receiving
thread begins one for each note, in the order of each source, and ends them in that order; sources do not wait for each
other.

The receiving thread puts down no byte of a call that the kernel of its own rank has not opened yet: earlier work may
still use the output. Until then it leaves the bytes to the transport, and reads what other ranks send. A call is over
when all of its slices have left and arrived; the thread that sees that tells the kernel, by a word in host memory that
it writes behind their bytes (the remote fence), and the other ranks.

A rank tells the others of each call that it begins. So a rank that waits in vain can tell one that has not come from
one that waits itself. The first failure that a rank learns of ends all of its calls, and it tells the others, who name
the same ranks.
"""

from __future__ import annotations

import collections
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from sidelane import forks
from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.memory import ending
from sidelane.ops.scale_out.connections import STEP_S, Gone, InterNodeConnections
from sidelane.ops.scale_out.transport import WINDOW, GroupTransport, Transfer
from sidelane.ops.scale_out.words import HandleWords, host_words

_LOOK_S = {"cuda": 20e-6, "cpu": 500e-6}
"""Seconds between two looks at what is under way, or not open yet: CPU ranks need the processor."""

_LAST_WORDS_S = 0.3
"""Seconds in which the note of a rank may arrive behind the end of a transfer that has failed."""

_SPIN_S = {"cuda": 50e-6, "cpu": 0.0}
"""Seconds in which a thread that finds nothing looks again at once: a sleep takes longer than a small transfer."""


class InterNodeCall:
    """A call under way.

    Args:
        epoch: generation of the launch.
        words: words of the operator's handle.
        source: elements that are sent, one-dimensional.
        landing: elements that arrive, one-dimensional.

    Attributes:
        unsent: which slices have not been taken to be sent.
        leaving: number of slices that have not left.
        missing: number of slices that have not come, by their sender; no entry if all have.
        number: number of the call, from 1, the same on all ranks.
        since: time at which it was first seen to be open.
        over: set once nothing of the call is left to do.
    """

    def __init__(self, epoch: int, words: HandleWords, source: torch.Tensor, landing: torch.Tensor) -> None:
        self.epoch, self.words, self.source, self.landing = epoch, words, source, landing
        self.unsent = words.unsent()
        self.leaving = int(self.unsent.sum())
        coming = {sender: sum(part.rows > 0 for part in some) for sender, some in words.slices.came.items()}
        self.missing = {sender: count for sender, count in coming.items() if count}
        self.number = 0
        self.since: float | None = None
        self.over = threading.Event()

    @property
    def is_open(self) -> bool:
        """True once the kernel lets others write."""
        return self.words.is_open(self.epoch)

    def target(self, source: int, number: int) -> torch.Tensor:
        """Return the elements of a slice that arrives, [rows, columns].

        Raises:
            PeerError: there is no such slice.
        """
        slices = self.words.slices
        some = slices.came[source]
        if not 0 <= number < len(some) or not some[number].rows:
            raise PeerError(f"scale-out: rank {source} sent slice {number} (allowed=0..{len(some) - 1})", (source,))
        first, rows, columns = some[number]
        return self.landing.as_strided((rows, columns), (slices.stride, 1), self.landing.storage_offset() + first)


_Arrivals: TypeAlias = collections.deque[tuple[InterNodeCall, Transfer]]
"""Transfers that arrive from a rank, in their order, each with its call."""


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
    """The two threads of a rank; see the module. A call is over before the next one begins.

    Args:
        rank: number of this rank in the group.
        remote_ranks: ranks on other nodes.
        links: connections with them.
        transport: moves the bytes.
        device: device of the kernels.
        timeout_s: time-out of a call, from the time when its kernel opens its output.
        failed: function that is called once, with the error that ends everything.

    Attributes:
        failure: the error that has ended everything; None if there is none.
        stop: word of host memory, not 0 once waits of kernels for other nodes end: what they move is garbage.
    """

    def __init__(
        self,
        rank: int,
        remote_ranks: Sequence[int],
        links: InterNodeConnections,
        transport: GroupTransport,
        device: torch.device,
        timeout_s: float,
        failed: Callable[[PeerError], None],
    ) -> None:
        self._rank, self._remote_ranks, self._links, self._transport = rank, tuple(remote_ranks), links, transport
        self._timeout_s, self._failed, self._look_s = timeout_s, failed, _LOOK_S[device.type]
        self._device = device
        self.failure: PeerError | None = None
        self.stop = host_words(1, device)
        self._owner = forks.Owner("proxy of a rank of several nodes")
        self._failing = forks.rlock()
        self._call: InterNodeCall | None = None
        self._comes = threading.Condition(forks.lock())
        self._begun = self._sent = 0  # number of calls of this rank, and of those whose slices have left
        self._begun_by, self._over_by = dict.fromkeys(remote_ranks, 0), dict.fromkeys(remote_ranks, 0)
        self._leaving: collections.deque[Transfer] = collections.deque()
        # Notes of slices that leave: number of the call, and of the slice among those from the rank to this one.
        self._reported: dict[int, collections.deque[tuple[int, int]]] = {
            remote: collections.deque() for remote in remote_ranks
        }
        self._arriving: dict[int, _Arrivals] = {remote: collections.deque() for remote in remote_ranks}
        self._broken: list[_Arrivals] = []  # what arrived from ranks that are gone
        self._closed: set[int] = set()  # ranks that have said so
        self._lost: set[int] = set()  # ranks whose notes have ended
        self._watched = 0.0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, if there are other nodes."""
        if not self._remote_ranks or self._threads:
            return
        ending.at_exit(self)
        for name, run in (("proxy", self._send), ("arrivals", self._receive)):
            thread = threading.Thread(
                target=self._guarded, args=(run,), name=f"sidelane-{name}-{self._rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def begin(self, call: InterNodeCall) -> None:
        """Register a call whose kernel is launched next."""
        if not self._remote_ranks:
            call.over.set()
            return
        assert self._call is None, "the call before is over"
        call.number = self._begun + 1
        with self._comes:
            self._call = call
            self._comes.notify()
        self._begun = call.number
        self._links.send(self._remote_ranks, {"begun": call.number})
        self._end_if_over(call)  # with no slices at all

    def fail(self, error: PeerError) -> PeerError:
        """End everything, if nothing has before, and tell the other nodes; return the error that has."""
        with self._failing:
            if self.failure is not None:
                return self.failure
            self.failure = error
        self.stop[0] = 1
        is_late = isinstance(error, PeerTimeoutError)
        self._links.send(self._remote_ranks, {"ranks": list(error.ranks), "why": str(error)[:2000], "late": is_late})
        self._failed(error)
        with self._comes:
            self._comes.notify()
        return error

    def close(self, until: float | None = None) -> None:
        """End the threads, and close the connections, once this rank's call is over and the others have what it has
        sent: the end of a connection, and of NCCL's communicators, takes what is under way with it. Idempotent.

        Args:
            until: time of ``time.monotonic`` at which it waits no longer; None for the time-out of a call.
        """
        if self._stop.is_set():
            return
        until = time.monotonic() + self._timeout_s if until is None else until
        while self._call is not None and self._is_waiting(until):
            time.sleep(self._look_s)
        self._links.send(self._remote_ranks, {"closed": True})
        while self._behind() and self._is_waiting(until):
            time.sleep(self._look_s)
        self._stop.set()
        if self._call is not None:
            self.stop[0] = 1
        with self._comes:
            self._comes.notify()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)
        self._transport.close()
        self._links.close()
        for each in (self._leaving, self._arriving, self._broken):  # only now, as the transport used their memory
            each.clear()
        self._call = None
        self._failed = lambda error: None  # these refer to objects that refer to this one

    def end(self, until: float) -> None:
        """End at exit of the interpreter; a forked copy leaves the connections to the process that made them."""
        if not self._owner.is_copied:
            self.close(until)

    def _behind(self) -> list[int]:
        """Return the ranks that may still need what this one has sent."""
        return [
            remote for remote in self._remote_ranks if self._over_by[remote] < self._sent and remote not in self._lost
        ]

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
                self.fail(error if isinstance(error, PeerError) else PeerError(text, (self._rank,)))

    def _gives_up(self) -> bool:
        """Return True once nothing should wait any more. It also looks at the time-out."""
        now = time.monotonic()
        if now > self._watched + STEP_S:
            self._watched = now
            self.watch()
        return self._stop.is_set() or self.failure is not None

    def _end_if_over(self, call: InterNodeCall) -> None:
        with self._failing:
            if call.leaving or call.missing or call.over.is_set():
                return
            self._call = None
            call.words.end(call.epoch)
            call.over.set()
        self._links.send(self._remote_ranks, {"over": call.number})

    # --- the sending thread -------------------------------------------------------------------------------------------

    def _send(self) -> None:
        pause = _Pause(self._device)
        while not self._gives_up():
            call = self._call
            if call is None or not call.leaving:
                with self._comes:
                    if self._call is call and self.failure is None and not self._stop.is_set():
                        self._comes.wait(10 * STEP_S)
                continue
            try:
                began, ended = self._begin_sending(call), self._end_sending(call)
            except Gone:
                return  # the receiving thread sees it, too, or the time-out ends the call
            if began or ended:
                pause.end()
            else:
                pause.take()

    def _begin_sending(self, call: InterNodeCall) -> bool:
        """Begin to send slices that are ready; return False if there is none, or no room in the window."""
        ready = call.words.take_ready(call.epoch, call.unsent, WINDOW - len(self._leaving))
        for target, number, first, size in ready:
            self._links.send([target], {"slice": (call.number, number)})
            self._leaving.append(self._transport.send(target, call.source[first : first + size]))
        return bool(ready)

    def _end_sending(self, call: InterNodeCall) -> bool:
        """Count the slices that have left, in the order of their transfers; return False if there were none."""
        ended = False
        while self._leaving and self._leaving[0].is_done():
            self._leaving[0].finish()
            self._leaving.popleft()
            call.leaving, ended = call.leaving - 1, True
            if not call.leaving:
                self._sent = call.number
                self._end_if_over(call)
        return ended

    # --- the receiving thread -----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        pause = _Pause(self._device)
        with selectors.DefaultSelector() as selector:
            for remote in self._remote_ranks:
                selector.register(self._links.sockets[remote], selectors.EVENT_READ, remote)
            while not self._gives_up():
                looks = any(self._reported.values()) or any(self._arriving.values())
                found = selector.select(0 if looks else STEP_S)
                for key, _ in found:
                    try:
                        self._read_notes(key.data)
                    except Gone:
                        selector.unregister(key.fileobj)
                        self._lose(key.data)
                moved = [
                    remote for remote in self._remote_ranks if self._begin_arrivals(remote) | self._end_arrivals(remote)
                ]
                if found or moved:
                    pause.end()
                elif looks:
                    pause.take()

    def _read_notes(self, remote: int) -> None:
        for note in self._links.notes(remote):
            match note:
                case {"slice": [int(call), int(number)]}:
                    self._reported[remote].append((call, number))
                case {"begun": int(number)}:
                    self._begun_by[remote] = number
                case {"over": int(number)}:
                    self._over_by[remote] = number
                case {"closed": True}:
                    self._closed.add(remote)
                case _:
                    kind = PeerTimeoutError if note.get("late") else PeerError
                    self.fail(kind(str(note.get("why")), tuple(map(int, note.get("ranks", ())))))

    def _begin_arrivals(self, source: int) -> bool:
        """Begin to receive the slices that a rank has reported; return False if there is none, its call is not open
        yet, or there is no room in the window.
        """
        reported, began = self._reported[source], False
        while reported:
            call, (wanted, number) = self._call, reported[0]
            if call is None or wanted != call.number or not call.is_open:
                break
            if sum(map(len, self._arriving.values())) >= WINDOW:
                break
            values = call.target(source, number)
            try:
                transfer = self._transport.receive(source, values)
            except Gone as gone:
                self._lose_arrivals(gone.rank)
                break
            self._arriving[source].append((call, transfer))
            reported.popleft()
            began = True
        return began

    def _end_arrivals(self, source: int) -> bool:
        """Count what has arrived from a rank, in the order of its notes; return False if there was nothing."""
        arriving, ended = self._arriving[source], False
        try:
            while arriving and arriving[0][1].is_done():
                (call, transfer), ended = arriving[0], True
                transfer.finish()
                arriving.popleft()
                call.missing[source] -= 1
                if not call.missing[source]:
                    del call.missing[source]
                    self._end_if_over(call)
        except Gone as gone:
            self._lose_arrivals(gone.rank)
        return ended

    def _lose_arrivals(self, source: int) -> None:
        """Learn that a transfer has failed: nothing arrives behind it."""
        self._broken.append(self._arriving[source])  # whose memory the transport may still use
        self._arriving[source] = collections.deque()
        self._reported[source].clear()
        self._lose(source)

    def _lose(self, remote: int) -> None:
        """Learn that a connection, or a transfer, has ended: its rank has reported why, or has died."""
        until = time.monotonic() + _LAST_WORDS_S
        while remote not in self._closed and self.failure is None and time.monotonic() < until:
            try:
                self._read_notes(remote)
            except Gone:
                break
            time.sleep(self._look_s)
        self._lost.add(remote)
        if remote not in self._closed and not self._stop.is_set():
            self.fail(
                PeerError(f"scale-out: rank {remote} died: its connection with rank {self._rank} ended", (remote,))
            )

    def watch(self) -> None:
        """End a call whose peers have closed, or do not come in time. Any thread may look: those of the proxy may be in
        a call of the driver that does not return.
        """
        call, now = self._call, time.monotonic()
        if call is None or (call.since is None and not call.is_open):
            return
        call.since = now if call.since is None else call.since
        gone = [remote for remote in sorted(call.missing) if remote in self._lost]
        gone = [remote for remote in gone if not self._arriving[remote] and not self._reported[remote]]
        if gone:
            self.fail(PeerError(f"scale-out: ranks {gone} have closed, and a call waits for them", gone))
        elif now - call.since > self._timeout_s:
            self.fail(self._late(call, now - call.since))

    def _late(self, call: InterNodeCall, waited_s: float) -> PeerTimeoutError:
        missing = sorted(call.missing)
        absent = [remote for remote in missing if self._begun_by[remote] < call.number]
        text = f"scale-out: rank {self._rank} waited {waited_s:.1f} s"
        if absent:
            return PeerTimeoutError(f"{text} for ranks {absent} of other nodes, which have not come", absent)
        if missing:
            return PeerTimeoutError(f"{text} for slices of ranks {missing}, which have come", missing)
        return PeerTimeoutError(f"{text} for its own slices to leave", (self._rank,))
