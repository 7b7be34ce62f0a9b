"""Order of a group's calls: on CPUs a thread keeps it for asynchronous ones, on GPUs a stream.

The decisions of an earlier call of Sidelane hold for calls like it, and take no time again. That applies to a call of
the same operation, dtype and device on tensors which a communicator takes as they are; on CPUs to synchronous ones
only, since a thread makes the others. All other decisions (``calls``, ``dispatch``) are made anew for each call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sidelane import forks
from sidelane.choice import Choice
from sidelane.collectives.call_forms import own_part
from sidelane.collectives.side_stream import SideStream
from sidelane.collectives.work import NO_TIMEOUT, CallFuture, CallThread
from sidelane.errors import CommunicatorClosedError, PeerError
from sidelane.integrations.calls import GroupCall, copy_bits, dtype_name, wholes
from sidelane.integrations.ledger import SIDELANE
from sidelane.integrations.works import EndedWork, HostWork, OtherWork
from sidelane.memory import ending
from sidelane.program.collective import Kind
from sidelane.session import Communicator

Job = Callable[[], object]
T = TypeVar("T")

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that compiled code can look at."""


class RepeatedCall:
    """Decisions for calls that are alike.

    Args:
        communicator: communicator that makes them.
        call: first of these calls, which has a key.
        order: order of the group's calls on the device.

    Attributes:
        communicator, order: see above.
        operation: operation of the calls.
        dtype, device: dtype and device of all tensors.
        kind: kind of each call.
        details: its reduction or root, as compiled code compares it.
        backend: device of the communicator.
        calls: calls of the communicator, which have the choice of the last one.
        choice: choice that ``row`` is of; None before the first call.
        row: row of the report for calls of that choice.
    """

    def __init__(self, communicator: Communicator, call: GroupCall, order: HostOrder | StreamOrder) -> None:
        assert call.key is not None
        self.communicator, self.order, self._options = communicator, order, call.options
        self.operation = call.operation
        name, _, self.dtype, self.device = call.key
        self._columns = name, dtype_name(self.dtype), self.device.type, SIDELANE
        self.kind = Kind(call.operation.kind)
        self._method = getattr(communicator, self.kind)
        self.details = tuple(call.options.values()) if self.kind is not Kind.ALL_TO_ALL else own_part(True)
        self.backend: Any = communicator.backend
        self.calls: Any = communicator.calls
        self.choice: Choice | None = None
        self.row = ("", "", "", "", "")

    def columns(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Return the outputs and the inputs of a call with lists; the tensors alone if it is in place."""
        operation = self.operation
        outputs = -1 if operation.has_output_parts else 1 if operation.has_input_parts else len(tensors) // 2
        return (tensors,) if self.kind is Kind.ALL_REDUCE else (tensors[:outputs], tensors[outputs:])

    def takes(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Return True for tensors that need no further decisions."""
        if self.operation.has_parts and len({tensor.numel() for tensor in max(self.columns(tensors), key=len)}) > 1:
            return False
        return are_plain(tensors, self.dtype, self.device)

    def given(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...] | None:
        """Return lists as the communicator takes them; None for parts that do not lie in a row."""
        if not self.operation.has_parts:
            return self.columns(tensors)
        return wholes(self.operation, *self.columns(tensors)) if self.takes(tensors) else None

    def make(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Make a call on these tensors, the output first; autograd does not record it, as with all calls."""
        data = tuple(tensor.data for tensor in tensors)
        given: Any = self.columns(data) if self.operation.has_lists else data
        if self.operation.is_listed:
            given = map(list, given)
        elif self.operation.has_parts and (given := wholes(self.operation, *given)) is None:
            self._make_parted(*self.columns(data))
            return
        self._method(*given, **self._options)

    def _make_parted(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Make a call on parts of one size, which may lie anywhere, in one tensor in their place."""
        writes = self.operation.has_output_parts
        parts = [part.view(-1) for part in (outputs if writes else inputs)]
        if writes:
            whole = inputs[0].new_empty((len(parts), len(parts[0])))
            given = whole, inputs[0]
        else:
            given = outputs[0], torch.stack(parts)
        if not self.communicator.repeat_call(self.kind, given, self.details, 0):
            self._method(*given, **self._options)
        if writes:
            copy_bits(parts, whole.unbind())

    def take_choice(self, choice: Choice) -> None:
        """Count calls in the row of another choice from now on."""
        self.choice, self.row = choice, (*self._columns, choice.candidate.variant)


def are_plain(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a communicator takes these tensors as they are."""
    for tensor in tensors:  # plainly: a generator takes a third of the time of all decisions for a call
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.dtype is not dtype:
            return False
        if tensor.device != device or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return False
    return True


class HostOrder:
    """Calls on CPU tensors. A synchronous one runs in its caller's thread, behind the asynchronous ones.

    Asynchronous calls never block their caller, which a communicator's own would: it compares new calls on the spot.

    Args:
        guard: group that waiting calls query (``works.HostWork``).
    """

    def __init__(self, guard: Any) -> None:
        self._guard = guard
        self._mutex = forks.Mutex(_names)
        self._thread = CallThread("sidelane-group", self._mutex.is_mine)
        self._is_known = self._gives_up = self._precedes = False

    def run(
        self,
        job: Job,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        is_async: bool,
        timeout: timedelta,
    ) -> dist.Work:
        """Make a call behind all others of the group.

        Args:
            job: function that makes it, and returns when it has ended.
            tensors: tensors of the caller, which waiting calls keep alive.
            outputs: tensors that it writes.
            is_async: the caller goes on at once.
            timeout: time-out of its own; 0 for none.

        Raises:
            RuntimeError: a signal handler or a finaliser calls inside of a call of its own thread.
        """
        if is_async or timeout > NO_TIMEOUT:
            return HostWork(self._submit(job), outputs, timeout, self._guard)
        self.alone(job)
        return EndedWork(outputs)

    def repeat(self, call: RepeatedCall, tensors: tuple[torch.Tensor, ...], is_async: bool) -> dist.Work | None:
        """Make a call like an earlier one; see :meth:`StreamOrder.repeat`."""
        if is_async or not call.takes(tensors):
            return None  # the thread makes all decisions of asynchronous calls, while the caller goes on
        self.alone(lambda: call.make(tensors))
        return ENDED

    def precedes_others(self) -> bool:
        """Return True while calls of the thread may be the other group's: until it is idle, later ones come after.

        Those are the calls of a group without a communicator, and the other group's that came after such ones.
        """
        self._precedes = bool(self._thread.pending) and (self._precedes or "cpu" not in self._guard.communicators)
        return self._precedes

    def alone(self, job: Callable[[], T]) -> T:
        """Run a function behind the calls of the thread, and beside none. Raises as :meth:`run`."""
        if self._thread.pending:
            self._mutex.require_other()
            self._thread.drain()
        return self._mutex.run(job)

    def other(
        self,
        call: Callable[[], dist.Work],
        tensors: Sequence[torch.Tensor],
        is_async: bool,
        captures: bool | None = None,
    ) -> dist.Work:
        """Make a call of the other group: on CPUs it does not wait for calls of this one."""
        return call()

    def close(self, *, wait: bool = True) -> None:
        """End the thread when it has made its calls; without ``wait``, return before."""
        self._thread.finish(wait=wait)

    def end(self, until: float) -> None:
        """Let the thread make its calls at exit, but not for long."""
        if not self._thread.end(until):
            self._gives_up = True
            ending.give_up()
            rank = self._guard.rank
            self._guard.leave(PeerError(f"rank {rank} ended without waiting for its asynchronous calls", (rank,)))
            self._thread.end(time.monotonic() + ending.LEAVING_S)

    def _submit(self, job: Job) -> CallFuture:
        if not self._is_known:
            self._is_known = True
            ending.at_exit(self, first=True)
        return self._thread.submit(self._make, job)

    def _make(self, job: Job) -> None:
        if self._gives_up:
            raise CommunicatorClosedError("the interpreter has ended before this call began")
        self._mutex.run(job)


def _names() -> tuple[str, str]:
    """Return the methods of groups that this thread is inside of: the one called last, and the one before."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "sidelane.integrations.process_group":
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[0] if names else "a call", names[1] if len(names) > 1 else "a call of this group"


class StreamOrder:
    """Calls on GPU tensors. A synchronous one is queued on the current stream, others on a stream of the group.

    Asynchronous calls of the other group take their place on that stream, too: all calls of the group, whoever makes
    them, run in one order, as those of one NCCL communicator do.

    Args:
        communicator: function that returns the communicator on the GPU, with which the works of asynchronous calls
            wait.
    """

    def __init__(self, communicator: Callable[[], Any]) -> None:
        self._communicator = communicator
        self._side: SideStream | None = None
        # The other group's last asynchronous call, or the stream that has waited for it: the next call is behind that.
        self._ahead: OtherWork | tuple[int, int, int] | None = None
        self._is_ahead = False  # asynchronous calls of the communicator are, of the other group's next one

    def run(
        self,
        job: Job,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        is_async: bool,
        timeout: timedelta,
    ) -> dist.Work:
        """Queue a call as :meth:`HostOrder.run` makes one; ``timeout`` is for ``Work.wait`` to give."""
        if not is_async:
            self._join()
            job()
            return EndedWork(outputs)
        side = self._side = self._side or SideStream(tensors[0].device)
        self._follow_other(side)
        side.run(job)
        self._is_ahead = True
        made: dist.Work = self._communicator().backend.work_on(side, tensors, tuple(outputs))
        return made

    def repeat(self, call: RepeatedCall, tensors: tuple[torch.Tensor, ...], is_async: bool) -> dist.Work | None:
        """Make a call like an earlier one, in compiled code if that remembers it.

        It orders streams, too: a call on the group's stream behind the caller's work so far, each behind the last one.

        Args:
            call: decisions for calls like this one.
            tensors: tensors of the caller, the outputs first.
            is_async: the caller goes on at once.

        Returns:
            Work of the call; None, with no call made, if decisions are needed.
        """
        for tensor in tensors:  # compiled code cannot look at others, and does not find out about them
            if type(tensor) not in PLAIN:
                return None
        outputs = call.columns(tensors)[0] if call.operation.has_lists else tensors[:1]
        side, given = self._side, call.given(tensors) if call.operation.has_lists else tensors
        if given is not None and call.kind is Kind.ALL_REDUCE:
            given = given[0], given[0]
        if given is not None and not is_async:
            self._join()
            if call.communicator.repeat_call(call.kind, given, call.details, 0):
                return ENDED
        elif given is not None and side is not None:
            if self._ahead is not None:
                self._follow_other(side)
            self._is_ahead = True
            mark = call.communicator.repeat_call(call.kind, given, call.details, side.handle)
            if mark:
                made: dist.Work = call.backend.work_on(side, tensors, outputs, mark)
                return made
        if not call.takes(tensors):
            return None
        return self.run(lambda: call.make(tensors), tensors, outputs, is_async, NO_TIMEOUT)

    def other(
        self,
        call: Callable[[], dist.Work],
        tensors: Sequence[torch.Tensor],
        is_async: bool,
        captures: bool | None = None,
    ) -> dist.Work:
        """Make a call of the other group behind those of this one; the next call of this one comes behind it.

        ``captures``: the current stream is captured, where that is known.

        The library has a stream for its asynchronous calls, which comes behind the current one. So only calls that are
        on this group's stream since the last one of the other group need an order.
        """
        side, captures = self._side, torch.cuda.is_current_stream_capturing() if captures is None else captures
        if not is_async:
            if side is not None and self._is_ahead:
                _wait_for(side)
            self._is_ahead = self._is_ahead and captures
            return call()
        if side is None:
            if captures:
                return call()
            side = self._side = SideStream(tensors[0].device)  # calls of this one may come while it runs
        work = side.run(call) if self._is_ahead or captures else call()
        if isinstance(work, OtherWork):
            work.tensors = tensors
            if captures:
                side.within(work.precede)
            else:
                self._ahead, work.waited = work, self._note_wait
        self._is_ahead = self._is_ahead and captures
        return work

    def _note_wait(self, work: OtherWork) -> None:
        """Keep the stream in place of the work of a call for which it waits, and which holds tensors."""
        if self._ahead is work and self._side is not None:
            self._ahead = self._side.current()

    def _follow_other(self, side: SideStream | None = None) -> None:
        """Let a call of the communicator, on the current stream or on ``side``, come behind the other group's last."""
        ahead = self._ahead
        if ahead is None or torch.cuda.is_current_stream_capturing():
            return  # a graph cannot wait for work outside
        self._ahead = None
        if not isinstance(ahead, OtherWork):
            assert self._side is not None
            self._side.follow(ahead)
        elif side is None:
            ahead.precede()
        else:
            side.run(ahead.precede)

    def close(self, *, wait: bool = True) -> None:
        """Forget the stream; calls queued there go on."""
        self._side = self._ahead = None

    def _join(self) -> None:
        """Make the current stream, on which a call of the communicator follows, wait for the group's."""
        if self._ahead is not None:
            self._follow_other()
        if self._side is not None and self._side.is_open:
            _wait_for(self._side)
            # A later call comes behind that call, whatever its stream; not in a capture, which other calls do not know.
            self._side.is_open = torch.cuda.is_current_stream_capturing()


ENDED = EndedWork()
"""Work of a repeated call for which its caller has waited, or its stream."""


def _wait_for(side: SideStream) -> None:
    """Make the current stream wait for the group's. A capture cannot wait for work queued before it."""
    if torch.cuda.is_current_stream_capturing():
        with torch.cuda.stream(side.stream):
            if not torch.cuda.is_current_stream_capturing():
                return
    side.join()
