"""A call of several nodes, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidelane.collectives.arguments import op_name
from sidelane.program.collective import REDUCING, Kind
from sidelane.program.shape import Beside

Tensor = torch.Tensor
NodeTensors = Tensor | Sequence[Tensor]

RAIL_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclasses.dataclass(frozen=True, slots=True)
class NodesCall:
    """A call of one rank.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce (in place), all_to_all or broadcast (in place).
        output, input: tensors, or lists of tensors.
        op: operation of a reduction.
        root: root of a broadcast.
        beside: computation next to the calls within nodes; None for ``Config.beside``.
    """

    kind: Kind
    output: NodeTensors
    input: NodeTensors
    op: Any = "sum"
    root: int = 0
    beside: Beside | None = None

    @property
    def outputs(self) -> Sequence[Tensor]:
        """The output as a list."""
        return (self.output,) if isinstance(self.output, Tensor) else self.output

    @property
    def inputs(self) -> Sequence[Tensor]:
        """The input as a list."""
        return (self.input,) if isinstance(self.input, Tensor) else self.input

    @property
    def adds_floats(self) -> bool:
        """True for a reduction whose bits depend on the order of its terms."""
        adds = self.kind in REDUCING and op_name(self.op) not in ("min", "max")
        return adds and any(tensor.is_floating_point() for tensor in self.outputs)

    def counts(self, rank: int, size: int, device: torch.device) -> list[int]:
        """Check the call, and return the elements of a part of each tensor (all_reduce and broadcast: of the tensor).

        Args:
            rank: this rank in the group.
            size: number of ranks of the group.
            device: the only device whose tensors are accepted.

        Raises:
            ValueError, TypeError: the call cannot be made.
        """
        kind = self.kind
        if op_name(self.op) not in RAIL_OPS:
            raise ValueError(f"{kind}: op (value={self.op!r}, allowed={', '.join(RAIL_OPS)})")
        if not isinstance(self.root, int) or not 0 <= self.root < size:
            raise ValueError(f"{kind}: root (value={self.root!r}, allowed=0..{size - 1})")
        pairs = list(zip(self.outputs, self.inputs, strict=True))
        counts = [self._count(size, device, *pair) for pair in pairs]
        if kind in REDUCING and len({tensor.dtype for tensor in self.outputs}) > 1:
            raise TypeError(f"{kind}: dtypes of a list (value=several, allowed=one)")
        self._check_apart(rank, pairs)
        return counts

    def _count(self, size: int, device: torch.device, output: Tensor, input: Tensor) -> int:
        kind = self.kind
        for tensor in (output, input):
            if tensor.device != device or not tensor.is_contiguous():
                raise ValueError(f"{kind}: tensor (value={tensor.device}, allowed=contiguous, on {device})")
        if output.dtype != input.dtype:
            raise TypeError(f"{kind}: dtypes (value={output.dtype} and {input.dtype}, allowed=the same)")
        count = min(output.numel(), input.numel()) if kind is not Kind.ALL_TO_ALL else input.numel() // size
        wanted = {
            Kind.ALL_GATHER: (count * size, count),
            Kind.REDUCE_SCATTER: (count, count * size),
            Kind.ALL_TO_ALL: (count * size, count * size),
        }.get(kind, (count, count))
        if (output.numel(), input.numel()) != wanted:
            sizes = f"{output.numel()} and {input.numel()}"
            raise ValueError(
                f"{kind}: elements of output and input (value={sizes}, allowed={wanted[0]} and {wanted[1]})"
            )
        return count

    def _check_apart(self, rank: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse tensors of which one is written where another one lies, unless the call is in place."""
        touched: list[tuple[int, int, bool]] = []
        for to, given in pairs:
            whole, part = (given, to) if self.kind is Kind.REDUCE_SCATTER else (to, given)
            begin, own = whole.data_ptr(), rank * part.nbytes if part.nbytes < whole.nbytes else 0
            touched.append((begin, begin + whole.nbytes, whole is to or part.data_ptr() == begin + own))
            if part.data_ptr() != begin + own:
                touched.append((part.data_ptr(), part.data_ptr() + part.nbytes, part is to))
        ends = {True: 0, False: 0}  # of those that are written, and of those that are read
        for begin, end, is_written in sorted(each for each in touched if each[0] < each[1]):
            if begin < ends[True] or (is_written and begin < ends[False]):
                raise ValueError(f"{self.kind}: tensors (value=that overlap, allowed=apart, or in place)")
            ends[is_written] = max(ends[is_written], end)
