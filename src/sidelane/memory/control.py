"""The control block: what the ranks of one machine tell each other besides bytes and flags.

Every rank owns one part of a shared allocation and is the only one who writes it; all read all parts. It says which
calls the rank has begun and ended, what it is doing, what each of its last calls was, and whether it gave up. CPU and
GPU executors use it alike, from host threads. Who a rank is (process id with start time) is exchanged when it is made.

Layout of a part: four words (last call begun, last call ended, closed, last call agreed on), then records (see
``memory.record``): the step, the abort and a ring of the last 64 calls. Words are single stores; records carry a
sequence number and a checksum, so that a reader gets either a whole record or none, on every memory model
(``memory.ordering`` tells why a plain store would not do on ARM).
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Sequence

from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError
from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import SharedBytes
from sidelane.memory.posts import (
    ABORT_BYTES,
    AGREED,
    BEGUN,
    CLOSED,
    ENDED,
    FAILED,
    OK,
    PART_BYTES,
    REFUSED,
    REPEATED,
    RING_CALLS,
    RUNS,
    STEP_TEXT_BYTES,
    TIMED_OUT,
    WAITS,
    PostBoard,
    PostedCall,
    fit,
)
from sidelane.memory.process import ProcessIdentity
from sidelane.memory.record import Record

_MOST_PAYLOADS = 4096
_LIVENESS_INTERVAL_S = 0.1  # a look at a process costs a system call or two
_STEP_S = 200e-6  # a wait for peers that are in step


@dataclasses.dataclass(frozen=True, slots=True)
class OwnPosts:
    """Where a rank posts its calls, for code that does so without :meth:`ControlBlock.post_call`.

    Attributes:
        records: call ``n`` is posted in number ``n % len(records)``.
        begun_address: of the 64-bit word that holds the last call begun.
        lock: held by whoever writes there.
    """

    records: list[Record]
    begun_address: int
    lock: threading.Lock


class ControlBlock:
    """One rank's view of the control parts of all ranks of a group. Making one is collective; any thread may use it.

    Calls are numbered from 1 by the communicator, growing, the same on every rank; executors call them epochs.

    Args:
        exchange: of the ranks, all on one machine. From here on it notices what is said here.

    Attributes:
        unread: the first call that peers may still have to read here; 0 if there is none.
        pid: of the process that is this rank.

    Raises:
        UnavailableError, PeerError, PeerTimeoutError: as :class:`sidelane.memory.host_shared.SharedBytes` does.
    """

    def __init__(self, exchange: Exchange) -> None:
        shared = SharedBytes(exchange, PART_BYTES)
        self.rank, self.world_size = shared.rank, shared.world_size
        self._peers = shared.peers
        self._self = ProcessIdentity.own()
        self.pid = self._self.pid
        self._parts = [PostBoard(shared.view(rank)) for rank in range(shared.world_size)]
        self._own = self._parts[shared.rank]
        self._lock = threading.Lock()  # threads of this rank share one writer's role
        self._giving_up = threading.RLock()  # in a signal handler, too, in the middle of anything
        self._open_calls: set[int] = set()
        self._last_ended = 0
        self.unread, self._patience_s = 0, 0.0  # and how long they may take
        self._payloads: dict[str, bytes] = {}  # of signatures posted before: most calls are repetitions
        self._dead: set[int] = set()
        self._look_at = 0.0
        self._is_closed = False
        exchange.look = self._look

    # --- what this rank says ------------------------------------------------------------------------------------------

    def post_call(self, call: int, signature: str, refusal: str | None = None, *, blames: int | None = None) -> None:
        """Say what call number ``call`` is here, or why this rank refuses it (its arguments were wrong).

        With ``blames``, the refusal repeats that the call of that rank cannot be made, for ranks that did not compare.
        Texts beyond 1024 bytes are cut, with a digest of the whole at the end, so that different ones stay different.
        """
        if call < 1:
            raise ValueError(f"ControlBlock.post_call: call numbers begin at 1 (value={call})")
        if self._is_closed:
            self._check_usable("post_call")
        while self.unread and call >= self.unread + RING_CALLS:
            self._let_peers_read()
        payload = self._payloads.get(signature) if refusal is None else None
        if payload is None:
            payload = fit(signature) + b"\0" + fit(refusal or "")
            if refusal is None:
                if len(self._payloads) >= _MOST_PAYLOADS:
                    self._payloads.clear()
                self._payloads[signature] = payload
        with self._lock:
            own = self._own
            status = OK if refusal is None else REFUSED if blames is None else REPEATED + blames
            own.slots[call % RING_CALLS].write(call, status, payload)
            if refusal is None and own.words[BEGUN] < call:
                own.words[BEGUN] = call
            if refusal is not None and own.words[AGREED] < call:
                own.words[AGREED] = call  # who refuses does not compare: nobody need keep a post for this rank

    def own_posts(self) -> OwnPosts:
        """Where :meth:`post_call` writes."""
        return OwnPosts(self._own.slots, _address(self._own.words, BEGUN), self._lock)

    def payload(self, signature: str) -> bytes | None:
        """What posts with ``signature`` put there; None before the first."""
        return self._payloads.get(signature)

    def begin(self, call: int, step: str) -> None:
        """Say that this rank has begun ``call``; ``step`` describes it in a few words."""
        self._check_usable("begin")
        with self._lock:
            self._open_calls.add(call)
            self._own.words[BEGUN] = max(self._own.words[BEGUN], call)
            self._own.step.write(call, RUNS, fit(step, STEP_TEXT_BYTES - 1))

    def note(self, call: int, step: str) -> None:
        """Say that this rank waits for a peer in ``call``; ``step`` takes the place of what ``begin`` said."""
        with self._lock:
            self._own.step.write(call, WAITS, fit(step, STEP_TEXT_BYTES - 1))

    def end(self, call: int) -> None:
        """Say that nothing of ``call`` runs here any more, whichever way it ended."""
        with self._lock:
            self._open_calls.discard(call)
            self._last_ended = max(self._last_ended, call)
            # Calls may end out of order; the word promises that everything up to it has ended.
            self._own.words[ENDED] = min(self._open_calls) - 1 if self._open_calls else self._last_ended

    def abort(self, message: str, ranks: Sequence[int] = (), *, timed_out: bool = False) -> None:
        """Make ``check`` raise on every rank from now on, for good. The first message of a rank stands.

        Args:
            message: what happened, naming rank and step.
            ranks: the ranks at fault; this one if none is given.
            timed_out: peers raise PeerTimeoutError instead of PeerError.
        """
        if os.getpid() != self._self.pid:
            return  # a forked copy shares the memory, but is no rank
        culprits = ",".join(map(str, ranks or (self.rank,)))
        with self._giving_up:
            if self._own.abort.is_blank:
                payload = culprits.encode() + b"\0" + fit(message, ABORT_BYTES - 100)
                # The monotonic clock is one for the machine: it tells which of several aborts came first.
                self._own.abort.write(time.monotonic_ns(), TIMED_OUT if timed_out else FAILED, payload)

    def close(self) -> None:
        """Say that this rank takes part in no further call. Idempotent. The memory goes with the last reference."""
        self._is_closed = True
        if os.getpid() != self._self.pid:
            return  # a forked copy shares the memory, but is no rank
        self._own.words[CLOSED] = 1

    # --- what this rank sees ------------------------------------------------------------------------------------------

    def begun(self, rank: int) -> int:
        """Number of the last call that ``rank`` has begun; 0 before the first."""
        return self._parts[rank].words[BEGUN]

    def ended(self, rank: int) -> int:
        """Number of the last call of ``rank`` that has ended, as have all before it."""
        return self._parts[rank].words[ENDED]

    def absent(self, call: int) -> tuple[int, ...]:
        """Ranks that have not begun ``call``."""
        return tuple(rank for rank, part in enumerate(self._parts) if part.words[BEGUN] < call)

    def at_fault(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Of ranks that somebody waits for, those that do not wait for a peer themselves; all, if all of them do."""
        return tuple(rank for rank in ranks if not self._waits(rank)) or tuple(ranks)

    def check(self, call: int) -> None:
        """Raise if ``call`` cannot complete any more. Costs microseconds; processes are looked at every 100 ms.

        Raises:
            PeerError: a rank gave up (the text is its own, ``ranks`` the culprits it named), refused this call, closed
                its side before this call, or died in it. PeerTimeoutError if a rank gave up because of a time-out.
        """
        self._check_aborts()
        self._check_refusals(call)
        self._check_gone(call)

    def check_present(self, call: int) -> None:
        """As :meth:`check`, but that ranks may have refused ``call``: others follow it then."""
        self._check_aborts()
        self._check_gone(call)

    def check_same(self, call: int) -> None:
        """Raise if a rank has posted another call under this number, where that is known. One or two loads a rank.

        Raises:
            PeerError: with both calls.
        """
        own = self._own.slot(call)
        for rank, part in enumerate(self._parts):
            if part.slot(call).number != call or part.slot(call).looks_like(own):
                continue
            mine, other = self._own.posted(self.rank, call), part.posted(rank, call)
            if mine is None or other is None or other.common == mine.common:
                continue
            both = f"rank {self.rank}: {mine.signature}; rank {rank}: {other.signature}"
            raise PeerError(f"call {call}: ranks made different calls, and bytes have moved: {both}", (rank,))

    def calls_of_all(self, call: int, timeout_s: float) -> list[PostedCall]:
        """Wait until every rank has posted ``call``; what they posted, by rank, refusals included.

        A rank that did not wait for this one and is more than ``RING_CALLS`` ahead has overwritten what it posted; a
        signature that says so, and equals no other, stands for it.

        Raises:
            PeerTimeoutError: ranks did not come within ``timeout_s``; all ranks are told, as by ``abort``.
            PeerError: a rank gave up, closed its side or died.
        """
        began = time.monotonic()
        found: dict[int, PostedCall] = {}
        while True:
            for rank, part in enumerate(self._parts):
                if rank not in found and (posted := part.posted(rank, call) or self._overwritten(rank, call)):
                    found[rank] = posted
            if len(found) == self.world_size:
                self._check_aborts()  # what follows may wait for a rank that has posted and then given up
                self._own.words[AGREED] = self.unread = call
                self._patience_s = timeout_s
                return [found[rank] for rank in range(self.world_size)]
            self._check_aborts()
            missing = [rank for rank in range(self.world_size) if rank not in found]
            mine = found[self.rank].signature if self.rank in found else "not posted here"
            self._wait_on(call, mine, missing, began, timeout_s)

    def behind(self, call: int) -> tuple[int, ...]:
        """Ranks that have not come to ``call``: they have not begun it or a later one, nor refused one that late."""
        return tuple(
            rank for rank, part in enumerate(self._parts) if part.words[BEGUN] < call and part.words[AGREED] < call
        )

    def wait_for(self, call: int, timeout_s: float) -> None:
        """Wait until every rank has come to ``call``. Raises as :meth:`calls_of_all`."""
        began = time.monotonic()
        while missing := self.behind(call):
            self._check_aborts()
            self._wait_on(call, "long ago here", missing, began, timeout_s)

    def _wait_on(self, call: int, mine: str, missing: Sequence[int], began: float, timeout_s: float) -> None:
        """Wait a little for ranks that have not posted ``call``; raise if there is no use in it."""
        self._check_gone(call, missing)
        waited = time.monotonic() - began
        if waited > timeout_s:
            message = f"call {call} ({mine}): waited {waited:.1f} s on rank {self.rank} for " + "; ".join(
                self.describe(rank) for rank in missing
            )
            culprits = self.at_fault(missing)
            self.abort(message, culprits, timed_out=True)
            raise PeerTimeoutError(message, culprits)
        # Ranks in step come within microseconds, and the shortest sleep takes 70.
        time.sleep(0 if waited < _STEP_S else min(max(waited / 8, 20e-6), 5e-3))

    def describe(self, rank: int, call: int = 0) -> str:
        """One phrase for people: who the rank is, whether it lives and what it was last seen doing.

        With ``call``, also that it has ended there, though later ones have not; and what it is on the other rank,
        unless it is known to be the same as here.
        """
        part, peer = self._parts[rank], self._peers[rank]
        if part.words[CLOSED]:
            state = "closed"
        else:
            state = {True: "alive", False: "dead", None: "out of sight"}[peer.alive(self._self)]
        begun, ended = self.begun(rank), self.ended(rank)
        step = part.step.read()
        doing = f", {step[2].decode(errors='replace')}" if step and step[0] == begun and begun > ended else ""
        progress = f"in call {begun}" if begun > ended else f"ended call {ended}" if ended else "has begun no call"
        over = f", has ended call {call}" if 0 < call <= ended < begun else ""
        return f"rank {rank} (pid {peer.pid}, {state}, {progress}{doing}{over}{self._other_call(rank, call)})"

    def _waits(self, rank: int) -> bool:
        step = self._parts[rank].step.read()
        return step is not None and step[1] == WAITS and step[0] > self.ended(rank)

    def _look(self) -> None:
        """Raise if what all ranks agreed on last cannot complete any more."""
        self.check(int(self._own.words[AGREED]))

    def _let_peers_read(self) -> None:
        """Before a post is overwritten that peers may read: this rank may have run ahead while another one slept.

        Whoever has not read it by the time-out, or has left, does without: that failure shows elsewhere. Of calls that
        all ranks agreed on, one is enough to remember: peers that posted for an agreement had read what was posted for
        the one before.
        """
        call, self.unread = self.unread, 0
        until = time.monotonic() + self._patience_s
        while not all(part.has_read(call) or part.words[CLOSED] for part in self._parts):
            try:
                self._check_aborts()
                self._check_gone(call)
            except PeerError:
                return
            if time.monotonic() > until:
                return
            time.sleep(50e-6)

    def _overwritten(self, rank: int, call: int) -> PostedCall | None:
        """What stands for a post that its rank has overwritten by a later one; None if it did not."""
        if self._parts[rank].slot(call).number <= call:
            return None
        ahead = self.begun(rank) - call
        text = f"{ahead} calls ahead, its call {call} is no longer on record (SIDELANE_DEBUG=1 compares every call)"
        return PostedCall(rank, text, None)

    def _other_call(self, rank: int, call: int) -> str:
        own, other = self._own.posted(self.rank, call), self._parts[rank].posted(rank, call)
        if other is None:
            lost = self._overwritten(rank, call) if call else None
            return f", {lost.signature}" if lost else ""
        same = own is not None and own.signature == other.signature
        return "" if same else f", its call {call} is {other.signature}"

    def _check_aborts(self) -> None:
        aborts = [(rank, part.abort.read()) for rank, part in enumerate(self._parts) if not part.abort.is_blank]
        records = [(record, rank) for rank, record in aborts if record is not None]
        if not records:
            return
        (_, status, payload), rank = min(records)  # the first to give up names the cause, the others its consequences
        culprits, message = payload.split(b"\0", 1)
        error = PeerTimeoutError if status == TIMED_OUT else PeerError
        text = message.decode(errors="replace")
        raise error(f"rank {rank} gave up: {text}", [int(culprit) for culprit in culprits.split(b",")])

    def _check_refusals(self, call: int) -> None:
        for rank, part in enumerate(self._parts):
            if rank != self.rank and (posted := part.posted(rank, call)) and posted.refusal is not None:
                if posted.blames is not None:
                    raise PeerError(posted.refusal, (posted.blames,))
                raise PeerError(f"rank {rank} refused call {call}, {posted.signature}: {posted.refusal}", (rank,))

    def _check_gone(self, call: int, ranks: Sequence[int] | None = None) -> None:
        """Raise for a peer that cannot contribute to ``call`` any more."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LIVENESS_INTERVAL_S
            self._dead.update(rank for rank, peer in enumerate(self._peers) if peer.alive(self._self) is False)
        for rank in range(self.world_size) if ranks is None else ranks:
            closed = self._parts[rank].words[CLOSED]
            if rank == self.rank or not (closed or rank in self._dead):
                continue
            # Its words are final now that it is gone. A rank that closed in good order had ended what it began.
            if (self.begun(rank) if closed else self.ended(rank)) < call:
                self._check_aborts()  # what it said before it went, maybe since the last look, is the cause
                how = "closed its communicator before" if closed else "died in or before"
                raise PeerError(f"rank {rank} {how} call {call}: {self.describe(rank)}", (rank,))

    def _check_usable(self, method: str) -> None:
        if self._is_closed:
            raise CommunicatorClosedError(f"ControlBlock.{method}: the control block was closed")


def _address(words: memoryview, index: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(words)) + words.itemsize * index
