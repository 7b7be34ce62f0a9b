"""Communicators on GPUs behind billions of calls, in several threads, and in forked copies."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from counting import come_close_to_a_renewal, skip
from device_context import Context
from on_ranks import on_ranks
from test_device_repeats import Repeated
from turns import Turns

from sidelane import Communicator, Config

AROUND = [2**26 - 100, 2**31 - 50, 2**31 + 1000, 2**32 - 50, 2**32 + 1000]
CALLS = (
    ("all_gather", "b2b", 1000, torch.bfloat16),
    ("all_gather", "striped", 1 << 16, torch.int32),
    ("all_gather", "pcpy", 321, torch.int64),
    ("all_gather", "one_shot", 1000, torch.float32),
    ("all_to_all", "pcpy", 4096, torch.float32),
    ("all_reduce", "b2b", 5000, torch.float32),
    ("all_reduce", "two_shot", 100_000, torch.int32),
)


@on_ranks(gpu=True, timeout_s=120)
def test_flags_that_nobody_set_for_billions_of_calls(context: Context) -> None:
    """Calls of every kind, repeated ones too, whose flags were last set up to 2**26 calls ago; and across renewals."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), Communicator(device=context.device, config=Config(timeout_s=30)) as comm:
        repeated = [Repeated(comm, *call, place) for call in CALLS for place in ("symmetric", "ordinary")]
        weights = comm.empty(comm.world_size, 1000)
        graph = torch.cuda.CUDAGraph()
        captured = Repeated(comm, "all_gather", "b2b", 2000, torch.float32, "symmetric")
        captured.call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            comm.all_gather(captured.output, captured.input, variant="b2b")

        def everything(late: int) -> None:
            for call in repeated:
                if comm.rank == late:
                    torch.cuda._sleep(200_000)
                call.call()
            with comm.prepare_all_gather(weights, weights[comm.rank], host_trigger=True) as handle:
                for fire in (handle.trigger, handle.trigger_from_host):
                    handle.arm()
                    torch.cuda.current_stream().synchronize()
                    time.sleep(0.002 * (comm.rank == late))
                    fire()
                    handle.wait()
            captured.output.fill_(-1)
            graph.replay()

        for round_number, number in enumerate(AROUND):
            skip(comm, number)
            for again in range(3):
                everything((round_number + again) % comm.world_size)
            come_close_to_a_renewal(comm, 5)
            for _ in range(10):  # by way of compiled code: the renewal falls among these
                repeated[0].call()
                repeated[6].call()
            assert number <= comm.calls.number() < number + 2**27
        comm.synchronize()
        for call in repeated:
            call.check()
        assert torch.equal(captured.output, captured.expected().to(captured.output.dtype))


@on_ranks(gpu=True, fresh=True, timeout_s=120, in_turn=True)
@on_ranks(gpu=True, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, timeout_s=120, in_turn=False)
def test_two_communicators_of_one_group_have_a_thread_each(context: Context, in_turn: bool) -> None:
    """Each with a stream of its own; both need memory of the peers again and again.

    In no order at all, only what has run before in turn: a kernel that is loaded waits for those that run, and these
    may wait for a peer whose other thread loads one (docs/guide/lanes.md). They need more hardware channels then than
    CUDA gives unless asked (docs/internals/failure.md).
    """
    turns, rounds = Turns(2), 20
    group = dist.group.WORLD
    comms = [Communicator(group, device=context.device, config=Config(timeout_s=30)) for _ in range(2)]
    errors: list[BaseException] = []
    made = [0, 0]

    def work(which: int) -> None:
        try:
            torch.cuda.set_device(context.device)
            comm = comms[which]
            with torch.cuda.stream(torch.cuda.Stream()):
                for k in itertools.chain(range(rounds), () if in_turn else range(rounds)):
                    numel = (1 << 14) * (k % 7 + 1) * (which + 1) + 64 * k
                    with turns.take(which) if in_turn or made[which] < rounds else contextlib.nullcontext():
                        call = Repeated(comm, "all_gather", "b2b" if k % 2 else "auto", numel, torch.int32, "ordinary")
                        for _ in range(3):
                            call.call()
                        if k % 5 == which:
                            comm.empty(1 << 16)
                    call.check()
                    made[which] += 1
                    if made[which] == rounds:
                        turns.leave(which)
        except BaseException as error:
            errors.append(error)
        finally:
            turns.leave(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for comm in comms:
        comm.close()
    if errors:
        raise errors[0]
    assert made == ([20, 20] if in_turn else [40, 40])


@on_ranks(gpu=True)
def test_a_forked_copy_is_told_at_once(context: Context) -> None:
    """A copy of a rank makes calls. The rank itself goes on."""
    with Communicator(device=context.device, config=Config(timeout_s=30)) as comm:
        call = Repeated(comm, "all_gather", "b2b", 1000, torch.float32, "ordinary")
        for _ in range(5):
            call.call()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, _told(comm, call).encode())
            os._exit(0)
        os.close(writing)
        began = time.monotonic()
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() - began > 10:
                os.kill(child, 9)
            time.sleep(0.01)
        with os.fdopen(reading, "rb") as answer:
            text = answer.read().decode()
        for _ in range(5):
            call.call()
        call.check()
    assert text.count("CommunicatorClosedError") == 3 and "it was made in another process" in text


def _told(comm: Communicator, call: Repeated) -> str:
    told: list[Any] = []
    for function in (lambda: comm.all_gather(call.output, call.input, variant="b2b"), comm.barrier, comm.synchronize):
        try:
            function()
            told.append("nothing")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    comm.close()
    return "; ".join(told)
