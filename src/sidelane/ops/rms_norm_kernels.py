# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The kernels of all_reduce_rms_norm: one for few bytes, and one for many.

In *cells* every word of data carries its own readiness (``device/flagged.py``), so that there is no barrier. A row is
cut into slices of W words, and a block has PARTS slices of a row, one on GPUs: each warp of a GPU has few words, and a
row comes from many of its units at once. The blocks of a row are a team, which adds up the row's squares::

    rank 0   slice -> cells of all others | count itself | wait for cells of the slice -> add -> total
                 -> sum of squares, to the team | wait for those of the team -> norm -> output | slice of the next row
    rank 1   slice -> cells of all others | count itself | wait for cells of the slice -> add -> total
                 -> sum of squares, to the team | wait for those of the team -> norm -> output | slice of the next row

A sum of squares is a flagged word as well, in memory of its own rank, and so is, for scales of rows in 8 bits, the
largest magnitude of a slice. One place is enough for each: launches of a rank do not overlap. All blocks of a grid are
on the GPU at once, all send before any waits, and the blocks of a team have the same rows in the same turns: so a block
waits only for what others make before they wait for a later row.

For low latency, rank and generation are one load away at most (``begin_of``); the weight and the residual are loaded
while cells are on their way; and a block counts itself while it waits for peers, so that no fence stands behind the
last row (``end_relaxed`` says why that is enough).

*Pushed* rows go unchanged, half the bytes of cells, and a flag of the block follows them::

    rank 0   rows -> places of all others | signal, wait all | add, norm -> outputs, row by row
    rank 1   rows -> places of all others | signal, wait all | add, norm -> outputs, row by row

Block b of every rank has the same rows, and waits only for the stores that blocks b make before they wait. A grid has
no more blocks than fit on the GPU. Every rank waits for data of every other one in each launch, so that two places for
each sender, for even and odd generations, are enough (``kernels/ll.py``).

Squares are added up in one order in both, which :func:`_squares_of_slices` and :func:`_sum_of_slices` write down.

Legend: N ranks; T tokens, M most tokens of the handle; H hidden size, HP elements of S slices; C words of 4 bytes of a
row; W words and E elements of a slice; SLICES of a row, S a power of two from it on; PARTS slices of a block, a power
of two; ONE if no block has more than one row, WHOLE if all slices of all blocks are full. In cells ``x``, ``residual``
and outputs are int32 [T, C], ``weight`` int32 [C], ``cells`` int64 [2, N, M, C]; ``partials`` int64 [2, M, S]: sums of
squares, and magnitudes. Pushed, elements: [T, H], [H], ``staging`` [2, N, M, H]. ``quantized`` bytes [T,
H], in cells of two-byte elements int16 [T, C]; ``scale`` one element, ``own_scales`` [T].
"""

from __future__ import annotations

from sidelane.device.context import begin_of, end, end_relaxed, put_weak, signal_all_release, wait_all_acquire
from sidelane.device.flagged import put_flagged_relaxed, store_flagged_relaxed, wait_flagged_relaxed
from sidelane.device.stamps import ADD, COMPUTE, END, SEND, WAIT, stamp
from sidelane.device.triton_language import tl, triton
from sidelane.kernels.arithmetic import largest_magnitude
from sidelane.kernels.ll import elements_of, words_of, words_there

SLICE_BYTES = 512
"""Size of a slice in bytes: a load of 16 bytes for each thread of a warp."""

LANES = tl.constexpr(32)
"""Numbers of a slice that :func:`_squares_of_slices` leaves to the hardware's reduction among lanes."""

NOBODY = tl.constexpr(-1)
"""Whom a block blames that waits for its team: the one that is late waits for a peer, and says so."""

NAN_BYTE = tl.constexpr(0x7F)
"""Bits of NaN in float8_e4m3fn."""


@triton.jit
def _norm_in_cells(
    context, counters, rank, cells_of, cells, partials, output, total_output, x, residual, weight, tokens, most_tokens,
    words, eps, stamps, quantized, scale, own_scales,
    N: tl.constexpr, W: tl.constexpr, SLICES: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, ONE: tl.constexpr,
    WHOLE: tl.constexpr, DTYPE: tl.constexpr, ELEMENT_BYTES: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    generation = begin_of(counters)
    TEAM: tl.constexpr = (SLICES + PARTS - 1) // PARTS
    member, team, teams = tl.program_id(0) % TEAM, tl.program_id(0) // TEAM, tl.num_programs(0) // TEAM
    parts = member * PARTS + tl.arange(0, PARTS)
    lane = parts[:, None] * W + tl.arange(0, W)[None, :]
    mask = words_there(lane, words, WHOLE)
    place = (generation & 1) * N
    turns = 1 if ONE else tl.cdiv(tokens - team, teams)

    stamp(stamps, SEND)
    own = tl.load(x + team * words + lane, mask=mask, other=0)
    for turn in range(turns):
        row = team + turn * teams
        if not ONE:
            own = tl.load(x + row * words + lane, mask=mask, other=0)
        for hop in tl.static_range(1, N):
            at = ((place + rank) * most_tokens + row).to(tl.int64) * words
            put_flagged_relaxed(cells_of, (rank + hop) % N, at + lane, own, generation, mask, True)

    factors = elements_of(tl.load(weight + lane, mask=mask, other=0), DTYPE, ELEMENT_BYTES, True)
    end_relaxed(counters, generation)  # a barrier of threads: the stores below may overwrite inputs read above
    for turn in range(turns):
        row = team + turn * teams
        stamp(stamps, WAIT)
        if not ONE:
            own = tl.load(x + row * words + lane, mask=mask, other=0)
        if HAS_RESIDUAL:
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
        if HAS_RESIDUAL:
            total += elements_of(before, DTYPE, ELEMENT_BYTES, True)
        squares = _squares_of_slices(total, PARTS)
        if S > 1:
            _send_to_team(partials + row * S, squares, parts, generation, SLICES)
        tl.debug_barrier()  # outputs may be inputs, which other threads have read
        tl.store(total_output + row * words + lane, words_of(total, DTYPE, ELEMENT_BYTES), mask=mask)
        if S > 1:
            squares = _from_team(context, partials + row * S, generation, stamps, SLICES, S)
        mean = _sum_of_slices(squares) / (words * (4 // ELEMENT_BYTES))  # words may be a constant, which has no dtype
        y = total * (1.0 / tl.sqrt(mean + eps)) * factors
        tl.store(output + row * words + lane, words_of(y, DTYPE, ELEMENT_BYTES), mask=mask)
        if quantized is not None:
            if own_scales is not None:
                largest = largest_magnitude(tl.reshape(y, (PARTS, y.numel // PARTS)), 1)
                if S > 1:
                    magnitudes = partials + (most_tokens + row) * S
                    _send_to_team(magnitudes, largest, parts, generation, SLICES)
                    largest = _from_team(context, magnitudes, generation, stamps, SLICES, S)
                factor = _scale_of(largest_magnitude(largest, 0))
                tl.store(own_scales + row, factor, mask=member == 0)
            else:
                factor = tl.load(scale)
            narrow = _scaled(y, factor)
            if ELEMENT_BYTES == 2:
                low, high = tl.split(narrow)
                narrow = low.to(tl.int16) | (high.to(tl.int16) << 8)
            tl.store(quantized + row * words + lane, narrow, mask=mask)
    stamp(stamps, END)


@triton.jit
def _send_to_team(places, values, parts, generation, SLICES: tl.constexpr):
    """Give the float32 of each slice of this block to the team of a row."""
    store_flagged_relaxed(places, parts, values.to(tl.int32, bitcast=True), generation, parts < SLICES)


@triton.jit
def _from_team(context, places, generation, stamps, SLICES: tl.constexpr, S: tl.constexpr):
    """Wait for the float32 of each slice of a row, and return them, float32[S]; 0 beyond the last one."""
    stamp(stamps, WAIT)
    every = tl.arange(0, S)
    words = wait_flagged_relaxed(context, places, NOBODY, every, every < SLICES, generation)
    stamp(stamps, COMPUTE)
    return words.to(tl.float32, bitcast=True)


@triton.jit
def _squares_of_slices(values, SLICES: tl.constexpr):
    """Return the sum of the squares of each slice, float32[SLICES], of float32 whose slices lie behind each other.

    Neighbours are added up in pairs, neighbours of these in pairs, and so on until LANES are left; these by the
    hardware's reduction, one in a lane. The first sum of a pair is one operation of a square and another's square: of
    ``a * a + b * b`` compilers choose which product is not rounded.
    """
    E: tl.constexpr = values.numel // SLICES
    left, right = tl.split(tl.reshape(values, (SLICES, E // 2, 2)))
    sums = tl.fma(right, right, left * left)
    for level in tl.static_range(_levels_of(E // 2, LANES)):
        left, right = tl.split(tl.reshape(sums, (SLICES, E >> (level + 2), 2)))
        sums = left + right
    return tl.sum(sums, axis=1)


@triton.jit
def _sum_of_slices(sums):
    """Return the sum of a power of two of numbers, of which neighbours are added up in pairs as well."""
    S: tl.constexpr = sums.numel
    for level in tl.static_range(_levels_of(S, 1)):
        left, right = tl.split(tl.reshape(sums, (1, S >> (level + 1), 2)))
        sums = left + right
    return tl.sum(tl.reshape(sums, (1,)), axis=0)


@triton.constexpr_function
def _levels_of(many, few):
    """Return how often ``many`` are halved until there are no more than ``few``; both are powers of two."""
    return max(0, many.bit_length() - few.bit_length())


@triton.jit
def _norm_pushed(
    context, counters, rank, staging_of, staging, output, total_output, x, residual, weight, tokens, most_tokens,
    hidden, eps, stamps, quantized, scale, own_scales,
    N: tl.constexpr, HP: tl.constexpr, S: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
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
        mean = _sum_of_slices(_squares_of_slices(total, S)) / hidden
        y = total * (1.0 / tl.sqrt(mean + eps)) * factors
        tl.store(output + row * hidden + lane, y.to(kind), mask=mask)
        if quantized is not None:
            if own_scales is not None:
                factor = _scale_of(largest_magnitude(y, None))
                tl.store(own_scales + row, factor)
            else:
                factor = tl.load(scale)
            tl.store(quantized + row * hidden + lane, _scaled(y, factor), mask=mask)
    stamp(stamps, END)
    end(context, generation)


@triton.jit
def _scale_of(largest):
    """Return the scale in 8 bits of a row whose largest magnitude is given."""
    return tl.maximum(largest / 448.0, 1e-12, tl.PropagateNan.ALL)


@triton.jit
def _scaled(y, factor):
    """Return a row, or a part of it, as bytes of e4m3, over a factor."""
    wide = tl.minimum(tl.div_rn(y, tl.full(y.shape, 0, tl.float32) + factor), 448.0, tl.PropagateNan.ALL)
    narrow = tl.maximum(wide, -448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(wide != wide, NAN_BYTE, narrow)  # GPUs convert it so, and Triton's interpreter to a number


CELLS_KERNEL, PUSHED_KERNEL = _norm_in_cells, _norm_pushed
