"""Every collective, by 2 to 8 CPU ranks and on GPUs: bytes against a reference, all dtypes, odd sizes."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expected import MOVING_DTYPES, REDUCING_DTYPES, any_bytes, close, numbers, reduced, same_bytes, versions_of
from marks import long
from on_ranks import BOTH_STREAMS, default_stream, on_ranks
from sweeps import communicator, delay, place

from sidelane.choice import Choice
from sidelane.choice.candidate import find
from sidelane.collectives.agreement import Agreement
from sidelane.program.collective import Kind


def over_nccl(context: Any, function: Callable[[dist.ProcessGroup], None]) -> None:
    """Execute a test on this rank's GPU with NCCL as the control plane."""
    group = dist.new_group(backend="nccl", device_id=context.device)
    with torch.device(context.device):
        function(group)


OVER_NCCL = pytest.param(
    over_nccl, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
)
VARIANTS = ("auto", "pcpy", "b2b")


@on_ranks(2, dtypes=(torch.bfloat16,), sizes=(1,), variants=VARIANTS)
@on_ranks(3, long(6), long(8), dtypes=(torch.bfloat16,), sizes=(257,), variants=VARIANTS)
@on_ranks(long(4), gpu=BOTH_STREAMS, dtypes=(torch.bfloat16,), sizes=(1, 1023), variants=VARIANTS)
@on_ranks(1, 4, dtypes=(torch.float32,), sizes=(5,), variants=VARIANTS)
@on_ranks(2, dtypes=MOVING_DTYPES[::3], sizes=(37,), variants=("auto",))  # a program moves bytes
@on_ranks(long(2), long(3), dtypes=MOVING_DTYPES, sizes=(37,), variants=("auto",))  # variants know no dtypes
@on_ranks(gpu=True, dtypes=MOVING_DTYPES, sizes=(37,), variants=("auto", "b2b"), timeout_s=150)
@on_ranks(gpu=OVER_NCCL, dtypes=(torch.float32,), sizes=(33,), variants=VARIANTS)
def test_moving_collectives(
    group: dist.ProcessGroup,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, ...],
    variants: tuple[str, ...],
) -> None:
    """Every moving collective in ``variants`` and its own, with ordinary and symmetric tensors, in and out of place."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        for seed, (dtype, size, symmetric) in enumerate(itertools.product(dtypes, sizes, (False, True))):
            inputs = [any_bytes(seed, r, n * size, dtype) for r in range(n)]
            shards = [tensor[:size] for tensor in inputs]
            for variant in variants + (("bcst",) if symmetric else ()):
                out = place(comm, symmetric, n * size, dtype)
                comm.all_gather(out, shards[rank], variant=variant)
                assert same_bytes(out, torch.cat(shards)), ("all_gather", variant, dtype, size, symmetric)
                out.view(torch.uint8).fill_(0x5A)
                out[rank * size : (rank + 1) * size] = shards[rank]
                comm.all_gather(out, out[rank * size : (rank + 1) * size], variant=variant)
                assert same_bytes(out, torch.cat(shards)), ("all_gather in place", variant, dtype, size, symmetric)
            root = seed % n
            for variant in variants + (("bcst", "relay") if symmetric else ()):
                tensor = place(comm, symmetric, size, dtype)
                if rank == root:
                    tensor.copy_(shards[rank])
                comm.broadcast(tensor, root=root, variant=variant)
                assert same_bytes(tensor, shards[root]), ("broadcast", variant, dtype, size, symmetric)
            exchanged = torch.cat([tensor[rank * size : (rank + 1) * size] for tensor in inputs])
            for variant in variants + (("swap",) if symmetric else ()):
                out = place(comm, symmetric, n * size, dtype)
                comm.all_to_all(out, inputs[rank], variant=variant)
                assert same_bytes(out, exchanged), ("all_to_all", variant, dtype, size, symmetric)
                out.copy_(inputs[rank])
                comm.all_to_all(out, out, variant=variant)
                assert same_bytes(out, exchanged), ("all_to_all in place", variant, dtype, size, symmetric)
            for variant, root in itertools.product(("pcpy", "b2b"), {0, n - 1}):
                out = place(comm, symmetric, size, dtype)
                comm.scatter(out, inputs[rank] if rank == root else None, root=root, variant=variant)
                assert same_bytes(out, inputs[root][rank * size : (rank + 1) * size]), ("scatter", variant, dtype)
                source = place(comm, symmetric, size, dtype)
                source.copy_(shards[rank])
                target = place(comm, False, n * size, dtype) if rank == root else None
                comm.gather(target, source, root=root, variant=variant)
                assert target is None or same_bytes(target, torch.cat(shards)), ("gather", variant, dtype)


@on_ranks(2, long(5), long(7), long(8), dtypes=(torch.float32,), sizes=(333,))
@on_ranks(3, dtypes=REDUCING_DTYPES, sizes=(333,))
@on_ranks(1, 4, dtypes=(torch.float32,), sizes=(5,))
@on_ranks(gpu=True, dtypes=REDUCING_DTYPES, sizes=(333, 70_001), timeout_s=150)
def test_reducing_collectives(
    group: dist.ProcessGroup, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]
) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        cases = itertools.product(dtypes, sizes, ("sum", "avg", "min", "max"), ("pcpy", "b2b"))
        for seed, (dtype, size, op, variant) in enumerate(cases):
            if comm.device.type == "cpu" and (seed + seed // 2 + seed // 8) % 2:
                continue  # each dtype and each operation has both variants
            inputs = [numbers(seed, r, n * size, dtype) for r in range(n)]
            total = reduced(inputs, op)
            part = total[rank * size : (rank + 1) * size]
            out = place(comm, seed % 2 == 0, size, dtype)
            comm.reduce_scatter(out, inputs[rank], op=op, variant=variant)
            assert close(out, part), ("reduce_scatter", dtype, size, op, variant)
            whole = inputs[rank].clone()
            comm.reduce_scatter(whole[rank * size : (rank + 1) * size], whole, op=op, variant=variant)
            assert same_bytes(whole[rank * size : (rank + 1) * size], out), "the same order gives the same bits"
            odd = inputs[rank][: n * size - 1].clone()
            result = place(comm, False, odd.numel(), dtype)
            comm.all_reduce(odd, op=op, output=result, variant=variant)
            assert close(result, total[: odd.numel()]), ("all_reduce", dtype, size, op, variant)
            comm.all_reduce(odd, op=op, variant=variant)
            assert same_bytes(odd, result), ("all_reduce in place", dtype, size, op, variant)


@on_ranks(1, 4, gpu=default_stream)
def test_no_bytes_and_one_rank(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        n = comm.world_size
        for variant in ("auto", "pcpy", "b2b", "bcst"):
            comm.all_gather(torch.empty(0), torch.empty(0), variant=variant)
        comm.all_to_all(torch.empty(0), torch.empty(0), variant="swap")
        comm.all_reduce(torch.empty(0))
        comm.broadcast(torch.empty(0), root=n - 1)
        one = torch.arange(n) + comm.rank
        comm.all_reduce(one, op="max")
        assert one.tolist() == [i + n - 1 for i in range(n)]


@on_ranks(long(2), seed=1, calls=1000)
@on_ranks(3, seed=2, calls=150)
@on_ranks(long(8), seed=4, calls=80)
@on_ranks(gpu=BOTH_STREAMS, seed=0, calls=500, timeout_s=150)
@on_ranks(gpu=BOTH_STREAMS, seed=1, calls=500, timeout_s=150)
def test_calls_of_every_kind_in_turn(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Calls of every kind and at random sizes, mixed with others, nobody waiting for anybody."""
    draw = random.Random(seed)  # the same on every rank
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        mine = random.Random(seed + 1 + rank)
        variants = ["b2b", "auto", "striped", "pcpy"]
        heap = comm.empty(n * 5000, dtype=torch.uint8)
        pending: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for call in range(calls):
            if mine.random() < 0.02:
                delay()
            size = draw.choice((0, 1, 7, draw.randrange(300), draw.randrange(5000)))
            variant = draw.choice(variants)
            kind = draw.choice(("all_gather", "all_to_all", "uneven", "broadcast", "scatter", "gather"))
            in_place, symmetric, root = draw.random() < 0.5, draw.random() < 0.5, draw.randrange(n)
            asynchronous = draw.random() < 0.1
            inputs = [any_bytes(seed + call, r, n * size, torch.uint8) for r in range(n)]
            shards = [tensor[:size] for tensor in inputs]
            out = heap[: n * size] if symmetric else torch.empty(n * size, dtype=torch.uint8)
            out.fill_(0xA5)
            work, expected = None, torch.cat(shards)
            if kind == "all_gather":
                part = out[rank * size : (rank + 1) * size].copy_(shards[rank]) if in_place else shards[rank]
                work = comm.all_gather(out, part, variant=variant, async_op=asynchronous)
            elif kind == "all_to_all":
                source = out.copy_(inputs[rank]) if in_place else inputs[rank]
                work = comm.all_to_all(out, source, variant=variant, async_op=asynchronous)
                expected = torch.cat([tensor[rank * size : (rank + 1) * size] for tensor in inputs])
            elif kind == "uneven":
                counts = [[draw.randrange(3) * size // 3 for _ in range(n)] for _ in range(n)]
                received = [counts[r][rank] for r in range(n)]
                parts = [inputs[r][sum(counts[r][:rank]) : sum(counts[r][: rank + 1])] for r in range(n)]
                out, expected = out[: sum(received)], torch.cat(parts)
                comm.all_to_all(
                    out,
                    inputs[rank][: sum(counts[rank])],
                    output_split_sizes=received,
                    input_split_sizes=counts[rank],
                    variant=variant,
                )
            elif kind == "broadcast":
                out, expected = out[:size], shards[root]
                if rank == root:
                    out.copy_(expected)
                work = comm.broadcast(out, root=root, variant=variant, async_op=asynchronous)
            elif kind == "scatter":
                out, expected = out[:size], inputs[root][rank * size : (rank + 1) * size]
                comm.scatter(out, inputs[rank] if rank == root else None, root=root, variant=variant)
            else:
                comm.gather(out if rank == root else None, shards[rank], root=root, variant=variant)
                expected = expected if rank == root else torch.full_like(out, 0xA5)
            if work is not None:
                work.wait()
            text = f"{call}: {kind} {variant} {size} {in_place} {symmetric}"
            pending.append((text, out.clone(), expected.clone()))
            inputs[rank].fill_(0x5A)  # a peer that still read it would see this
        for text, found, right in pending:
            assert same_bytes(found, right), text


@on_ranks(3, gpu=default_stream)
def test_large_messages(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        size = (8 << 20) + 3
        inputs = [any_bytes(7, r, n * size, torch.uint8) for r in range(n)]
        out = torch.empty(n * size, dtype=torch.uint8)
        relayed = comm.empty(3 * size, dtype=torch.uint8)  # 24 MiB: three chunks for each engine
        for root in range(n):
            sent = any_bytes(8, root, 3 * size, torch.uint8)
            if rank == root:
                relayed.copy_(sent)
            comm.broadcast(relayed, root=root, variant="relay")
            assert same_bytes(relayed, sent), root
        comm.all_gather(out, inputs[rank][:size])
        assert same_bytes(out, torch.cat([tensor[:size] for tensor in inputs]))
        comm.all_to_all(out, inputs[rank])
        assert same_bytes(out, torch.cat([tensor[rank * size : (rank + 1) * size] for tensor in inputs]))
        comm.all_to_all(inputs[rank], inputs[rank])
        assert same_bytes(out, inputs[rank])


@on_ranks(2, 5, gpu=default_stream)
def test_uneven_all_to_all(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        for seed in range(6):
            counts = torch.randint(0, 5, (n, n), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
            inputs = [numbers(seed, r, 3 * sum(counts[r]), torch.float32).view(-1, 3) for r in range(n)]
            parts = [inputs[i].split(counts[i])[rank] for i in range(n)]
            received = [counts[i][rank] for i in range(n)]
            for symmetric, variant in ((False, "auto"), (True, "auto"), (True, "pcpy")):
                out = comm.empty(60, dtype=torch.float32) if symmetric else torch.empty(60)
                view = out[: 3 * sum(received)].view(-1, 3)
                comm.all_to_all(
                    view,
                    inputs[rank],
                    output_split_sizes=received,
                    input_split_sizes=counts[rank],
                    variant=variant,
                )
                assert torch.equal(view, torch.cat(parts))


@on_ranks(3, gpu=default_stream)
def test_places_that_need_not_be_the_same(group: dist.ProcessGroup) -> None:
    """Buffers that lie in different places on different ranks, where that must not matter."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        out, shards = comm.empty(n * 4), comm.empty(n * 4)
        shard = shards[rank * 4 : rank * 4 + 4].fill_(float(rank))
        comm.all_gather(out, shard)  # each rank's input at an offset of its own
        assert out.view(n, 4)[:, 0].tolist() == list(range(n))
        out.fill_(-1)
        comm.all_gather(out, shard if rank else torch.full((4,), float(rank)))  # symmetric on some ranks only
        assert out.view(n, 4)[:, 0].tolist() == list(range(n))
        total = shards[rank * 4 : rank * 4 + 4] if rank else torch.empty(4)
        comm.reduce_scatter(total, out, op=dist.ReduceOp.MAX)  # the output likewise
        assert total[0] == rank
        # Rank 0 sends everything and receives one row, as happens between experts.
        send, receive = ([1] * n if rank == 0 else [0] * n), [1] + [0] * (n - 1)
        rows, got = comm.empty(n, 4), comm.empty(1, 4)
        rows.copy_(torch.arange(n)[:, None].expand(n, 4))
        for _ in range(3):
            comm.all_to_all(got, rows[: sum(send)], output_split_sizes=receive, input_split_sizes=send)
            assert got.eq(rank).all()
        # And back: only rank 0 receives anything.
        back = torch.empty(n, 4) if rank else rows.fill_(-1)
        comm.all_to_all(back[: sum(send)], got, output_split_sizes=send, input_split_sizes=receive)
        assert rank or rows[:, 0].tolist() == list(range(n))


@on_ranks(4, gpu=default_stream)
def test_growing_staging(group: dist.ProcessGroup) -> None:
    """A remembered call must move to the new staging block on all ranks at once, whatever addresses they use."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        kept = [torch.full((64,), float(rank)) for _ in range(4)]
        for step in range(12):
            # Rank 0 repeats its addresses, the others come with new ones.
            source = kept[step % 2] if rank == 0 else torch.full((64,), float(rank))
            out = torch.empty(n * 64)
            comm.all_gather(out, source)
            assert out.view(n, 64)[:, 0].tolist() == list(range(n))
            big = torch.full((1 << (10 + step),), rank + 1.0)
            comm.all_reduce(big)
            assert big[0] == big[-1] == n * (n + 1) / 2


@on_ranks(3, gpu=default_stream)
def test_written_tensors_count_as_modified(group: dist.ProcessGroup) -> None:
    """Autograd hears of every tensor that a call writes, and of no other."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        whole, shard = torch.zeros(4 * n), torch.ones(4)
        first = rank == 0
        calls: tuple[tuple[Any, torch.Tensor | None, torch.Tensor | None], ...] = (
            (lambda: comm.all_gather(whole, shard), whole, shard),
            (lambda: comm.all_gather(whole, shard, async_op=True).wait(), whole, shard),
            (lambda: comm.reduce_scatter(shard, whole), shard, whole),
            (lambda: comm.all_reduce(shard), shard, None),
            (lambda: comm.all_reduce(shard, output=whole[4:8]), whole, shard),  # a view counts with its base
            (lambda: comm.broadcast(shard, root=0), shard, None),
            (lambda: comm.scatter(shard, whole if first else None, root=0), shard, whole),
            (lambda: comm.gather(whole if first else None, shard, root=0), whole if first else None, shard),
        )
        for call, written, read in calls:
            before = versions_of((written, read))
            call()
            now = versions_of((written, read))
            assert (written is None or now[0] > before[0]) and now[1] == before[1]
        # What it is for: a result that backward needs and a call overwrote.
        weight = torch.ones(4, requires_grad=True)
        product = (weight * shard).sum()
        comm.all_reduce(shard)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        with torch.inference_mode():  # tensors without a version
            total = torch.ones(7)
            comm.all_reduce(total)
            assert total.eq(n).all()


@on_ranks(2)
@pytest.mark.parametrize("captured", [False, True])
def test_only_captured_staging_is_kept(group: dist.ProcessGroup, captured: bool) -> None:
    """Is the first block of staging still there after it grew? As under capture: CPU programs can be frozen, too."""
    with communicator(group) as comm:
        alive, blocks, preparer = [], list[Any](), comm.preparer
        allocate = comm.backend.memory.allocate

        def watched(nbytes: int) -> Any:
            block = allocate(nbytes)
            blocks.append(weakref.ref(block.tensor))
            return block

        comm.backend.memory.allocate = watched  # type: ignore[method-assign]
        tensor = torch.ones(100)
        comm.all_reduce(tensor)
        if captured:
            request = comm.arguments.all_reduce(tensor, tensor, "sum")
            preparer.prepare(Agreement.of((request,), "b2b", frozen=True), (request,))
        for size in (1 << 20, 1 << 22):
            old = blocks[-1]
            comm.all_reduce(tensor, async_op=True)
            large = torch.ones(size)
            comm.all_reduce(large)
            assert large.eq(comm.world_size).all()
            gc.collect()
            alive.append(old() is not None)
        assert alive == [captured, False]


@on_ranks(3)
def test_a_first_call_reserves_what_its_capture_needs(group: dist.ProcessGroup) -> None:
    """``auto`` takes another variant in a capture than outside. As on GPUs: CPUs have no captures."""
    with communicator(group) as comm:
        preparer = comm.preparer
        tensor = comm.empty(comm.world_size * 200_000)
        request = comm.arguments.all_to_all(tensor, tensor)

        def choice(agreement: Agreement) -> Choice:
            candidate = find(Kind.ALL_TO_ALL, "b2b" if agreement.frozen else "swap")
            assert candidate is not None
            return Choice(candidate, "as the test wants it", ())

        preparer.planner.choice = choice  # type: ignore[method-assign]
        preparer.planner._abilities = dataclasses.replace(comm.backend.abilities, captures=True)
        comm.all_to_all(tensor, tensor)
        preparer.prepare(Agreement.of((request,), "auto", frozen=True), (request,))


@on_ranks(3)
def test_a_capture_does_without_staging_that_is_not_there(group: dist.ProcessGroup) -> None:
    """``auto`` would take what needs staging in a capture, and no call has been made before."""
    with communicator(group) as comm:
        tensor = comm.empty(comm.world_size * 200_000)
        request = comm.arguments.all_to_all(tensor, tensor)
        found = [one for name in ("b2b", "swap") if (one := find(Kind.ALL_TO_ALL, name)) is not None]
        table = tuple((candidate, None) for candidate in found)
        wanted = Choice(found[0], "as the test wants it", table)
        with mock.patch.object(comm.preparer.planner, "choice", return_value=wanted):
            prepared = comm.preparer.prepare(Agreement.of((request,), "auto", frozen=True), (request,))
            comm.all_to_all(tensor, tensor, variant="b2b")
            again = comm.preparer.prepare(Agreement.of((request,), "auto", frozen=True), (request,))
        assert (prepared.choice.candidate.variant, again.choice.candidate.variant) == ("swap", "b2b")


@on_ranks(4, gpu=default_stream)
def test_asynchronous_calls_keep_their_order(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        tensors = [torch.full((1000,), float(rank + i)) for i in range(10)]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        last = torch.full((10,), float(rank))
        comm.all_reduce(last)  # a synchronous call takes its place behind them
        for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            assert work is not None
            work.wait()  # on a GPU it orders the stream; to read a value waits for that
            assert tensor[0] == n * (n - 1) / 2 + n * i
            assert work.is_completed()
        comm.barrier()
        comm.synchronize()


@on_ranks(4, gpu=default_stream)
def test_two_communicators_do_not_disturb_each_other(group: dist.ProcessGroup) -> None:
    with communicator(group) as first, communicator(group) as second:
        n, rank = first.world_size, first.rank
        for i in range(30):
            a, b = torch.full((97,), float(rank + i)), torch.full((31,), float(rank * i))
            work = first.all_reduce(a, async_op=True)
            second.all_reduce(b, op="max")
            assert work is not None
            work.wait()
            assert a[0] == n * (n - 1) / 2 + n * i and b[0] == (n - 1) * i


@on_ranks((1, 4, 6))
def test_sub_groups_count_their_own_ranks(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        tensor = torch.tensor([float(dist.get_rank())])
        out = torch.empty(comm.world_size)
        comm.all_gather(out, tensor)
        root = torch.tensor([float(dist.get_rank())])
        comm.broadcast(root, root=1)
        assert [*out.tolist(), root.item()] == [1.0, 4.0, 6.0, 4.0]


@on_ranks(4, calls=300)
@on_ranks(gpu=BOTH_STREAMS, calls=1000)
def test_many_calls_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        out, shard = comm.empty(n * 17), torch.empty(17)
        generator = torch.Generator().manual_seed(rank)
        for i in range(calls):
            if torch.rand(1, generator=generator, device="cpu") < 0.02:
                delay()
            shard.fill_(rank * 1000 + i)
            comm.all_gather(out, shard)
            assert out.view(n, 17)[:, 3].tolist() == [r * 1000 + i for r in range(n)]
            out.fill_(-1)  # a peer that ran ahead would see its bytes overwritten
