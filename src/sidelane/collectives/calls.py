"""What all calls of a communicator share: their numbers, what the peers hear about them, and how they end it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch.autograd import graph

from sidelane.choice import Choice
from sidelane.collectives.agree import compare
from sidelane.collectives.backend import Backend, Work
from sidelane.collectives.prepare import Prepared
from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, PeerError, PeerTimeoutError
from sidelane.execute.base import Place
from sidelane.memory.control import ControlBlock, PostedCall

count_writes: Callable[[tuple[torch.Tensor, ...]], None] = getattr(
    torch._C, "_increment_version", graph.increment_version
)
"""Tell autograd that tensors were written: ``torch.autograd.graph.increment_version`` without its detour."""


class Handle(Protocol):
    """A prelaunched call, as the communicator sees it."""

    def close(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Calls:
    """The calls of one communicator on one rank.

    Args:
        control: where the ranks tell each other.
        backend: runs them.
        config: settings.

    Attributes:
        last_choice: how the last call was run.
        armed: the prelaunched call that waits for its trigger, if one does.
        unfinished: prelaunched calls that are armed, or fired without anybody having waited for them: their tensors
            are in use.
        failure: what ended the communicator, if anything did.
        numbers: of the calls to come.
    """

    def __init__(self, control: ControlBlock, backend: Backend, config: Config) -> None:
        self.control, self.backend, self.config = control, backend, config
        self.last_choice: Choice | None = None
        self.armed: Handle | None = None
        self.unfinished: set[Handle] = set()
        self.failure: BaseException | None = None
        self.closed = False
        self.numbers = itertools.count(1)

    def number(self) -> int:
        """Take the number of a new call.

        Raises:
            CommunicatorClosedError: there can be none any more.
            RuntimeError: a prelaunched call is armed; its program shares flags and staging with all others.
        """
        if self.closed or self.failure is not None or self.armed is not None:
            self.require_open()
        return next(self.numbers)

    def require_open(self) -> None:
        """Raise as :meth:`number` does."""
        if self.closed:
            raise CommunicatorClosedError("Communicator: closed")
        if self.failure is not None:
            raise CommunicatorClosedError(
                f"Communicator: unusable since a call failed: {self.failure}"
            ) from self.failure
        if self.armed is not None:
            raise RuntimeError(
                f"Communicator: another call while a prelaunched one waits for its trigger (value={self.armed}, "
                "allowed=trigger(), trigger_from_host(), wait() and close() of its handle)"
            )

    def run(
        self,
        prepared: Prepared,
        call: int,
        async_op: bool,
        tensors: tuple[torch.Tensor | None, ...],
        place: Place,
    ) -> Work | None:
        """Start a call that is ready, behind the caller's work.

        Args:
            prepared: for a caller who is captured, or for one who is not.
            call: its number.
            async_op: the caller's next work does not wait for its end.
            tensors: its own, what it writes first.
            place: where the caller stands.

        Raises:
            PeerError, PeerTimeoutError: it failed, or an earlier one did.
        """
        try:
            work = self.backend.run(prepared.loaded, call, async_op, tensors, place)
        except (PeerError, KeyboardInterrupt) as error:
            self.fail(error)
            raise
        self.last_choice = prepared.choice
        written = tensors[0]
        if written is not None:
            count_writes((written,))
        return work

    def posts(self, call: int) -> Sequence[PostedCall]:
        """Wait until every rank has posted ``call``; what they posted."""
        with self.failing_for_good():
            return self.control.calls_of_all(call, self.config.timeout_s)

    def agree(self, call: int) -> None:
        """Wait until every rank has posted ``call``, and compare.

        Raises:
            MismatchError, PeerError: they differ, or one refused; nothing has begun.
        """
        compare(self.control, call, self.posts(call))  # an error here leaves all ranks in step

    @contextlib.contextmanager
    def telling_refusals(self, call: int, name: str) -> Iterator[None]:
        """Whatever keeps this rank from making the call, its peers are told."""
        try:
            yield
        except Exception as error:
            self.refuse(call, name, error)
            raise

    def refuse(self, call: int, name: str, error: Exception) -> None:
        """Tell the peers that this rank does not make the call, and why."""
        self.control.post_call(call, name, refusal=f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def failing_for_good(self) -> Iterator[None]:
        """A failed peer, or Ctrl-C in a wait for the peers, ends the communicator."""
        try:
            yield
        except (PeerError, KeyboardInterrupt) as error:
            self.fail(error)
            raise

    def fail(self, error: PeerError | KeyboardInterrupt) -> None:
        """End the communicator, and tell the peers: this rank comes to none of their calls any more."""
        self.failure = error
        if isinstance(error, KeyboardInterrupt):
            self.control.abort(f"rank {self.control.rank} was interrupted", (self.control.rank,))
        else:
            self.control.abort(str(error), error.ranks, timed_out=isinstance(error, PeerTimeoutError))
