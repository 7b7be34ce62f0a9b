# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Products of rows by several experts of a rank, for the unfused method of GEMMs whose rows travel by counts.

Equivalent: a product for each rank and expert. The library's grouped product is one call instead, whose groups end
at rows given on the device. It takes a weight for each group, one after the other, so that rows ordered by rank
and then by expert would need each weight once for each rank. So rows lie by expert and then by rank for the product::

    all_to_all_gemm   the exchange leaves rows by expert | grouped product | results by rank, a copy
    gemm_all_to_all   rows by expert, a copy | grouped product | the exchange takes rows in place

If the library has no such product, rows stay in their order, and the host has to know their number.

Example: 2 ranks, 2 experts, rows [[2, 1], [3, 1]] of a rank. By rank, groups begin at 0, 2, 3 and 6; by expert at 0, 5,
2 and 6: those of expert 0 first.

Legend: N ranks; E experts of a rank, in EP lanes; G = N * E groups, in GP lanes; K columns of ``x``, H of the result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch.nn import functional

from sidelane.device import layout
from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.ops.handle import power_of_two

MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
ROWS, COLS = 16, 1024
"""Rows and columns that a program of a copy moves."""

ALIGNED_BYTES = 16
"""Alignment in bytes of rows in the library's grouped product."""

GENERATIONS = 9, 10
"""Generations of compute units on which the library's grouped product does not wait for the host."""


def has_grouped_product(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Return True if the library multiplies groups of sizes that only the device knows, without the host.

    Ranks have to agree: ``widths`` are H, and K if it is alike on all ranks.
    """
    if dtype != torch.bfloat16 or any(width * dtype.itemsize % ALIGNED_BYTES for width in widths):
        return False
    return device.type == "cpu" or (torch.version.hip is None and _generation(device) in GENERATIONS)


@functools.cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


class ExpertGroups:
    """Places of row groups by rank and by expert, computed on the device in one launch.

    Args:
        counts: number of rows from rank i to rank j, by experts, [N, N, E]; int32 or int64, on the device.
        rank: this rank.
        rows: number of rows that there is room for.
        are_sent: groups are those of the rows that a rank sends; otherwise of those that arrive.

    Attributes:
        are_sent: the argument.
        moved: begin of each group by expert, int32[N, N, E], in the order of ``counts``.
    """

    def __init__(self, counts: torch.Tensor, rank: int, rows: int, *, are_sent: bool) -> None:
        n, _, self._experts = counts.shape
        self.are_sent, self._groups = are_sent, n * self._experts
        self.moved = counts.new_empty(counts.shape, dtype=torch.int32)
        self._stops = counts.new_empty(self._experts, dtype=torch.int32)
        self._own = counts.new_empty(2, self._groups, dtype=torch.int32)  # ends by rank; distances by expert
        arguments = counts, self.moved, self._stops, self._own, n, self._experts, rank, rows
        launch(_groups, (n,), arguments, {"EP": max(2, power_of_two(self._experts)), "SENT": are_sent})

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return products [rows, H] of rows in the order of experts, [rows, K]; ``weight`` [E, H, K]. Rows behind the
        last group are undefined. If rows do not begin at multiples of 16 bytes, padded copies of both are multiplied.
        """
        if not rows.shape[0]:
            return rows.new_empty(0, weight.shape[-2])
        more = -rows.shape[1] % (ALIGNED_BYTES // rows.element_size())
        if more:
            rows, weight = (functional.pad(matrix, (0, more)) for matrix in (rows, weight))
        strides = weight.stride()[:-1]
        if any(width * weight.element_size() % ALIGNED_BYTES for width in (*strides, weight.data_ptr())):
            weight = weight.clone(memory_format=torch.contiguous_format)
        return functional.grouped_mm(rows, weight.transpose(-2, -1), offs=self._stops)

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of rows in the other order: by rank if they have arrived, by expert if they will be sent."""
        count, columns = rows.shape
        output = rows.new_empty(count, columns)
        grid = -(-count // ROWS), -(-columns // COLS)
        arguments = rows, output, self._own, count, columns, rows.stride(0), self._groups
        options = {"GP": power_of_two(self._groups), "ROWS": ROWS, "COLS": COLS, "SENT": self.are_sent}
        if count:
            launch(_in_order, grid, arguments, options)
        return output


def one_by_one(rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the same by a product for each group, of rows by rank; ``counts``: by rank, then by expert."""
    output = rows.new_empty(rows.shape[0], weight.shape[-2])
    ends = itertools.accumulate(itertools.chain.from_iterable(counts), initial=0)
    for group, (first, stop) in enumerate(itertools.pairwise(min(end, rows.shape[0]) for end in ends)):
        if first < stop:
            torch.mm(rows[first:stop], weight[group % weight.shape[0]].t(), out=output[first:stop])
    return output


@triton.jit(do_not_specialize=["rank", "rows"])
def _groups(counts, moved, stops, own, ranks, experts, rank, rows, EP: tl.constexpr, SENT: tl.constexpr):
    which = tl.program_id(0)  # the rank of the groups
    lane, kind = tl.arange(0, MAX_RANKS)[:, None], tl.arange(0, EP)[None, :]
    known = (lane < ranks) & (kind < experts)
    pair = which * ranks + lane if SENT else lane * ranks + which
    place = pair * experts + kind
    count = tl.maximum(tl.load(counts + place, mask=known, other=0), 0).to(tl.int32)
    of_rank = tl.sum(count, 1)
    start = (tl.cumsum(of_rank, 0) - of_rank)[:, None] + tl.cumsum(count, 1) - count
    count = tl.maximum(tl.minimum(count, rows - start), 0)  # there is no room for more
    of_expert = tl.sum(count, 0)
    stop = tl.cumsum(of_expert, 0)
    by_expert = (stop - of_expert)[None, :] + tl.cumsum(count, 0) - count
    tl.store(moved + place, by_expert, mask=known)
    if which == rank:
        group = lane * experts + kind
        tl.store(own + group, tl.minimum(start, rows) + count, mask=known)
        tl.store(own + ranks * experts + group, by_expert - tl.minimum(start, rows), mask=known)
        number = tl.arange(0, EP)
        tl.store(stops + number, stop, mask=number < experts)


@triton.jit(do_not_specialize=["rows", "groups"])
def _in_order(
    x, output, own, rows, columns, x_stride, groups,
    GP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    number = tl.arange(0, GP)
    ends = tl.load(own + number, mask=number < groups, other=2147483647)
    group = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    there = (row < rows) & (group < groups)
    away = row + tl.load(own + groups + group, mask=there, other=0)
    source = row if SENT else away
    place = away if SENT else row
    inside = there[:, None] & (column < columns)[None, :]
    values = tl.load(x + source.to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside)
    tl.store(output + place.to(tl.int64)[:, None] * columns + column[None, :], values, mask=inside)


GROUPS, IN_ORDER = _groups, _in_order
