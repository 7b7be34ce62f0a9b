# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The kernel of gemv_all_reduce whose partial results carry their own readiness (``device/flagged.py``).

One pass, without fences or barriers; block b of two ranks::

    rank 0   rows of b: weights in one stream, a tile's sums -> cells of all | wait for cells of b | add -> output
    rank 1   rows of b: weights in one stream, a tile's sums -> cells of all | wait for cells of b | add -> output

To keep memory busy, rows of a block are neighbours, and tiles and columns are one loop, so that loads of the next
tile are on their way while a tile is added up and sent; STAGES of them are copied to shared memory asynchronously. A
rank sends to itself, too, so that all its terms lie in one place.

Two places for each sender, for even and odd generations, are enough (``kernels/ll.py``): every rank waits for
cells of every other one in each launch. Cells are 0 before the first launch.

Legend: as of ``ops/gemv.py``; ``cells`` int64 [2, N, M, TP]; R the power of two from N on; a block has ``rows_each``
rows, of which it waits for LANES cells at a time. EVEN: tiles are whole, and there are columns.
"""

from __future__ import annotations

from typing import Any

from sidelane.device.context import begin, end, rank_of
from sidelane.device.flagged import put_flagged_relaxed, wait_flagged_of_ranks_relaxed
from sidelane.device.stamps import ADD, COMPUTE, END, SEND, WAIT, stamp
from sidelane.device.triton_language import tl, triton
from sidelane.ops.gemv_tiling import Tiling
from sidelane.ops.handle import power_of_two, register_limit

LANES = 256
"""Cells of each rank that a program waits for at a time."""


def constants_of(tiling: Tiling, *, ranks: int, padded: int, wide: bool, stages: int = 0) -> dict[str, Any]:
    """Return constants and options of the kernel.

    Args:
        tiling: tile sizes of the kernel.
        ranks: number of ranks of the communicator.
        padded: TP, number of lanes for tokens.
        wide: WIDE: dots are of float32.
        stages: number of stages that fit; 0 for the tiling's.
    """
    return {
        "N": ranks,
        "R": power_of_two(ranks),
        "ROWS": tiling.rows,
        "COLS": tiling.columns,
        "TP": padded,
        "WIDE": wide,
        "STAGES": stages or tiling.stages,
        "EVICT": tiling.evict,
        "LANES": LANES,
        "num_warps": tiling.warps,
        **register_limit(tiling.registers, tiling.warps, tiling.per_unit),
    }


@triton.jit
def _gemv_cells(
    context, cells_of, cells, output, weight, x, scale,
    rows, columns, weight_stride, x_stride, tokens, scale_stride, rows_each, stamps, EVEN: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TP: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank = rank_of(context)
    first = tl.program_id(0) * rows_each
    last = tl.minimum(first + rows_each, rows)
    lane, token, across = tl.arange(0, ROWS), tl.arange(0, TP)[None, :], tl.arange(0, COLS)
    place = (generation & 1) * N
    size = rows * TP  # cells of a sender
    steps = tl.maximum((columns + COLS - 1) // COLS, 1)  # peers wait for sums of no columns, too
    tiles = (tl.maximum(last - first, 0) + ROWS - 1) // ROWS
    xs = x + token.to(tl.int64) * x_stride
    kind = weight.dtype.element_ty
    if kind.primitive_bitwidth == 8:  # this dtype has no 0 for masked loads
        weight = weight.to(tl.pointer_type(tl.uint8), bitcast=True)

    stamp(stamps, COMPUTE)
    sums = tl.zeros([ROWS, COLS if TP == 1 else TP], tl.float32)
    for step in tl.range(0, tiles * steps, num_stages=STAGES):
        tile = step // steps
        column = (step - tile * steps) * COLS + across
        row = first + tile * ROWS + lane
        there = row < last
        places = weight + row[:, None].to(tl.int64) * weight_stride + column[None, :]
        if EVEN:
            w = tl.load(places, eviction_policy=EVICT)
        else:
            w = tl.load(places, mask=there[:, None] & (column[None, :] < columns), other=0, eviction_policy=EVICT)
        w = w.to(kind, bitcast=True)
        if TP == 1:
            v = tl.load(x + column) if EVEN else tl.load(x + column, mask=column < columns, other=0)
            sums += w.to(tl.float32) * v.to(tl.float32)[None, :]
        else:
            known = (token < tokens) & (column[:, None] < columns)
            v = tl.load(xs + column[:, None], mask=known, other=0)
            if WIDE:  # also where kernels are interpreted, which takes bfloat16 for integers in a dot
                w, v = w.to(tl.float32), v.to(tl.float32)
            sums = tl.dot(w.to(v.dtype), v, sums, input_precision="ieee")  # 8 bits are exact in 16

        if step - tile * steps == steps - 1:
            part = tl.sum(sums, axis=1)[:, None] if TP == 1 else sums
            if scale is not None:
                part *= tl.load(scale + row * scale_stride, mask=there, other=0)[:, None]
            mask = there[:, None] & (token < tokens)
            if N == 1:
                tl.store(output + token * rows + row[:, None], part.to(output.dtype.element_ty), mask=mask)
            else:
                stamp(stamps, SEND, MEETS=False)
                words = part.to(tl.int32, bitcast=True)
                for turn in tl.static_range(N):
                    peer = (rank + 1 + turn) % N
                    at = (place + rank) * size + row[:, None] * TP + token
                    put_flagged_relaxed(cells_of, peer, at, words, generation, mask)
                stamp(stamps, COMPUTE, MEETS=False)
            sums = tl.zeros_like(sums)

    if N > 1:
        sender, inside = tl.arange(0, R)[:, None], tl.arange(0, LANES)
        for start in range(first * TP, last * TP, LANES):
            stamp(stamps, WAIT)
            index = start + inside
            mask = (index < last * TP) & (index % TP < tokens)
            at = place * size + sender * size + index[None, :]
            came = wait_flagged_of_ranks_relaxed(context, cells, at, mask[None, :] & (sender < N), generation)
            stamp(stamps, ADD)
            total = tl.zeros([LANES], tl.float32)
            for number in tl.static_range(N):  # in rank order; a sum of which all terms but one are 0 is that term
                words = tl.sum(tl.where(sender == number, came, 0), axis=0)
                total += words.to(tl.float32, bitcast=True)
            result = output + (index % TP) * rows + index // TP
            tl.store(result, total.to(output.dtype.element_ty), mask=mask)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _gemv_cells
