"""What ranks execute in the tests of the communicator: the same functions for CPU processes and for GPUs.

A rank's tensors are on its default device (``torch.set_default_device``), which the processes for GPUs set.
"""

from __future__ import annotations

import itertools
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import any_bytes, close, numbers, reduced, same_bytes

from sidelane import Communicator, Config, Work
from sidelane.program.collective import Kind
from sidelane.session.prelaunch import Prelaunched


def communicator(group: dist.ProcessGroup, **settings: Any) -> Communicator:
    return Communicator(group, device=torch.get_default_device(), config=Config(**{"timeout_s": 30, **settings}))


def place(comm: Communicator, symmetric: bool, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A poisoned tensor in symmetric or ordinary memory."""
    tensor = comm.empty(numel, dtype=dtype) if symmetric else torch.empty(numel, dtype=dtype)
    tensor.view(torch.uint8).fill_(0xA5)
    return tensor


VARIANTS = ("auto", "pcpy", "b2b")


def moving_sweep(
    group: dist.ProcessGroup,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, ...],
    variants: tuple[str, ...] = VARIANTS,
) -> int:
    """Every moving collective in ``variants`` and its own, with ordinary and symmetric tensors, in and out of place."""
    checked = 0
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
            checked += 1
    return checked


def reducing_sweep(group: dist.ProcessGroup, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]) -> int:
    checked = 0
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        cases = itertools.product(dtypes, sizes, ("sum", "avg", "min", "max"), ("pcpy", "b2b"))
        for seed, (dtype, size, op, variant) in enumerate(cases):
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
            checked += 1
    return checked


def nothing_and_alone(group: dist.ProcessGroup) -> None:
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


def large_messages(group: dist.ProcessGroup) -> None:
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        size = (8 << 20) + 3
        inputs = [any_bytes(7, r, n * size, torch.uint8) for r in range(n)]
        out = torch.empty(n * size, dtype=torch.uint8)
        comm.all_gather(out, inputs[rank][:size])
        assert same_bytes(out, torch.cat([tensor[:size] for tensor in inputs]))
        comm.all_to_all(out, inputs[rank])
        assert same_bytes(out, torch.cat([tensor[rank * size : (rank + 1) * size] for tensor in inputs]))
        comm.all_to_all(inputs[rank], inputs[rank])
        assert same_bytes(out, inputs[rank])
        relayed = comm.empty(3 * size, dtype=torch.uint8)  # 24 MiB: three chunks for each engine
        for root in range(n):
            sent = any_bytes(8 + root, root, 3 * size, torch.uint8)
            if rank == root:
                relayed.copy_(sent)
            comm.broadcast(relayed, root=root, variant="relay")
            assert same_bytes(relayed, sent), root


def uneven(group: dist.ProcessGroup) -> None:
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


def places(group: dist.ProcessGroup) -> None:
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


def growing_staging(group: dist.ProcessGroup) -> None:
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


def versions(group: dist.ProcessGroup) -> None:
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
            before = [None if tensor is None else tensor._version for tensor in (written, read)]
            call()
            assert written is None or written._version > before[0]
            assert read is None or read._version == before[1]
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


def asynchronous(group: dist.ProcessGroup) -> None:
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


def works(group: dist.ProcessGroup) -> None:
    """What an asynchronous call returns, asked in every way that torch.distributed knows."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        output, input = torch.zeros(2 * n), torch.full((2,), float(rank))
        expected = torch.arange(n).float().repeat_interleave(2)
        work = comm.all_gather(output, input, async_op=True)
        assert isinstance(work, Work) and isinstance(work, dist.Work)
        assert work.wait() is True and work.wait(timedelta(seconds=20)) is True
        assert work.is_completed() and work.is_success() and work.exception() is None
        (found,) = work.result()
        assert found is output and torch.equal(output, expected)

        total = torch.ones(3)
        work = comm.all_reduce(total, async_op=True)
        assert work is not None
        later = work.get_future().then(lambda future: future.value()[0] / n)
        assert torch.equal(later.wait(), torch.ones(3)) and torch.equal(total, torch.full((3,), float(n)))
        assert torch.equal(work.get_future().wait()[0], total), "of one that has ended, too"

        many = [torch.zeros(n), torch.zeros(3 * n)]
        work = comm.all_gather(many, [torch.ones(1), torch.ones(3)], async_op=True)
        assert work is not None and [tensor.sum().item() for tensor in work.result()] == [n, 3 * n]
        with comm.batch(async_op=True) as batch:
            batch.all_gather(output, input)
            batch.all_reduce(total)
        assert batch.work is not None
        first, second = batch.work.get_future().wait()
        assert first is output and second is total and torch.equal(total, torch.full((3,), float(n * n)))
        gathered = comm.gather(output if rank == 0 else None, input, root=0, async_op=True)
        assert gathered is not None and len(gathered.result()) == (rank == 0)


def interleaved(group: dist.ProcessGroup, half: tuple[int, ...]) -> None:
    with communicator(group) as first, communicator(group) as second:
        n, rank = first.world_size, first.rank
        for i in range(30):
            a, b = torch.full((97,), float(rank + i)), torch.full((31,), float(rank * i))
            work = first.all_reduce(a, async_op=True)
            second.all_reduce(b, op="max")
            assert work is not None
            work.wait()
            assert a[0] == n * (n - 1) / 2 + n * i and b[0] == (n - 1) * i


def sub_group(group: dist.ProcessGroup) -> list[float]:
    with communicator(group) as comm:
        tensor = torch.tensor([float(dist.get_rank())])
        out = torch.empty(comm.world_size)
        comm.all_gather(out, tensor)
        root = torch.tensor([float(dist.get_rank())])
        comm.broadcast(root, root=1)
        return [*out.tolist(), root.item()]


def delay() -> None:
    """Some milliseconds of this rank's time, on the host or on its stream."""
    if torch.get_default_device().type == "cuda":
        torch.cuda._sleep(10_000_000)
    else:
        time.sleep(0.005)


def of_every_kind(group: dist.ProcessGroup, seed: int, calls: int) -> None:
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


def many(group: dist.ProcessGroup, calls: int) -> None:
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


def prelaunched(group: dist.ProcessGroup) -> int:
    """Every variant, place and trigger of the handles, with other calls between two of them."""
    checked = 0
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        cases = [
            (Kind.ALL_GATHER, variant, symmetric, in_place)
            for variant in ("b2b", "pcpy", "bcst")
            for symmetric, in_place in ((True, False), (True, True), (False, False))
            if symmetric or variant != "bcst"
        ] + [
            (Kind.ALL_TO_ALL, variant, symmetric, in_place)
            for variant in ("b2b", "pcpy", "swap")
            for symmetric, in_place in ((True, False), (True, True), (False, False), (False, True))
            if symmetric or variant != "swap"
        ]
        for seed, (kind, variant, symmetric, in_place) in enumerate(cases):
            numel = 37 + seed
            output = place(comm, symmetric, n * numel, torch.float32)
            if kind is Kind.ALL_GATHER:
                input = output[rank * numel : (rank + 1) * numel] if in_place else torch.empty(numel)
                prepare, sent = comm.prepare_all_gather, numel
            else:
                input = output if in_place else torch.empty(n * numel)
                prepare, sent = comm.prepare_all_to_all, n * numel
            host = bool(seed % 2)

            def produce(
                repeat: int,
                seed: int = seed,
                sent: int = sent,
                output: torch.Tensor = output,
                input: torch.Tensor = input,
            ) -> list[torch.Tensor]:
                inputs = [any_bytes(100 * seed + repeat, r, sent, torch.float32) for r in range(n)]
                output.zero_()
                input.copy_(inputs[rank])
                return inputs

            produce(0)  # a GPU cannot load kernels while a call is armed
            with prepare(output, input, variant=variant, host_trigger=host) as handle:
                for repeat in range(4):
                    if repeat % 2:
                        delay()
                    handle.arm()
                    inputs = produce(repeat)
                    fire(handle, host and repeat % 2 == 0)
                    parts = inputs if kind is Kind.ALL_GATHER else [t.view(n, -1)[rank] for t in inputs]
                    assert same_bytes(output, torch.cat(parts)), (kind, variant, symmetric, in_place, repeat)
                    checked += 1
                    if repeat == 1:
                        total = torch.ones(3)
                        comm.all_reduce(total)
                        assert total.tolist() == [n] * 3
    return checked


def fire(handle: Prelaunched, from_host: bool) -> None:
    """Trigger, and make the output readable for the caller's stream."""
    if not from_host:
        handle.trigger()
        return
    if torch.get_default_device().type == "cuda":
        torch.cuda.current_stream().synchronize()  # the trigger does not wait for who made the input
    handle.trigger_from_host()
    handle.wait()


def prelaunched_rounds(group: dist.ProcessGroup, rounds: int) -> None:
    """Two handles in turn, with random delays, ranks running ahead of each other."""
    with communicator(group) as comm:
        n, rank, numel = comm.world_size, comm.rank, 129
        gathered, shard = comm.empty(n * numel), torch.empty(numel)
        exchanged, source = torch.empty(n * numel), torch.empty(n * numel)
        with (
            comm.prepare_all_gather(gathered, shard) as gather,
            comm.prepare_all_to_all(exchanged, source, variant="pcpy") as exchange,
        ):
            for step in range(-1, rounds):
                delay()
                if step < 0:  # a GPU cannot load kernels while a call is armed
                    shard.fill_(step)
                    source.view(n, numel).copy_(rank + torch.arange(n)[:, None].expand(n, numel))
                    source.view(n, numel).copy_(step + 1000 * rank + torch.arange(n)[:, None].expand(n, numel))
                    continue
                gather.arm()
                shard.fill_(step + 1000 * rank)
                gather.trigger()
                assert gathered.view(n, numel).eq(step + 1000 * torch.arange(n)[:, None]).all()
                exchange.arm()
                delay()
                source.view(n, numel).copy_(step + 1000 * rank + torch.arange(n)[:, None].expand(n, numel))
                exchange.trigger()
                assert exchanged.view(n, numel).eq(step + rank + 1000 * torch.arange(n)[:, None]).all()


def prelaunched_staging(group: dist.ProcessGroup) -> None:
    """A call between two triggers needs more staging than there was."""
    with communicator(group) as comm:
        n, rank, numel = comm.world_size, comm.rank, 1000
        output, shard = torch.empty(n * numel), torch.zeros(numel)
        shard.fill_(rank)
        with comm.prepare_all_gather(output, shard) as handle:
            for step, between in enumerate((1 << 10, 1 << 20, 3 << 20)):
                handle.arm()
                shard.fill_(10 * step + rank)
                handle.trigger()
                assert output.view(n, numel).eq(10 * step + torch.arange(n)[:, None]).all()
                large, whole = torch.full((between,), float(rank)), torch.empty(n * between)
                comm.all_gather(whole, large)
                assert whole.view(n, between).eq(torch.arange(n)[:, None]).all()
