"""Prelaunched calls on GPUs: the three triggers, what gets through while one is armed, captures, failures."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import triton
from device_context import Context
from device_pool import Pool
from expected import any_bytes, same_bytes
from firing import fire, produce_and_fire
from on_ranks import default_stream, everyones, on_ranks
from sweeps import communicator

from sidelane import Communicator, CommunicatorClosedError, Config, PeerError, UnavailableError
from sidelane.program.wraparound import as_int32


@on_ranks(gpu=default_stream, rounds=40)
@pytest.mark.parametrize("variant", ["b2b", "pcpy"])
@pytest.mark.parametrize("numel", [1, 4097, 300_001])
@pytest.mark.parametrize("how", ["stream", "host", "kernel"])
def test_triggers(group: dist.ProcessGroup, how: str, variant: str, numel: int, rounds: int) -> None:
    """Right bytes in every round, with a producer that takes its time; prints microseconds of a trigger."""
    times: list[float] = []
    with communicator(group) as comm, torch.cuda.stream(torch.cuda.Stream()):
        n, rank = comm.world_size, comm.rank
        output, input = comm.empty(n * numel), torch.empty(numel)
        wanted = torch.empty(n * numel)
        # Kernels are loaded when they are first launched, which waits for the device: never while a call is armed.
        fire[(1,)](wanted.data_ptr(), 1)
        input.zero_().copy_(output.fill_(-1)[:numel])
        torch.cuda._sleep(1000)
        with comm.prepare_all_gather(output, input, variant=variant, host_trigger=how == "host") as handle:
            for step in range(rounds):
                made = [any_bytes(step, r, numel, torch.float32) for r in range(n)]
                mine = made[rank].to(input.device)
                wanted.copy_(torch.cat(made))
                handle.arm()
                output.fill_(-1)
                input.zero_()
                if (step + rank) % 3 == 0:
                    torch.cuda._sleep(2_000_000)
                input.copy_(mine)
                if how == "host":
                    torch.cuda.current_stream().synchronize()
                elif how == "kernel":
                    fire[(1,)](handle.trigger_address, as_int32(handle.trigger_value))
                began = time.perf_counter_ns()
                if how == "stream":
                    handle.trigger()
                elif how == "host":
                    handle.trigger_from_host()
                times.append((time.perf_counter_ns() - began) / 1e3)
                if how != "stream":
                    handle.wait()
                assert same_bytes(output, wanted), (how, variant, numel, step)
        comm.synchronize()
    slowest = max(everyones(group, statistics.median(times)))
    print(f"{how} trigger, {variant}, {numel} elements: {slowest:.2f} us of the host (median, slowest rank)")


@on_ranks(gpu=default_stream, rounds=30)
def test_the_kernel_that_produces_fires(group: dist.ProcessGroup, rounds: int) -> None:
    """The kernel that makes the data fires the collective while it still runs."""
    numel, size = 1 << 20, 1024
    with communicator(group) as comm, torch.cuda.stream(torch.cuda.Stream()):
        n, rank = comm.world_size, comm.rank
        output, input = comm.empty(n * numel), torch.empty(numel)
        count = torch.arange(numel)
        done = torch.zeros(1, dtype=torch.int32)
        produce_and_fire[(triton.cdiv(numel, size),)](
            input, 7, numel, done, output.data_ptr(), 1, SIZE=size
        )  # loads it
        with comm.prepare_all_gather(output, input) as handle:
            for step in range(rounds):
                done = torch.zeros(1, dtype=torch.int32)
                handle.arm()
                address, value = handle.trigger_address, as_int32(handle.trigger_value)
                produce_and_fire[(triton.cdiv(numel, size),)](
                    input, 7 * step + rank, numel, done, address, value, SIZE=size
                )
                handle.wait()
                for r in range(n):
                    assert output[r * numel : (r + 1) * numel].eq((count + 7 * step + r).float()).all(), (step, r)


@on_ranks(gpu=default_stream)
def test_work_gets_through_while_armed(group: dist.ProcessGroup) -> None:
    """A producer's work ends while a call is armed: kernels, copies of all kinds, many streams."""
    with communicator(group) as comm:
        n, rank, numel = comm.world_size, comm.rank, 1 << 20
        output, input = comm.empty(n * numel), torch.empty(numel)
        pinned = torch.full((numel,), float(rank), device="cpu").pin_memory()
        back = torch.empty(numel, device="cpu").pin_memory()
        streams = [torch.cuda.Stream() for _ in range(12)]

        def produce(step: int) -> None:
            for stream in streams:
                with torch.cuda.stream(stream):
                    staged = pinned.to(input.device, non_blocking=True)
                    staged += step
                    product = torch.ones(256, 256) @ torch.ones(256, 256)
                    assert product.shape == (256, 256)
                    input.copy_(staged)
                    back.copy_(input, non_blocking=True)
                _wait_for(stream.query, f"rank {rank}, step {step}: work on another stream")

        produce(0)  # loads kernels and fills the allocator, which may wait for the device
        with comm.prepare_all_gather(output, input) as handle:
            for step in range(5):
                handle.arm()
                produce(step)
                with torch.cuda.stream(streams[step]):
                    handle.trigger()
                    for r in range(n):
                        assert output[r * numel : (r + 1) * numel].eq(float(r + step)).all(), (step, r)


def _wait_for(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(1e-4)


@on_ranks(gpu=default_stream)
def test_on_the_default_stream(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        output, input = torch.empty(n * 1000), torch.empty(1000)
        input.fill_(0)
        torch.cuda._sleep(1000)
        with comm.prepare_all_gather(output, input) as handle:
            assert torch.cuda.current_stream().cuda_stream == 0
            for step in range(20):
                handle.arm()
                torch.cuda._sleep(1_000_000)
                input.fill_(step + 100 * rank)
                handle.trigger()
                assert output.view(n, 1000).eq(step + 100 * torch.arange(n)[:, None]).all()


@on_ranks(gpu=default_stream)
def test_captures_are_refused(group: dist.ProcessGroup) -> None:
    from cuda.bindings import driver as api

    with communicator(group) as comm:
        n = comm.world_size
        output, input = comm.empty(n * 100), torch.ones(100)
        with comm.prepare_all_gather(output, input) as handle:
            handle.arm()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                # By the driver: torch's graphs wait for the device, at the beginning and where they are instantiated.
                captured = api.CUstream(stream.cuda_stream)
                relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
                assert not api.cuStreamBeginCapture(captured, relaxed)[0]
                for refused in (handle.trigger, handle.wait):
                    with pytest.raises(ValueError, match="graph"):
                        refused()
                error, graph = api.cuStreamEndCapture(captured)
                assert not error
                api.cuGraphDestroy(graph)
            handle.trigger()
            assert output.eq(1).all()
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(UnavailableError, match="graph"):
            comm.prepare_all_gather(output, input)


@on_ranks(gpu=default_stream)
def test_closed_while_armed(group: dist.ProcessGroup) -> None:
    """It is fired and ends; the communicator goes on."""
    with communicator(group) as comm:
        n = comm.world_size
        output, input = comm.empty(n * 100), torch.ones(100)
        for host in (False, True):
            with comm.prepare_all_gather(output, input, host_trigger=host) as handle:
                handle.arm()
            comm.all_gather(output, input)
            assert output.eq(1).all()
            torch.cuda.synchronize()
        comm.prepare_all_gather(output, input).arm()  # close() of the communicator ends it
    torch.cuda.synchronize()


@on_ranks(gpu=default_stream, fresh=True, timeout_s=60)
@pytest.mark.parametrize("arms", [False, True])
def test_a_rank_that_never_fires(group: dist.ProcessGroup, arms: bool) -> None:
    """Rank 1 never fires, or does not even arm."""
    comm = communicator(group, timeout_s=2)
    output, input = comm.empty(comm.world_size * 100), torch.ones(100)
    handle = comm.prepare_all_gather(output, input)
    if comm.rank != 1 or arms:
        handle.arm()
    if comm.rank == 1:
        time.sleep(6)
        with contextlib.suppress(PeerError, CommunicatorClosedError):
            if arms:
                handle.trigger()
                comm.synchronize()
    else:
        with pytest.raises(PeerError, match="rank 1") as caught:
            handle.trigger()
            comm.synchronize()
        assert caught.value.ranks == (1,) and "all_gather" in str(caught.value)
    torch.cuda.synchronize()  # everything drains
    comm.close()


def wait_for_a_dead_peer(context: Context, victim: int) -> str:
    device = context.device
    comm = Communicator(device=device, config=Config(timeout_s=60))
    output, input = comm.empty(comm.world_size * 100), torch.ones(100, device=device)
    handle = comm.prepare_all_gather(output, input)
    handle.arm()
    dist.barrier()
    if context.rank == victim:
        os.kill(os.getpid(), 9)
    try:
        handle.trigger()
        comm.synchronize()
    except PeerError as error:
        torch.cuda.synchronize()
        return f"{error.ranks} {error}"
    return "no error"


def test_a_dead_peer(fresh_pool: type[Pool]) -> None:
    pool = fresh_pool()
    victim = len(pool.processes) - 1
    pool.begin(wait_for_a_dead_peer, victim)
    answers = pool.finish(30.0, but=(victim,))
    assert len(answers) == victim
    assert all(f"({victim},)" in text and f"rank {victim} died" in text for text in answers), answers
