"""Programs that callers release in slices, by CPU ranks and on GPUs."""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from on_ranks import on_ranks
from ranks import crew
from sliced import sliced_gather

from sidelane import Communicator, Config, PeerError
from sidelane.errors import SidelaneError, UnavailableError
from sidelane.program.pieces import gathering_program, row_slices


@on_ranks(1, 2, long(3), seed=1, calls=60)
@on_ranks(long(2), 3, 4, seed=5, calls=60)
@on_ranks(gpu=True, seed=0, calls=200)
@on_ranks(gpu=True, seed=1, calls=200)
@on_ranks(gpu=True, seed=2, calls=200)
def test_slices_go_as_they_come(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Random slices, in any order, some late, from the stream and from the host, with collectives in between."""
    late = random.Random(100 * seed + dist.get_rank(group))
    draw = random.Random(seed)
    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        slices, nbytes = draw.choice(((1, 40), (3, 1000), (5, 64), (4, 1 << 16)))
        shard = torch.zeros(slices, nbytes, dtype=torch.uint8)
        output = comm.empty(n, slices * nbytes, dtype=torch.uint8)
        with comm.load(sliced_gather(n, slices, nbytes), {"shard": shard, "output": output}) as run:
            assert run.triggers == slices
            for call in range(calls):
                order = list(range(slices))
                late.shuffle(order)
                work = run(async_op=True)
                for number in order:
                    if late.random() < 0.1:
                        time.sleep(0.005 * late.random())
                    shard[number] = (17 * call + 5 * rank + number) % 251
                    if late.random() < 0.3:
                        if shard.is_cuda:
                            torch.cuda.current_stream().synchronize()
                        run.trigger_from_host(number)
                    else:
                        run.trigger(number)
                assert work is not None
                if draw.random() < 0.7:
                    work.wait()
                    found = output.view(n, slices, nbytes)[:, :, nbytes // 2].tolist()
                    expected = [
                        [(17 * call + 5 * peer + number) % 251 for number in range(slices)] for peer in range(n)
                    ]
                    assert found == expected, (call, found, expected)
                if draw.random() < 0.3:
                    total = torch.ones(100)
                    comm.all_reduce(total)
                    assert total.eq(n).all()
        comm.barrier()


@on_ranks(gpu=True, replays=60)
@pytest.mark.parametrize("seed", range(4))
def test_slices_in_graphs(group: dist.ProcessGroup, seed: int, replays: int) -> None:
    """Two calls in a graph, triggers in any order, replayed with new data between eager ones; what is refused there."""
    draw, told = random.Random(seed), []
    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        slices, nbytes = draw.choice(((1, 40), (3, 1000), (5, 64), (4, 1 << 20)))
        shard, base = torch.zeros(slices, nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        output = comm.empty(n, slices * nbytes, dtype=torch.uint8)
        copies = [torch.empty_like(output) for _ in range(2)]
        with comm.load(sliced_gather(n, slices, nbytes), {"shard": shard, "output": output}) as run:

            def call(copy: torch.Tensor, step: int) -> None:
                work = run(async_op=True)
                for number in random.Random(10 * rank + step).sample(range(slices), slices):
                    torch.add((base + 5 * rank + number + step).expand(nbytes), 0, out=shard[number])
                    run.trigger(number)
                assert work is not None
                work.wait()
                copy.copy_(output)

            def is_right(first: int, step: int) -> bool:
                wanted = torch.arange(n)[:, None] * 5 + torch.arange(slices) + step + first
                return bool(copies[step].view(n, slices, nbytes).eq(wanted.to(torch.uint8)[:, :, None]).all())

            def check(first: int) -> None:
                assert is_right(first, 0) and is_right(first, 1), first

            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                # Kernels are loaded now: to load one waits for the device, and later that for a trigger.
                torch.add((base + 1).expand(nbytes), 0, out=shard[0])
                copies[0].copy_(output)
                is_right(0, 0)
                call(copies[0], 0)
                call(copies[1], 1)
                check(0)
                comm.barrier()
                comm.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                call(copies[0], 0)
                work = run(async_op=True)
                for wrong in (run.trigger_from_host, run.trigger_by_kernel, lambda number: work.wait()):
                    try:
                        wrong(0)
                    except (RuntimeError, ValueError) as error:
                        told.append(str(error))
                for number in range(slices):
                    torch.add((base + 5 * rank + number + 1).expand(nbytes), 0, out=shard[number])
                    run.trigger(number)
                work.wait()
                copies[1].copy_(output)
            for replay in range(replays):
                with torch.cuda.stream(stream):
                    first = (7 * replay) % 100
                    base.fill_(first)
                    for copy in copies:
                        copy.zero_()
                    if draw.random() < 0.3:
                        call(copies[0], 0)
                    else:
                        graph.replay()
                    if draw.random() < 0.3:
                        call(copies[1], 1)
                        call(copies[0], 0)
                    else:
                        graph.replay()
                    check(first)
            stream.synchronize()
            comm.barrier()
            comm.synchronize()
            del graph
    assert len(told) == 3 and "trigger_from_host" in told[0] and "trigger_by_kernel" in told[1]
    assert "not fired in this capture" in told[2]


@on_ranks(2, 3, calls=6)
@on_ranks(gpu=True, calls=60)
def test_parts_are_read_as_they_come(group: dist.ProcessGroup, calls: int) -> None:
    """Parts of a gather are waited for in any order; what is refused, and leaves the call as it is."""
    told: list[str] = []

    def attempt(what: Any) -> None:
        try:
            what()
            told.append("nothing")
        except (RuntimeError, ValueError, UnavailableError) as error:
            told.append(f"{type(error).__name__}: {error}")

    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=30)) as comm:
        n, rank, rows, pieces = comm.world_size, comm.rank, 5, 2
        gathered = comm.empty(n, rows, 8, dtype=torch.uint8)
        with comm.load(gathering_program(n, rows, pieces, 8), {"rows": gathered}) as run:
            assert (run.triggers, run.arrivals) == (0, (n - 1) * pieces)
            attempt(lambda: run.wait_for_arrival(0))
            for call in range(calls):
                gathered.zero_()
                gathered[rank] = (10 * call + rank) % 251
                work = run(async_op=True)
                assert work is not None
                if call == 1:
                    attempt(lambda: run.wait_for_arrival(run.arrivals))
                    if not gathered.is_cuda:  # as if a graph were captured, which there is not here
                        with pytest.MonkeyPatch.context() as patch:
                            patch.setattr(comm.backend, "caller_stream", lambda: (0, True))
                            patch.setattr(comm.backend, "capture_of", lambda place: 7)
                            attempt(lambda: run(async_op=True))
                for number in random.Random(call).sample(range(run.arrivals), run.arrivals):
                    run.wait_for_arrival(number)
                    turn, piece = divmod(number, pieces)
                    source, part = (rank - turn - 1) % n, row_slices(rows, pieces)[piece]
                    assert gathered[source, part].eq((10 * call + source) % 251).all(), (call, number)
                work.wait()
        comm.barrier()
    words = [
        "not under way",
        f"allowed={[*range((n - 1) * pieces)]}",
        *([] if gathered.is_cuda else ["cannot be captured"]),
    ]
    assert len(told) == len(words) and all(word in text for word, text in zip(words, told, strict=True)), told


@on_ranks(2, gpu=True)
def test_triggers_that_are_fired_in_the_wrong_way(group: dist.ProcessGroup) -> None:
    """What callers are told who fire in the wrong way; the call ends well all the same."""
    told: list[str] = []
    with Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=20)) as comm:
        n, rank = comm.world_size, comm.rank
        shard, output = torch.full((2, 8), rank + 1, dtype=torch.uint8), comm.empty(n, 16, dtype=torch.uint8)

        def attempt(what: Any) -> None:
            try:
                what()
                told.append("nothing")
            except (RuntimeError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")

        with comm.load(sliced_gather(n, 2, 8), {"shard": shard, "output": output}) as run:
            attempt(lambda: run.trigger(0))
            attempt(run)
            work = run(async_op=True)
            attempt(lambda: run.trigger(2))
            run.trigger(1)
            attempt(lambda: run.trigger(1))
            attempt(lambda: run(async_op=True))
            run.trigger(0)
            assert work is not None
            work.wait()
            assert output.eq(torch.arange(n)[:, None] + 1).all()
            run(async_op=True)  # closing fires what is left
        assert output.eq(torch.arange(n)[:, None] + 1).all()
        attempt(lambda: run.trigger(0))
        comm.barrier()
    words = ["never called", "allowed=async_op=True", "allowed=[0, 1]", "fired in this call", "triggers [0]", "closed"]
    assert len(told) == len(words) and all(word in text for word, text in zip(words, told, strict=True)), told


def left(group: dist.ProcessGroup, how: str) -> tuple[str, str, tuple[int, ...]]:
    """Rank 0 fires one of two triggers, then ``raises``, ``dies`` or ``sleeps``: what each rank is told."""
    comm = Communicator(group, device=torch.get_default_device(), config=Config(timeout_s=3))
    n, rank = comm.world_size, comm.rank
    shard, output = torch.zeros(2, 8, dtype=torch.uint8), comm.empty(n, 16, dtype=torch.uint8)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(comm)
            run = stack.enter_context(comm.load(sliced_gather(n, 2, 8), {"shard": shard, "output": output}))
            work = run(async_op=True)
            run.trigger(0)
            if rank == 0 and how == "raises":
                raise RuntimeError("no more")
            if rank == 0 and how == "dies":
                os._exit(3)
            if rank or how != "sleeps":
                run.trigger(1)
            assert work is not None
            work.wait()
            comm.synchronize()
    except PeerError as error:
        return type(error).__name__, str(error), error.ranks
    except (RuntimeError, SidelaneError) as error:
        return type(error).__name__, str(error), ()
    return "nothing", "", ()


@pytest.mark.parametrize("how", ["raises", "dies", "sleeps"])
def test_a_rank_that_does_not_fire(how: str) -> None:
    with crew(3) as own:
        own_end, *others = own.run(left, None, how, dying=(0,) if how == "dies" else ())
    for kind, text, ranks in others:
        assert ranks == (0,), (kind, text, ranks)
        assert kind == ("PeerTimeoutError" if how == "sleeps" else "PeerError")
        assert "untriggered: RuntimeError: no more" in text or how != "raises", text
    if how != "dies":
        assert own_end[0] == ("RuntimeError" if how == "raises" else "PeerTimeoutError"), own_end


@on_ranks(gpu=True)
@pytest.mark.parametrize("how", ["raises", "sleeps"])
def test_a_rank_that_does_not_fire_on_gpus(group: dist.ProcessGroup, how: str) -> None:
    kind, text, culprits = left(group, how)
    assert group.rank() == 0 or (kind in ("PeerError", "PeerTimeoutError") and culprits == (0,)), text
