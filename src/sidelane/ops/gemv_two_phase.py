# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The kernel of gemv_all_reduce in which each rank adds up its share of the tiles.

Two phases (the fused operators paper, section III.B and Figure 7); block b of two ranks::

    rank 0   tiles of 1 -> 1 | signal 1 | tiles of 0 | signal 0 | wait all | add tiles of 0 -> all | signal, wait all
    rank 1   tiles of 0 -> 0 | signal 0 | tiles of 1 | signal 1 | wait all | add tiles of 1 -> all | signal, wait all

Block b of every rank computes the same tiles, and waits for blocks b only, behind all that these wait for. A grid has
no more blocks than fit on the GPU, so that all of them run.

Why nobody has to say that he is ready. A rank sends partial results again when its last call has ended, so after every
owner has sent results, having read its partial results; an owner stores results when it has partial results of this
call from every rank, whose streams have then passed all work in front of it.

Legend: as of ``ops/gemv.py``; E tiles of each owner; ``results`` [T, M], ``partials`` float32 [N, E, ROWS, TP].
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidelane.device.context import (
    barrier_acq_rel,
    begin,
    end,
    put_weak,
    rank_of,
    signal_release,
    wait_all_acquire,
    world_size_of,
)
from sidelane.device.stamps import ADD, COMPUTE, COPY, END, SEND, WAIT, stamp


@triton.jit
def _partial(
    weight, x, scale, tile, rows, columns, weight_stride, x_stride, tokens, scale_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, TP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """float32[ROWS, TP]: what this rank's columns add to a tile. Tokens that there are not are 0."""
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TP)
    lane = tl.arange(0, COLS)
    kind = weight.dtype.element_ty
    if kind.primitive_bitwidth == 8:  # of which there is no 0 to load in place of what there is not
        weight = weight.to(tl.pointer_type(tl.uint8), bitcast=True)
    weights = weight + row[:, None].to(tl.int64) * weight_stride
    if TP > 1:
        result = tl.zeros([ROWS, TP], tl.float32)
        for first in range(0, columns, COLS):
            column = first + lane
            there = (row[:, None] < rows) & (column[None, :] < columns)
            w = tl.load(weights + column[None, :], mask=there, other=0).to(kind, bitcast=True)
            known = (token[None, :] < tokens) & (column[:, None] < columns)
            v = tl.load(x + token[None, :] * x_stride + column[:, None], mask=known, other=0)
            if WIDE:  # also where kernels are interpreted, which takes bfloat16 for integers in a dot
                w, v = w.to(tl.float32), v.to(tl.float32)
            result = tl.dot(w.to(v.dtype), v, result, input_precision="ieee")  # 8 bits are exact in 16
    else:
        sums = tl.zeros([ROWS, COLS], tl.float32)
        for first in range(0, columns, COLS):
            column = first + lane
            there = (row[:, None] < rows) & (column[None, :] < columns)
            w = tl.load(weights + column[None, :], mask=there, other=0).to(kind, bitcast=True).to(tl.float32)
            v = tl.load(x + column, mask=column < columns, other=0).to(tl.float32)
            sums += w * v[None, :]
        result = tl.sum(sums, axis=1)[:, None]
    if scale is not None:
        result *= tl.load(scale + row * scale_stride, mask=row < rows, other=0)[:, None]
    return result


@triton.jit
def _sum_of_ranks(partials, held, step, ranks, inside, mask):
    """float32[ROWS, TP]: a tile of every rank, added in their order."""
    result = tl.load(partials + held + inside, mask=mask, other=0)
    for sender in range(1, ranks):
        result += tl.load(partials + held + sender * step + inside, mask=mask, other=0)
    return result


@triton.jit
def _gemv_two_phase(
    context, partials_of, partials, results_of, results, output, weight, x, scale,
    rows, columns, weight_stride, x_stride, tokens, scale_stride, tiles_each, stamps,
    ROWS: tl.constexpr, COLS: tl.constexpr, TP: tl.constexpr, WIDE: tl.constexpr,
    REMOTE_FIRST: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane, token = tl.arange(0, ROWS)[:, None], tl.arange(0, TP)[None, :]
    inside = lane * TP + token
    each = tiles_each * ROWS * TP  # of what a rank sends to an owner
    is_token = token < tokens
    kind = output.dtype.element_ty

    for turn in range(ranks):
        owner = (rank + 1 + turn) % ranks if REMOTE_FIRST else turn
        for number in range(program, tiles_each, programs):
            tile = owner * tiles_each + number
            if tile * ROWS < rows:  # the last owners may have fewer
                stamp(stamps, COMPUTE, owner)
                part = _partial(weight, x, scale, tile, rows, columns, weight_stride, x_stride, tokens,
                                scale_stride, ROWS, COLS, TP, WIDE)  # fmt: skip
                mask = is_token & (tile * ROWS + lane < rows)
                stamp(stamps, SEND, owner)
                put_weak(partials_of, owner, rank * each + number * ROWS * TP + inside, part, mask)
        signal_release(context, owner, program, generation)
    stamp(stamps, WAIT)
    wait_all_acquire(context, program, generation)
    stamp(stamps, ADD)
    for number in range(program, tiles_each, programs):
        row = (rank * tiles_each + number) * ROWS + lane
        mask = is_token & (row < rows)
        total = _sum_of_ranks(partials, number * ROWS * TP, each, ranks, inside, mask).to(kind)
        for turn in range(ranks):
            put_weak(results_of, (rank + 1 + turn) % ranks, token * rows + row, total, mask)
    stamp(stamps, WAIT)
    barrier_acq_rel(context, programs + program, generation)
    if COPIES:
        stamp(stamps, COPY)
        for owner in range(ranks):
            for number in range(program, tiles_each, programs):
                row = (owner * tiles_each + number) * ROWS + lane
                mask = is_token & (row < rows)
                value = tl.load(results + token * rows + row, mask=mask)
                tl.store(output + token * rows + row, value, mask=mask)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _gemv_two_phase
