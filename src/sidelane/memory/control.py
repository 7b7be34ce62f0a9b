"""The control block: shared memory in which the ranks of one machine post their calls, progress and failures.

Every rank owns one part of a shared allocation and is its only writer; all ranks read all parts. A part holds the last
call that the rank has begun and ended, its current step, its last calls, and its abort, if it gave up. Host threads of
CPU and GPU executors use it alike. The ranks know each other's processes (``memory.liveness``) when it is made.

Layout of a part: four words (last call begun, last call ended, closed, last call agreed on), then records (see
``memory.record``): the step, the abort, the last call of another library and a ring of the last 64 calls. Words are
single stores; records carry a sequence number and a checksum, so that a reader gets either a whole record or none, on
every memory model (``memory.record`` tells why a plain store would not do on ARM).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from sidelane import ranges
from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError
from sidelane.memory import posts
from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import SharedBytes
from sidelane.memory.liveness import LongWaits, users_call

NO_CALL = 0
"""Number of no call, since calls begin at 1: ``check`` with it finds aborts of peers only."""

_MOST_PAYLOADS = 4096
_LIVENESS_INTERVAL_S = 0.1  # checking a process costs a system call or two
_STEP_S = 200e-6  # time in which peers usually come: no sleep until then


class ControlBlock:
    """One rank's view of the control parts of all ranks of a group. Making one is collective; any thread may use it.

    The communicator numbers calls from 1 upwards, the same on every rank; executors call these numbers epochs.

    Args:
        exchange: connection of the ranks, all on one machine. From here on its waits raise failures posted here.

    Attributes:
        own: part of this rank. Compiled code posts calls there, in place of :meth:`post_call`.
        lock: held while this rank writes there.
        world_ranks: numbers of the ranks in the world, for observers.
        unread: first call whose post peers may not have read yet; 0 if there is none.
        pid: process id of this rank.

    Raises:
        UnavailableError, PeerError, PeerTimeoutError: as :class:`sidelane.memory.host_shared.SharedBytes` does.
    """

    def __init__(self, exchange: Exchange) -> None:
        shared = SharedBytes(exchange, posts.PART_BYTES)
        self.rank, self.world_size = shared.rank, shared.world_size
        self._liveness, self.pid = exchange.liveness, os.getpid()
        self._parts = [posts.PostMemory(shared.view(rank)) for rank in range(shared.world_size)]
        self.own = self._parts[shared.rank]
        self.lock = threading.Lock()  # a part has one writer at a time
        self._giving_up = threading.RLock()  # reentrant: a signal handler may abort at any point of the code
        self._open_calls: set[int] = set()
        self._last_ended = 0
        self.unread, self._patience_s = 0, 0.0  # seconds that peers may take to read it
        self._payloads: dict[str, bytes] = {}  # by signature: most calls are repetitions
        self._dead: set[int] = set()
        self._look_at = 0.0
        self._is_closed = False
        self._long_waits = LongWaits(self.rank, exchange.warn_s)
        exchange.look = self._look
        self.world_ranks: Sequence[int] = range(self.world_size)

    # --- writing this rank's part -------------------------------------------------------------------------------------

    def post_call(self, call: int, signature: str, refusal: str | None = None, *, blames: int | None = None) -> None:
        """Post the signature of call number ``call``, or the reason why this rank refuses it (wrong arguments).

        With ``blames``, the refusal repeats that of the given rank, for ranks that did not compare the call. Texts over
        1024 bytes are cut and end with a digest of the whole, so that different texts stay different.
        """
        if call < 1:
            raise ValueError(f"ControlBlock.post_call: call numbers begin at 1 (value={call})")
        if self._is_closed:
            self._check_usable("post_call")
        while self.unread and call >= self.unread + posts.RING_CALLS:
            self._let_peers_read()
        payload = self._payloads.get(signature) if refusal is None else None
        if payload is None:
            payload = posts.fit(signature) + b"\0" + posts.fit(refusal or "")
            if refusal is None:
                if len(self._payloads) >= _MOST_PAYLOADS:
                    self._payloads.clear()
                self._payloads[signature] = payload
        with self.lock:
            own = self.own
            status = posts.OK if refusal is None else posts.REFUSED if blames is None else posts.REPEATED + blames
            own.slots[call % posts.RING_CALLS].write(call, status, payload)
            if refusal is None and own.words[posts.BEGUN] < call:
                own.words[posts.BEGUN] = call
            if refusal is not None and own.words[posts.AGREED] < call:
                own.words[posts.AGREED] = call  # a rank that refuses does not compare: peers need keep no posts for it

    def payload(self, signature: str) -> bytes | None:
        """Return the payload of posts with ``signature``; None before the first such post."""
        return self._payloads.get(signature)

    def begin(self, call: int, step: str) -> None:
        """Record that this rank has begun ``call``; ``step`` describes it in a few words."""
        self._check_usable("begin")
        with self.lock:
            self._open_calls.add(call)
            self.own.words[posts.BEGUN] = max(self.own.words[posts.BEGUN], call)
            self.own.step.write(call, posts.RUNS, posts.fit(step, posts.STEP_TEXT_BYTES - 1))

    def note(self, call: int, step: str) -> None:
        """Record that this rank waits for a peer in ``call``; ``step`` replaces the text of ``begin``."""
        with self.lock:
            self.own.step.write(call, posts.WAITS, posts.fit(step, posts.STEP_TEXT_BYTES - 1))

    def end(self, call: int) -> None:
        """Record that ``call`` has ended on this rank, with or without an error."""
        with self.lock:
            self._open_calls.discard(call)
            self._last_ended = max(self._last_ended, call)
            # Calls may end out of order; the word promises that everything up to it has ended.
            self.own.words[posts.ENDED] = min(self._open_calls) - 1 if self._open_calls else self._last_ended

    def abort(self, message: str, ranks: Sequence[int] = (), *, timed_out: bool = False) -> None:
        """Make ``check`` raise on every rank from now on. Only the first message of a rank counts.

        Args:
            message: what happened, naming rank and step.
            ranks: the ranks at fault; this one if none is given.
            timed_out: peers raise PeerTimeoutError instead of PeerError.
        """
        if os.getpid() != self.pid:
            return  # a forked copy shares the memory, but is no rank
        culprits = ",".join(map(str, ranks or (self.rank,)))
        with self._giving_up:
            if self.own.abort.is_blank:
                payload = culprits.encode() + b"\0" + posts.fit(message, posts.ABORT_BYTES - 100)
                # The monotonic clock is one for the machine: it tells which of several aborts came first.
                self.own.abort.write(time.monotonic_ns(), posts.TIMED_OUT if timed_out else posts.FAILED, payload)

    def hand_over(self, text: str) -> None:
        """Record the call that this rank hands to another library now, for ranks that wait for this one."""
        # Without the lock: a signal handler may make such a call, and a torn record is nothing but a missing hint.
        self.own.handed.write(NO_CALL, posts.OK, posts.fit(text, posts.STEP_TEXT_BYTES))

    def close(self) -> None:
        """Record that this rank makes no further call. Idempotent. The memory is unmapped with the last reference."""
        self._is_closed = True
        if os.getpid() != self.pid:
            return  # a forked copy shares the memory, but is no rank
        self.own.words[posts.CLOSED] = 1

    # --- reading all parts --------------------------------------------------------------------------------------------

    def begun(self, rank: int) -> int:
        """Return the number of the last call that ``rank`` has begun; 0 before the first."""
        return self._parts[rank].words[posts.BEGUN]

    def ended(self, rank: int) -> int:
        """Return the number of the last call of ``rank`` up to which all calls have ended."""
        return self._parts[rank].words[posts.ENDED]

    def absent(self, call: int) -> tuple[int, ...]:
        """Return the ranks that have not begun ``call``."""
        return tuple(rank for rank, part in enumerate(self._parts) if part.words[posts.BEGUN] < call)

    def at_fault(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of the awaited ranks that do not wait for a peer themselves; all of them if every one does."""
        return tuple(rank for rank in ranks if not self._waits(rank)) or tuple(ranks)

    def check(self, call: int) -> None:
        """Raise if ``call`` cannot complete any more. Costs microseconds; liveness is checked every 100 ms.

        Raises:
            PeerError: a rank gave up (the text is its own, ``ranks`` the culprits it named), refused this call, closed
                its side before this call, or died in it. PeerTimeoutError if a rank gave up because of a time-out.
        """
        self._check_aborts()
        self._check_refusals(call)
        self._check_gone(call)

    def check_present(self, call: int) -> None:
        """Check as :meth:`check` does, but accept refusals of ``call``: the next calls can still complete."""
        self._check_aborts()
        self._check_gone(call)

    def check_same(self, call: int) -> None:
        """Raise if a rank is known to have posted another call under this number. Costs one or two loads per rank.

        Raises:
            PeerError: the calls differ; both are named.
        """
        own = self.own.slot(call)
        for rank, part in enumerate(self._parts):
            if part.slot(call).number != call or part.slot(call).looks_like(own):
                continue
            mine, other = self.own.posted(self.rank, call), part.posted(rank, call)
            if mine is None or other is None or other.common == mine.common:
                continue
            text = f"call {call}: ranks made different calls, and bytes have moved: {posts.different(mine, other)}"
            raise PeerError(text, (rank,))

    def calls_of_all(self, call: int, timeout_s: float) -> list[posts.PostedCall]:
        """Wait until every rank has posted ``call``, and return the posts by rank, refusals included.

        A rank that did not wait for this one and is more than ``RING_CALLS`` ahead has overwritten its post. It is
        replaced by a signature that says so and equals no other.

        Raises:
            PeerTimeoutError: ranks did not come within ``timeout_s``; all ranks are told, as by ``abort``.
            PeerError: a rank gave up, closed its side or died.
        """
        began = time.monotonic()
        found: dict[int, posts.PostedCall] = {}
        missing: list[int] = []
        while True:
            for rank, part in enumerate(self._parts):
                if rank not in found and (posted := part.posted(rank, call) or self._overwritten(rank, call)):
                    found[rank] = posted
            if len(found) == self.world_size:
                self._check_aborts()  # a rank may have posted and then given up
                self.own.words[posts.AGREED] = self.unread = call
                self._patience_s = timeout_s
                if ranges.observers and missing:
                    self.waited(missing, time.monotonic() - began)
                return [found[rank] for rank in range(self.world_size)]
            self._check_aborts()
            missing = [rank for rank in range(self.world_size) if rank not in found]
            mine = found[self.rank].shown if self.rank in found else "not posted here"
            self._check_gone(call, missing, is_post_enough=True)
            self._wait_on(call, mine, missing, began, timeout_s)

    def waited(self, ranks: Sequence[int], seconds: float) -> None:
        """Tell observers that the host has waited for some ranks."""
        ranges.notify("waited", [self.world_ranks[rank] for rank in ranks], seconds)

    def lasts(self, call: int, title: str, ranks: Sequence[int], waited_s: float, timeout_s: float) -> None:
        """Write a line of the log, once for ``call``, if this rank has waited long.

        Args:
            call: number of the call.
            title: the call in words.
            ranks: ranks that have not come, or have not signalled; none if that is not known.
            waited_s: seconds that the wait has lasted.
            timeout_s: seconds after which it becomes an error.
        """

        def describe() -> tuple[str, str]:
            return users_call() or title, "; ".join(self.describe(rank) for rank in ranks) or "signals of its peers"

        self._long_waits.look(call, waited_s, timeout_s, describe)

    def _wait_on(self, call: int, mine: str, missing: Sequence[int], began: float, timeout_s: float) -> None:
        """Sleep shortly for ranks that have not posted ``call``; raise if they are too late.

        Args:
            call: number of the call.
            mine: this rank's call in words.
            missing: the ranks.
            began: time at which the wait began, of ``time.monotonic``.
            timeout_s: seconds that it may take.

        Raises:
            PeerTimeoutError: they are too late; all ranks are told, as by ``abort``.
        """
        waited = time.monotonic() - began
        if waited > timeout_s:
            message = f"call {call} ({mine}): waited {waited:.1f} s on rank {self.rank} for " + "; ".join(
                self.describe(rank) for rank in missing
            )
            culprits = self.at_fault(missing)
            if ranges.observers:
                self.waited(missing, waited)
            self.abort(message, culprits, timed_out=True)
            raise PeerTimeoutError(message, culprits)
        self.lasts(call, mine, missing, waited, timeout_s)
        # Ranks usually come within microseconds, and the shortest sleep takes 70.
        time.sleep(0 if waited < _STEP_S else min(max(waited / 8, 20e-6), 5e-3))

    def describe(self, rank: int, call: int = 0) -> str:
        """Describe a rank for an error: process, liveness, and its last known step.

        With ``call``, also tell whether that call has ended there while a later one has not, and the rank's signature
        of the call, unless it is known to equal this rank's.
        """
        part = self._parts[rank]
        if part.words[posts.CLOSED]:
            state = "closed"
        else:
            state = {True: "alive", False: "dead", None: "out of sight"}[self._liveness.alive(rank)]
        begun, ended = self.begun(rank), self.ended(rank)
        step = part.step.read()
        doing = f", {step[2].decode(errors='replace')}" if step and step[0] == begun and begun > ended else ""
        progress = f"in call {begun}" if begun > ended else f"ended call {ended}" if ended else "has begun no call"
        over = f", has ended call {call}" if 0 < call <= ended < begun else ""
        pid, handed = self._liveness.process(rank).pid, part.handed.read()
        others = f", {handed[2].decode(errors='replace')}" if handed else ""
        return f"rank {rank} (pid {pid}, {state}, {progress}{doing}{over}{self._other_call(rank, call)}{others})"

    def _waits(self, rank: int) -> bool:
        step = self._parts[rank].step.read()
        return step is not None and step[1] == posts.WAITS and step[0] > self.ended(rank)

    def _look(self) -> None:
        """Raise if the last call that all ranks agreed on cannot complete any more."""
        self.check(int(self.own.words[posts.AGREED]))

    def _let_peers_read(self) -> None:
        """Wait, before a post is overwritten, until peers have read it: this rank may have run ahead of a slow one.

        A peer that has not read it by the time-out, or has left, gets no post: that failure is raised elsewhere. It is
        enough to remember one agreed call, since peers that posted for an agreement have read the posts of the previous
        one.
        """
        call, self.unread = self.unread, 0
        until = time.monotonic() + self._patience_s
        # A rank reads no more posts of a call that it has read, or once it has begun a later call.
        words = [part.words for part in self._parts]
        while any(each[posts.AGREED] < call >= each[posts.BEGUN] and not each[posts.CLOSED] for each in words):
            try:
                self._check_aborts()
                self._check_gone(call)
            except PeerError:
                return
            if time.monotonic() > until:
                return
            time.sleep(50e-6)

    def _overwritten(self, rank: int, call: int) -> posts.PostedCall | None:
        """Return the replacement of a post that its rank has overwritten by a later one; None if it has not."""
        if self._parts[rank].slot(call).number <= call:
            return None
        ahead = self.begun(rank) - call
        text = f"{ahead} calls ahead, its call {call} is no longer on record (SIDELANE_DEBUG=1 compares every call)"
        return posts.PostedCall(rank, text, None)

    def _other_call(self, rank: int, call: int) -> str:
        own, other = self.own.posted(self.rank, call), self._parts[rank].posted(rank, call)
        if other is None:
            lost = self._overwritten(rank, call) if call else None
            return f", {lost.shown}" if lost else ""
        same = own is not None and own.signature == other.signature
        return "" if same else f", its call {call} is {other.shown}"

    def _check_aborts(self) -> None:
        aborts = [(rank, part.abort.read()) for rank, part in enumerate(self._parts) if not part.abort.is_blank]
        records = [(record, rank) for rank, record in aborts if record is not None]
        if not records:
            return
        (_, status, payload), rank = min(records)  # the first to give up names the cause, the others its consequences
        culprits, message = payload.split(b"\0", 1)
        error = PeerTimeoutError if status == posts.TIMED_OUT else PeerError
        text = message.decode(errors="replace")
        raise error(f"rank {rank} gave up: {text}", [int(culprit) for culprit in culprits.split(b",")])

    def _check_refusals(self, call: int) -> None:
        for rank, part in enumerate(self._parts):
            if rank != self.rank and (posted := part.posted(rank, call)) and posted.refusal is not None:
                if posted.blames is not None:
                    raise PeerError(posted.refusal, (posted.blames,))
                raise PeerError(f"rank {rank} refused call {call}, {posted.shown}: {posted.refusal}", (rank,))

    def _check_gone(self, call: int, ranks: Sequence[int] | None = None, *, is_post_enough: bool = False) -> None:
        """Raise for a peer that cannot contribute to ``call`` any more.

        With ``is_post_enough``, a peer that posted ``call`` before it left has contributed all that it is waited for.
        """
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LIVENESS_INTERVAL_S
            self._dead.update(self._liveness.dead(range(self.world_size)))
        for rank in range(self.world_size) if ranks is None else ranks:
            closed = self._parts[rank].words[posts.CLOSED]
            if rank == self.rank or not (closed or rank in self._dead):
                continue
            # The words of a rank that is gone are final. A rank that closed without an error had ended its calls.
            if (self.begun(rank) if closed else self.ended(rank)) < call:
                # It may have posted and left since the caller looked: an abort or a refusal is the cause.
                self._check_aborts()
                if is_post_enough and (self._parts[rank].posted(rank, call) or self._overwritten(rank, call)):
                    continue
                if not is_post_enough:
                    self._check_refusals(call)
                how = "closed its communicator before" if closed else "died in or before"
                raise PeerError(f"rank {rank} {how} call {call}: {self.describe(rank)}", (rank,))

    def _check_usable(self, method: str) -> None:
        if self._is_closed:
            raise CommunicatorClosedError(f"ControlBlock.{method}: the control block was closed")
