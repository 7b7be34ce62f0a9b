# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

"""Slots of experts that each have room of their own, as grouped products of few tokens take them.

The exchange is that of ``experts``; only the slots differ. There the rows of one expert follow those of the one before;
here every expert has ``room`` rows, of which it fills the first ones. A token that arrives is copied to the slots of
all its experts at once, since most slots stay empty and are not written.

Example: 2 ranks with 2 experts each, 3 tokens a rank at most, so that ``room`` is 6: rank 1 has the experts 2 and 3. If
the first token of each rank wants both and no other token wants any, ``results`` of rank 1 is (0, 6) in row 0, (1, 7)
in row 3, and -1 elsewhere.

Legend: N ranks; T tokens of a rank; k experts of a token; E experts of a rank; H elements of a row; a program copies
COLS of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.ops.experts import BLOCK, TOKENS, leave_others, send_to_ranks
from sidelane.ops.handle import power_of_two
from sidelane.ops.rows import SCALED, row_widths
from sidelane.session import Communicator

COLS = 1024
"""Number of elements of a row that a program copies."""


def assign_slots(
    comm: Communicator, chosen: Tensor, everyone: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the number of rows of each expert of this rank, int32[E], then ``leaving``, ``returned`` and ``results``
    of :class:`~sidelane.ops.experts.ExpertRoutes`, whose results are slots of experts with N * T rows of room each.

    Args:
        comm: communicator of the ranks.
        chosen: experts of this rank's tokens, int32[T, k], contiguous.
        everyone: experts of all ranks' tokens, int32[N * T, k], contiguous.
        experts: E, number of experts of each rank.
    """
    n, (tokens, k), empty = comm.world_size, chosen.shape, chosen.new_empty
    numbers, leaving, returned, results = empty(experts), empty(n * tokens, 1), empty(tokens, n), empty(n * tokens, k)
    arguments = chosen, everyone, numbers, leaving, returned, results, tokens, k, experts, n, comm.rank
    constants = {"KP": power_of_two(k), "TOKENS": TOKENS, "BLOCK": BLOCK, "num_warps": 8}
    launch(_assign_slots, (experts + 1 + -(-tokens // TOKENS),), arguments, constants)
    return numbers, leaving, returned, results


def spread_rows(came: Tensor, results: Tensor, experts: int) -> Tensor:
    """Copy rows that arrived, [N * T, H], to the slots of their experts, and return these, [E, N * T, H]. Slots
    without a row are not written.

    Args:
        came: rows that arrived.
        results: slots of each row, int32[N * T, k].
        experts: E, number of experts of this rank.
    """
    output = came.new_empty(experts, *came.shape)
    _spread(came, results, output, came.shape[1], None, None)
    return output


def spread_float8(came: Tensor, results: Tensor, experts: int, columns: int) -> tuple[Tensor, Tensor]:
    """Do the same with rows of :func:`~sidelane.ops.rows.quantized_rows`: return values float8_e4m3fn[E, N * T, H] and
    scales float32[E, N * T, H / 128], of which neighbours in a column are neighbours in memory.
    ``columns`` is H, an even number.
    """
    rows, groups, first_scale = len(came), -(-columns // SCALED), row_widths(columns)[0]
    values = came.new_empty(experts, rows, columns // 2)
    scales = came.new_empty(experts, groups, rows, dtype=torch.float32).transpose(1, 2)
    _spread(came, results, values, columns // 2, came.view(torch.float32)[:, first_scale // 4 :], scales)
    return values.view(torch.float8_e4m3fn), scales


def _spread(
    came: Tensor, results: Tensor, output: Tensor, columns: int, of_scales: Tensor | None, scales: Tensor | None
) -> None:
    (rows, k), groups = results.shape, 1 if scales is None else scales.shape[2]
    more = of_scales, scales, groups, *((0, 0, 0) if scales is None else scales.stride())
    arguments = came, results, output, columns, came.stride(0), output.shape[1], *more
    cols = min(COLS, power_of_two(columns))
    grid = rows, -(-columns // cols) + (scales is not None)
    launch(_spread_rows, grid, arguments, {"TERMS": k, "COLS": cols, "GP": power_of_two(groups)})


@triton.jit
def _assign_slots(
    chosen, everyone, numbers, leaving, returned, results, tokens, k, experts, ranks, rank,
    KP: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, pairs, first = tl.program_id(0), ranks * tokens * k, rank * experts
    if program < experts:
        before = program * ranks * tokens
        for at in range(0, pairs, BLOCK):
            pair = at + tl.arange(0, BLOCK)
            is_own = tl.load(everyone + pair, mask=pair < pairs, other=-1) == first + program
            slot = before + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(results + pair, slot, mask=is_own)
            before += tl.sum(is_own.to(tl.int32))
        tl.store(numbers + program, before - program * ranks * tokens)
    elif program == experts:
        leave_others(everyone, results, pairs, first, experts, BLOCK)
    else:
        send_to_ranks(program - experts - 1, chosen, leaving, returned, tokens, k, experts, ranks, KP, TOKENS)


@triton.jit
def _spread_rows(
    x, results, output, columns, x_stride, room, of_scales, scales, groups, expert_stride, row_stride, column_stride,
    TERMS: tl.constexpr, COLS: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if scales is None:
        _spread_row(x, results, output, row, columns, x_stride, TERMS, COLS)
    else:
        if tl.program_id(1) < tl.num_programs(1) - 1:
            _spread_row(x, results, output, row, columns, x_stride, TERMS, COLS)
        else:  # scales of a row, whose elements take half as many places
            lane = tl.arange(0, GP)
            found = tl.load(of_scales + row * (x_stride // 2) + lane, mask=lane < groups, other=0)
            for term in tl.static_range(TERMS):
                slot = tl.load(results + row * TERMS + term).to(tl.int64)
                if slot >= 0:
                    place = slot // room * expert_stride + slot % room * row_stride + lane * column_stride
                    tl.store(scales + place, found, mask=lane < groups)


@triton.jit
def _spread_row(
    x, results, output, row, columns, x_stride, TERMS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < columns
    values = tl.load(x + row * x_stride + column, mask=inside, other=0)
    for term in tl.static_range(TERMS):
        slot = tl.load(results + row * TERMS + term).to(tl.int64)  # experts' slots follow each other
        if slot >= 0:
            tl.store(output + slot * columns + column, values, mask=inside)


ASSIGNING, KERNEL = _assign_slots, _spread_rows
