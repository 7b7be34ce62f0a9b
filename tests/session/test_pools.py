"""Pools: any operation's results as symmetric memory, by CPU ranks and on GPUs."""

from __future__ import annotations

import gc
import random
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checked_calls import CheckedCall
from marks import long
from on_ranks import default_stream, on_ranks
from sweeps import communicator

import sidelane
from sidelane import Communicator, MismatchError, PeerError

NEW = "staged: its place in the pool has not been compared with the peers' yet"
MOVING, REDUCING = ("all_gather", "all_to_all", "broadcast"), ("reduce_scatter", "all_reduce")


def room() -> int:
    """Bytes of a pool. torch takes memory of GPUs in parts of 20 MiB."""
    return (96 if torch.get_default_device().type == "cuda" else 16) << 20


def staging(comm: Communicator) -> int:
    return sum(staging.nbytes for staging in comm.preparer._stagings[:2])


@on_ranks(2)
def test_symmetric_memory_is_made_inside_of_a_pool_as_outside(group: dist.ProcessGroup) -> None:
    """What a communicator takes for itself, or for its caller, while a pool is entered is the same as outside."""
    with communicator(group) as comm, sidelane.pool(comm, room()):
        comm.barrier()
        weights = comm.empty(comm.world_size)
        comm.all_gather(weights, torch.full((1,), float(comm.rank)))
        assert str(comm.reach(weights)) == "symmetric" and weights.tolist() == list(range(comm.world_size))


@on_ranks(2, 4, gpu=default_stream)
def test_results_of_operations_are_symmetric(group: dist.ProcessGroup) -> None:
    """Collectives on what operations return are symmetric after the first call."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        pool = sidelane.pool(comm, room())
        expected = torch.arange(5000.0) + torch.arange(n)[:, None]
        with pool:
            input = torch.arange(5000.0) + rank
            output = torch.empty(n, 5000)
        assert str(comm.reach(output)) == NEW
        for variant in ("auto", "auto", "pcpy", "b2b"):
            output.fill_(-1)
            comm.all_gather(output, input, variant=variant)
            assert torch.equal(output, expected), variant
        assert str(comm.reach(output)) == "symmetric"
        assert staging(comm) == 0 or output.is_cuda
        with pool:
            total = (input * 2).relu() + 1
        comm.all_reduce(total)
        assert torch.equal(total, n * (2 * torch.arange(5000.0) + 1) + n * (n - 1))
        assert str(comm.reach(total)) == "symmetric"
        assert str(comm.reach(torch.zeros(4))).startswith("staged"), "what is made outside lies outside"
        assert comm.location(output) is not None and len(comm.peers(output)) == n


@on_ranks(2)
def test_what_lies_in_a_pool(group: dist.ProcessGroup) -> None:
    """Whether what torch makes in many ways lies in the pool."""
    found: dict[str, bool] = {}
    with communicator(group) as comm:
        heap, pool = comm.heap, sidelane.pool(comm, room())

        def note(name: str, tensor: torch.Tensor | None) -> None:
            assert tensor is not None
            found[name] = heap.pool_at(tensor.data_ptr()) is not None

        outside = torch.randn(64, 64, requires_grad=True)
        layer = torch.nn.Linear(64, 64)
        with pool:
            note("empty", torch.empty(100))
            note("values", torch.tensor([1.0, 2.0]))
            note("strided", torch.empty_strided((3, 4), (1, 3)))
            note("matmul", outside @ outside)
            note("view", (outside @ outside).t()[1:, 2:])
            out = torch.empty(0)
            torch.add(outside.detach(), 1.0, out=out)
            note("out", out)
            values, places = outside.detach().sort()
            note("first of two", values), note("second of two", places)
            note("one of a list", outside.detach().split(3)[0].clone())
            note("chunk", torch.ones(30).chunk(3)[2])
            hidden = layer(outside)
            note("hidden", hidden)
            assert hidden.requires_grad
            hidden.square().sum().backward()
            note("gradient", layer.weight.grad)
            note("parameter", torch.nn.Parameter(torch.zeros(8)))
            note("bfloat16", outside.detach().bfloat16())
            note("clone", torch.ones(3, 5).t().clone())
            assert torch.equal(torch.ones(3, 5).cumsum(0).t().clone(), torch.ones(3, 5).cumsum(0).t())
            with torch.inference_mode():
                note("inference", outside @ outside)
            note("given", outside), note("in place", outside.detach().mul_(1))
        note("after", outside @ outside)
        weight = layer.weight.grad
        assert weight is not None
        expected = torch.autograd.grad(layer(outside).square().sum(), layer.weight)[0]
        assert torch.allclose(weight, expected, rtol=1e-4, atol=1e-4)
    assert {name for name, inside in found.items() if not inside} == {"given", "in place", "after"}


@on_ranks(2, long(3), calls=80, drift=0, kinds=MOVING)
@on_ranks(2, long(3), calls=40, drift=0, kinds=REDUCING)
@on_ranks(2, long(4), calls=80, drift=9, kinds=MOVING)
@on_ranks(2, long(4), calls=40, drift=9, kinds=REDUCING)
@on_ranks(gpu=default_stream, calls=200, drift=0, kinds=MOVING)
@on_ranks(gpu=default_stream, calls=200, drift=0, kinds=REDUCING)
@on_ranks(gpu=default_stream, calls=200, drift=9, kinds=MOVING)
@on_ranks(gpu=default_stream, calls=200, drift=9, kinds=REDUCING)
def test_ranks_that_allocate_alike_and_that_do_not(
    group: dist.ProcessGroup, calls: int, drift: int, kinds: tuple[str, ...]
) -> None:
    """Calls on tensors that come and go, at other places on some ranks once in ``drift`` tensors."""
    seed = 3 + (drift > 0)
    draw, own = random.Random(seed), random.Random(1000 * seed + group.rank())
    kept: list[torch.Tensor] = []
    moved: list[torch.Tensor] = []
    symmetric = staged = 0
    with communicator(group) as comm:
        pool = sidelane.pool(comm, room())
        for number in range(calls):
            kind, size = draw.choice(kinds), draw.choice((1, 33, 5000, 70_000))
            dtype = draw.choice((torch.uint8, torch.bfloat16, torch.float32)) if kind in MOVING else torch.float32
            if drift and own.randrange(drift) == 0:
                with pool:
                    moved.append(torch.empty(own.randrange(1, 3000)))
            if len(moved) > 5:
                del moved[own.randrange(5)]

            def make(what: str, numel: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                with pool:
                    return torch.empty(numel, dtype=dtype)

            is_in_place = kind == "all_reduce"
            call = CheckedCall(comm, kind, size, dtype, make, seed=seed + number, root=1, in_place=is_in_place)
            for _ in range(draw.choice((1, 1, 2))):
                call.run()
            says = comm.reach(call.output).how
            symmetric += says == "symmetric"
            staged += says == "staged"
            kept.append(call.output)
            if len(kept) > 6:
                del kept[draw.randrange(6)]
        assert symmetric + staged == calls and (staged > 0 if drift else staged == 0)
        on_gpus = call.output.is_cuda
        assert on_gpus or staged > calls // 4 or not drift
        assert on_gpus or drift or kinds == REDUCING or staging(comm) == 0


@on_ranks(3, gpu=default_stream, seed=1, rounds=12)
def test_lists_batches_and_exchanges(group: dist.ProcessGroup, seed: int, rounds: int) -> None:
    """Lists, batches, exchanges with split sizes, scatter and gather, asynchronous calls."""
    draw, own = random.Random(seed), random.Random(100 * seed + dist.get_rank(group))
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        pool = sidelane.pool(comm, room())
        for step in range(rounds):
            with pool:
                moved = torch.empty(own.randrange(1, 4000)) if step % 3 == 0 else None
                sizes = [draw.choice((1, 7, 300)) for _ in range(draw.randrange(1, 4))]
                inputs = [torch.full((size,), step + 1000 * rank, dtype=torch.int32) for size in sizes]
                outputs = [torch.empty(n * size, dtype=torch.int32) for size in sizes]
                exchanged = [torch.empty_like(output) for output in outputs]
                summed = torch.full((50,), rank + step, dtype=torch.int32)
            comm.all_gather(outputs, inputs)
            with comm.batch() as batch:
                batch.all_to_all(exchanged, outputs)
                batch.all_reduce(summed)
            assert summed.tolist() == [n * step + sum(range(n))] * 50, step
            for size, output, other in zip(sizes, outputs, exchanged, strict=True):
                assert output.view(n, size)[:, -1].tolist() == [step + 1000 * peer for peer in range(n)], step
                assert other.view(n, size).tolist() == [[step + 1000 * rank] * size] * n, step
            counts = [[draw.randrange(1, 4) for _ in range(n)] for _ in range(n)]
            sent, expected = counts[rank], [row[rank] for row in counts]
            with pool:
                source, target = torch.full((sum(sent),), step + rank), torch.full((sum(expected),), -1)
                part = torch.empty(3, dtype=torch.int64)
                whole = torch.arange(3 * n) + step if rank == 1 else None
                late = torch.full((20 * n,), -1)
                mine = torch.full((20,), rank + step)
            comm.all_to_all(target, source, input_split_sizes=sent, output_split_sizes=expected)
            came = [step + peer for peer in range(n) for _ in range(expected[peer])]
            assert target.tolist() == came, step
            comm.scatter(part, whole, root=1)
            assert part.tolist() == [3 * rank + step + i for i in range(3)], step
            comm.gather(whole, part, root=1)
            assert whole is None or whole.tolist() == list(range(step, step + 3 * n)), step
            work = comm.all_gather(late, mine, async_op=True)
            assert work is not None
            work.wait()
            assert late[::20].tolist() == [peer + step for peer in range(n)], step
            del moved


@on_ranks(3)
def test_a_tensor_that_some_ranks_have_in_no_pool(group: dist.ProcessGroup) -> None:
    """A tensor that is in the pool on some ranks only is staged; one that is new on one rank only is refused."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        pool = sidelane.pool(comm, room())
        for step in range(3):
            output = torch.empty(n * 100)
            if rank != 1:
                with pool:
                    output = torch.empty(n * 100)
            comm.all_gather(output, torch.full((100,), float(rank + step)))
            assert output[::100].tolist() == [float(peer + step) for peer in range(n)]
        assert comm.reach(output).how == "staged"
        pool = sidelane.pool(comm, room())
        with pool:
            kept, other = torch.ones(300), torch.ones(300)
        comm.all_reduce(kept), comm.all_reduce(other)
        assert kept[5] == n and comm.reach(other).how == "symmetric"
        if rank == 0:
            with pool:
                kept = kept.clone()
        with pytest.raises(MismatchError if rank == 0 else (MismatchError, PeerError)):
            comm.all_reduce(kept)
            comm.synchronize()


@on_ranks(3, gpu=default_stream)
def test_calls_on_compared_tensors_wait_for_nobody(group: dist.ProcessGroup) -> None:
    """Rank 0 starts a call and then tells its peers to come: a call that waited for their hosts would never return."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        with sidelane.pool(comm, room()):
            output, input = torch.empty(n * 100), torch.empty(100)
        for step in range(4):
            input.fill_(step + rank)
            if rank and step > 1:  # in the first one the ranks compare, and the next one is the first of its kind
                dist.barrier(group)
            work = comm.all_gather(output, input, async_op=rank == 0 and step > 0)
            if work is not None:
                if step > 1:
                    time.sleep(0.01)
                    dist.barrier(group)
                work.wait()
            assert output[::100].tolist() == [step + peer for peer in range(n)], step
        assert staging(comm) == 0 and comm.reach(output).how == "symmetric"


@on_ranks(1, 2, calls=6)
def test_calls_that_come_again_are_prepared_once(group: dist.ProcessGroup, calls: int) -> None:
    """How many of so many calls on the same tensors were prepared: in a pool; the same with an input that has not been
    compared, at other places on some ranks; that one with symmetric memory for an output; a list of both."""
    counts = []
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        symmetric = comm.empty(n * 100)
        with sidelane.pool(comm, room()):
            output, input, apart = torch.empty(n * 100), torch.empty(100), torch.empty(300)[100 * (rank % 2) :][:100]
        preparer = comm.preparer
        both = [(output, apart), (symmetric, input)]
        for pairs in ([(output, input)], both[:1], [(symmetric, apart)], both):
            real = type(preparer).prepare
            with mock.patch.object(type(preparer), "prepare", autospec=True, side_effect=real) as prepare:
                for call in range(calls):
                    for target, given in pairs:
                        target.fill_(-1), given.fill_(call + 10 * rank)
                    targets, sources = map(list, zip(*pairs, strict=True))
                    comm.all_gather(*((targets, sources) if len(pairs) > 1 else pairs[0]))
                    comm.synchronize()
                    for target in targets:
                        assert target.view(n, 100).unique(dim=1).flatten().tolist() == [call + 10 * p for p in range(n)]
            counts.append(prepare.call_count)
    assert counts[0] <= 2 and counts[1:] == [1, 1, 1]


@on_ranks(2, gpu=default_stream)
def test_memory_comes_and_goes(group: dist.ProcessGroup) -> None:
    """What is in use while tensors live and afterwards, and whether a tensor outlives its pool and communicator."""
    with communicator(group, memory_bytes=2 * room()) as comm:
        n, rank = comm.world_size, comm.rank
        before = comm.memory().used
        for step in range(3):  # more than is allowed, if nothing came back
            pool = sidelane.pool(comm, room())
            with pool:
                tensor = torch.full((1 << 20,), float(rank + step))
            with pool:
                other = torch.full((1 << 20,), float(step))
            assert tensor.data_ptr() != other.data_ptr() and pool.used >= 8 << 20
            comm.all_reduce(tensor)
            assert tensor[7] == n * step + sum(range(n))
            del pool, other
            gc.collect()
            assert comm.reach(tensor).how == "symmetric", "it lives on"
            del tensor
            gc.collect()
        pool = sidelane.pool(comm, room())
        used = comm.memory().used - before
        with pool:
            last = torch.full((1000,), 5.0)
        names = f"{comm.heap.pools.keys()}"
    gc.collect()
    assert last.sum() == 5000, "ordinary memory from now on"
    assert last.is_cuda or (used == room() and "pool 4 of lane 0" in names and "pool 3" not in names)


@on_ranks(2, gpu=default_stream)
def test_a_pool_that_is_full(group: dist.ProcessGroup) -> None:
    """What is said when there is no room, and that all goes on."""
    with communicator(group) as comm:
        pool = sidelane.pool(comm, 24 << 20)
        with pytest.raises(torch.OutOfMemoryError) as full, pool:  # on GPUs the pool's words replace those of torch
            kept = torch.ones(1 << 20)
            torch.empty(32 << 20, dtype=torch.uint8)
        on_gpus = "asked for 33554432 bytes, which do not fit"
        assert re.search(on_gpus if kept.is_cuda else "33554432 bytes do not fit.* of 25165824", str(full.value)), full
        comm.all_reduce(kept)
        assert kept[-1] == comm.world_size


@on_ranks(gpu=default_stream)
def test_any_operation(group: dist.ProcessGroup) -> None:
    """What the ranks of a layer compute, forward and backward, is what collectives take: no byte is staged."""
    n, rank = group.size(), group.rank()
    with communicator(group) as comm:
        pool = sidelane.pool(comm, 256 << 20)
        torch.manual_seed(5)
        layer = torch.nn.Linear(256, 512)
        with pool:
            tokens = torch.randn(1024, 256)
            hidden = torch.nn.functional.gelu(layer(tokens)).detach()
            gathered = torch.empty(n, *hidden.shape)
            exchanged = torch.empty_like(hidden)
            big = torch.full((12 << 20,), float(rank))
        for _ in range(3):
            comm.all_gather(gathered, hidden)
            comm.all_to_all(exchanged, hidden)
            comm.broadcast(big, root=1)
        assert torch.equal(gathered[rank], hidden)
        assert torch.equal(exchanged.chunk(n)[rank], hidden.chunk(n)[rank])
        assert (big == 1).all()
        assert staging(comm) == 0
        assert [comm.reach(each).how for each in (gathered, exchanged, big)] == ["symmetric"] * 3
        assert comm.reach(torch.empty(4)).how == "staged"


@on_ranks(gpu=default_stream, replays=12)
def test_graphs(group: dist.ProcessGroup, replays: int) -> None:
    """Graphs on tensors of a pool, and with a pool's memory for what is made inside them; other calls in between."""
    n, rank, size = group.size(), group.rank(), 1 << 20
    with communicator(group) as comm:
        pool = sidelane.pool(comm, 512 << 20)
        with pool:
            output, input = torch.empty(n, size), torch.empty(size)
            total = torch.empty(5000)

        def step() -> torch.Tensor:
            comm.all_gather(output, input)
            comm.all_reduce(total)
            return output.sum(0)

        for captured_in_pool in (False, True):
            input.fill_(1), total.fill_(1)
            comm.all_reduce(step())  # each call once, for its staging, before it is captured
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool.id if captured_in_pool else None):
                summed = step()
                comm.all_reduce(summed)
            inside = comm.heap.pool_at(summed.data_ptr()) is not None
            assert inside == captured_in_pool
            for replay in range(replays):
                input.fill_(replay + rank), total.fill_(replay + rank)
                graph.replay()
                once = n * replay + sum(range(n))
                assert output[:, -1].tolist() == [replay + peer for peer in range(n)], replay
                assert total[::499].unique().tolist() == [once], replay
                assert summed[:: size // 7].unique().tolist() == [n * once], replay
                with pool:
                    other = torch.full((n, 1000 * (replay % 5 + 1)), -1.0)
                    mine = torch.full_like(other[0], replay)
                comm.all_gather(other, mine)
                assert (other == replay).all()
            del graph, summed


@on_ranks(gpu=default_stream, seed=5, steps=200)
def test_streams_and_memory_that_is_given_back(group: dist.ProcessGroup, seed: int, steps: int) -> None:
    """Tensors that come and go on two streams, with what torch keeps for later given back in between."""
    n, rank = group.size(), group.rank()
    draw, own = random.Random(seed), random.Random(100 * seed + rank)
    found = {"symmetric": 0, "staged": 0}
    with communicator(group) as comm:
        pool = sidelane.pool(comm, 512 << 20)
        both = torch.cuda.current_stream(), torch.cuda.Stream()
        kept: list[torch.Tensor] = []
        for step in range(steps):
            size = draw.choice((1, 5000, 70_000, 3 << 20))
            stream = draw.choice(both)
            stream.wait_stream(both[0]), stream.wait_stream(both[1])
            with torch.cuda.stream(stream), pool:
                output = torch.empty(n, size)
                input = torch.full((size,), float(step + rank))
                comm.all_gather(output, input)
                expected = torch.arange(step, step + n).float()
                assert torch.equal(output[:, -1], expected) and torch.equal(output[:, 0], expected), step
            found[comm.reach(output).how] += 1
            if own.random() < 0.1:
                kept.append(input)
            if len(kept) > 3:
                kept.clear()
            if draw.random() < 0.05:
                torch.cuda.empty_cache()
            del output, input
    assert found["symmetric"] + found["staged"] == steps and found["symmetric"] > 0
