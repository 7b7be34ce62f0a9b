"""What ranks do with tensors in pools; on CPUs and on GPUs."""

from __future__ import annotations

import gc
import random
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checked_calls import CheckedCall

import sidelane
from sidelane import Communicator, Config, MismatchError, PeerError

POOLS = Config(timeout_s=30)
MOVING, REDUCING = ("all_gather", "all_to_all", "broadcast"), ("reduce_scatter", "all_reduce")


def room() -> int:
    """Bytes of a pool. torch takes memory of GPUs in parts of 20 MiB."""
    return (96 if torch.get_default_device().type == "cuda" else 16) << 20


def _communicator(group: dist.ProcessGroup, config: Config = POOLS) -> Communicator:
    return Communicator(group, device=torch.get_default_device(), config=config)


def staging(comm: Communicator) -> int:
    return sum(staging.nbytes for staging in comm.preparer._stagings[:2])


def symmetric_memory_inside(group: dist.ProcessGroup) -> tuple[str, list[float]]:
    """What a communicator takes for itself, or for its caller, while a pool is entered is the same as outside."""
    with _communicator(group) as comm, sidelane.pool(comm, room()):
        comm.barrier()
        weights = comm.empty(comm.world_size)
        comm.all_gather(weights, torch.full((1,), float(comm.rank)))
        return str(comm.reach(weights)), weights.tolist()


def results_of_operations(group: dist.ProcessGroup) -> list[Any]:
    """Collectives on what operations return; what the communicator says of each, before and after the first call."""
    said: list[Any] = []
    with _communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        pool = sidelane.pool(comm, room())
        expected = torch.arange(5000.0) + torch.arange(n)[:, None]
        with pool:
            input = torch.arange(5000.0) + rank
            output = torch.empty(n, 5000)
        said.append(str(comm.reach(output)))
        for variant in ("auto", "auto", "pcpy", "b2b"):
            output.fill_(-1)
            comm.all_gather(output, input, variant=variant)
            assert torch.equal(output, expected), variant
        said.append(str(comm.reach(output)))
        said.append(staging(comm))
        with pool:
            total = (input * 2).relu() + 1
        comm.all_reduce(total)
        assert torch.equal(total, n * (2 * torch.arange(5000.0) + 1) + n * (n - 1))
        said.append(str(comm.reach(total)))
        assert str(comm.reach(torch.zeros(4))).startswith("staged"), "what is made outside lies outside"
        assert comm.location(output) is not None and len(comm.peers(output)) == n
    return said


def covered(group: dist.ProcessGroup) -> dict[str, bool]:
    """Whether what torch makes in many ways lies in the pool."""
    found: dict[str, bool] = {}
    with _communicator(group) as comm:
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
    return found


def storm(group: dist.ProcessGroup, seed: int, calls: int, drift: int, kinds: tuple[str, ...]) -> tuple[int, int, int]:
    """Calls on tensors that come and go, at other places on some ranks once in ``drift`` tensors: how many of the calls
    found a tensor symmetric and staged, and the bytes of staging."""
    draw, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank(group))
    kept: list[torch.Tensor] = []
    moved: list[torch.Tensor] = []
    symmetric = staged = 0
    with _communicator(group) as comm:
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
            del call
        return symmetric, staged, staging(comm)


def lists(group: dist.ProcessGroup, seed: int, rounds: int) -> tuple[int, str]:
    """Lists, batches, exchanges with split sizes, scatter and gather, asynchronous calls; the bytes of staging."""
    draw, own = random.Random(seed), random.Random(100 * seed + dist.get_rank(group))
    with _communicator(group) as comm:
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
        return staging(comm), str(comm.reach(summed)).partition(":")[0]


def not_in_the_pool_everywhere(group: dist.ProcessGroup) -> list[str]:
    """A tensor that is in the pool on some ranks only is staged; one that is new on one rank only is refused."""
    said = []
    with _communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        pool = sidelane.pool(comm, room())
        for step in range(3):
            output = torch.empty(n * 100)
            if rank != 1:
                with pool:
                    output = torch.empty(n * 100)
            comm.all_gather(output, torch.full((100,), float(rank + step)))
            assert output[::100].tolist() == [float(peer + step) for peer in range(n)]
        said.append(comm.reach(output).how)
        pool = sidelane.pool(comm, room())
        with pool:
            kept, other = torch.ones(300), torch.ones(300)
        comm.all_reduce(kept), comm.all_reduce(other)
        assert kept[5] == n and comm.reach(other).how == "symmetric"
        if rank == 0:
            with pool:
                kept = kept.clone()
        try:
            comm.all_reduce(kept)
            comm.synchronize()
        except (MismatchError, PeerError) as error:
            said.append(type(error).__name__)
    return said


def compared_ones_wait_for_nobody(group: dist.ProcessGroup) -> str:
    """Rank 0 starts a call and then tells its peers to come: a call that waited for their hosts would never return."""
    with _communicator(group) as comm:
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
        assert staging(comm) == 0
        return comm.reach(output).how


def prepared(group: dist.ProcessGroup, calls: int) -> list[int]:
    """How many of so many calls on the same tensors were prepared: in a pool; the same with an input that has not been
    compared, at other places on some ranks; that one with symmetric memory for an output; a list of both."""
    counts = []
    with _communicator(group) as comm:
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
    return counts


def comes_and_goes(group: dist.ProcessGroup) -> list[Any]:
    """What is in use while tensors live and afterwards, and whether a tensor outlives its pool and communicator."""
    with _communicator(group, Config(timeout_s=30, memory_bytes=2 * room())) as comm:
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
        during = comm.memory().used - before
        with pool:
            last = torch.full((1000,), 5.0)
        said = f"{comm.heap.pools.keys()}"
    gc.collect()
    assert last.sum() == 5000, "ordinary memory from now on"
    return [during, said]


def full(group: dist.ProcessGroup) -> tuple[str, float]:
    """What is said when there is no room, and that all goes on."""
    with _communicator(group) as comm:
        pool = sidelane.pool(comm, 24 << 20)
        said = ""
        try:
            with pool:
                kept = torch.ones(1 << 20)
                torch.empty(32 << 20, dtype=torch.uint8)
        except torch.OutOfMemoryError as error:
            said = str(error)
        comm.all_reduce(kept)
        return said, kept[-1].item()
