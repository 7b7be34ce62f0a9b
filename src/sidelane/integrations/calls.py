"""Calls of a process group as data: Sidelane's way, the other group's way, and which of them to take.

The choice depends only on facts that all ranks know alike: operation, dtype, layout, kind of device, and the shapes
that every rank gives. Each rank handles by itself tensors that are not contiguous, not symmetric, or overlap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidelane.collectives.arguments import op_name
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.integrations.order import Key
from sidelane.program.collective import ELEMENT_BYTES, Kind, ReduceOp
from sidelane.session import Communicator


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor for reading, contiguous; a copy only if the tensor is not."""
    return tensor.data.resolve_conj().resolve_neg().contiguous()


@contextlib.contextmanager
def receiving(tensors: Sequence[torch.Tensor], *, filled: bool = False) -> Iterator[list[torch.Tensor]]:
    """Yield contiguous tensors for a call to write; stand-ins are copied to the caller's tensors at the end.

    Args:
        tensors: tensors of the caller, of any strides.
        filled: the call reads them, too.
    """
    direct = [_is_direct(tensor) for tensor in tensors]
    yields = [
        tensor.data if itself else plain(tensor) if filled else torch.empty_like(tensor, memory_format=_CONTIGUOUS)
        for tensor, itself in zip(tensors, direct, strict=True)
    ]
    yield yields
    for tensor, stand_in, itself in zip(tensors, yields, direct, strict=True):
        if not itself:
            tensor.data.copy_(stand_in)


@contextlib.contextmanager
def parted(tensors: Sequence[torch.Tensor], *, apart_from: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield one tensor for a call to write, whose parts are ``tensors``, in their order.

    Args:
        tensors: tensors of the caller; their own memory is used if they lie in a row.
        apart_from: tensor that the call reads. It must not lie among them: only a call in place on all ranks may do so.
    """
    whole = _in_a_row(tensors, apart_from)
    if whole is not None:
        yield whole
        return
    whole = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    yield whole
    for tensor, part in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data.copy_(part.view(tensor.shape))


def call_contiguous(other: functools.partial[Any], outputs: Sequence[torch.Tensor]) -> tuple[Any, Copies]:
    """Make a call of another group, which takes the memory of each tensor for contiguous and looks at no strides.

    Args:
        other: the call, with tensors and lists of them among its arguments. Copies replace those not contiguous.
        outputs: tensors that it writes.

    Returns:
        Result of the call, and the outputs that were replaced with their copies, to copy back when it has ended.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def contiguous(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [contiguous(each) for each in argument]
        if not isinstance(argument, torch.Tensor) or _is_direct(argument):
            return argument
        return copies.setdefault(id(argument), (argument, plain(argument)))[1]

    work = other.func(*map(contiguous, other.args), **other.keywords)
    return work, [copies[id(output)] for output in outputs if id(output) in copies]


def joined(tensors: Sequence[torch.Tensor], *, apart_from: torch.Tensor) -> torch.Tensor:
    """Return one tensor for a call to read, whose parts are ``tensors``; see :func:`parted`."""
    whole = _in_a_row(tensors, apart_from)
    return torch.cat([plain(tensor).flatten() for tensor in tensors]) if whole is None else whole


_CONTIGUOUS = torch.contiguous_format
Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of the caller, each with its contiguous copy that a call writes."""


def _is_direct(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not (tensor.is_complex() and tensor.is_conj())


def _in_a_row(tensors: Sequence[torch.Tensor], apart_from: torch.Tensor | None) -> torch.Tensor | None:
    """Return the bytes of ``tensors`` as one tensor; None if they do not lie in a row, or reach into the other one."""
    first = tensors[0]
    storage, end = first.untyped_storage(), first.data_ptr()
    for tensor in tensors:
        same = tensor.dtype == first.dtype and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not (same and _is_direct(tensor) and tensor.data_ptr() == end):
            return None
        end += tensor.nbytes
    if apart_from is not None and apart_from.numel():
        low = apart_from.data_ptr()
        steps = zip(apart_from.shape, apart_from.stride(), strict=True)
        high = low + apart_from.element_size() * (1 + sum((length - 1) * stride for length, stride in steps))
        if low < end and first.data_ptr() < high:
            return None
    return first.data.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


DTYPES = frozenset(getattr(torch, name) for name in ELEMENT_BYTES)
"""Dtypes that Sidelane can reduce."""

_ANY_ORDER = ("min", "max", "band", "bor", "bxor")

Tensor = torch.Tensor
Other = functools.partial[dist.Work]


@dataclasses.dataclass(slots=True)
class GroupCall:
    """One call of the group.

    Attributes:
        name: name of the operation.
        tensors: all tensors of the caller.
        outputs: tensors that are written.
        other: function that makes the call on the other group.
        job: function that makes the call on a communicator; None if Sidelane has no such operation.
        refusal: reason why Sidelane does not make it; "" if it does. Alike on all ranks.
        is_async: the caller goes on before the call has ended.
        timeout: time-out of this call; 0 for the group's.
        across: kind of collective whose steps it can take among several nodes; None for none.
        flat: name in the text that no such steps exist for it; "" for the name of the operation.
        reason: reason why it takes the steps; "" if it does not.
        options: options of the communicator's method, if ``job`` is that method on the tensors themselves.
        key: key of calls like this one (``order``); None for calls that are not remembered.
        repeats: calls like this one may be remembered.
        reduction: torch's operation of a reduction; None for other calls.
    """

    name: str
    tensors: Sequence[Tensor]
    outputs: Sequence[Tensor]
    other: Other
    job: Callable[[Communicator], None] | None = None
    refusal: str = ""
    is_async: bool = True
    timeout: timedelta = NO_TIMEOUT
    across: Kind | None = None
    flat: str = ""
    reason: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    key: Key | None = None
    repeats: bool = True
    reduction: Any = None

    @property
    def adds_floats(self) -> bool:
        """True for a reduction whose bits depend on the order of its terms."""
        if self.reduction is None or op_name(self.reduction) in _ANY_ORDER:
            return False
        return any(tensor.is_floating_point() or tensor.is_complex() for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side: the gathered bytes of an all_gather, the whole buffer of the others."""
        written = sum(map(_nbytes, self.outputs))
        return max(written, sum(map(_nbytes, self.tensors)) - written)


def make(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    other: Other,
    job: Callable[[Communicator], None] | None,
    opts: Any,
    *,
    op: Any = None,
    shapes: str = "",
    across: Kind | None = None,
) -> GroupCall:
    """Put a call together, and make the decisions that need no group.

    Args:
        name: name of the operation.
        inputs: tensors that are only read.
        outputs: tensors that are written.
        other: function that makes the call on the other group.
        job: function that makes the call on a communicator.
        opts: options of torch; None for its defaults.
        op: operation of a reduction.
        shapes: reason why Sidelane does not take these shapes; "" for none.
        across: see :class:`GroupCall`.
    """
    tensors = (*outputs, *inputs)
    refusal = "Sidelane has no such operation" if job is None else shapes or _refusal(tensors, op)
    is_async = True if opts is None else bool(getattr(opts, "asyncOp", True))
    timeout = getattr(opts, "timeout", NO_TIMEOUT)
    call = GroupCall(name, tensors, outputs, other, job, refusal, is_async, max(timeout, NO_TIMEOUT), across)
    call.reduction = getattr(opts, "reduceOp", None)
    return call


def all_gather(output: Tensor, input: Tensor, opts: Any, other: Other) -> GroupCall:
    """Describe an ``all_gather_into_tensor``."""

    def job(communicator: Communicator) -> None:
        with receiving([output]) as (whole,):
            communicator.all_gather(whole, plain(input))

    return make("all_gather_into_tensor", (input,), (output,), other, job, opts, across=Kind.ALL_GATHER)


def all_gather_coalesced(outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any, other: Other) -> GroupCall:
    """Describe several ``all_gather_into_tensor`` at once."""

    def job(communicator: Communicator) -> None:
        with receiving(outputs) as wholes:
            communicator.all_gather(wholes, [plain(tensor) for tensor in inputs])

    return make("all_gather_into_tensor_coalesced", inputs, outputs, other, job, opts, across=Kind.ALL_GATHER)


def all_gather_list(outputs: Sequence[Tensor], input: Tensor, opts: Any, other: Other) -> GroupCall:
    """Describe an ``all_gather``: a tensor for each rank."""

    def job(communicator: Communicator) -> None:
        with parted(outputs, apart_from=input) as whole:
            communicator.all_gather(whole, plain(input))

    return make("all_gather", (input,), outputs, other, job, opts, shapes=_unequal(outputs), across=Kind.ALL_GATHER)


def all_to_all(
    output: Tensor, input: Tensor, outputs: Sequence[int], inputs: Sequence[int], opts: Any, other: Other
) -> GroupCall:
    """Describe an ``all_to_all_single``; split sizes are given on all ranks, or on none."""

    def job(communicator: Communicator) -> None:
        splits = {"output_split_sizes": outputs, "input_split_sizes": inputs} if outputs or inputs else {}
        with receiving([output]) as (whole,):
            communicator.all_to_all(whole, plain(input), **splits)  # type: ignore[arg-type]

    across = None if outputs or inputs else Kind.ALL_TO_ALL
    call = make("all_to_all_single", (input,), (output,), other, job, opts, across=across)
    call.flat = _SPLITS
    return call


def all_to_all_list(outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any, other: Other) -> GroupCall:
    """Describe an ``all_to_all``: a tensor to and from each rank; equal ones here say nothing of other ranks."""

    def job(communicator: Communicator) -> None:
        with parted(outputs, apart_from=None) as whole:
            communicator.all_to_all(
                whole,
                torch.cat([plain(tensor).flatten() for tensor in inputs]),
                output_split_sizes=[tensor.numel() for tensor in outputs],
                input_split_sizes=[tensor.numel() for tensor in inputs],
            )

    call = make("all_to_all", inputs, outputs, other, job, opts)
    call.flat = _SPLITS
    return call


def reduce_scatter(output: Tensor, input: Tensor, opts: Any, other: Other) -> GroupCall:
    """Describe a ``reduce_scatter_tensor``."""
    reduction = _reduction(opts, [input])

    def job(communicator: Communicator) -> None:
        with receiving([output]) as parts:
            communicator.reduce_scatter(parts[0], plain(input), op=reduction.op)
            reduction.finish(parts)

    op, across = reduction.op, Kind.REDUCE_SCATTER
    call = make("reduce_scatter_tensor", (input,), (output,), other, job, opts, op=op, across=across)
    call.options, call.repeats = {"op": op}, reduction.repeats
    return call


def reduce_scatter_coalesced(outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any, other: Other) -> GroupCall:
    """Describe several ``reduce_scatter_tensor`` at once."""
    reduction = _reduction(opts, inputs)

    def job(communicator: Communicator) -> None:
        with receiving(outputs) as parts:
            communicator.reduce_scatter(parts, [plain(tensor) for tensor in inputs], op=reduction.op)
            reduction.finish(parts)

    op, across = reduction.op, Kind.REDUCE_SCATTER
    return make("reduce_scatter_tensor_coalesced", inputs, outputs, other, job, opts, op=op, across=across)


def reduce_scatter_list(output: Tensor, inputs: Sequence[Tensor], opts: Any, other: Other) -> GroupCall:
    """Describe a ``reduce_scatter``: a tensor for each rank."""
    reduction = _reduction(opts, inputs)

    def job(communicator: Communicator) -> None:
        with receiving([output]) as parts:
            communicator.reduce_scatter(parts[0], joined(inputs, apart_from=output), op=reduction.op)
            reduction.finish(parts)

    return make(
        "reduce_scatter",
        inputs,
        (output,),
        other,
        job,
        opts,
        op=reduction.op,
        shapes=_unequal(inputs),
        across=Kind.REDUCE_SCATTER,
    )


def all_reduce(tensors: Sequence[Tensor], opts: Any, other: Other) -> GroupCall:
    """Describe an ``all_reduce``, of several tensors at once if there are several."""
    reduction = _reduction(opts, tensors)

    def job(communicator: Communicator) -> None:
        with receiving(tensors, filled=True) as wholes:
            communicator.all_reduce(wholes[0] if len(wholes) == 1 else wholes, op=reduction.op)
            reduction.finish(wholes)

    name = "all_reduce" if len(tensors) == 1 else "all_reduce_coalesced"
    call = make(name, (), tensors, other, job, opts, op=reduction.op, across=Kind.ALL_REDUCE)
    call.options, call.repeats = {"op": reduction.op}, reduction.repeats
    return call


def broadcast(tensor: Tensor, opts: Any, other: Other) -> GroupCall:
    """Describe a ``broadcast``."""
    root = opts.rootRank

    def job(communicator: Communicator) -> None:
        with receiving([tensor], filled=communicator.rank == root) as (whole,):
            communicator.broadcast(whole, root=root)

    call = make("broadcast", (), (tensor,), other, job, opts, across=Kind.BROADCAST)
    call.options = {"root": root}
    return call


def scatter(output: Tensor, inputs: Sequence[Tensor], opts: Any, other: Other) -> GroupCall:
    """Describe a ``scatter``; ``inputs`` is empty except on the root."""
    root = opts.rootRank

    def job(communicator: Communicator) -> None:
        whole = torch.cat([plain(tensor).flatten() for tensor in inputs]) if inputs else None
        with receiving([output]) as (part,):
            communicator.scatter(part, whole, root=root)

    call = make("scatter", (), (output,), other, job, opts)  # the others do not know the root's inputs
    call.tensors, call.flat = (output, *inputs), "scatter: all of it leaves by the root's network"
    return call


def gather(outputs: Sequence[Tensor], input: Tensor, opts: Any, other: Other) -> GroupCall:
    """Describe a ``gather``; ``outputs`` is empty except on the root."""
    root = opts.rootRank

    def job(communicator: Communicator) -> None:
        if not outputs:
            communicator.gather(None, plain(input), root=root)
            return
        with parted(outputs, apart_from=input) as whole:
            communicator.gather(whole, plain(input), root=root)

    call = make("gather", (input,), (), other, job, opts)
    call.tensors, call.outputs = (*outputs, input), outputs
    call.flat = "gather: all of it comes by the root's network"
    return call


_SPLITS = "parts of several sizes: a rank knows its own only, and to ask costs what steps save"


@dataclasses.dataclass(frozen=True, slots=True)
class GroupReduction:
    """A reduction of torch's as a communicator makes it.

    Attributes:
        op: operation of the communicator, or the name of one that Sidelane does not have.
        factor: number by which the result is multiplied afterwards.
        repeats: torch's number of the operation says all of it, so that calls with this number are alike.
    """

    op: str
    factor: float = 1.0
    repeats: bool = True

    @classmethod
    def of(cls, op: Any, dtype: torch.dtype) -> GroupReduction:
        """Return what a communicator makes of ``torch.distributed.ReduceOp``, or of a name, for a dtype.

        A PREMUL_SUM, by which FSDP2 divides gradients by a factor of the program's own, is a sum whose result is
        multiplied: one multiplication for all ranks' terms. Terms of float16 can overflow in a sum, and a factor that
        is a tensor lies on the device: those are left to the group's own backend.
        """
        name = op_name(op)
        if name != "premul_sum":
            return _named(name)
        _, factor = op.__getstate__()
        if isinstance(factor, float) and (factor == 1 or dtype in (torch.float32, torch.bfloat16)):
            return cls(ReduceOp.SUM, factor, repeats=False)
        return cls(name, repeats=False)

    def finish(self, results: Iterable[Tensor]) -> None:
        """Multiply the results."""
        if self.factor != 1:
            for result in results:
                result.mul_(self.factor)


@functools.cache
def _named(name: str) -> GroupReduction:
    return GroupReduction(name)


def _reduction(opts: Any, tensors: Sequence[Tensor]) -> GroupReduction:
    if opts is None or not tensors:
        return _named(ReduceOp.SUM)
    return GroupReduction.of(opts.reduceOp, tensors[0].dtype)


def _refusal(tensors: Sequence[Tensor], op: str | None) -> str:
    if not tensors:
        return "no tensors"
    first = tensors[0]
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            return f"layout {tensor.layout}"
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"tensors of class {type(tensor).__name__}"
        if tensor.device.type != first.device.type:
            return "tensors on several kinds of devices"
        if tensor.dtype != first.dtype:
            return "several dtypes"
    if op is None:
        return ""
    if op not in tuple(ReduceOp):
        return f"operation {op}"
    return "" if first.dtype in DTYPES else f"{op} of {name_of(first.dtype)}"


def name_of(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # a sparse one has no nbytes


def _unequal(tensors: Sequence[Tensor]) -> str:
    return "" if len({tensor.numel() for tensor in tensors}) <= 1 else "parts of several sizes"
