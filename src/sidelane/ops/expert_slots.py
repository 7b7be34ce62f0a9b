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
from sidelane.ops.experts import ASSIGNING, BLOCK, TOKENS
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
    count, assign, leave = ASSIGNING
    n, (tokens, k), pairs = comm.world_size, chosen.shape, everyone.numel()
    room, first, empty = n * tokens, comm.rank * experts, chosen.new_empty
    numbers, ends, leaving, returned = empty(experts), empty(experts), empty(room, 1), empty(tokens, n)
    results = torch.empty_like(everyone)
    warps = {"BLOCK": BLOCK, "num_warps": 8}
    launch(count, (experts,), (everyone, numbers, pairs, first), warps)
    assigned = everyone, numbers, ends, None, results, pairs, first, experts, room * experts, k, room
    launch(assign, (experts + 1,), assigned, {"EP": power_of_two(experts), **warps})
    left = chosen, leaving, returned, tokens, k, experts, n
    launch(leave, (-(-tokens // TOKENS),), left, {"KP": power_of_two(k), "TOKENS": TOKENS})
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
    _spread(came, results, output, output.stride(), came.shape[1])
    return output


def spread_float8(came: Tensor, results: Tensor, experts: int, columns: int) -> tuple[Tensor, Tensor]:
    """Do the same with rows of :func:`~sidelane.ops.rows.quantized_rows`: return values float8_e4m3fn[E, N * T, H] and
    scales float32[E, N * T, H / 128], of which neighbours in a column are neighbours in memory.
    ``columns`` is H, an even number.
    """
    rows, groups, first_scale = len(came), -(-columns // SCALED), row_widths(columns)[0]
    values = came.new_empty(experts, rows, columns // 2)
    scales = came.new_empty(experts, groups, rows, dtype=torch.float32).transpose(1, 2)
    _spread(came, results, values, values.stride(), columns // 2)
    of_scales = came.view(torch.float32)[:, first_scale // 4 :]
    _spread(of_scales, results, scales, scales.stride(), groups)
    return values.view(torch.float8_e4m3fn), scales


def _spread(came: Tensor, results: Tensor, output: Tensor, strides: tuple[int, ...], columns: int) -> None:
    (rows, k), room = results.shape, output.shape[1]
    arguments = came, results, output, columns, came.stride(0), room, *strides
    columns_each = min(COLS, power_of_two(columns))
    launch(_spread_rows, (rows, -(-columns // columns_each)), arguments, {"TERMS": k, "COLS": columns_each})


@triton.jit
def _spread_rows(
    x, results, output, columns, x_stride, room, expert_stride, row_stride, column_stride,
    TERMS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < columns
    values = tl.load(x + row * x_stride + column, mask=inside, other=0)
    for term in tl.static_range(TERMS):
        slot = tl.load(results + row * TERMS + term).to(tl.int64)
        if slot >= 0:
            place = slot // room * expert_stride + slot % room * row_stride + column * column_stride
            tl.store(output + place, values, mask=inside)


KERNEL = _spread_rows
