"""Collectives in kernels on GPUs: right bytes by every protocol, eager and captured, and peers that do not come."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from device_context import Context
from device_pool import Pool
from expected import any_bytes, close, numbers, reduced, same_bytes
from on_ranks import default_stream, on_ranks
from sweeps import communicator

from sidelane import Communicator, CommunicatorClosedError, Config, PeerError
from sidelane.program.kernel import MOST_BLOCKS
from sidelane.program.kernel_chunks import SLOTS, TILE_BYTES, chunks_of

Reductions = tuple[tuple[str, str], ...]
SHOTS: Reductions = (("reduce_scatter", "one_shot"), ("all_reduce", "one_shot"), ("all_reduce", "two_shot"))
REDUCTIONS: Reductions = (*SHOTS, ("all_reduce", "two_shot_push"))
NARROW: Reductions = tuple((kind, f"{variant}_narrow") for kind, variant in SHOTS)


@on_ranks(gpu=default_stream)
@pytest.mark.parametrize("sizes", [(1, 7, 4096), (65_548, 200_000), (1 << 20, 1_048_592, 3_000_001)])
def test_moving(group: dist.ProcessGroup, sizes: tuple[int, ...]) -> None:
    """Both kinds that move, by every protocol, back to back: the host looks at nothing until the end."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        heap = comm.empty(n * max(sizes) + 64, dtype=torch.uint8)
        found = []
        cases = itertools.product(sizes, (True, False), (True, False), (True, False), (0, 16, 5))
        for seed, (size, gather, symmetric, in_place, shift) in enumerate(cases):
            inputs = [any_bytes(seed, r, size if gather else n * size, torch.uint8) for r in range(n)]
            room = heap if symmetric else torch.empty(n * size + shift, dtype=torch.uint8)
            output = room[shift : shift + n * size]
            output.fill_(0xA5)
            input = torch.empty(len(inputs[rank]) + rank, dtype=torch.uint8)[rank:]  # aligned otherwise on each rank
            if in_place:
                input = output[rank * size : (rank + 1) * size] if gather else output
            input.copy_(inputs[rank])
            (comm.all_gather if gather else comm.all_to_all)(output, input, variant="one_shot")
            parts = inputs if gather else [tensor[rank * size : (rank + 1) * size] for tensor in inputs]
            found.append((output.clone(), torch.cat(parts), (size, gather, symmetric, in_place, shift)))
        for output, expected, case in found:
            assert same_bytes(output, expected), case
        assert comm.submitted().kernels == len(found) == 24 * len(sizes)
        assert comm.submitted().peer_copies == 0


@on_ranks(gpu=default_stream)
@pytest.mark.parametrize("sizes", [(1, 7, 4096, 70_001), (393_216, 524_288, 524_289, 1_572_864, 3_000_001, 40 << 20)])
def test_broadcasting(group: dist.ProcessGroup, sizes: tuple[int, ...]) -> None:
    """From every root, by every protocol, next to another kernel, back to back: roots hear of no data."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        heap = comm.empty(max(sizes) + 64, dtype=torch.uint8)
        whole, part = torch.empty(n, dtype=torch.int64), torch.full((1,), rank)
        found = []
        cases = list(itertools.product(sizes, range(n), (True, False), (0, 16, 5)))
        for seed, (size, root, symmetric, shift) in enumerate(cases):
            room = heap if symmetric else torch.empty(size + 64, dtype=torch.uint8)
            shift += 0 if symmetric else rank  # aligned otherwise on each rank
            tensor = room[shift : shift + size]
            expected = any_bytes(seed, root, size, torch.uint8)
            tensor.copy_(expected if rank == root else any_bytes(seed, n, size, torch.uint8))
            comm.broadcast(tensor, root=root, variant="one_shot")
            found.append((tensor.clone(), expected, (size, root, symmetric, shift)))
            if seed % 3 == 0:
                comm.all_gather(whole, part, variant="one_shot")
                found.append((whole.clone(), torch.arange(n), "all_gather between"))
        for output, expected, case in found:
            assert same_bytes(output, expected), case
        assert comm.submitted().kernels == len(found)
        assert comm.submitted().peer_copies == 0
        small = torch.full((3,), rank)
        for number in range(2000):  # a root may not run away from its peers
            root = number // 500 % n
            if rank == (root + 1) % n and number % 100 == 0:
                torch.cuda._sleep(1_000_000)
            small.fill_(number if rank == root else -1)
            comm.broadcast(small, root=root, variant="one_shot")
            found.append((small.clone(), torch.full((3,), number), number))
        for output, expected, case in found[-2000:]:
            assert same_bytes(output, expected), case


@on_ranks(
    gpu=default_stream, dtypes=(torch.float32,), sizes=(1, 333, 70_001, 300_000), reductions=REDUCTIONS, timeout_s=150
)
@on_ranks(
    gpu=default_stream, dtypes=(torch.float16,), sizes=(1, 333, 70_001, 300_000), reductions=REDUCTIONS, timeout_s=150
)
@on_ranks(
    gpu=default_stream, dtypes=(torch.bfloat16,), sizes=(1, 333, 70_001, 300_000), reductions=REDUCTIONS, timeout_s=150
)
@on_ranks(
    gpu=default_stream, dtypes=(torch.int32,), sizes=(1, 333, 70_001, 300_000), reductions=REDUCTIONS, timeout_s=150
)
@on_ranks(
    gpu=default_stream, dtypes=(torch.int64,), sizes=(1, 333, 70_001, 300_000), reductions=REDUCTIONS, timeout_s=150
)
# On a tenth of the GPU:
@on_ranks(
    gpu=default_stream,
    dtypes=(torch.bfloat16, torch.int32),
    sizes=(333, 70_001, 300_000, 1 << 20),
    reductions=NARROW,
    timeout_s=150,
)
def test_reducing(
    group: dist.ProcessGroup, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...], reductions: Reductions
) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        heaps = [comm.empty(n * max(sizes) + 8, dtype=torch.int64) for _ in range(2)]
        # In ordinary memory, or so many elements from the start of symmetric memory; five meet all of what is below.
        shifts = itertools.cycle((None, 0, 8, 0, 1))
        for seed, (dtype, size, op) in enumerate(itertools.product(dtypes, sizes, ("sum", "avg", "min", "max"))):
            inputs = [numbers(seed, r, n * size, dtype) for r in range(n)]  # drawn on the host, which takes a while
            result = reduced(inputs, op)
            own, count = slice(rank * size, (rank + 1) * size), n * size
            rooms = [heap.view(dtype) for heap in heaps]
            for (kind, variant), in_place in itertools.product(reductions, (True, False)):
                shift = next(shifts)
                source, output = (
                    torch.empty(count, dtype=dtype) if shift is None else room[shift : shift + count] for room in rooms
                )
                source.copy_(inputs[rank])
                if kind == "reduce_scatter":
                    output = source[own] if in_place else output[:size]
                    comm.reduce_scatter(output, source, op=op, variant=variant)
                else:
                    output = source if in_place else output
                    comm.all_reduce(source, op=op, output=output, variant=variant)
                expected = result[own] if kind == "reduce_scatter" else result
                exact = op in ("min", "max") or not dtype.is_floating_point
                case = (dtype, size, op, kind, variant, in_place, shift)
                assert (same_bytes if exact else close)(output, expected), case


@on_ranks(gpu=default_stream, calls=20)
def test_reducing_in_chunks(group: dist.ProcessGroup, calls: int) -> None:
    """All_reduces of more chunks than their slots, back to back, ranks running ahead."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        shard = 82 * MOST_BLOCKS * TILE_BYTES // 4 - 1001
        source, output = comm.empty(n * shard, dtype=torch.int32), comm.empty(n * shard, dtype=torch.int32)
        assert chunks_of(4 * shard, MOST_BLOCKS).count > 2 * SLOTS
        generator = torch.Generator(source.device)
        wrong = torch.zeros((), dtype=torch.int64)
        for call in range(calls):
            expected = torch.zeros_like(output)
            for sender in range(n):
                generator.manual_seed(8 * call + sender)
                drawn = torch.randint(-(1 << 20), 1 << 20, (n * shard,), generator=generator, dtype=torch.int32)
                expected += drawn
                if sender == rank:
                    source.copy_(drawn)
            if call % 5 == rank:
                torch.cuda._sleep(2_000_000)
            target = source if call % 2 else output
            comm.all_reduce(source, output=target, variant="two_shot_push")
            wrong += (target != expected).sum()
        assert int(wrong.item()) == 0


@on_ranks(gpu=default_stream, replays=20)
def test_graphs_replay_between_eager_calls(group: dist.ProcessGroup, replays: int) -> None:
    """Every kernel in one graph, replayed with fresh inputs, eager calls between, ranks running ahead."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        small, medium, large = 1021, 60_000, 300_000
        source, shard, big = torch.empty(n * small), torch.empty(small), torch.empty(large)
        gathered, exchanged, pushed = comm.empty(n * small), torch.empty(n * small), comm.empty(n * large)
        pulled, scattered, summed, both = (torch.empty(k) for k in (n * large, small, n * small, large))
        part, wide, packed, mixed, added = (torch.empty(k * medium) for k in (1, n, n, n, 1))  # block flags
        there, stored, sent, kept = (comm.empty(n * large) for _ in range(4))  # read and written by the peers
        read = torch.empty(large)

        def calls() -> None:
            comm.all_gather(gathered, shard, variant="one_shot")
            comm.all_to_all(exchanged, source, variant="one_shot")
            comm.reduce_scatter(scattered, source, op="max", variant="one_shot")
            comm.all_gather(pushed, big, variant="one_shot")
            comm.all_reduce(source, output=summed, variant="one_shot")
            comm.all_gather(pulled, big, variant="one_shot")
            comm.all_reduce(big, output=both, variant="two_shot")
            comm.all_gather(packed, part, variant="one_shot")
            comm.all_to_all(mixed, wide, variant="one_shot")
            comm.reduce_scatter(added, wide, op="max", variant="one_shot")
            comm.reduce_scatter(read, there, op="max", variant="one_shot")
            comm.all_reduce(there, op="max", output=stored, variant="two_shot")
            comm.all_reduce(there, op="max", output=sent, variant="b2b")
            comm.all_reduce(there, op="max", output=kept, variant="two_shot_push")
            comm.all_gather(gathered, shard)  # of copy engines, perhaps: they take turns

        def fill(seed: int) -> tuple[list[torch.Tensor], ...]:
            inputs = [numbers(seed, r, n * small, torch.float32) for r in range(n)]
            bigs = [numbers(seed + 500, r, large, torch.float32) for r in range(n)]
            source.copy_(inputs[rank])
            shard.copy_(inputs[rank][:small])
            big.copy_(bigs[rank])
            wides = [numbers(seed + 900, r, n * large, torch.float32) for r in range(n)]
            there.copy_(wides[rank])
            wide.copy_(wides[rank][: n * medium])
            part.copy_(wides[rank][:medium])
            for output in (gathered, exchanged, pulled, scattered, summed, both, packed, mixed, added, read):
                output.fill_(float("nan"))
            return inputs, bigs, wides

        def check(inputs: list[torch.Tensor], bigs: list[torch.Tensor], wides: list[torch.Tensor]) -> None:
            most, mine = reduced(wides, "max"), slice(rank * medium, (rank + 1) * medium)
            assert same_bytes(packed, torch.cat([tensor[:medium] for tensor in wides]))
            assert same_bytes(mixed, torch.cat([tensor[mine] for tensor in wides]))
            assert same_bytes(added, most[mine])
            assert same_bytes(read, most[rank * large : (rank + 1) * large])
            assert all(same_bytes(output, most) for output in (stored, sent, kept))
            own = slice(rank * small, (rank + 1) * small)
            assert same_bytes(gathered, torch.cat([tensor[:small] for tensor in inputs]))
            assert same_bytes(exchanged, torch.cat([tensor[own] for tensor in inputs]))
            assert same_bytes(scattered, reduced(inputs, "max")[own])
            assert same_bytes(pushed, torch.cat(bigs)) and same_bytes(pulled, torch.cat(bigs))
            assert close(summed, reduced(inputs, "sum")) and close(both, reduced(bigs, "sum"))

        calls()  # staging cannot be allocated while a graph is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        for seed in range(replays):
            data = fill(seed)
            if (seed + rank) % 5 == 0:
                torch.cuda._sleep(3_000_000)
            graph.replay()
            check(*data)
            if seed % 3 == 0:
                data = fill(seed + 1000)
                calls()
                check(*data)
        for _ in range(200):  # back to back, nobody waits for anybody on the host
            graph.replay()
        data = fill(5000)
        graph.replay()
        check(*data)
        comm.synchronize()


@on_ranks(gpu=default_stream, calls=1000)
def test_a_thousand_back_to_back_with_delays(group: dist.ProcessGroup, calls: int) -> None:
    """Eager calls of changing size and kind, back to back, with delays on single ranks."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        heap = comm.empty(n * 50_000)
        found = []
        for call in range(calls):
            size = (7, 50_000, 1000, 50_000, 50_000)[call % 5]  # LL and block flags, after each other and themselves
            value = float(call % 100)
            if call % 50 == rank:
                torch.cuda._sleep(1_000_000)
            shard = torch.full((size,), value + rank)
            output = heap[: n * size] if call % 3 else torch.empty(n * size)
            comm.all_gather(output, shard, variant="one_shot")
            comm.all_reduce(shard, variant=("one_shot", "one_shot", "two_shot")[call % 3])
            parts = output.view(n, size)
            found.append(torch.stack([parts[:, 0].sum(), parts[:, -1].sum(), shard.min(), shard.max()]))
        expected = torch.tensor([[n * float(call % 100) + n * (n - 1) / 2] * 4 for call in range(calls)])
        assert torch.equal(torch.stack(found), expected)


@on_ranks(gpu=default_stream, fresh=True, timeout_s=60)
def test_an_absent_peer(group: dist.ProcessGroup) -> None:
    """Rank 1 makes one call fewer; the others find out, their kernels give up, and the next call refuses."""
    comm = communicator(group, timeout_s=2)
    output, shard = torch.empty(1000 * comm.world_size), torch.ones(1000)
    comm.all_gather(output, shard, variant="one_shot")
    comm.synchronize()
    if comm.rank == 1:
        time.sleep(7)
        return
    with pytest.raises(PeerError, match="rank 1") as caught:
        for _ in range(50):
            comm.all_gather(output, shard, variant="one_shot")
        comm.synchronize()
    assert caught.value.ranks == (1,) and "a kernel" in str(caught.value)
    torch.cuda.synchronize()  # hangs if the kernels spin on
    with pytest.raises(CommunicatorClosedError):
        comm.all_gather(output, shard, variant="one_shot")


@on_ranks(gpu=default_stream, timeout_s=150)
@pytest.mark.parametrize("sizes", [(1, 333, 30_000), (33_001, 70_001, 600_000)])
def test_through_host_memory(group: dist.ProcessGroup, sizes: tuple[int, ...]) -> None:
    """Words with flags, and plain bytes by blocks that store or load, in turn and back to back, in and out of place."""
    with communicator(group, peers="host") as comm:
        n, rank, found = comm.world_size, comm.rank, []
        for seed, (dtype, size) in enumerate(itertools.product((torch.bfloat16, torch.int32, torch.int64), sizes)):
            inputs = [numbers(seed, r, n * size, dtype) for r in range(n)]
            own = slice(rank * size, (rank + 1) * size)
            total = reduced(inputs, "sum")
            wanted = {
                "all_reduce": total,
                "reduce_scatter": total[own],
                "all_gather": torch.cat([data[:size] for data in inputs]),
                "all_to_all": torch.cat([data[own] for data in inputs]),
                "broadcast": inputs[n - 1],
            }
            for in_place, (kind, right) in itertools.product((True, False), wanted.items()):
                room = torch.empty(n * size + 1, dtype=dtype)[seed % 2 :][: n * size]
                room.copy_(inputs[rank])
                if rank == seed % n:
                    torch.cuda._sleep(200_000)
                if kind == "all_reduce":
                    comm.all_reduce(
                        room, output=(out := room if in_place else torch.empty_like(room)), variant="one_shot"
                    )
                elif kind == "broadcast":
                    comm.broadcast(out := room, root=n - 1, variant="one_shot")
                elif kind == "reduce_scatter":
                    out = room[own] if in_place else torch.empty_like(room[own])
                    comm.reduce_scatter(out, room, variant="one_shot")
                elif kind == "all_gather":
                    part = room[:size].clone()
                    out = room if in_place else torch.empty_like(room)
                    comm.all_gather(out, out[own].copy_(part) if in_place else part, variant="one_shot")
                else:
                    comm.all_to_all(out := room if in_place else torch.empty_like(room), room, variant="one_shot")
                found.append((out.clone(), right, (dtype, size, kind, in_place)))
        for out, right, case in found:
            assert (close if out.dtype.is_floating_point else same_bytes)(out, right), case
        assert comm.submitted().kernels == len(found) and comm.submitted().peer_copies == 0
        assert comm.reach(room).how == "staged"


@on_ranks(gpu=default_stream, fresh=True, timeout_s=60)
@pytest.mark.parametrize("size", [1000, 100_000])
def test_an_absent_peer_through_host_memory(group: dist.ProcessGroup, size: int) -> None:
    comm = communicator(group, timeout_s=2, peers="host")
    comm.all_reduce(tensor := torch.ones(size), variant="one_shot")
    comm.synchronize()
    if comm.rank == 1:
        time.sleep(7)
        return
    with pytest.raises(PeerError, match="rank 1") as caught:
        comm.all_reduce(tensor, variant="one_shot")
        comm.synchronize()
    assert caught.value.ranks == (1,)
    torch.cuda.synchronize()  # hangs if the kernels spin on


def wait_for_a_dead_peer(context: Context, victim: int) -> str:
    """The victim sleeps until it is killed; the others call. The time-out is far away: the death must be noticed."""
    device = context.device
    comm = Communicator(device=device, config=Config(timeout_s=600))
    output, shard = torch.empty(1000 * comm.world_size, device=device), torch.ones(1000, device=device)
    comm.all_gather(output, shard, variant="one_shot")
    comm.synchronize()
    if comm.rank == victim:
        time.sleep(1000)
    comm.all_gather(output, shard, variant="one_shot")
    try:
        comm.synchronize()
    except PeerError as error:
        torch.cuda.synchronize()
        return f"{error.ranks} {error}"
    raise AssertionError("no error was raised")


def test_a_dead_peer(fresh_pool: type[Pool]) -> None:
    pool = fresh_pool()
    victim = len(pool.processes) - 1
    answers = pool.run_and_kill(victim, 6.0, wait_for_a_dead_peer, victim)  # the others hang in their call by then
    assert len(answers) == victim
    assert all(f"({victim},)" in message and f"rank {victim} died" in message for message in answers)
