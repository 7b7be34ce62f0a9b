"""What ranks execute in the tests of the communicator on GPUs (``test_device_communicator``)."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import lanes
import loads
import pooled
import slices
import sweeps
import torch
import torch.distributed as dist
from device_context import Context
from expected import any_bytes, close, numbers, reduced, same_bytes

from sidelane import Communicator, CommunicatorClosedError, Config, PeerError, UnavailableError
from sidelane.memory.release import held_bytes


def sweep(context: Context, name: str, *args: Any, stream: bool = False) -> Any:
    """One of the sweeps that CPU ranks run too, on the legacy default stream or on another one."""
    group = dist.group.WORLD
    torch.set_default_device(context.device)
    try:
        if not stream:
            return getattr(sweeps, name)(group, *args)
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(sweeps, name)(group, *args)
    finally:
        torch.set_default_device(None)


def sweep_on_stream(context: Context, name: str, *args: Any) -> Any:
    return sweep(context, name, *args, stream=True)


def loaded(context: Context, name: str, *args: Any, stream: bool = False) -> Any:
    """One of the cases of programs of one's own that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream() if stream else None):
            return getattr(loads, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def in_lanes(context: Context, name: str, *args: Any) -> None:
    """One of the cases of lanes that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        getattr(lanes, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def in_slices(context: Context, name: str, *args: Any) -> Any:
    """One of the cases of programs of slices that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(slices, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def pooled_memory(context: Context, name: str, *args: Any) -> Any:
    """One of the cases of memory that comes and goes that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(pooled, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def captured_memory_stays(context: Context) -> None:
    """A tensor that a graph has captured is dropped; what is allocated afterwards lies elsewhere."""
    device = context.device
    with torch.cuda.stream(torch.cuda.Stream()), Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        output, input = comm.empty(n, 1000), torch.full((1000,), float(rank), device=device)
        comm.all_gather(output, input, variant="b2b")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            comm.all_gather(output, input, variant="b2b")
        address = output.data_ptr()
        del output
        others = [comm.empty(n, 1000) for _ in range(10)]
        assert address not in {each.data_ptr() for each in others}
        for each in others:
            each.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert all(each.eq(-1).all() for each in others)


def own_kernel(context: Context, name: str, *args: Any) -> Any:
    """One of the cases of kernels of one's own that CPU ranks run, too."""
    import own_kernels

    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(own_kernels, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)


def own_kernel_in_a_graph(context: Context, replays: int) -> list[float]:
    """A kernel of one's own and a collective in one graph, replayed, with launches in between; times of both, in us."""
    from own_kernels import push_tiles

    device = context.device
    with torch.cuda.stream(torch.cuda.Stream()), Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank, count = comm.world_size, comm.rank, 3000
        output, sums = comm.empty(n, count), torch.zeros(count, device=device)
        shard = torch.zeros(count, device=device)
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
        return times


def loaded_on_stream(context: Context, name: str, *args: Any) -> Any:
    return loaded(context, name, *args, stream=True)


def loaded_in_a_graph(context: Context, replays: int) -> None:
    """A program of one's own and a collective in one graph, replayed with eager calls of both in between."""
    device = context.device
    torch.set_default_device(device)
    try:
        with Communicator(device=device, config=Config(timeout_s=30)) as comm:
            n, rank = comm.world_size, comm.rank
            case = loads.Case(comm, loads.handover(n))
            shard, whole = torch.empty(500, dtype=torch.int32), torch.empty(500 * n, dtype=torch.int32)

            def calls() -> None:
                case.run()
                comm.all_gather(whole, shard)

            calls()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls()
            for replay in range(replays):
                case.fill(replay)
                shard.fill_(replay + rank)
                calls() if replay % 3 == 2 else graph.replay()
                comm.synchronize()
                case.check(replay)
                assert whole.view(n, -1)[:, 7].tolist() == [replay + peer for peer in range(n)]
            del graph
            case.run.close()
    finally:
        torch.set_default_device(None)


def nccl_control_plane(context: Context) -> None:
    group = dist.new_group(backend="nccl", device_id=context.device)
    torch.set_default_device(context.device)
    try:
        sweeps.moving_sweep(group, (torch.float32,), (33,))
    finally:
        torch.set_default_device(None)


def captured(context: Context, replays: int) -> None:
    """Every collective in one graph, replayed with fresh inputs, with eager calls between the replays."""
    device = context.device
    torch.set_default_device(device)
    try:
        with Communicator(device=device, config=Config(timeout_s=30)) as comm:
            n, rank = comm.world_size, comm.rank
            size = 1021
            source, shard = torch.empty(n * size), torch.empty(size)
            gathered, exchanged = comm.empty(n * size), torch.empty(n * size)
            scattered, summed = torch.empty(size), torch.empty(n * size)
            swapped, root = comm.empty(n * size), comm.empty(size)
            relayed = comm.empty((5 << 20) + 1)  # 20 MiB: two rounds

            def calls() -> None:
                comm.all_gather(gathered, shard)
                comm.all_to_all(exchanged, source)
                comm.reduce_scatter(scattered, source, op="max")
                comm.all_reduce(source, output=summed)
                comm.all_to_all(swapped, swapped, variant="swap")
                comm.broadcast(root, root=n - 1, variant="bcst")
                comm.broadcast(relayed, root=0, variant="relay")

            def fill(seed: int) -> list[torch.Tensor]:
                inputs = [numbers(seed, r, n * size, torch.float32) for r in range(n)]
                source.copy_(inputs[rank])
                shard.copy_(inputs[rank][:size])
                swapped.copy_(inputs[rank])
                root.fill_(float(seed + rank))
                relayed.copy_(torch.arange(len(relayed)) % 1000 + (seed if rank == 0 else -1))
                for output in (gathered, exchanged, scattered, summed):
                    output.fill_(float("nan"))
                return inputs

            def check(seed: int, inputs: list[torch.Tensor]) -> None:
                exchange = torch.cat([tensor[rank * size : (rank + 1) * size] for tensor in inputs])
                assert same_bytes(gathered, torch.cat([tensor[:size] for tensor in inputs]))
                assert same_bytes(exchanged, exchange)
                assert same_bytes(swapped, exchange)
                assert same_bytes(scattered, reduced(inputs, "max")[rank * size : (rank + 1) * size])
                assert close(summed, reduced(inputs, "sum"))
                assert root.eq(seed + n - 1).all()
                assert relayed.eq(torch.arange(len(relayed)) % 1000 + seed).all()

            calls()  # staging cannot be allocated while a graph is captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls()
            for seed in range(replays):
                inputs = fill(seed)
                if (seed + rank) % 5 == 0:
                    torch.cuda._sleep(3_000_000)
                graph.replay()
                check(seed, inputs)
                if seed % 3 == 0:
                    inputs = fill(seed + 1000)
                    calls()
                    check(seed + 1000, inputs)
            for _ in range(100):  # back to back, nobody waits for anybody on the host
                graph.replay()
            torch.cuda.synchronize()
            comm.synchronize()
    finally:
        torch.set_default_device(None)


def staging_in_a_capture(context: Context) -> str:
    device = context.device
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        tensor = torch.ones(100_000, device=device)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                comm.all_reduce(tensor, variant="b2b")
            text = "captured"
        except UnavailableError as error:
            text = str(error)
        comm.all_reduce(tensor, variant="b2b")
        assert tensor.eq(comm.world_size).all()
        return text


def streams_in_turn(context: Context) -> None:
    """Calls on changing streams: the communicator keeps them in order, since they share flags and staging."""
    device = context.device
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        streams = [torch.cuda.Stream() for _ in range(3)]
        results = []
        for i in range(60):
            stream = streams[i % 3]
            with torch.cuda.stream(stream):
                tensor = torch.full((50_001,), float(rank + i), device=device)
                if i % 7 == rank:
                    torch.cuda._sleep(2_000_000)
                work = comm.all_reduce(tensor, async_op=i % 4 == 0)
                if work is not None:
                    work.wait()
                results.append((i, tensor, tensor.clone()))
        torch.cuda.synchronize()
        for i, _, result in results:
            assert result.eq(n * (n - 1) / 2 + n * i).all()


def async_memory(context: Context) -> None:
    """Tensors dropped right after an asynchronous call: the allocator must not reuse them before it has ended."""
    device = context.device
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        outputs = []
        for i in range(30):
            shard = torch.full((1 << 18,), float(rank + i), device=device)
            output = torch.empty(n << 18, device=device)
            torch.cuda._sleep(500_000)
            work = comm.all_gather(output, shard, async_op=True)
            del shard
            torch.full((1 << 18,), -1.0, device=device)  # what would be handed the shard's bytes
            outputs.append((i, output, work))
        for i, output, work in outputs:
            assert work is not None
            work.wait()
            assert output.view(n, -1)[:, 0].tolist() == [float(r + i) for r in range(n)]
            assert output.view(n, -1)[:, -1].tolist() == [float(r + i) for r in range(n)]


def absent(context: Context) -> tuple[str, tuple[int, ...]]:
    """Rank 1 makes one call fewer; the others find out, their streams drain, and the next call refuses."""
    device = context.device
    comm = Communicator(device=device, config=Config(timeout_s=2))
    output, shard = comm.empty(1000 * comm.world_size), torch.ones(1000, device=device)
    comm.all_gather(output, shard)
    comm.synchronize()
    if comm.rank == 1:
        time.sleep(7)
        return "", ()
    comm.all_gather(output, shard)
    try:
        comm.synchronize()
    except PeerError as error:
        torch.cuda.synchronize()  # hangs if the streams have not drained
        try:
            comm.all_gather(output, shard)
        except CommunicatorClosedError:
            return str(error), error.ranks
    raise AssertionError("no error was raised")


def interrupted(context: Context, where: str) -> tuple[str, str, tuple[int, ...]]:
    """Ctrl-C hits rank 0 while the last rank keeps all others waiting. The time-out would fail the test.

    In ``synchronize``: in the wait of the host for a queued call. In the ``first_call`` of a kind: in the comparison
    between the ranks. In its ``own_work``: between its calls, inside the ``with`` block.
    """
    device = context.device
    last = context.world_size - 1
    began = time.monotonic()
    outcome = ("", "no error was raised", ())
    try:
        with Communicator(device=device, config=Config(timeout_s=600)) as comm:
            output, shard = comm.empty(1000 * comm.world_size), torch.ones(1000, device=device)
            comm.all_gather(output, shard)
            comm.synchronize()
            if comm.rank == 0:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            if comm.rank == last:
                time.sleep(4)
            if where == "first_call":
                comm.all_reduce(shard)
            for _ in range(3):
                comm.all_gather(output, shard)
            while where == "own_work" and comm.rank == 0:
                time.sleep(0.01)
            comm.synchronize()
    except KeyboardInterrupt as error:
        outcome = (type(error).__name__, "", ())
    except PeerError as error:
        outcome = (type(error).__name__, str(error), error.ranks)
    torch.cuda.synchronize()  # hangs if the streams have not drained
    assert time.monotonic() - began < 40, "somebody waited for the time-out"
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("sidelane-watch")]
    assert len(left) <= len(context.parties), f"threads that outlive the communicator: {left}"
    return outcome


def random_sizes(context: Context, seed: int, calls: int) -> None:
    """Sizes, dtypes and buffers at random, calls back to back without a look from the host."""
    device = context.device
    torch.set_default_device(device)
    try:
        with Communicator(device=device, config=Config(timeout_s=30)) as comm:
            n, rank = comm.world_size, comm.rank
            draw = torch.Generator().manual_seed(seed)

            def number(high: int) -> int:
                return int(torch.randint(0, high, (1,), generator=draw, device="cpu"))

            heap = comm.empty(n * 70_000, dtype=torch.uint8)
            pending = []
            for call in range(calls):
                size = number(60) if number(2) else number(60_000)
                inputs = [any_bytes(seed + call, r, n * size, torch.uint8) for r in range(n)]
                output = heap[: n * size] if number(2) else torch.empty(n * size, dtype=torch.uint8)
                variant = ("b2b", "pcpy")[number(2)]
                if number(2):
                    comm.all_gather(output, inputs[rank][:size], variant=variant)
                    expected = torch.cat([tensor[:size] for tensor in inputs])
                else:
                    comm.all_to_all(output, inputs[rank], variant=variant)
                    expected = torch.cat([tensor[rank * size : (rank + 1) * size] for tensor in inputs])
                pending.append((output.clone(), expected))
            assert all(same_bytes(a, b) for a, b in pending)
    finally:
        torch.set_default_device(None)


def memory_dropped_at_bad_moments(context: Context) -> None:
    """Symmetric memory of closed communicators goes while a graph is captured and while a call waits for its trigger.

    torch waits for the device in both cases, which ended the process in the first and never ended in the second.
    """
    device = context.device
    nbytes = 256 << 20

    def leave_behind() -> list[object]:
        """The last reference to a tensor of a communicator that was closed, and one that only a collection finds."""
        with Communicator(device=device, config=Config(timeout_s=30)) as closed:
            cycle: list[object] = [closed.empty(nbytes, dtype=torch.uint8)]
            cycle.append(cycle)
            return [closed.empty(nbytes, dtype=torch.uint8)]

    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        output, input = comm.empty(n, 1000), comm.empty(1000)
        comm.all_gather(output, input, variant="b2b")
        used, _ = held_bytes()
        left = leave_behind()
        torch.cuda.synchronize()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            comm.all_gather(output, input, variant="b2b")
            left.clear()
            gc.collect()
        for value in range(3):
            input.fill_(value + 10 * rank)
            output.fill_(-1)
            graph.replay()
            assert output[:, 0].tolist() == [value + 10 * peer for peer in range(n)]

        left = leave_behind()
        torch.cuda.synchronize()
        with comm.prepare_all_gather(output, input) as handle:
            for value in range(3):
                output.fill_(-1)
                input.fill_(value + 20 * rank)
                handle.arm()
                left.clear()
                gc.collect()
                handle.trigger()
                assert output[:, 0].tolist() == [value + 20 * peer for peer in range(n)]
        comm.empty(1)  # a good moment
        kept, dropped = held_bytes()
        assert kept < used + nbytes and not dropped, "what was dropped was not given back"
