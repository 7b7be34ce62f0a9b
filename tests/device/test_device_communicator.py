"""The communicator on GPUs: graphs, streams, memory that is dropped, a peer that does not come."""

from __future__ import annotations

import gc
import time

import loads
import pytest
import torch
import torch.distributed as dist
from expected import any_bytes, close, numbers, reduced, same_bytes
from on_ranks import default_stream, on_ranks
from sweeps import communicator

from sidelane import CommunicatorClosedError, PeerError, UnavailableError
from sidelane.memory.release import held_bytes


@on_ranks(gpu=default_stream, replays=100)
def test_a_program_of_ones_own_in_a_graph(group: dist.ProcessGroup, replays: int) -> None:
    """A program of one's own and a collective in one graph, replayed with eager calls of both in between."""
    with communicator(group) as comm:
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


@on_ranks(gpu=default_stream)
def test_memory_dropped_at_bad_moments(group: dist.ProcessGroup) -> None:
    """Symmetric memory of closed communicators goes while a graph is captured and while a call waits for its trigger.

    torch waits for the device in both cases, which ended the process in the first and never ended in the second.
    """
    nbytes = 256 << 20

    def leave_behind() -> list[object]:
        """The last reference to a tensor of a communicator that was closed, and one that only a collection finds."""
        with communicator(group) as closed:
            cycle: list[object] = [closed.empty(nbytes, dtype=torch.uint8)]
            cycle.append(cycle)
            return [closed.empty(nbytes, dtype=torch.uint8)]

    with communicator(group) as comm:
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


@on_ranks(gpu=default_stream, calls=200)
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Sizes, dtypes and buffers at random, calls back to back without a look from the host."""
    with communicator(group) as comm:
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


@on_ranks(gpu=default_stream, replays=20)
def test_graphs_replay_between_eager_calls(group: dist.ProcessGroup, replays: int) -> None:
    """Every collective in one graph, replayed with fresh inputs, with eager calls between the replays."""
    with communicator(group) as comm:
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


@on_ranks(gpu=default_stream)
def test_staging_cannot_grow_in_a_capture(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        tensor = torch.ones(100_000)
        with (
            pytest.raises(UnavailableError, match="make the call once before the capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            comm.all_reduce(tensor, variant="b2b")
        comm.all_reduce(tensor, variant="b2b")
        assert tensor.eq(comm.world_size).all()


@on_ranks(gpu=default_stream)
def test_calls_on_changing_streams(group: dist.ProcessGroup) -> None:
    """Calls on changing streams: the communicator keeps them in order, since they share flags and staging."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        streams = [torch.cuda.Stream() for _ in range(3)]
        results = []
        for i in range(60):
            stream = streams[i % 3]
            with torch.cuda.stream(stream):
                tensor = torch.full((50_001,), float(rank + i))
                if i % 7 == rank:
                    torch.cuda._sleep(2_000_000)
                work = comm.all_reduce(tensor, async_op=i % 4 == 0)
                if work is not None:
                    work.wait()
                results.append((i, tensor, tensor.clone()))
        torch.cuda.synchronize()
        for i, _, result in results:
            assert result.eq(n * (n - 1) / 2 + n * i).all()


@on_ranks(gpu=default_stream)
def test_tensors_dropped_during_asynchronous_calls(group: dist.ProcessGroup) -> None:
    """Tensors dropped right after an asynchronous call: the allocator must not reuse them before it has ended."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        outputs = []
        for i in range(30):
            shard = torch.full((1 << 18,), float(rank + i))
            output = torch.empty(n << 18)
            torch.cuda._sleep(500_000)
            work = comm.all_gather(output, shard, async_op=True)
            del shard
            torch.full((1 << 18,), -1.0)  # what would be handed the shard's bytes
            outputs.append((i, output, work))
        for i, output, work in outputs:
            assert work is not None
            work.wait()
            assert output.view(n, -1)[:, 0].tolist() == [float(r + i) for r in range(n)]
            assert output.view(n, -1)[:, -1].tolist() == [float(r + i) for r in range(n)]


@on_ranks(gpu=default_stream, fresh=True, timeout_s=60)
def test_an_absent_peer(group: dist.ProcessGroup) -> None:
    """Rank 1 makes one call fewer; the others find out, their streams drain, and the next call refuses."""
    comm = communicator(group, timeout_s=2)
    output, shard = comm.empty(1000 * comm.world_size), torch.ones(1000)
    comm.all_gather(output, shard)
    comm.synchronize()
    if comm.rank == 1:
        time.sleep(7)
        return
    comm.all_gather(output, shard)
    with pytest.raises(PeerError, match="rank 1") as caught:
        comm.synchronize()
    assert caught.value.ranks == (1,) and "all_gather" in str(caught.value)
    torch.cuda.synchronize()  # hangs if the streams have not drained
    with pytest.raises(CommunicatorClosedError):
        comm.all_gather(output, shard)
