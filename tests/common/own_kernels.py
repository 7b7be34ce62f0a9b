"""Kernels of one's own, and what ranks do with them in tests: the same on GPUs and under Triton's interpreter.

A rank's tensors are on its default device, which the processes for GPUs set.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidelane.device.context import (
    arrive_acq_rel,
    barrier_acq_rel,
    begin,
    end,
    first_relaxed,
    get_weak,
    put_signal_release,
    put_weak,
    rank_of,
    signal_add_release,
    signal_release,
    wait_acquire,
    wait_all_acquire,
    wait_eq_acquire,
    wait_ge_acquire,
    world_size_of,
)

TILE = 64


@triton.jit
def push_tiles(context, outputs, shard, count, TILE: tl.constexpr):
    """all_gather: tiles into the outputs of all peers, as many programs as there are."""
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    barrier_acq_rel(context, program, generation)
    for tile in range(program, tl.cdiv(count, TILE), programs):
        offsets = tile * TILE + tl.arange(0, TILE)
        values = tl.load(shard + offsets, mask=offsets < count)
        for turn in range(ranks):
            put_weak(outputs, (rank + turn) % ranks, rank * count + offsets, values, offsets < count)
    barrier_acq_rel(context, programs + program, generation)
    end(context, generation)


@triton.jit
def sum_of_all(context, output, inputs, count, TILE: tl.constexpr):
    """all_reduce in the order of the ranks: tiles from the inputs of all peers. A grid of two dimensions."""
    generation = begin(context)
    ranks = world_size_of(context)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    barrier_acq_rel(context, program, generation)
    for tile in range(program, tl.cdiv(count, TILE), programs):
        offsets = tile * TILE + tl.arange(0, TILE)
        total = tl.zeros([TILE], tl.float32)
        for peer in range(ranks):
            total += get_weak(inputs, peer, offsets, output.dtype.element_ty, offsets < count).to(tl.float32)
        tl.store(output + offsets, total.to(output.dtype.element_ty), mask=offsets < count)
    barrier_acq_rel(context, programs + program, generation)
    end(context, generation)


@triton.jit
def along_the_ring(context, boxes, box, data, TILE: tl.constexpr):
    """Every rank adds its number to what comes from the one before; rank 0 begins. Signals and waits of one peer."""
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    next, before = (rank + 1) % ranks, (rank + ranks - 1) % ranks
    offsets = tl.arange(0, TILE)
    signal_release(context, before, 0, generation)  # my box is free
    if rank > 0:
        wait_acquire(context, before, 1, generation)
        values = tl.load(box + offsets) + rank
    else:
        values = tl.load(data + offsets)
    wait_acquire(context, next, 0, generation)
    put_weak(boxes, next, offsets, values)
    signal_release(context, next, 1, generation)
    if rank == 0:
        wait_acquire(context, before, 1, generation)
    tl.store(data + offsets, tl.load(box + offsets))
    end(context, generation)


@triton.jit
def counted(context, boxes, box, output, counters, data, TILE: tl.constexpr):
    """all_gather whose programs all add to one flag of each peer; the last one of a rank waits for the sums of all.

    The first one says that the boxes are free, for all programs.
    """
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    offsets = tl.arange(0, TILE)
    if first_relaxed(counters):
        for turn in range(ranks):
            signal_release(context, turn, 0, generation)
    values = tl.load(data + program * TILE + offsets)
    wait_all_acquire(context, 0, generation)
    for turn in range(ranks):
        peer = (rank + 1 + turn) % ranks
        put_weak(boxes, peer, (rank * programs + program) * TILE + offsets, values)
        signal_add_release(context, peer, 1, 1)
    if arrive_acq_rel(counters + 1, programs):
        tl.store(counters, 0)
        for sender in range(ranks):
            wait_ge_acquire(context, sender, 1, generation * programs)
            wait_eq_acquire(context, sender, 1, generation * programs)  # no peer is ahead: its boxes are not free
        for tile in range(ranks * programs):
            tl.store(output + tile * TILE + offsets, tl.load(box + tile * TILE + offsets))
    end(context, generation)


@triton.jit
def to_the_next(context, boxes, box, data, TILE: tl.constexpr):
    """A ring of one step: values and their signal in one."""
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    next, before = (rank + 1) % ranks, (rank + ranks - 1) % ranks
    offsets = tl.arange(0, TILE)
    barrier_acq_rel(context, 0, generation)
    put_signal_release(context, boxes, next, offsets, tl.load(data + offsets), 1, generation, offsets < TILE - 1)
    wait_acquire(context, before, 1, generation)
    tl.store(data + offsets, tl.load(box + offsets))
    end(context, generation)


@triton.jit
def never_ends(context):
    begin(context)


@triton.jit
def waits_for(context, peer, flag):
    generation = begin(context)
    wait_acquire(context, peer, flag, generation)
    end(context, generation)
