"""Prelaunched calls: submitted ahead of the collective, and fired by one write (DMA collectives paper, section 4.2.5).

host     prepare | arm ......... |  produce  | trigger |  use
stream                           |  kernels  | write --|-- wait --| next kernels
engines            wait .................................copies .|
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable
from types import TracebackType

import torch

from sidelane.choice import Abilities, Candidate, Choice
from sidelane.choice.candidate import DMA, everything
from sidelane.collectives.arguments import Request, check_tensors
from sidelane.collectives.backend import SubmittedAhead
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.calls import Calls, count_writes
from sidelane.collectives.plan import Agreement
from sidelane.collectives.prepare import Preparer
from sidelane.errors import PeerError, SidelaneError, UnavailableError
from sidelane.execute.base import Addresses
from sidelane.modes import untraced
from sidelane.program.collective import Kind
from sidelane.program.ir import Program
from sidelane.program.shape import Beside
from sidelane.program.wraparound import WORD_MASK
from sidelane.session.entry import entry


@untraced
class Prelaunched:
    """A collective that is submitted ahead of its call. Made by ``Communicator.prepare_all_gather`` and its sisters.

    Every rank arms and fires it as it would make a call: the same handles in the same order. Between :meth:`arm` and
    the trigger the communicator takes no other call. Leave it by ``with`` or :meth:`close`; it holds its tensors until
    then. An exception that leaves the ``with`` block of an armed handle ends the communicator on all ranks: the peers
    may wait for what this rank will not send. docs/internals/prelaunch.md shows the three triggers.
    """

    def __init__(
        self,
        calls: Calls,
        preparer: Preparer,
        request: Request,
        plan: tuple[Program, Choice],
        signature: str,
        tensors: tuple[torch.Tensor, torch.Tensor],
        host_trigger: bool,
    ) -> None:
        self._calls, self._preparer, self._request, self._signature = calls, preparer, request, signature
        self._program, self._choice = plan
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
        """True from :meth:`arm` until it is fired from here, waited for or closed."""
        return self._is_armed

    @property
    def trigger_address(self) -> int:
        """Where a kernel of this rank fires it: by storing :attr:`trigger_value`, 32 bits, release, system scope.

        Then call :meth:`wait`. The address never changes, and is one for all handles of a communicator (two, where some
        have ``host_trigger``). On CPU ranks Triton's interpreter runs the kernel, in this process.
        """
        return self._held.trigger_address

    @property
    def trigger_value(self) -> int:
        """What fires it there: another value for every :meth:`arm`, below ``2**32``.

        Raises:
            RuntimeError: it is not armed.
        """
        self._require_armed("trigger_value")
        return self._epoch & WORD_MASK

    @entry
    def arm(self) -> None:
        """Take the place of a call in the order of calls, and submit everything, to wait for the trigger.

        Raises:
            RuntimeError: this or another handle is armed, or it was closed; nothing has happened.
            UnavailableError: inside a capture.
            MismatchError, PeerError, PeerTimeoutError: as other calls (docs/internals/failure.md).
        """
        calls = self._calls
        if calls.forked:
            calls.require_open()
        if self._is_closed:
            raise RuntimeError(f"arm: the handle was closed (value={self})")
        if self._is_armed:
            raise RuntimeError(f"arm: armed already (value=call {self._epoch}, allowed=after its trigger)")
        call = calls.number()
        with calls.telling_refusals(call, self._signature):
            _refuse_captures("arm", calls)
        calls.announce(call, self._signature, compares=False)
        with calls.making_ready():
            self._held = self._load()
            calls.armed, self._epoch, self._is_armed = self, call, True
            calls.unfinished.add(self)
            self._held.arm(call)
        calls.last_choice = self._choice

    def trigger(self) -> None:
        """Fire it behind the caller's work so far; the caller's next work follows its end. CPUs block until then.

        On a GPU this is one call to the driver (on the legacy default stream five), on the current stream.

        Raises:
            RuntimeError: it is not armed.
            ValueError: inside a capture.
            PeerError, PeerTimeoutError: as other calls.
        """
        if not self._is_armed:
            self._require_armed("trigger")
        calls = self._calls
        try:
            self._held.fire()
        except (PeerError, KeyboardInterrupt) as error:
            calls.fail(error)
            raise
        self._is_armed, calls.armed = False, None
        calls.unfinished.discard(self)
        count_writes(self._output)

    def trigger_from_host(self) -> None:
        """Fire it at once, by one store: not behind the caller's work, which must have ended as far as it matters.

        Raises:
            RuntimeError: it is not armed.
            ValueError: it was prepared without ``host_trigger``.
            PeerError, PeerTimeoutError: as other calls.
        """
        if not self._is_armed:
            self._require_armed("trigger_from_host")
        calls = self._calls
        try:  # plainly, as in trigger: a context manager takes longer than the store
            self._held.fire_from_host()
        except (PeerError, KeyboardInterrupt) as error:
            calls.fail(error)
            raise
        self._is_armed, calls.armed = False, None
        count_writes(self._output)

    def wait(self) -> None:
        """Order the caller's next work behind the end: after a trigger from the host, or once a kernel that fires it is
        queued. A kernel that never does is a time-out that names this rank. CPUs block.

        Raises:
            RuntimeError: it was never armed; on CPUs also if it was not fired, by a kernel neither.
            ValueError: inside a capture.
            PeerError, PeerTimeoutError: as other calls.
        """
        calls = self._calls
        if calls.forked:
            calls.require_open()
        if not self._epoch or self._is_closed:
            raise RuntimeError(f"wait: there is nothing to wait for (value={self}, allowed=after arm)")
        with calls.failing_for_good():
            self._held.wait(begun=not self._is_armed)
        calls.unfinished.discard(self)
        if self._is_armed:
            self._is_armed, calls.armed = False, None
            count_writes(self._output)

    def close(self) -> None:
        """Let go of everything. Idempotent. What is armed is cancelled on CPUs; GPUs cannot: they fire it and block
        until it has ended, and so must the peers.

        Raises:
            PeerError, PeerTimeoutError: the peers did not come to what was fired.
        """
        if self._is_closed:
            return
        self._is_closed = True
        calls = self._calls
        try:
            with calls.failing_for_good():
                if self in calls.unfinished and calls.failure is not None:
                    self._held.drain()
                elif self._is_armed:
                    self._held.give_up()
                elif self in calls.unfinished:
                    self._held.finish()
        finally:
            if self._is_armed:
                self._is_armed, calls.armed = False, None
            calls.unfinished.discard(self)
            self._tensors = self._output = ()

    def disown(self) -> None:
        """Let go of everything, and touch nothing: this process is a copy of the one that made the handle."""
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
            if isinstance(error, KeyboardInterrupt):
                calls.fail(error)
            else:
                rank = calls.control.rank
                text = f"rank {rank} left {self}, call {self._epoch}, untriggered: {type(error).__name__}: {error}"
                calls.control.abort(text, (rank,))
                calls.fail(PeerError(text, (rank,)))
        with contextlib.suppress(SidelaneError):  # the first error is the one to see
            self.close()

    def _load(self) -> SubmittedAhead:
        """Bind the program, again where staging has moved since."""
        addresses = self._preparer.addresses(self._program, self._request)
        if addresses == self._addresses:
            return self._held
        self._addresses = addresses
        return self._calls.backend.hold(self._program, addresses, self._host_trigger)

    def _require_armed(self, method: str) -> None:
        if self._calls.forked:
            self._calls.require_open()
        if not self._is_armed:
            state = "closed" if self._is_closed else "fired" if self._epoch else "never armed"
            raise RuntimeError(f"{method}: not armed (value={self}, {state}; allowed=after arm)")


def prepare_prelaunched(
    path: CallPath,
    kind: Kind,
    tensors: tuple[torch.Tensor, torch.Tensor],
    variant: str,
    host_trigger: bool,
    beside: Beside | None,
    details: tuple[Hashable, ...] = (),
) -> Prelaunched:
    """Plan, verify and load a prelaunched ``kind``, which does not reduce. Collective.

    Args:
        path: of the lane.
        kind: ``all_gather`` or ``all_to_all``.
        tensors: output and input.
        variant: see ``Communicator.prepare_all_gather``.
        host_trigger: likewise.
        beside: likewise.
        details: see ``Asked``.

    Raises:
        As ``Communicator.prepare_all_gather``.
    """
    calls, name = path.calls, f"prepare_{kind}"

    def check() -> tuple[tuple[Request, Agreement], str]:
        check_tensors(name, *tensors)
        _check_variant(name, kind, variant, calls.backend.abilities)
        request: Request = getattr(path.arguments, kind)(*tensors, *details)
        agreement = Agreement.of(request, variant, frozen=False, beside=path.hint(name, beside))
        return (request, agreement), f"{name}: {agreement.text()}"

    _, (request, agreement) = path.agree(name, check)
    with calls.making_ready():
        plan = path.preparer.held(agreement)
        signature = f"prelaunched {agreement.text()}"
        return Prelaunched(calls, path.preparer, request, plan, signature, tensors, host_trigger)


def prelaunchable(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Variants, of these candidates, that a handle can be made of."""
    return tuple(found.variant for found in candidates if found.implementation == DMA and not found.takes_turns)


def _check_variant(name: str, kind: Kind, variant: str, abilities: Abilities) -> None:
    allowed = prelaunchable(everything(kind, abilities))
    if variant not in allowed:
        raise ValueError(f"{name}: variant (value={variant!r}, allowed={', '.join(allowed)})")


def _refuse_captures(name: str, calls: Calls) -> None:
    if calls.backend.place()[1]:
        raise UnavailableError(
            f"{name}: not while a graph is captured, which hands all of its commands over at once anyway"
        )
