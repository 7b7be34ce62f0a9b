"""Kernels that fire triggers, and what ranks do with them in tests: the same on GPUs and under Triton's interpreter.

A rank's tensors are on its default device, which the processes for GPUs set.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from sliced import sliced_gather

from sidelane import Communicator, Config
from sidelane.program.wraparound import as_int32

SIZE = 64


# What changes from call to call must not choose between kernels: one that is loaded while a call is armed waits for it.
@triton.jit(do_not_specialize=["address", "value"])
def fire(address, value):
    """Store what fires a prelaunched call, after all that this block has read and written."""
    tl.debug_barrier()
    word = tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(word, tl.cast(value, tl.int32), sem="release", scope="sys")


@triton.jit(do_not_specialize=["seed", "address", "value"])
def produce_and_fire(input, seed, count, done, address, value, SIZE: tl.constexpr):
    """Fill ``input`` with ``seed`` and a running number; the last block to end fires from inside the kernel."""
    block = tl.program_id(0)
    offsets = block * SIZE + tl.arange(0, SIZE)
    tl.store(input + offsets, (offsets + seed).to(tl.float32), mask=offsets < count)
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        word = tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(word, tl.cast(value, tl.int32), sem="release", scope="sys")


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel; the interpreter's must not copy tensors, whose bytes peers fetch before it has ended."""
    if isinstance(kernel, triton.JITFunction):
        kernel[(programs,)](*arguments, **options)
        return
    from sidelane.device.triton_interpreter import run_interpreted

    run_interpreted(kernel, (programs,), arguments, options)


def handles(group: dist.ProcessGroup, rounds: int) -> None:
    """Two handles in turn, fired from inside of the kernel that makes the input, or behind it; one is closed so."""
    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=60)) as comm:
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


def slices(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Slices of one program, fired by kernels, by the host and by the stream, in any order; how many by kernels."""
    draw, fired = random.Random(100 * seed + dist.get_rank(group)), 0
    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=60)) as comm:
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
    return fired
