# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The kernels of all_reduce_rms_norm: one for few bytes, and one for many.

In *cells* every word of data carries its own readiness (``device/flagged.py``), so that there is no barrier; a block::

    rank 0   rows -> cells of all others | count itself | wait for the cells of a row -> add, norm -> outputs | next row
    rank 1   rows -> cells of all others | count itself | wait for the cells of a row -> add, norm -> outputs | next row

For low latency, rank and generation are one load away at most (``begin_of``); the weight and, of rows of up to
MOST_AHEAD words, the residual are loaded while cells are on their way; and a block counts itself while it waits for
peers, so that no fence stands behind the last row (``end_relaxed`` says why that is enough).

*Pushed* rows go unchanged, half the bytes of cells, and a flag of the block follows them::

    rank 0   rows -> places of all others | signal, wait all | add, norm -> outputs, row by row
    rank 1   rows -> places of all others | signal, wait all | add, norm -> outputs, row by row

Block b of every rank has the same rows, and waits only for the stores that blocks b make before they wait. A grid has
no more blocks than fit on the GPU. Every rank waits for data of every other one in each launch, so that two places for
each sender, for even and odd generations, are enough (``kernels/cells.py``).

Legend: N ranks; T tokens, M most tokens of the handle; H hidden size, HP a power of two from it on; C words of 4 bytes
of a row, in W lanes, a power of two. In cells ``x``, ``residual`` and outputs are int32 [T, C], ``weight`` int32 [C],
``cells`` int64 [2, N, M, C]; pushed, elements: [T, H], [H], ``staging`` [2, N, M, H]. ``quantized`` bytes [T, H], in
cells of two-byte elements int16 [T, C]; ``scale`` one element, ``own_scales`` [T].
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidelane.device.context import begin_of, end, end_relaxed, put_weak, signal_all_release, wait_all_acquire
from sidelane.device.flagged import put_flagged_relaxed, wait_flagged_relaxed
from sidelane.device.stamps import ADD, COMPUTE, END, SEND, WAIT, stamp
from sidelane.kernels.arithmetic import largest_magnitude
from sidelane.kernels.reduce_cells import elements_of, words_of

MOST_AHEAD = 4096
"""Words of a row up to which a block holds the residual while it waits. With more, registers would be spilled."""

NAN_BYTE = tl.constexpr(0x7F)
"""Bits of NaN in float8_e4m3fn."""


@triton.jit
def _norm_in_cells(
    context, counters, rank, cells_of, cells, output, total_output, x, residual, weight, tokens, most_tokens,
    words, eps, stamps, quantized, scale, own_scales,
    N: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    MOST_AHEAD: tl.constexpr,
):  # fmt: skip
    generation = begin_of(counters)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, W)
    mask = lane < words
    place = (generation & 1) * N

    stamp(stamps, SEND)
    for row in range(program, tokens, programs):
        own = tl.load(x + row * words + lane, mask=mask, other=0)
        for turn in tl.static_range(1, N):
            at = ((place + rank) * most_tokens + row).to(tl.int64) * words
            put_flagged_relaxed(cells_of, (rank + turn) % N, at + lane, own, generation, mask)

    factors = elements_of(tl.load(weight + lane, mask=mask, other=0), DTYPE, ELEMENT_BYTES, True)
    end_relaxed(counters, generation)  # a barrier of threads: the stores below may overwrite inputs read above
    for row in range(program, tokens, programs):
        stamp(stamps, WAIT)
        own = tl.load(x + row * words + lane, mask=mask, other=0)
        if HAS_RESIDUAL and W <= MOST_AHEAD:
            before = tl.load(residual + row * words + lane, mask=mask, other=0)
        total = tl.zeros_like(factors)
        for sender in range(N):
            if sender == rank:
                total += elements_of(own, DTYPE, ELEMENT_BYTES, True)
            else:
                at = ((place + sender) * most_tokens + row).to(tl.int64) * words
                came = wait_flagged_relaxed(context, cells + at, sender, lane, mask, generation)
                total += elements_of(came, DTYPE, ELEMENT_BYTES, True)
        stamp(stamps, COMPUTE)
        if HAS_RESIDUAL and W > MOST_AHEAD:
            before = tl.load(residual + row * words + lane, mask=mask, other=0)
        if HAS_RESIDUAL:
            total += elements_of(before, DTYPE, ELEMENT_BYTES, True)
        tl.debug_barrier()  # outputs may be inputs, which other threads have read
        tl.store(total_output + row * words + lane, words_of(total, DTYPE, ELEMENT_BYTES), mask=mask)
        mean = tl.sum(total * total) / (words * (4 // ELEMENT_BYTES))  # words may be a constant, which has no dtype
        y = total * (1.0 / tl.sqrt(mean + eps)) * factors
        tl.store(output + row * words + lane, words_of(y, DTYPE, ELEMENT_BYTES), mask=mask)
        if quantized is not None:
            narrow = _scaled(y, scale, own_scales, row)
            if ELEMENT_BYTES == 2:
                low, high = tl.split(narrow)
                narrow = low.to(tl.int16) | (high.to(tl.int16) << 8)
            tl.store(quantized + row * words + lane, narrow, mask=mask)
    stamp(stamps, END)


@triton.jit
def _norm_pushed(
    context, counters, rank, staging_of, staging, output, total_output, x, residual, weight, tokens, most_tokens,
    hidden, eps, stamps, quantized, scale, own_scales,
    N: tl.constexpr, HP: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    generation = begin_of(counters)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, HP)
    mask = lane < hidden
    place = (generation & 1) * N
    factors = tl.load(weight + lane, mask=mask, other=0).to(tl.float32)

    stamp(stamps, SEND)
    for row in range(program, tokens, programs):
        own = tl.load(x + row * hidden + lane, mask=mask, other=0)
        at = ((place + rank) * most_tokens + row).to(tl.int64) * hidden
        for turn in tl.static_range(1, N):
            put_weak(staging_of, (rank + turn) % N, at + lane, own, mask, True)
    signal_all_release(context, program, generation)  # a barrier of threads, as above
    stamp(stamps, WAIT)
    wait_all_acquire(context, program, generation)

    for row in range(program, tokens, programs):
        stamp(stamps, ADD)
        total = tl.zeros([HP], tl.float32)
        for sender in tl.static_range(N):
            if sender == rank:
                total += tl.load(x + row * hidden + lane, mask=mask, other=0).to(tl.float32)
            else:
                at = ((place + sender) * most_tokens + row).to(tl.int64) * hidden
                total += tl.load(staging + at + lane, mask=mask, other=0).to(tl.float32)
        if HAS_RESIDUAL:
            total += tl.load(residual + row * hidden + lane, mask=mask, other=0).to(tl.float32)
        kind = output.dtype.element_ty
        stamp(stamps, COMPUTE)
        tl.debug_barrier()  # outputs may be inputs, which other threads have read
        tl.store(total_output + row * hidden + lane, total.to(kind), mask=mask)
        mean = tl.sum(total * total) / hidden
        y = total * (1.0 / tl.sqrt(mean + eps)) * factors
        tl.store(output + row * hidden + lane, y.to(kind), mask=mask)
        if quantized is not None:
            tl.store(quantized + row * hidden + lane, _scaled(y, scale, own_scales, row), mask=mask)
    stamp(stamps, END)
    end(context, generation)


@triton.jit
def _scaled(y, scale, own_scales, row):
    """Return a row as bytes of e4m3, over ``scale``, or over a scale of its own, which is stored."""
    if own_scales is not None:
        factor = tl.maximum(largest_magnitude(y, None) / 448.0, 1e-12, tl.PropagateNan.ALL)
        tl.store(own_scales + row, factor)
    else:
        factor = tl.load(scale)
    wide = tl.minimum(tl.div_rn(y, tl.full(y.shape, 0, tl.float32) + factor), 448.0, tl.PropagateNan.ALL)
    narrow = tl.maximum(wide, -448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(wide != wide, NAN_BYTE, narrow)  # GPUs convert it so, and Triton's interpreter to a number


CELLS_KERNEL, PUSHED_KERNEL = _norm_in_cells, _norm_pushed
