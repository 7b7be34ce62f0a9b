"""State that all calls of a communicator share: call numbers, posts to the peers, and failures that end it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType, UnionType
from typing import Any, NoReturn

import torch
from torch.autograd import graph

from sidelane import forks, ranges
from sidelane.choice import Choice
from sidelane.collectives.backend import Backend
from sidelane.collectives.call_cache import PreparedCall
from sidelane.collectives.work import Work
from sidelane.config import Config
from sidelane.errors import (
    CommunicatorClosedError,
    MismatchError,
    PeerError,
    PeerTimeoutError,
    ProgramError,
    UnavailableError,
)
from sidelane.execute.base import CallerStream
from sidelane.memory.control import ControlBlock
from sidelane.memory.posts import PostedCall, different
from sidelane.program.ir import RENEWAL_CALLS

_ALIKE = (ValueError, MismatchError, ProgramError, UnavailableError)
"""Errors after an agreement that either all ranks raise or none."""

_FATAL = PeerError | KeyboardInterrupt
"""Errors that end a communicator."""

_CAPTURE_CALLS = 4096
"""Number of calls by which a renewal of flags is postponed while a graph is captured."""

count_writes: Callable[[tuple[torch.Tensor, ...]], None] = getattr(
    torch._C, "_increment_version", graph.increment_version
)
"""Function that tells autograd of written tensors: ``torch.autograd.graph.increment_version`` without its overhead."""


class _OnError:
    """A block whose errors of some kinds are passed to a function. A generator would take the host 0.6 us more."""

    __slots__ = ("_kinds", "_react")

    def __init__(self, kinds: type[Exception] | UnionType, react: Callable[[Any], None]) -> None:
        self._kinds, self._react = kinds, react

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and isinstance(error, self._kinds):
            self._react(error)


class Calls:
    """The calls of one communicator on one rank.

    Args:
        control: control block in which the ranks post their calls.
        backend: runs the calls.
        config: settings.

    Attributes:
        last_choice: candidate that ran the last call, and the reason.
        armed: the prelaunched call that waits for its trigger, if there is one.
        failure: error that ended the communicator, if there was one.
        closed: the communicator is closed and makes no more calls.
        forked: this process is a forked copy of the one that made the communicator.
        numbers: iterator of the numbers of the next calls, up to the next renewal.
        renewal: the number that follows the last of these.
        entrance: lock of the thread that is inside of a call (``entry``).
        hold: keeps memory that a graph has captured.
        ranks: ranks of the world that take part, as profilers show them.
        name: name of the communicator, the same on all its ranks, as profilers show it.
        renew: sets all flags of this rank as if the call of the given number had set them (:data:`RENEWAL_CALLS`).
    """

    def __init__(
        self,
        control: ControlBlock,
        backend: Backend,
        config: Config,
        renew: Callable[[int], None] = lambda call: None,
        hold: Callable[[Sequence[torch.Tensor | None]], None] = lambda tensors: None,
        ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self.ranks, self.name = ranks, name
        self.control, self.backend, self.config, self.renew, self.hold = control, backend, config, renew, hold
        self.last_choice: Choice | None = None
        self.armed: object | None = None
        self.failure: BaseException | None = None
        self.closed = self.forked = False
        self.entrance = forks.lock()
        self.count_from(1)
        forks.in_copies_of(self, Calls.disown)

    def number(self) -> int:
        """Take the number of a new call.

        Raises:
            CommunicatorClosedError: the communicator is closed, or has failed.
            RuntimeError: a prelaunched call is armed: its streams would hold up this call until it is fired.
        """
        if self.closed or self.failure is not None or self.armed is not None:
            self.require_open()
        number = next(self.numbers, 0)
        return number or self._renewed()

    def count_from(self, number: int) -> None:
        """Set the number of the next call. The numbers from there on end where flags must be renewed."""
        self.renewal = (number // RENEWAL_CALLS + 1) * RENEWAL_CALLS
        self.numbers = iter(range(number, self.renewal))

    def _renewed(self) -> int:
        """Renew all flags, all ranks together, and take the number of the next call.

        A flag holds the number of the call that set it last, in 32 bits. One that was not set for 2**31 calls would
        count as set by a call to come. So after every ``RENEWAL_CALLS`` calls the ranks wait until all have ended,
        make their own flags count as set by the call before, and wait until all have done so.
        """
        first = self.renewal
        if self.backend.caller_stream()[1]:
            # The host cannot wait in a capture, and captured programs use no numbers. All ranks capture alike.
            self.renewal = first + _CAPTURE_CALLS
            self.numbers = iter(range(first, self.renewal))
            return next(self.numbers)
        with self.failing_for_good():
            self.backend.synchronize()
            self.announce(first, "renewal of flags: all calls have ended", compares=True)
            self.renew(first)
            self.announce(first + 1, "renewal of flags: all flags are renewed", compares=True)
        self.count_from(first + 2)
        return next(self.numbers)

    def require_open(self) -> None:
        """Raise as :meth:`number` does."""
        if self.closed:
            raise CommunicatorClosedError("Communicator: closed; calls come before close(), or inside of its block")
        if self.forked:
            raise forks.refusal("Communicator", self.control.pid)
        if self.failure is not None:
            why = "" if isinstance(self.failure, CommunicatorClosedError) else "unusable since a call failed: "
            raise CommunicatorClosedError(f"Communicator: {why}{self.failure}") from self.failure
        if self.armed is not None:
            raise RuntimeError(
                f"Communicator: another call while a prelaunched one waits for its trigger (value={self.armed}, "
                "allowed=trigger(), trigger_from_host(), wait() and close() of its handle)"
            )

    def run(
        self,
        prepared: PreparedCall,
        call: int,
        async_op: bool,
        tensors: tuple[torch.Tensor | None, ...],
        written: tuple[torch.Tensor, ...],
        caller: CallerStream,
    ) -> Work | None:
        """Start a prepared call behind the caller's work.

        Args:
            prepared: the loaded call; it was prepared for a capture if the caller's stream is being captured.
            call: its number.
            async_op: the caller's next work does not wait for its end.
            tensors: its tensors; None where this rank has none.
            written: the tensors that it writes.
            caller: the caller's stream, and whether it is captured.

        Raises:
            PeerError, PeerTimeoutError: this call failed, or an earlier one.
        """
        try:
            work = self.backend.run(prepared.loaded, call, async_op, tensors, caller)
        except (PeerError, KeyboardInterrupt) as error:
            self.fail(error)
            raise
        self.last_choice = prepared.choice
        if prepared.frozen:
            self.hold(tensors)
        if written:
            count_writes(written)
        if work is not None:
            work.outputs = written
        return work

    def announce(self, call: int, signature: str, *, compares: bool) -> None:
        """Tell the peers of a call that this rank makes.

        Args:
            call: its number.
            signature: all that must be the same on every rank.
            compares: wait for the peers and compare with theirs, as for what is new; ``Config.debug`` always does.

        Raises:
            MismatchError, PeerError, PeerTimeoutError: as :meth:`agree`.
        """
        try:  # plainly: every call comes here
            self.control.post_call(call, signature)
        except (PeerError, KeyboardInterrupt) as error:
            self.fail(error)
            raise
        if compares or self.config.debug:
            self.agree(call)

    def posts(self, call: int) -> Sequence[PostedCall]:
        """Wait until every rank has posted ``call``, and return the posts."""
        with self.failing_for_good():
            return self.control.calls_of_all(call, self.config.timeout_s)

    def agree(self, call: int) -> None:
        """Wait until every rank has posted ``call``, and compare the posts.

        Raises:
            MismatchError, PeerError: the calls differ, or a rank refused; no bytes have moved.
        """
        compare(self.control, call, self.posts(call))  # all ranks raise an error here alike

    def reporting_refusals(self, call: int, name: str) -> _OnError:
        """Tell the peers about any error that keeps this rank from making the call."""
        return _OnError(Exception, functools.partial(self.refuse, call, name))

    def refuse_second_thread(self, name: str) -> NoReturn:
        """Refuse a call while another thread is inside of one, since their order is not defined; see ``entry``.

        Raises:
            CommunicatorClosedError: the communicator is closed, or has failed.
            RuntimeError: in all other cases.
        """
        if self.closed or self.failure is not None:
            self.require_open()
        rank = self.control.rank
        self.failure = RuntimeError(
            f"{name}: another call of this communicator is under way in another thread (value="
            f"{threading.current_thread().name!r}): one call is made at a time. Give each thread a communicator, or "
            "order the calls of the threads. Which of them comes first is not known, so that the communicator is of no "
            "use any more"
        )
        self.control.abort(f"rank {rank} called {name} in two threads at once", (rank,))
        raise self.failure

    def disown(self) -> None:
        """Disable the communicator in a forked copy of its process, which has none of its threads and is no rank."""
        self.forked = True
        self.failure = failure = forks.refusal("Communicator", self.control.pid)
        self.armed = None
        self.backend.disown(failure)

    def refuse(self, call: int, name: str, error: Exception) -> None:
        """Tell the peers that this rank does not make the call, and why."""
        self.control.post_call(call, name, refusal=f"{type(error).__name__}: {error}")

    def failing_for_good(self) -> _OnError:
        """End the communicator if a peer fails, or if Ctrl-C interrupts a wait for the peers."""
        return _OnError(_FATAL, self.fail)

    @contextlib.contextmanager
    def making_ready(self) -> Iterator[None]:
        """End the communicator if, after an agreement, an error occurs on this rank only: the peers make the call.

        Errors that follow from the agreement itself occur on all ranks alike, and do not end the communicator.
        """
        try:
            with self.failing_for_good():
                yield
        except (PeerError, *_ALIKE):
            raise
        except Exception as error:
            rank = self.control.rank
            self._note_failure(error)
            self.control.abort(f"rank {rank} could not make its call: {type(error).__name__}: {error}", (rank,))
            raise

    def _note_failure(self, error: BaseException) -> None:
        """Keep an error to raise it in later calls; not if the communicator is closed, since an error keeps frames."""
        self.failure = error
        if self.closed:
            self.failure = None
        if ranges.observers:
            ranges.notify("failed", error)

    def fail(self, error: PeerError | KeyboardInterrupt) -> None:
        """End the communicator, and tell the peers that this rank makes no more calls."""
        self._note_failure(error)
        if isinstance(error, KeyboardInterrupt):
            self.control.abort(f"rank {self.control.rank} was interrupted", (self.control.rank,))
        else:
            self.control.abort(str(error), error.ranks, timed_out=isinstance(error, PeerTimeoutError))

    def fail_untriggered(self, what: str, error: BaseException) -> None:
        """End the communicator as an error leaves a call whose triggers were not fired: peers wait for its bytes."""
        if not isinstance(error, KeyboardInterrupt):
            rank = self.control.rank
            error = PeerError(f"rank {rank} left {what}, untriggered: {type(error).__name__}: {error}", (rank,))
        self.fail(error)


def compare(control: ControlBlock, call: int, posts: Sequence[PostedCall]) -> None:
    """Check that all ranks posted the same call.

    Raises:
        PeerError: a rank refused the call; its reason is repeated.
        MismatchError: two ranks made different calls; both are named.
    """
    texts = [post.common for post in posts]
    # The refusal of a rank that compared first (it blames another one) only repeats the cause that is found here.
    refused = [(post.rank, post.refusal) for post in posts if post.refusal is not None and post.blames is None]
    if refused:
        culprit, reason = refused[0]
        found = f"call {call}: rank {culprit} refused it: {reason}"
    elif other := next((rank for rank, text in enumerate(texts) if text != texts[0]), None):
        culprit = other
        found = f"call {call}: ranks made different calls: {different(posts[0], posts[other])}"
    else:
        return
    # A rank that knew the call from before has not compared; it finds the refusal while it waits for this rank.
    control.post_call(call, posts[control.rank].signature, refusal=found, blames=culprit)
    if refused:
        raise PeerError(found, ranks=[rank for rank, _ in refused])
    raise MismatchError(found)
