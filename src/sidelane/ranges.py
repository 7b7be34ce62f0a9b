"""The place where calls are observed: profilers of torch, NVTX, and observers such as metrics and the flight recorder.

A call on copy engines launches no kernel, so that a profiler shows nothing by its name. Its range lies on the host's
thread, and the copies that were submitted within it belong to it. With ``SIDELANE_NVTX=1`` profilers that read NVTX
see the ranges too, such as Nsight Systems.

While nothing observes, a call asks :data:`is_active` and does nothing else here.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from sidelane import log

Row = TypeVar("Row", bound=tuple[str, ...])

DOMAIN = "sidelane"

MOST_ROWS = 1000
"""Number of rows of a table of sums, such as calls by group and dtype, beyond which new rows are summed up in one."""

OTHERS = "others"
"""Name of that row."""

_FAILED = "%s.%s failed"

_domain: Any = None
_thread = threading.local()
_world_rank: int | None = None

is_active: Callable[[], bool] = torch.autograd._profiler_enabled
"""Function that returns True if something observes the calls of this thread. Each call asks it."""

observers: tuple[Observer, ...] = ()
"""The observers of this process's calls; :func:`observe` and :func:`leave` change it."""


class Observer:
    """Something that is notified of calls. It keeps no tensors. A subclass has the methods of what it notes."""

    def begin(self, call: ObservedCall) -> Any:
        """Take note of a call that begins, on its thread; what is returned is this observer's note of the call."""

    def returned(self, call: ObservedCall, note: Any, error: BaseException | None) -> None:
        """Take note of a call that returns to its caller, or raises, on its thread."""

    def end(self, call: ObservedCall, note: Any, error: BaseException | None) -> None:
        """Take note of the end of a call: when the host learns of it, on any thread; on the call's thread if it has
        raised, has ended when it returns, or ends where no host sees it, as on GPUs (``call.finished_ns`` is 0 then).
        """

    def waited(self, ranks: Sequence[int], seconds: float) -> None:
        """Take note of a wait of the host for late peers, by their ranks in the world. Any thread may wait."""

    def fell_back(self, name: str, where: str, why: str) -> None:
        """Take note of a call that another backend makes, or of something slower that calls do from now on."""

    def failed(self, error: BaseException) -> None:
        """Take note of the end of a communicator by an error. Any thread may find it."""


def observe(observer: Observer) -> None:
    """Tell an observer of all calls from now on."""
    global observers
    observers = (*observers, observer)
    _set_active()


def leave(observer: Observer) -> None:
    """Tell an observer of no more calls."""
    global observers
    observers = tuple(one for one in observers if one is not observer)
    _set_active()


def mark_by_nvtx() -> None:
    """Mark ranges by NVTX from now on, in the domain ``sidelane``.

    Raises:
        ImportError: the package ``nvtx`` is not installed.
    """
    global _domain
    _domain = importlib.import_module("nvtx").get_domain(DOMAIN)
    _set_active()


def notify(event: str, *arguments: object) -> None:
    """Call a method of all observers. Their errors are logged: an observer fails no call."""
    for observer in observers:
        try:
            getattr(observer, event)(*arguments)
        except Exception:
            log.calls.exception(_FAILED, type(observer).__name__, event)


class ObservedCall:
    """A call, as a context manager around it. A call that another one makes on the same thread is a part of it.

    Profilers that record shapes also get the fields that ``record_param_comms`` has for calls of torch's backends in
    C++, under the names that tools read.

    Args:
        name: name of the collective or the operator.
        outputs: tensors that are written.
        inputs: tensors that are read only.
        ranks: the ranks of the group, in the world.
        group: name of the process group or communicator, the same on all ranks.
        maker: the communicator's calls (``collectives.calls``); None for a group that has no communicator yet.

    Attributes:
        began_ns: time of the begin, in nanoseconds of the epoch.
        ended_ns: time at which it returned to its caller, in nanoseconds of the epoch; 0 before.
        finished_ns: time of its end, where the host knows it; 0 if it does not, and before.
        work: what it returned: the handle of an asynchronous call, else None.
    """

    began_ns = ended_ns = finished_ns = 0
    work: Any = None
    _recorded = _is_marked = False
    _notified: Sequence[tuple[Observer, Any]] = ()
    _profiled: Any = None
    _device: str | None = None

    def __init__(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        ranks: Sequence[int],
        group: str = "",
        maker: Any = None,
    ) -> None:
        self.name, self.outputs, self.inputs, self.ranks = name, outputs, inputs, ranks
        self.group, self.maker = group, maker

    def __enter__(self) -> ObservedCall:
        if getattr(_thread, "within", False):
            return self
        _thread.within = self._recorded = True
        try:
            if observers:
                self.began_ns = time.time_ns()
                self._notified = notified = []
                for observer in observers:
                    note = None
                    try:
                        note = observer.begin(self)
                    except Exception:
                        log.calls.exception(_FAILED, type(observer).__name__, "begin")
                    notified.append((observer, note))
            if _domain is not None:
                _domain.push_range(_domain.get_event_attributes(message=f"{DOMAIN}:{self.name}"))
                self._is_marked = True
            if torch.autograd._profiler_enabled():
                fields = _fields(self.name, self.outputs, self.inputs, self.ranks, self.group)
                title, tensors = f"{DOMAIN}:{self.name}", [*self.outputs, *self.inputs]
                self._profiled = torch._C._profiler._RecordFunctionFast(title, tensors, fields)
                self._profiled.__enter__()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._recorded:
            return
        _thread.within = False
        if self._profiled is not None:
            self._profiled.__exit__(kind, error, trace)
        if self._is_marked:
            _domain.pop_range()
        if self._notified:
            self.ended_ns = time.time_ns()
            self._notify("returned", error)
            if error is None and self.device != "cuda" and (self.work is None or hasattr(self.work, "when_ended")):
                if self.work is not None and self.work.when_ended(self._end):
                    return  # observers are notified of the end when the host learns of it
                self.finished_ns = self.ended_ns
            self._notify("end", error)

    def _end(self, error: BaseException | None) -> None:
        self.finished_ns = time.time_ns()
        self._notify("end", error)
        self.outputs = self.inputs = ()  # the work keeps its callbacks, and with this one it would keep the tensors
        self.work = None

    def _notify(self, event: str, error: BaseException | None) -> None:
        for observer, note in self._notified:
            try:  # written out, as in __enter__: a function that guards any event costs a call 0.2 us for each
                getattr(observer, event)(self, note, error)
            except Exception:
                log.calls.exception(_FAILED, type(observer).__name__, event)

    @property
    def device(self) -> str:
        """Type of the device of its tensors; without tensors that of its maker; "" for neither."""
        if self._device is None:
            if tensors := self.outputs or self.inputs:
                self._device = "cuda" if tensors[0].is_cuda else "cpu" if tensors[0].is_cpu else tensors[0].device.type
            else:
                self._device = "" if self.maker is None else "cpu" if self.maker.backend.hosts_meet else "cuda"
        return self._device

    @property
    def host_us(self) -> float:
        """Microseconds until it returned to its caller."""
        return (self.ended_ns - self.began_ns) / 1e3

    def duration_us(self, error: BaseException | None) -> float | None:
        """Return the microseconds from its begin to its end; None if it failed, or the host does not know the end."""
        is_timed = error is None and self.finished_ns and self.device == "cpu"
        return (self.finished_ns - self.began_ns) / 1e3 if is_timed else None

    @property
    def dtype(self) -> str:
        """Name of the dtype of its first tensor; "" without tensors."""
        tensors = self.outputs or self.inputs
        return _short_name(tensors[0].dtype) if tensors else ""

    @property
    def nbytes(self) -> int:
        """Size in bytes: of the larger side, so that a gather counts what it gathers, and others their whole buffer."""
        written, read = _nbytes(self.outputs), _nbytes(self.inputs)
        return written if written > read else read


ArgumentIndices = tuple[int, int, int]
"""Places of a method's ``output``, ``input`` and ``tensor`` among its arguments behind ``self``; -1 for none."""


def argument_indices(names: Sequence[str]) -> ArgumentIndices:
    """Return the places of a method's tensors among the names of its arguments."""
    output, input, tensor = (names.index(name) if name in names else -1 for name in ("output", "input", "tensor"))
    return output, input, tensor


def method_call(
    name: str, places: ArgumentIndices, args: Sequence[object], kwargs: Mapping[str, object], maker: Any
) -> ObservedCall:
    """Observe a call of a communicator's method.

    Args:
        name: name of the call.
        places: places of its tensors among the arguments.
        args: arguments of the call that have a place.
        kwargs: its other arguments, by name.
        maker: the communicator's calls, with its ranks and its name.
    """
    count, (output, input, tensor) = len(args), places
    written = args[output] if 0 <= output < count else kwargs.get("output")
    read = args[input] if 0 <= input < count else kwargs.get("input")
    if tensor >= 0:
        in_place = args[tensor] if tensor < count else kwargs.get("tensor")
        read, written = in_place, in_place if written is None else written
    inputs, outputs = _tensors(read), _tensors(written)
    if inputs and outputs and (len(inputs) > 1 or len(outputs) > 1 or inputs[0] is outputs[0]):
        inputs = [tensor for tensor in inputs if all(tensor is not one for one in outputs)]
    return ObservedCall(name, outputs, inputs, maker.ranks, maker.name, maker)


def leave_thread_out() -> None:
    """Observe no calls of this thread from now on: they are parts of calls of other threads."""
    _thread.within = True


def row_of(key: Row, rows: Mapping[Row, object]) -> Row:
    """Return the key of a row in a table of sums; that of the row ``others`` if it is new and the table is full.

    Programs may have ever new keys, such as reasons with sizes in them, or groups that they make for a while.
    """
    return key if key in rows or len(rows) < MOST_ROWS else cast("Row", (OTHERS,) * len(key))


def world_rank() -> int:
    """Return the rank in the world, also after the group has gone; that of the launcher, or 0, if there was none."""
    global _world_rank
    if dist.is_initialized():
        _world_rank = dist.get_rank()
    return int(os.environ.get("RANK", "0")) if _world_rank is None else _world_rank


def _set_active() -> None:
    """Set :data:`is_active`: while only torch's profiler may observe, it is torch's own function."""
    global is_active
    is_active = (lambda: True) if observers or _domain is not None else torch.autograd._profiler_enabled


def _tensors(argument: object) -> list[torch.Tensor]:
    """Return the tensors of an argument: a tensor, or a list of them."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [part for part in argument if isinstance(part, torch.Tensor)] if isinstance(argument, (list, tuple)) else []


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    total = 0
    try:
        for tensor in tensors:
            total += tensor.nbytes
    except Exception:  # tensors that the call itself refuses
        return 0
    return total


@functools.cache
def torch_name(dtype: torch.dtype) -> str:
    """Return the name that torch's profilers and dumps have for a dtype: ``Float``."""
    return torch.empty(0, dtype=dtype, device="cpu").type().rpartition(".")[2].removesuffix("Tensor")


@functools.cache
def _short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fields(
    name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], ranks: Sequence[int], group: str
) -> dict[str, Any]:
    try:
        first = next(iter((*outputs, *inputs)), None)
        dtype = "" if first is None else torch_name(first.dtype)
        read = sum(tensor.numel() for tensor in inputs or outputs)
        written = sum(tensor.numel() for tensor in outputs)
    except Exception:  # tensors that the call itself refuses
        dtype, read, written = "", 0, 0
    return {
        "Collective name": name,
        "dtype": dtype,
        "In msg nelems": read,
        "Out msg nelems": written,
        "Group size": len(ranks),
        "Process Group Name": group,
        "Process Group Ranks": str(list(ranks)),
    }
