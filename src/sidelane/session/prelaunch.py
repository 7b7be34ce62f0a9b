"""Prelaunched calls: submitted ahead of the collective, and fired by one write (DMA collectives paper, section 4.2.5).

host     prepare | arm ......... |  produce  | trigger |  use
stream                           |  kernels  | write --|-- wait --| next kernels
engines            wait .................................copies .|
"""

from __future__ import annotations

from collections.abc import Iterable

from sidelane.choice import Candidate, Choice
from sidelane.choice.candidate import DMA, everything
from sidelane.collectives.agreement import Agreement, Request
from sidelane.collectives.arguments import check_tensors
from sidelane.collectives.call_forms import SingleCall
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.calls import Calls, count_writes
from sidelane.collectives.prepare import Preparer
from sidelane.errors import UnavailableError
from sidelane.execute.base import CallerStream
from sidelane.modes import untraced
from sidelane.program.collective import Buffer
from sidelane.program.shape import Beside
from sidelane.program.wraparound import WORD_MASK
from sidelane.session.bound_program import EAGER, Forms, LoadedProgram, NamedBuffers, load_program
from sidelane.session.entry import entry


@untraced
class Prelaunched(LoadedProgram):
    """A collective that is submitted ahead of its call. Made by ``Communicator.prepare_all_gather`` and others.

    Every rank arms and fires it like a call: the same handles in the same order. Between :meth:`arm` and the trigger
    the communicator accepts no other call. Use it in a ``with`` block, or call :meth:`close`; it keeps its tensors
    until then. An exception that leaves the ``with`` block of an armed handle ends the communicator on all ranks: the
    peers may be waiting for bytes that this rank will not send. docs/internals/prelaunch.md shows the three triggers.

    Attributes:
        host_trigger: :meth:`trigger_from_host` is allowed.
    """

    range_name = "prelaunched call"
    """Name of its calls in profilers, whose range is the arming."""

    def __init__(self, calls: Calls, preparer: Preparer, forms: Forms, buffers: NamedBuffers, choice: Choice) -> None:
        super().__init__(calls, preparer, forms, buffers, choice)
        self._name = f"prelaunched {self._name}"
        self.host_trigger = False
        self._before = 0  # number of the last call but one

    @property
    def armed(self) -> bool:
        """True from :meth:`arm` until the host fires the call, waits for it or closes the handle."""
        return bool(self._unfired)

    @property
    def trigger_address(self) -> int:
        """Address of the trigger. A kernel of this rank fires it by storing :attr:`trigger_value` there.

        The store has 32 bits, release, system scope; :meth:`wait` follows. The address never changes. On CPU ranks
        Triton's interpreter runs the kernel, in this process.
        """
        return self._words[0][0][0]

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
        if self._block is None:
            raise RuntimeError(f"arm: the handle was closed (value={self})")
        if self._unfired:
            raise RuntimeError(f"arm: armed already, and its trigger must come first (value=call {self._epoch})")
        call = calls.number()
        with calls.reporting_refusals(call, self._signature):
            if calls.backend.caller_stream()[1]:
                raise UnavailableError("arm: not while a graph is captured: it hands over all commands at once anyway")
        calls.announce(call, self._signature, compares=False)
        self._before, self._epoch, self._works[EAGER] = self._epoch, call, None
        if (ahead := calls.backend.ahead) is not None:
            self._run(ahead)
        calls.armed, self._unfired = self, {0}

    def trigger(self) -> None:
        """Fire the call after the caller's work so far; the caller's next work follows its end. CPU ranks block.

        Raises:
            RuntimeError: it is not armed.
            ValueError: inside a capture.
            PeerError, PeerTimeoutError: as other calls.
        """
        self._require_armed("trigger")
        caller = self._caller_stream("trigger")
        with self._calls.failing_for_good():
            self._triggers[0].fire(self._epoch, caller, follows=True)
        self._end_behind(caller)

    def trigger_from_host(self) -> None:
        """Fire the call at once. The caller's work that computes its input must have ended.

        Raises:
            RuntimeError: it is not armed.
            ValueError: it was prepared without ``host_trigger``.
            PeerError, PeerTimeoutError: as other calls.
        """
        self._require_armed("trigger_from_host")
        if not self.host_trigger:
            raise ValueError("trigger_from_host: it needs a call prepared with host_trigger=True")
        with self._calls.failing_for_good():
            self._wait_for_last()
            self._triggers[0].fire_from_host(self._epoch)
        self._note_fired()
        if self._calls.backend.ahead is None:
            self._run(self._calls.backend.caller_stream(), async_op=True)

    def wait(self) -> None:
        """Order the caller's next work after the end of the call. CPU ranks block.

        Call it after :meth:`trigger_from_host`, or after launching a kernel that fires the trigger. If the kernel never
        does, the call times out and names this rank. Another handle may be armed meanwhile.

        Raises:
            RuntimeError: it was never armed; on CPU ranks also if neither host nor kernel has fired it.
            ValueError: inside a capture.
            PeerError, PeerTimeoutError: as other calls.
        """
        calls = self._calls
        if calls.forked:
            calls.require_open()
        if not self._epoch or self._block is None:
            raise RuntimeError(f"wait: there is nothing to wait for before arm (value={self})")
        caller = self._caller_stream("wait")
        with calls.failing_for_good():
            if not self._unfired and (work := self._works[EAGER]) is not None:
                work.wait()
            self._triggers[0].follow(self._epoch, caller, fired=not self._unfired)
        if self._unfired:
            self._end_behind(caller)

    def close(self) -> None:
        """Release all resources. Idempotent.

        CPU ranks cancel an armed call. GPUs cannot: they fire it and block until it has ended, as the peers must do.

        Raises:
            PeerError, PeerTimeoutError: the peers did not make the call that was fired.
        """
        calls = self._calls
        try:
            if self._unfired and not (calls.forked or calls.failure):
                with calls.failing_for_good():
                    self._wait_for_last()
                if calls.backend.ahead is None:
                    self._end_if_fired()
            super().close()
        finally:
            if calls.armed is self:
                calls.armed = None

    def _wait_for_last(self) -> None:
        """Wait for the call before: a stream that has yet to write its trigger would undo what the host writes."""
        if self._before:
            self._calls.backend.synchronize(self._before)

    def _end_if_fired(self) -> None:
        """Make the call of a CPU rank if a kernel has fired it, since the peers may have its bytes; else cancel it."""
        caller = self._calls.backend.caller_stream()
        try:
            self._triggers[0].follow(self._epoch, caller, fired=False)
        except RuntimeError:
            self._unfired.clear()
        else:
            self._end_behind(caller)

    def _synchronize(self) -> None:
        if self._epoch:
            self._calls.backend.synchronize(self._epoch)  # another handle may be armed

    def _run(self, caller: CallerStream, *, async_op: bool = False) -> None:
        prepared = self._prepared[EAGER]
        assert prepared is not None
        self._works[EAGER] = self._calls.run(prepared, self._epoch, async_op, self._tensors, self._written, caller)

    def _end_behind(self, caller: CallerStream) -> None:
        """Note that the call has been fired, and that the caller's next work follows its end. CPU ranks make it."""
        self._note_fired()
        backend = self._calls.backend
        if backend.ahead is None:
            self._run(caller)
        else:
            backend.note_followed(caller)

    def _note_fired(self) -> None:
        self._unfired.clear()
        self._calls.armed = None
        count_writes(self._written)

    def _require_armed(self, method: str) -> None:
        if self._calls.forked:
            self._calls.require_open()
        if not self._unfired:
            state = "closed" if self._block is None else "fired" if self._epoch else "never armed"
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

    call, (request, agreement) = path.agree(name, check)
    with calls.making_ready():
        program, choice = path.preparer.planner.held(agreement)
        tensors = dict(zip((Buffer.OUTPUT, Buffer.INPUT), single.tensors, strict=True))
        regions = {buffer: request.region(buffer) for buffer in tensors}
        buffers = NamedBuffers(program, tensors, regions, program.remote_buffers() & set(regions))
        forms = Forms.proved(program, path.arguments.rank, captures=False)
        handle = load_program(Prelaunched, path, call, forms, buffers, choice)
    handle.host_trigger = host_trigger
    return handle


def prelaunchable(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Return the variants among candidates that can be prelaunched."""
    return tuple(found.variant for found in candidates if found.implementation == DMA)
