"""Kernels of one's own, and what ranks do with them in tests: the same on GPUs and under Triton's interpreter.

A rank's tensors are on its default device, which the processes for GPUs set.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from sidelane import Communicator, Config
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
from sidelane.device.layout import GENERATION, MAX_RANKS, REGION_FLAGS_OFFSET
from sidelane.errors import PeerError, UnavailableError

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


def everything(group: dist.ProcessGroup, seed: int, launches: int) -> int:
    """Launches of several kernels and collectives in between, checked; who is late changes."""
    late = random.Random(100 * seed + dist.get_rank(group))
    draw = random.Random(seed)
    device = torch.get_default_device()
    with Communicator(group, device=device, config=Config(timeout_s=40)) as comm:
        n, rank = comm.world_size, comm.rank
        kernels = [comm.load_kernel(kernel, flags=12) for kernel in (push_tiles, sum_of_all, along_the_ring)]
        gather, reduce, ring = kernels
        heap = {dtype: comm.empty(n * 1000, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)}
        inputs, box = comm.empty(1000, dtype=torch.float16), comm.empty(TILE, dtype=torch.int64)
        addresses, boxes = comm.peers(inputs), comm.peers(box)
        counts = [0, 0, 0]
        for number in range(launches):
            which, count, wide = draw.randrange(4), draw.randrange(1, 1000), draw.randrange(1, 6)
            time.sleep(0.01 * late.random() * (late.random() < 0.2))
            if which == 0:
                output = heap[draw.choice(list(heap))]
                shard = (torch.arange(count) + 7 * rank + number).to(output.dtype)
                gather.launch((wide,), comm.peers(output), shard, count, TILE=TILE)
                comm.barrier()
                for peer in range(n):
                    expected = (torch.arange(count) + 7 * peer + number).to(output.dtype)
                    assert torch.equal(output[peer * count : (peer + 1) * count], expected), (number, count, peer)
                comm.barrier()
            elif which == 1:
                values = [torch.arange(count).mul(0.25).add(peer).half() for peer in range(n)]
                inputs[:count] = values[rank]
                result = torch.full((count,), -1.0, dtype=torch.float16)
                options: dict[str, Any] = {"num_warps": 8} if number % 2 else {}
                work = reduce.launch((1 + wide // 2, 2), result, addresses, count, TILE=TILE, async_op=True, **options)
                assert work is not None
                work.wait()
                assert torch.equal(result, torch.stack(values).float().sum(0).half()), (number, count)
            elif which == 2:
                data = torch.arange(TILE) + number
                ring.launch([1], boxes, box, data, TILE=TILE)
                expected = torch.arange(TILE) + number
                for peer in range(rank or n):
                    expected += peer
                assert torch.equal(data, expected), number
            else:
                total = torch.full((count,), rank + 1)
                comm.all_reduce(total)
                assert total.eq(n * (n + 1) // 2).all()
            if which < 3:
                counts[which] += 1
        comm.synchronize()
        assert [kernel.generation() for kernel in kernels] == counts
        ring.close()
        with pytest.raises(RuntimeError, match="closed"):
            ring.launch((1,), boxes, box, box, TILE=TILE)
    return sum(counts)


def counting(group: dist.ProcessGroup, seed: int, launches: int) -> int:
    """Sums as flags, the first and the last program of a grid, and values with their signal; sums pass 0 and wrap."""
    late = random.Random(100 * seed + dist.get_rank(group))
    device = torch.get_default_device()
    with Communicator(group, device=device, config=Config(timeout_s=40)) as comm:
        n, rank, programs = comm.world_size, comm.rank, 4
        gather, ring = comm.load_kernel(counted, flags=2), comm.load_kernel(to_the_next, flags=2)
        box, counters = comm.empty(n * programs * TILE, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
        assert gather._block is not None
        begun = (1 << 30) - launches // 2  # times 4 programs, that is 0 in the middle
        words = gather._block.tensor.view(torch.int32)
        words[REGION_FLAGS_OFFSET // 4 + MAX_RANKS :][:n] = (begun * programs + 2**31) % 2**32 - 2**31
        words[GENERATION] = begun
        comm.barrier()
        for number in range(launches):
            time.sleep(0.01 * late.random() * (late.random() < 0.3))
            shards = [torch.arange(programs * TILE) + 1000 * peer + number for peer in range(n)]
            output = torch.zeros(n * programs * TILE, dtype=torch.int64)
            gather.launch((programs,), comm.peers(box), box, output, counters, shards[rank], TILE=TILE)
            assert torch.equal(output, torch.cat(shards)), number
            assert not counters.any()
            data = torch.arange(TILE) + 100 * rank + number
            box[TILE - 1] = -1
            ring.launch((1,), comm.peers(box), box, data, TILE=TILE)
            expected = torch.arange(TILE) + 100 * ((rank + n - 1) % n) + number
            expected[-1] = -1  # outside of the mask
            assert torch.equal(data, expected), number
        return gather.generation() - begun


def refused(group: dist.ProcessGroup) -> list[str]:
    """What is wrong with a launch is said on every rank, and the next one is as if nothing had been."""
    device = torch.get_default_device()
    told: list[str] = []
    with Communicator(group, device=device, config=Config(timeout_s=20)) as comm:
        output, shard = comm.empty(comm.world_size * 10), torch.full((10,), 1.0 + comm.rank)
        push = comm.load_kernel(push_tiles, flags=4)
        other = comm.load_kernel(never_ends, flags=0)

        def attempt(what: Any) -> None:
            try:
                what()
                told.append("nothing")
            except (RuntimeError, TypeError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")

        for grid in ((), (0,), (1, 1, 1, 1), (2**31,)):
            attempt(lambda grid=grid: push.launch(grid, comm.peers(output), shard, 10, TILE=TILE))
        attempt(lambda: comm.peers(shard))
        attempt(lambda: comm.load_kernel(abs, flags=1))
        attempt(lambda: comm.load_kernel(push_tiles, flags=-1))
        attempt(lambda: push.launch((1 + comm.rank,), comm.peers(output), shard, 10, TILE=TILE))  # ranks differ
        other.launch((3,))
        comm.synchronize()
        attempt(lambda: other.launch((3,)))
        push.launch((2,), comm.peers(output), shard, 10, TILE=TILE)
        comm.synchronize()
        assert output.view(-1, 10)[:, 0].tolist() == [1.0 + peer for peer in range(comm.world_size)]
    return told


def waits_in_vain(group: dist.ProcessGroup, flag: int, dead: int | None) -> tuple[str, str, tuple[int, ...]]:
    """Wait for a signal that nobody sends, or for a rank that ends; what is told."""
    device = torch.get_default_device()
    comm = Communicator(group, device=device, config=Config(timeout_s=3 if device.type == "cuda" else 1))
    kernel = comm.load_kernel(waits_for, flags=2)
    last = comm.world_size - 1
    if comm.rank == dead:
        os._exit(3)
    try:
        kernel.launch((2,), last, flag)
        comm.synchronize()
    except PeerError as error:
        return type(error).__name__, str(error), error.ranks
    return "nothing", "", ()


def without_interpreter(group: dist.ProcessGroup) -> str:
    """What CPU ranks say to a compiled kernel; collectives go on."""
    with Communicator(group) as comm:
        kernel = comm.load_kernel(never_ends, flags=0)
        with pytest.raises(UnavailableError) as caught:
            kernel.launch((1,))
        comm.barrier()
        return str(caught.value)
