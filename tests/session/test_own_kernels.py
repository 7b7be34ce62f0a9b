"""Kernels of one's own between CPU processes, by Triton's interpreter, and on GPUs."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from on_ranks import BOTH_STREAMS, everyones, on_ranks
from sweeps import communicator

pytest.importorskip("triton")

import triton
from firing import SIZE, fire, launch, produce_and_fire
from own_kernels import TILE, along_the_ring, counted, never_ends, push_tiles, sum_of_all, to_the_next, waits_for
from sliced import sliced_gather

from sidelane import Communicator, Config, PeerError, UnavailableError
from sidelane.device.layout import GENERATION, MAX_RANKS, REGION_FLAGS_OFFSET
from sidelane.program.wraparound import as_int32


@on_ranks(3, interpreted=True, seed=3, launches=15)
@on_ranks(long(1), long(2), long(3), interpreted=True, seed=3, launches=40)
@on_ranks(gpu=True, seed=0, launches=300, timeout_s=150)
@on_ranks(gpu=True, seed=1, launches=300, timeout_s=150)
def test_kernels_and_collectives_in_turn(group: dist.ProcessGroup, seed: int, launches: int) -> None:
    """Launches of several kernels and collectives in between, checked; who is late changes."""
    late = random.Random(100 * seed + dist.get_rank(group))
    draw = random.Random(seed)
    with communicator(group, timeout_s=40) as comm:
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
    assert sum(counts) > launches // 2 and everyones(group, counts) == [counts] * n


@on_ranks(2, 3, interpreted=True, seed=3, launches=6)
def test_sums_as_flags_and_the_last_program(group: dist.ProcessGroup, seed: int, launches: int) -> None:
    """Sums as flags, the first and the last program of a grid, and values with their signal; sums pass 0 and wrap."""
    late = random.Random(100 * seed + dist.get_rank(group))
    with communicator(group, timeout_s=40) as comm:
        n, rank, programs = comm.world_size, comm.rank, 4
        gather, ring = comm.load_kernel(counted, flags=2), comm.load_kernel(to_the_next, flags=2)
        box, counters = comm.empty(n * programs * TILE, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
        block = gather._block
        assert block is not None
        begun = (1 << 30) - launches // 2  # times 4 programs, that is 0 in the middle
        words = block.tensor.view(torch.int32)
        words[REGION_FLAGS_OFFSET // 4 + MAX_RANKS :][:n] = (begun * programs + 2**31) % 2**32 - 2**31
        gather.counters[GENERATION] = begun
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
        assert gather.generation() - begun == launches


def waits_in_vain(group: dist.ProcessGroup, flag: int) -> tuple[str, str, tuple[int, ...]]:
    """Wait for a signal that nobody sends; what is told."""
    device = torch.get_default_device()
    comm = Communicator(group, device=device, config=Config(timeout_s=3 if device.type == "cuda" else 1))
    kernel = comm.load_kernel(waits_for, flags=2)
    last = comm.world_size - 1
    try:
        kernel.launch((2,), last, flag)
        comm.synchronize()
    except PeerError as error:
        return type(error).__name__, str(error), error.ranks
    return "nothing", "", ()


@on_ranks(3, interpreted=True, flag=2)
@on_ranks(long(3), interpreted=True, flag=1)
@on_ranks(gpu=True, flag=1)
@on_ranks(gpu=True, flag=-1)
def test_a_signal_that_nobody_sends(group: dist.ProcessGroup, flag: int) -> None:
    """Also of a flag that there is not."""
    kind, text, ranks = waits_in_vain(group, flag)
    assert kind == "PeerTimeoutError" and "kernel waits_for" in text, text
    assert 2 in ranks or (ranks and torch.get_default_device().type == "cuda"), ranks


@on_ranks(1, 3, interpreted=True, rounds=6)
@on_ranks(gpu=BOTH_STREAMS, rounds=40)
def test_kernels_fire_handles(group: dist.ProcessGroup, rounds: int) -> None:
    """Two handles in turn, fired from inside of the kernel that makes the input, or behind it; one is closed so."""
    with communicator(group, timeout_s=60) as comm:
        n, rank, numel = comm.world_size, comm.rank, 3 * SIZE + 5
        output, input = comm.empty(n * numel), torch.empty(numel)
        exchanged, source = torch.empty(n * numel), torch.empty(n * numel)
        ramp, blocks = torch.arange(numel), triton.cdiv(numel, SIZE)
        words, done = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        # A GPU loads kernels when they are first launched, which waits for what is armed.
        launch(produce_and_fire, blocks, input, 7, numel, done, words.data_ptr(), 1, SIZE=SIZE)
        launch(fire, 1, words.data_ptr() + 4, -1)
        source.view(n, numel).copy_(ramp.expand(n, numel) + 3)
        assert words.tolist() == [1, -1] and input.eq(ramp + 7).all()
        gather = comm.prepare_all_gather(output, input, host_trigger=not input.is_cuda and bool(rank % 2))
        with gather, comm.prepare_all_to_all(exchanged, source, variant="pcpy") as exchange:
            for step in range(rounds):
                done.zero_()
                gather.arm()
                word = gather.trigger_address, as_int32(gather.trigger_value)
                launch(produce_and_fire, blocks, input, 100 * step + rank, numel, done, *word, SIZE=SIZE)
                if step == rounds - 1:
                    if input.is_cuda:  # where closing fires at once
                        torch.cuda.current_stream().synchronize()
                    break
                gather.wait()
                assert output.view(n, numel).eq(100 * step + torch.arange(n)[:, None] + ramp).all(), step
                exchange.arm()
                source.view(n, numel).copy_(ramp.expand(n, numel) + (step + rank))
                launch(fire, 1, exchange.trigger_address, as_int32(exchange.trigger_value))
                exchange.wait()
                assert exchanged.view(n, numel).eq(step + torch.arange(n)[:, None] + ramp).all(), step
        assert output.view(n, numel).eq(100 * (rounds - 1) + torch.arange(n)[:, None] + ramp).all()
        comm.barrier()


@on_ranks(1, 2, 3, interpreted=True, seed=1, calls=8)
@on_ranks(gpu=BOTH_STREAMS, seed=1, calls=60)
def test_kernels_fire_slices(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Slices of one program, fired by kernels, by the host and by the stream, in any order."""
    draw, fired = random.Random(100 * seed + dist.get_rank(group)), 0
    with communicator(group, timeout_s=60) as comm:
        n, rank, count, nbytes = comm.world_size, comm.rank, 4, 48
        shard, output = torch.zeros(count, nbytes, dtype=torch.uint8), comm.empty(n, count * nbytes, dtype=torch.uint8)
        word = torch.zeros(1, dtype=torch.int32)
        launch(fire, 1, word.data_ptr(), 1)  # a GPU loads kernels when they are first launched
        for number in range(count):
            shard[number] = 1
        with comm.load(sliced_gather(n, count, nbytes), {"shard": shard, "output": output}) as run:
            for call in range(calls):
                work = run(async_op=True)
                for number in draw.sample(range(count), count):
                    shard[number] = (17 * call + 5 * rank + number) % 251
                    how = draw.choice(("kernel", "kernel", "host", "stream"))
                    if how == "kernel":
                        ((address, value),) = run.trigger_by_kernel(number)
                        launch(fire, 1, address, as_int32(value))
                        fired += 1
                    elif how == "host":
                        if shard.is_cuda:
                            torch.cuda.current_stream().synchronize()
                        run.trigger_from_host(number)
                    else:
                        run.trigger(number)
                assert work is not None
                work.wait()
                found = output.view(n, count, nbytes)[:, :, nbytes // 2].tolist()
                assert found == [
                    [(17 * call + 5 * peer + number) % 251 for number in range(count)] for peer in range(n)
                ]
        comm.barrier()
    assert fired > 2


@on_ranks(gpu=True, replays=100)
def test_a_kernel_of_ones_own_in_a_graph(group: dist.ProcessGroup, replays: int) -> None:
    """A kernel of one's own and a collective in one graph, replayed, with launches in between; times of both, in us."""
    with communicator(group) as comm:
        n, rank, count = comm.world_size, comm.rank, 3000
        output, sums = comm.empty(n, count), torch.zeros(count)
        shard = torch.zeros(count)
        kernel = comm.load_kernel(push_tiles, flags=16)

        def both() -> None:
            kernel.launch((8,), comm.peers(output), shard, count, TILE=512)
            torch.sum(output, 0, out=sums)
            comm.all_reduce(sums)

        both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            both()
        for step in range(replays):
            shard.fill_(step + rank)
            output.fill_(-1)
            comm.barrier()
            graph.replay() if step % 3 else both()
            assert sums.eq(n * sum(step + peer for peer in range(n))).all(), step
            comm.barrier()
        assert kernel.generation() == replays + 1
        times = []
        for run in (lambda: kernel.launch((8,), comm.peers(output), shard, count, TILE=512), graph.replay):
            began = time.perf_counter()
            for _ in range(200):
                run()
            times.append((time.perf_counter() - began) / 200 * 1e6)
            torch.cuda.synchronize()
        print(times)


@on_ranks(2)
def test_compiled_kernels_run_on_no_cpu(group: dist.ProcessGroup) -> None:
    """What CPU ranks say to a compiled kernel; collectives go on."""
    with Communicator(group) as comm:
        kernel = comm.load_kernel(never_ends, flags=0)
        with pytest.raises(UnavailableError, match="TRITON_INTERPRET=1"):
            kernel.launch((1,))
        comm.barrier()
