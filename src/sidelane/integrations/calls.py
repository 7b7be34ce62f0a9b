"""Calls of a process group as data: Sidelane's way, the other group's way, and which of them to take.

The choice depends only on facts that all ranks know alike: operation, dtype, layout, kind of device, and the shapes
that every rank gives. Each rank handles by itself tensors that are not contiguous, not symmetric, or overlap.

One choice depends on whether tensors are symmetric, too: NCCL makes large calls on ordinary ones
(``dispatch.MOST_STAGED``). The ranks compare that in the first call of a size alone; in later ones it must be alike on
all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from sidelane.collectives.arguments import op_name
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, ROOTED, Kind, ReduceOp
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
def parted(tensors: Sequence[torch.Tensor], *, apart_from: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """Yield one tensor for a call to write, in a list, whose parts are ``tensors``, in their order.

    Args:
        tensors: tensors of the caller; their own memory is used if they lie in a row.
        apart_from: tensor that the call reads. It must not lie among them: only a call in place on all ranks may do so.
    """
    whole = _in_a_row(tensors, apart_from)
    if whole is not None:
        yield [whole]
        return
    whole = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    yield [whole]
    parts = zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True)
    copy_bits([tensor.data for tensor in tensors], [part.view(tensor.shape) for tensor, part in parts])


def copy_bits(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copy tensors with few kernels. On GPUs torch's kernel converts small floats, which makes all NaN the same one."""
    written, read = ([each.view(_BITS.get(each.itemsize, each.dtype)) for each in side] for side in (outputs, inputs))
    torch._foreach_copy_(written, read)


def joined(tensors: Sequence[torch.Tensor], *, apart_from: torch.Tensor | None) -> torch.Tensor:
    """Return one tensor for a call to read, whose parts are ``tensors``: their own memory if they lie in a row.

    Args:
        tensors: tensors of the caller.
        apart_from: tensor that the call writes, which must not lie among them; None for several, so for a copy.
    """
    whole = None if apart_from is None else _in_a_row(tensors, apart_from)
    return torch.cat([plain(tensor).flatten() for tensor in tensors]) if whole is None else whole


def wholes(
    operation: GroupOperation, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return output and input of a call in which one side is parts in a row; None if they are not."""
    parts, other = (outputs, inputs[0]) if operation.has_output_parts else (inputs, outputs[0])
    whole = _in_a_row(parts, other)
    return None if whole is None else (whole, other) if operation.has_output_parts else (other, whole)


_BITS = {1: torch.uint8, 2: torch.int16}
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
_SPLITS = "parts of several sizes: a rank knows its own only, and to ask costs what steps save"
_BARRIER = "barrier"

RepeatKey = tuple[str, Hashable, torch.dtype, torch.device]
"""Key of repeated calls: torch's name of the operation, its reduction or root, dtype and device of all tensors."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GroupOperation:
    """An operation of process groups: its name in torch, and the methods that make it.

    Attributes:
        name: name of the operation in ``torch.distributed``.
        method: name of the other group's method.
        kind: name of the communicator's method; "" if Sidelane has no such operation.
        has_output_parts: the outputs are parts of one tensor for the communicator.
        has_input_parts: the inputs are.
        is_listed: the communicator takes lists of tensors.
        has_lists: its tensors are lists.
        repeats: calls of it are remembered (``order``).
        flat: reason why it takes no steps among several nodes; "" if it does.
    """

    name: str
    method: str
    kind: str = ""
    has_output_parts: bool = False
    has_input_parts: bool = False
    repeats: bool = False
    flat: str = ""
    is_listed: bool = False
    has_lists: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_lists", self.is_listed or self.has_parts)

    @property
    def has_parts(self) -> bool:
        """True if one side is parts of one tensor."""
        return self.has_output_parts or self.has_input_parts

    @property
    def lacking(self) -> GroupOperation:
        """This operation in a form that Sidelane does not have."""
        return GroupOperation(self.name, self.method)


ALL_GATHER = GroupOperation("all_gather_into_tensor", "_allgather_base", Kind.ALL_GATHER, repeats=True)
ALL_GATHER_COALESCED = GroupOperation(
    *("all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced", Kind.ALL_GATHER),
    repeats=True,
    is_listed=True,
)
ALL_GATHER_LIST = GroupOperation("all_gather", "allgather", Kind.ALL_GATHER, has_output_parts=True, repeats=True)
ALL_TO_ALL = GroupOperation("all_to_all_single", "alltoall_base", Kind.ALL_TO_ALL, repeats=True)
ALL_TO_ALL_UNEVEN = GroupOperation("all_to_all_single", "alltoall_base", Kind.ALL_TO_ALL, flat=_SPLITS)
ALL_TO_ALL_LIST = GroupOperation("all_to_all", "alltoall", Kind.ALL_TO_ALL, True, True, flat=_SPLITS)
REDUCE_SCATTER = GroupOperation("reduce_scatter_tensor", "_reduce_scatter_base", Kind.REDUCE_SCATTER, repeats=True)
REDUCE_SCATTER_COALESCED = GroupOperation(
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced", Kind.REDUCE_SCATTER),
    repeats=True,
    is_listed=True,
)
REDUCE_SCATTER_LIST = GroupOperation(
    *("reduce_scatter", "reduce_scatter", Kind.REDUCE_SCATTER), has_input_parts=True, repeats=True
)
ALL_REDUCE = GroupOperation("all_reduce", "allreduce", Kind.ALL_REDUCE, repeats=True)
ALL_REDUCE_LIST = GroupOperation("all_reduce_coalesced", "allreduce", Kind.ALL_REDUCE, repeats=True, is_listed=True)
ALL_REDUCE_OF_ONE = GroupOperation("all_reduce", "allreduce_coalesced", Kind.ALL_REDUCE, repeats=True)
ALL_REDUCE_COALESCED = dataclasses.replace(ALL_REDUCE_LIST, method="allreduce_coalesced")
BROADCAST = GroupOperation("broadcast", "broadcast", Kind.BROADCAST, repeats=True)
SCATTER = GroupOperation(
    "scatter", "scatter", Kind.SCATTER, has_input_parts=True, flat="scatter: all of it leaves by the root's network"
)
GATHER = GroupOperation(
    "gather", "gather", Kind.GATHER, has_output_parts=True, flat="gather: all of it comes by the root's network"
)
BARRIER = GroupOperation("barrier", "barrier", _BARRIER, flat="barrier")
REDUCE = GroupOperation("reduce", "reduce")
ALL_GATHER_OF_LISTS = GroupOperation("all_gather_coalesced", "allgather_coalesced")
SEND, RECV = GroupOperation("send", "send"), GroupOperation("recv", "recv")
RECV_ANYSOURCE = GroupOperation("recv", "recv_anysource")


class GroupCall:
    """One call of the group, with the decisions that need no group.

    Args:
        operation: operation of the call.
        outputs: tensors that are written.
        inputs: tensors that are only read.
        opts: options of torch; None for its defaults.
        args: arguments of the other group's method.
        key: key of calls like this one; None for calls that are not remembered.

    Attributes:
        operation, outputs, inputs, opts, args, key: see above.
        copies: outputs that ``args`` has copies of, with these copies, which are copied back.
        tensors: all tensors of the caller, or the copies of :meth:`make_contiguous`.
        is_async: the caller goes on before the call has ended.
        timeout: time-out of this call; 0 for the group's.
        options: options of the communicator's method.
        reduction: operation of a reduction; None for other calls.
        refusal: reason why Sidelane does not make it; "" if it does. Alike on all ranks.
        reason: reason why it takes steps among several nodes; "" if it does not.
    """

    def __init__(
        self,
        operation: GroupOperation,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any,
        args: Sequence[Any],
        key: RepeatKey | None = None,
    ) -> None:
        self.operation, self.outputs, self.inputs = operation, outputs, inputs
        self.opts, self.args, self.key, self.copies = opts, args, key, Copies()
        self.tensors = (*outputs, *inputs)
        self.is_async = bool(getattr(opts, "asyncOp", True))
        self.timeout: timedelta = max(getattr(opts, "timeout", NO_TIMEOUT), NO_TIMEOUT)
        self.options: dict[str, Any] = {}
        self.reduction: GroupReduction | None = None
        self.reason, kind, op = "", operation.kind, None
        if kind in REDUCING and self.tensors:
            self.reduction = GroupReduction.of(opts.reduceOp, self.tensors[0].dtype)
            self.options = {"op": (op := self.reduction.op)}
            self.key = key if self.reduction.repeats else None
        elif kind in ROOTED:
            self.options = {"root": opts.rootRank}
        elif operation is ALL_TO_ALL_UNEVEN:
            self.options = dict(zip(_SPLIT_SIZES, args[2:4], strict=True))
        elif operation is ALL_TO_ALL_LIST:
            self.options = {
                name: [each.numel() for each in side]
                for name, side in zip(_SPLIT_SIZES, (outputs, inputs), strict=True)
            }
        self.refusal = self._refusal(op)

    def _refusal(self, op: str | None) -> str:
        operation, kind = self.operation, self.operation.kind
        if not kind:
            return "Sidelane has no such operation"
        # Ranks other than the root do not know the root's list; equal parts of an all_to_all here say nothing of those
        # elsewhere.
        sides = [
            side for side, unknown in ((self.outputs, Kind.GATHER), (self.inputs, Kind.SCATTER)) if kind != unknown
        ]
        if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
            parts = self.outputs if operation.has_output_parts else self.inputs if operation.has_input_parts else ()
            if len({tensor.numel() for tensor in parts}) > 1:
                return "parts of several sizes"
        return _refusal_of(sides, op)

    def make_contiguous(self) -> None:
        """Put copies in place of tensors that are not contiguous, for another group: it reads no strides.

        ``copies`` gets the outputs among them, to copy back when the call has ended.
        """
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def contiguous(argument: Any) -> Any:
            if isinstance(argument, list | tuple):
                return [contiguous(each) for each in argument]
            if not isinstance(argument, torch.Tensor) or argument.layout is not torch.strided or _is_direct(argument):
                return argument  # a sparse tensor goes as it is
            if id(argument) not in copies:
                copies[id(argument)] = argument, plain(argument)
            return copies[id(argument)][1]

        self.args, self.tensors = contiguous(self.args), tuple(contiguous(self.tensors))
        self.copies = [copies[id(output)] for output in self.outputs if id(output) in copies]

    @property
    def adds_floats(self) -> bool:
        """True for a reduction whose bits depend on the order of its terms."""
        op = getattr(self.opts, "reduceOp", None)
        if op is None or op_name(op) in _ANY_ORDER:
            return False
        return any(tensor.is_floating_point() or tensor.is_complex() for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side: the gathered bytes of an all_gather, the whole buffer of the others."""
        return larger_bytes(self.outputs, self.inputs)

    def make(self, communicator: Communicator) -> None:
        """Make the call on a communicator; tensors that it does not take as they are get contiguous stand-ins."""
        kind, outputs, inputs = self.operation.kind, self.outputs, self.inputs
        method = getattr(communicator, kind)
        if kind == _BARRIER:
            method()
            if inputs[0].is_cuda and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(inputs[0].device).synchronize()
            return
        is_exchange = kind == Kind.ALL_TO_ALL
        if self.operation.has_input_parts:
            given: Sequence[torch.Tensor | None] = (
                [joined(inputs, apart_from=None if is_exchange else outputs[0])] if inputs else [None]
            )
        else:
            given = [plain(tensor) for tensor in inputs]
        writing: contextlib.AbstractContextManager[list[Any]] = contextlib.nullcontext([None])
        if outputs and self.operation.has_output_parts:
            writing = parted(outputs, apart_from=None if is_exchange else inputs[0])
        elif outputs:
            is_read = kind == Kind.ALL_REDUCE or (kind == Kind.BROADCAST and communicator.rank == self.options["root"])
            writing = receiving(outputs, filled=is_read)
        with writing as written:
            sides = [side[0] if len(side) == 1 else side for side in (written, given) if side]
            method(*sides, **self.options)
            if self.reduction is not None:
                self.reduction.finish(written)


_SPLIT_SIZES = ("output_split_sizes", "input_split_sizes")


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

    def finish(self, results: Iterable[torch.Tensor]) -> None:
        """Multiply the results."""
        if self.factor != 1:
            for result in results:
                result.mul_(self.factor)


@functools.cache
def _named(name: str) -> GroupReduction:
    return GroupReduction(name)


def _refusal_of(sides: Sequence[Sequence[torch.Tensor]], op: str | None) -> str:
    tensors = [tensor for side in sides for tensor in side]
    if not tensors:
        return "no tensors"
    first, dtypes = tensors[0], [{tensor.dtype for tensor in side} for side in sides if side]
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            return f"layout {tensor.layout}"
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"tensors of class {type(tensor).__name__}"
        if tensor.device.type != first.device.type:
            return "tensors on several kinds of devices"
    if any(len(of_side) > 1 for of_side in dtypes):
        return "several dtypes"
    if op is None or dtypes[0] != dtypes[-1]:  # a communicator refuses an output of another dtype, and tells the peers
        return ""
    if op not in tuple(ReduceOp):
        return f"operation {op}"
    return "" if first.dtype in DTYPES else f"{op} of {dtype_name(first.dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def larger_bytes(outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the larger side."""
    return max(sum(map(_nbytes, outputs)), sum(map(_nbytes, inputs)))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # a sparse one has no nbytes
