"""Prelaunched calls: submitted ahead of the collective, and fired by one write (DMA collectives paper, section 4.2.5).

host     prepare | arm ......... |  produce  | trigger |  use
stream                           |  kernels  | write --|-- wait --| next kernels
engines            wait .................................copies .|
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType

import torch

from sidelane.choice import Candidate
from sidelane.choice.candidate import DMA, everything
from sidelane.collectives.agreement import Agreement, Request
from sidelane.collectives.arguments import check_tensors
from sidelane.collectives.backend import SubmittedAhead
from sidelane.collectives.call_forms import SingleCall
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.calls import count_writes
from sidelane.errors import PeerError, SidelaneError, UnavailableError
from sidelane.execute.base import Addresses
from sidelane.modes import untraced
from sidelane.program.shape import Beside
from sidelane.program.wraparound import WORD_MASK
from sidelane.session.entry import entry


@untraced
class Prelaunched:
    """A collective that is submitted ahead of its call. Made by ``Communicator.prepare_all_gather`` and others.

    Every rank arms and fires it like a call: the same handles in the same order. Between :meth:`arm` and the trigger
    the communicator accepts no other call. Use it in a ``with`` block, or call :meth:`close`; it keeps its tensors
    until then. An exception that leaves the ``with`` block of an armed handle ends the communicator on all ranks: the
    peers may be waiting for bytes that this rank will not send. docs/internals/prelaunch.md shows the three triggers.
    """

    range_name = "prelaunched call"
    """Name of its calls in profilers, whose range is the arming."""

    def __init__(
        self,
        path: CallPath,
        request: Request,
        agreement: Agreement,
        tensors: tuple[torch.Tensor, ...],
        host_trigger: bool,
    ) -> None:
        self._calls, self._preparer, self._request = path.calls, path.preparer, request
        self._program, self._choice = path.preparer.planner.held(agreement)
        self._signature = f"prelaunched {agreement.text}"
        self._tensors: tuple[torch.Tensor, ...] = tensors
        self._output: tuple[torch.Tensor, ...] = tensors[:1]
        self._host_trigger = host_trigger
        self._addresses: Addresses | None = None
        self._held: SubmittedAhead = self._load()
        self._epoch = 0
        self._is_armed = self._is_closed = False

    def __str__(self) -> str:
        return f"prelaunched {self._program.collective} {self._program.variant}"

    @property
    def armed(self) -> bool:
        """True from :meth:`arm` until the host fires the call, waits for it or closes the handle."""
        return self._is_armed

    @property
    def trigger_address(self) -> int:
        """Address of the trigger. A kernel of this rank fires it by storing :attr:`trigger_value` there.

        The store has 32 bits, release, system scope; :meth:`wait` follows. The address never changes, and all handles
        of a communicator share it (those with ``host_trigger`` another one). On CPU ranks Triton's interpreter runs the
        kernel, in this process.
        """
        return self._held.trigger_address

    @property
    def trigger_value(self) -> int:
        """Value that fires the trigger: another one for every :meth:`arm`, below ``2**32``.

        Raises:
            RuntimeError: it is not armed.
        """
        self._require_armed("trigger_value")
        return self._epoch & WORD_MASK

    @entry
    def arm(self) -> None:
        """Take a number in the order of calls, and submit all commands; they wait for the trigger.

        Raises:
            RuntimeError: this or another handle is armed, or this one was closed; nothing has been submitted.
            UnavailableError: inside a capture.
            MismatchError, PeerError, PeerTimeoutError: as other calls (docs/internals/failure.md).
        """
        calls = self._calls
        if calls.forked:
            calls.require_open()
        if self._is_closed:
            raise RuntimeError(f"arm: the handle was closed (value={self})")
        if self._is_armed:
            raise RuntimeError(f"arm: armed already, and its trigger must come first (value=call {self._epoch})")
        call = calls.number()
        with calls.reporting_refusals(call, self._signature):
            if calls.backend.caller_stream()[1]:
                raise UnavailableError("arm: not while a graph is captured: it hands over all commands at once anyway")
        calls.announce(call, self._signature, compares=False)
        with calls.making_ready():
            self._held = self._load()
            calls.armed, self._epoch, self._is_armed = self, call, True
            calls.unfinished.add(self)
            self._held.arm(call)
        calls.last_choice = self._choice

    def trigger(self) -> None:
        """Fire the call behind the caller's work so far; the caller's next work follows its end. CPU ranks block.

        On a GPU this is one call to the driver (on the legacy default stream five), on the current stream.

        Raises:
            RuntimeError: it is not armed.
            ValueError: inside a capture.
            PeerError, PeerTimeoutError: as other calls.
        """
        if not self._is_armed:
            self._require_armed("trigger")
        calls = self._calls
        try:  # no context manager, and no function for both triggers: either takes as long as the store
            self._held.fire()
        except (PeerError, KeyboardInterrupt) as error:
            calls.fail(error)
            raise
        self._is_armed, calls.armed = False, None
        calls.unfinished.discard(self)
        count_writes(self._output)

    def trigger_from_host(self) -> None:
        """Fire the call at once, by one store. The caller's work that computes its input must have ended.

        Raises:
            RuntimeError: it is not armed.
            ValueError: it was prepared without ``host_trigger``.
            PeerError, PeerTimeoutError: as other calls.
        """
        if not self._is_armed:
            self._require_armed("trigger_from_host")
        if not self._host_trigger:  # CPU ranks could, but the same code on GPUs could not
            raise ValueError("trigger_from_host: it needs a call prepared with host_trigger=True")
        calls = self._calls
        try:
            self._held.fire_from_host()
        except (PeerError, KeyboardInterrupt) as error:
            calls.fail(error)
            raise
        self._is_armed, calls.armed = False, None
        count_writes(self._output)

    def wait(self) -> None:
        """Order the caller's next work behind the end of the call. CPU ranks block.

        Call it after :meth:`trigger_from_host`, or after launching a kernel that fires the trigger. If the kernel never
        does, the call times out and names this rank.

        Raises:
            RuntimeError: it was never armed; on CPU ranks also if neither host nor kernel has fired it.
            ValueError: inside a capture.
            PeerError, PeerTimeoutError: as other calls.
        """
        calls = self._calls
        if calls.forked:
            calls.require_open()
        if not self._epoch or self._is_closed:
            raise RuntimeError(f"wait: there is nothing to wait for before arm (value={self})")
        with calls.failing_for_good():
            self._held.wait(begun=not self._is_armed)
        calls.unfinished.discard(self)
        if self._is_armed:
            self._is_armed, calls.armed = False, None
            count_writes(self._output)

    def close(self) -> None:
        """Release all resources. Idempotent.

        CPU ranks cancel an armed call. GPUs cannot: they fire it and block until it has ended, as the peers must do.

        Raises:
            PeerError, PeerTimeoutError: the peers did not make the call that was fired.
        """
        if self._is_closed:
            return
        self._is_closed = True
        calls = self._calls
        has_failed = calls.failure is not None
        try:
            if self in calls.unfinished:
                with calls.failing_for_good(), contextlib.suppress(*(SidelaneError,) * has_failed):
                    self._held.end(armed=self._is_armed and not has_failed)
        finally:
            if self._is_armed:
                self._is_armed, calls.armed = False, None
            calls.unfinished.discard(self)
            self._tensors = self._output = ()

    def disown(self) -> None:
        """Disable the handle in a forked copy of the process that made it, without touching any memory."""
        self._is_armed, self._is_closed = False, True

    def __enter__(self) -> Prelaunched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        calls = self._calls
        if self._is_armed and calls.failure is None:
            calls.fail_untriggered(f"{self}, call {self._epoch}", error)
        with contextlib.suppress(SidelaneError):  # the first error is the one to see
            self.close()

    def _load(self) -> SubmittedAhead:
        """Bind the program, or bind it again if staging has moved since."""
        addresses = self._preparer.addresses(self._program, (self._request,))
        if addresses == self._addresses:
            return self._held
        self._addresses = addresses
        return self._calls.backend.hold(self._program, addresses, self._host_trigger)

    def _require_armed(self, method: str) -> None:
        if self._calls.forked:
            self._calls.require_open()
        if not self._is_armed:
            state = "closed" if self._is_closed else "fired" if self._epoch else "never armed"
            raise RuntimeError(f"{method}: not armed, and arm must come first (value={self}, {state})")


def prepare_prelaunched(
    path: CallPath, single: SingleCall, variant: str, host_trigger: bool, beside: Beside | None
) -> Prelaunched:
    """Plan, verify and load a prelaunched call, which does not reduce. Collective.

    Args:
        path: call path of the lane.
        single: kind and arguments of the call.
        variant: see ``Communicator.prepare_all_gather``.
        host_trigger: see ``Communicator.prepare_all_gather``.
        beside: see ``Communicator.prepare_all_gather``.

    Raises:
        Exception: as ``Communicator.prepare_all_gather`` does.
    """
    calls, name = path.calls, f"prepare_{single.name}"

    def check() -> tuple[tuple[Request, Agreement], str]:
        check_tensors(name, *single.tensors)
        allowed = prelaunchable(everything(single.name, calls.backend.abilities))
        if variant not in allowed:
            raise ValueError(f"{name}: variant (value={variant!r}, allowed={', '.join(allowed)})")
        (request,) = single.requests(path.arguments)
        agreement = single.agreement((request,), variant, False, path.hint(name, beside))
        return (request, agreement), f"{name}: {agreement.text}"

    _, (request, agreement) = path.agree(name, check)
    with calls.making_ready():
        return Prelaunched(path, request, agreement, single.tensors, host_trigger)


def prelaunchable(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Return the variants among candidates that can be prelaunched."""
    return tuple(found.variant for found in candidates if found.implementation == DMA)
