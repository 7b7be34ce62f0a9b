"""What ranks execute in the tests of prelaunched calls on GPUs (``test_device_prelaunch``)."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import firing
import torch
import torch.distributed as dist
import triton
from device_context import Context
from expected import any_bytes, same_bytes
from firing import fire, produce_and_fire

from sidelane import Communicator, CommunicatorClosedError, Config, PeerError, UnavailableError
from sidelane.program.wraparound import as_int32


def communicator(context: Context, **settings: float) -> Communicator:
    device = context.device
    return Communicator(device=device, config=Config(**{"timeout_s": 30, **settings}))  # type: ignore[arg-type]


def triggers(context: Context, how: str, variant: str, numel: int, rounds: int) -> float:
    """Right bytes in every round, with a producer that takes its time; median host microseconds of a trigger."""
    device = context.device
    times: list[float] = []
    with communicator(context) as comm, torch.cuda.stream(torch.cuda.Stream(device)):
        n, rank = comm.world_size, comm.rank
        output, input = comm.empty(n * numel), torch.empty(numel, device=device)
        wanted = torch.empty(n * numel, device=device)
        # Kernels are loaded when they are first launched, which waits for the device: never while a call is armed.
        fire[(1,)](wanted.data_ptr(), 1)
        input.zero_().copy_(output.fill_(-1)[:numel])
        torch.cuda._sleep(1000)
        with comm.prepare_all_gather(output, input, variant=variant, host_trigger=how == "host") as handle:
            for step in range(rounds):
                made = [any_bytes(step, r, numel, torch.float32) for r in range(n)]
                mine = made[rank].to(device)
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
    return statistics.median(times)


def fired_by_kernels(context: Context, name: str, *args: int, stream: bool = True) -> None:
    """One of the cases that CPU ranks run with Triton's interpreter."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream() if stream else None):
            getattr(firing, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def on_the_default_stream(context: Context, name: str, *args: int) -> None:
    fired_by_kernels(context, name, *args, stream=False)


def kernel_that_produces(context: Context, rounds: int) -> None:
    """The kernel that makes the data fires the collective while it still runs."""
    device = context.device
    numel, size = 1 << 20, 1024
    with communicator(context) as comm, torch.cuda.stream(torch.cuda.Stream(device)):
        n, rank = comm.world_size, comm.rank
        output, input = comm.empty(n * numel), torch.empty(numel, device=device)
        count = torch.arange(numel, device=device)
        done = torch.zeros(1, dtype=torch.int32, device=device)
        produce_and_fire[(triton.cdiv(numel, size),)](
            input, 7, numel, done, output.data_ptr(), 1, SIZE=size
        )  # loads it
        with comm.prepare_all_gather(output, input) as handle:
            for step in range(rounds):
                done = torch.zeros(1, dtype=torch.int32, device=device)
                handle.arm()
                address, value = handle.trigger_address, as_int32(handle.trigger_value)
                produce_and_fire[(triton.cdiv(numel, size),)](
                    input, 7 * step + rank, numel, done, address, value, SIZE=size
                )
                handle.wait()
                for r in range(n):
                    assert output[r * numel : (r + 1) * numel].eq((count + 7 * step + r).float()).all(), (step, r)


def work_while_armed(context: Context) -> None:
    """What a producer may use gets through while a call is armed: kernels, copies of all kinds, many streams."""
    device = context.device
    with communicator(context) as comm:
        n, rank, numel = comm.world_size, comm.rank, 1 << 20
        output, input = comm.empty(n * numel), torch.empty(numel, device=device)
        pinned = torch.full((numel,), float(rank)).pin_memory()
        back = torch.empty(numel).pin_memory()
        streams = [torch.cuda.Stream(device) for _ in range(12)]

        def produce(step: int) -> None:
            for stream in streams:
                with torch.cuda.stream(stream):
                    staged = pinned.to(device, non_blocking=True)
                    staged += step
                    product = torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)
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


def on_default_stream(context: Context) -> None:
    device = context.device
    with communicator(context) as comm:
        n, rank = comm.world_size, comm.rank
        output, input = torch.empty(n * 1000, device=device), torch.empty(1000, device=device)
        input.fill_(0)
        torch.cuda._sleep(1000)
        with comm.prepare_all_gather(output, input) as handle:
            assert torch.cuda.current_stream().cuda_stream == 0
            for step in range(20):
                handle.arm()
                torch.cuda._sleep(1_000_000)
                input.fill_(step + 100 * rank)
                handle.trigger()
                assert output.view(n, 1000).eq(step + 100 * torch.arange(n, device=device)[:, None]).all()


def in_a_capture(context: Context) -> list[str]:
    from cuda.bindings import driver as api

    device = context.device
    texts = []
    with communicator(context) as comm:
        n = comm.world_size
        output, input = comm.empty(n * 100), torch.ones(100, device=device)
        with comm.prepare_all_gather(output, input) as handle:
            handle.arm()
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                # By the driver: torch's graphs wait for the device, at the beginning and where they are instantiated.
                captured = api.CUstream(stream.cuda_stream)
                relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
                assert not api.cuStreamBeginCapture(captured, relaxed)[0]
                for refused in (handle.trigger, handle.wait):
                    try:
                        refused()
                    except ValueError as error:
                        texts.append(str(error))
                error, graph = api.cuStreamEndCapture(captured)
                assert not error
                api.cuGraphDestroy(graph)
            handle.trigger()
            assert output.eq(1).all()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                comm.prepare_all_gather(output, input)
            except UnavailableError as error:
                texts.append(str(error))
    return texts


def closed_while_armed(context: Context) -> None:
    """It is fired and ends; the communicator goes on."""
    device = context.device
    with communicator(context) as comm:
        n = comm.world_size
        output, input = comm.empty(n * 100), torch.ones(100, device=device)
        for host in (False, True):
            with comm.prepare_all_gather(output, input, host_trigger=host) as handle:
                handle.arm()
            comm.all_gather(output, input)
            assert output.eq(1).all()
            torch.cuda.synchronize()
        comm.prepare_all_gather(output, input).arm()  # close() of the communicator ends it
    torch.cuda.synchronize()


def absent(context: Context, arms: bool) -> tuple[str, tuple[int, ...]]:
    """Rank 1 never fires, or does not even arm."""
    device = context.device
    comm = communicator(context, timeout_s=2.0)
    output, input = comm.empty(comm.world_size * 100), torch.ones(100, device=device)
    handle = comm.prepare_all_gather(output, input)
    text, ranks = "", ()
    if context.rank != 1 or arms:
        handle.arm()
    if context.rank == 1:
        time.sleep(6)
    else:
        handle.trigger()
    try:
        if context.rank != 1 or arms:
            if context.rank == 1:
                handle.trigger()
            comm.synchronize()
    except PeerError as error:
        text, ranks = str(error), error.ranks
    except CommunicatorClosedError as error:
        text = str(error)
    torch.cuda.synchronize()  # everything drains
    comm.close()
    return text, ranks


def wait_for_a_dead_peer(context: Context, victim: int) -> str:
    device = context.device
    comm = communicator(context, timeout_s=60.0)
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
