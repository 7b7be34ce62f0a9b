"""What ranks do with a Sidelane process group in the tests: every collective next to Gloo's, and training.

Tensors of Sidelane's lie on the default device, those of the group that it is held against on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

import sidelane
from sidelane import fsdp
from sidelane.integrations import calls, ledger, torch_world
from sidelane.integrations.process_group import SidelaneGroup

BYTES = (torch.uint8, torch.float64, torch.int32, torch.bfloat16)
NOT_GLOOS = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16)
REDUCED = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
SIZES = (1, 7, 1000)
Sum = dist.ReduceOp


_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


@contextlib.contextmanager
def sidelane_group(members: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """The group of the pool with Sidelane in front of it, which the ranks keep."""
    if members not in _groups:
        _groups[members] = sidelane.wrap(members)
    ledger.reset()
    yield _groups[members]


def data(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of which every dtype holds the sum of a few exactly, so that the order of additions does not show."""
    made = torch.randint(-8, 8, (numel,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device(), dtype)


def on_cpu(call: Callable[[], Any]) -> Any:
    """What ``call`` makes of tensors of the CPU."""
    with torch.device("cpu"):
        return call()


Collective = Callable[[dist.ProcessGroup, torch.dtype, int, bool], list[torch.Tensor]]


def ended(work: dist.Work | None, is_async: bool) -> None:
    assert (work is not None) == is_async
    if work is not None:
        work.wait()
        on_host = isinstance(work, sidelane.Work) and torch.get_default_device().type == "cpu"
        assert work.is_completed() or not on_host  # Gloo's may say so later, and a stream waits in place of the host


def all_gather_into_tensor(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    output = torch.zeros(group.size() * n, dtype=dtype)
    ended(dist.all_gather_into_tensor(output, data(n, dtype, group.rank()), group, a), a)
    in_place = torch.zeros(group.size() * n, dtype=dtype)
    part = in_place.split(n)[group.rank()].copy_(data(n, dtype, group.rank() + 50))
    ended(dist.all_gather_into_tensor(in_place, part, group, a), a)
    return [output, in_place]


def all_gather(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    outputs = [torch.zeros(n, 2, dtype=dtype) for _ in range(group.size())]
    ended(dist.all_gather(outputs, data(2 * n, dtype, group.rank()).view(n, 2), group, a), a)
    row = list(torch.zeros(group.size(), n, dtype=dtype).unbind())
    ended(dist.all_gather(row, data(n, dtype, group.rank()), group, a), a)
    strided = list(torch.zeros(n, group.size(), dtype=dtype).unbind(1)) if group.size() > 1 else []
    if strided and type(group) is not dist.ProcessGroup:  # Gloo wants contiguous ones
        ended(dist.all_gather(strided, data(n, dtype, group.rank()), group, a), a)
        assert all(map(torch.equal, strided, row))
    return [*outputs, *row]


def all_to_all_single(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    size, rank = group.size(), group.rank()
    even = torch.zeros(size * n, dtype=dtype)
    ended(dist.all_to_all_single(even, data(size * n, dtype, rank), group=group, async_op=a), a)
    sent = [(rank + 2 * other) % 5 * n for other in range(size)]
    received = [(other + 2 * rank) % 5 * n for other in range(size)]
    uneven = torch.zeros(sum(received), 3, dtype=dtype)
    given = data(3 * sum(sent), dtype, rank).view(-1, 3)
    ended(dist.all_to_all_single(uneven, given, received, sent, group=group, async_op=a), a)
    return [even, uneven]


def all_to_all(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    size, rank = group.size(), group.rank()
    inputs = [data(n + rank + 2 * other, dtype, rank) for other in range(size)]
    outputs = [torch.zeros(n + other + 2 * rank, dtype=dtype) for other in range(size)]
    if type(group) is dist.ProcessGroup:  # Gloo takes lists of equal sizes only
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
        whole = torch.cat(outputs)
        dist.all_to_all_single(whole, torch.cat(inputs), *sizes, group=group)
        return list(whole.split(sizes[0]))
    ended(dist.all_to_all(outputs, inputs, group=group, async_op=a), a)
    return outputs


def broadcast(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    tensors = [data(n, dtype, group.rank()) for _ in range(group.size())]
    for root, tensor in enumerate(tensors):
        ended(dist.broadcast(tensor, group=group, async_op=a, group_src=root), a)
    return tensors


def scatter(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    root, output = group.size() - 1, torch.zeros(n, dtype=dtype)
    parts = [data(n, dtype, part) for part in range(group.size())] if group.rank() == root else None
    ended(dist.scatter(output, parts, group=group, async_op=a, group_src=root), a)
    return [output]


def gather(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    root = group.size() - 1
    parts = [torch.zeros(n, dtype=dtype) for _ in range(group.size())] if group.rank() == root else None
    ended(dist.gather(data(n, dtype, group.rank()), parts, group=group, async_op=a, group_dst=root), a)
    return parts or []


MOVING = (all_gather_into_tensor, all_gather, all_to_all_single, all_to_all, broadcast, scatter, gather)


def all_reduce(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    found = []
    for op in (Sum.SUM, Sum.MIN, Sum.MAX):
        tensor = data(n, dtype, group.rank())
        ended(dist.all_reduce(tensor, op, group, a), a)
        found.append(tensor)
    return found


def reduce_scatter_tensor(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    output = torch.zeros(n, dtype=dtype)
    ended(dist.reduce_scatter_tensor(output, data(group.size() * n, dtype, group.rank()), group=group, async_op=a), a)
    return [output]


def reduce_scatter(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    output = torch.zeros(n, dtype=dtype)
    inputs = [data(n, dtype, group.rank() + part) for part in range(group.size())]
    ended(dist.reduce_scatter(output, inputs, group=group, async_op=a), a)
    return [output]


REDUCING = (all_reduce, reduce_scatter_tensor, reduce_scatter)


def like_gloo(gloo: dist.ProcessGroup) -> None:
    """Every collective, dtype and size, synchronous and not, has the bytes that Gloo's has."""
    with sidelane_group(gloo) as ours:
        chosen = [(function, dtype) for function in MOVING for dtype in BYTES]
        chosen += [(function, dtype) for function in REDUCING for dtype in REDUCED]
        cases = [(*pair, SIZES[number % len(SIZES)], number % 2 == 0) for number, pair in enumerate(chosen)]
        for function, dtype, numel, is_async in cases:
            expected = on_cpu(functools.partial(function, gloo, dtype, numel, is_async))
            found = function(ours, dtype, numel, is_async)
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one, other.cpu()), (function.__name__, dtype, numel, is_async)
        where = {(row.operation, row.where) for row in sidelane.report().rows}
        assert where == {(function.__name__, "sidelane") for function in (*MOVING, *REDUCING)}, where


def more_dtypes(gloo: dist.ProcessGroup) -> None:
    """Bytes are bytes: dtypes that Gloo refuses."""
    with sidelane_group(gloo) as ours:
        rank, size = ours.rank(), ours.size()
        for dtype in NOT_GLOOS:
            parts = [data(5, dtype, each) for each in range(size)]
            outputs = [torch.zeros(5, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, parts[rank], ours)
            mine, told = torch.zeros(5, dtype=dtype), data(5, dtype, rank)
            dist.scatter(mine, parts if rank == 1 else None, group=ours, group_src=1)
            dist.broadcast(told, group=ours, group_src=1)
            for found, expected in [*zip(outputs, parts, strict=True), (mine, parts[rank]), (told, parts[1])]:
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), dtype
        assert {row.where for row in sidelane.report().rows} == {"sidelane"}


def averages(gloo: dist.ProcessGroup) -> None:
    """The average, which Gloo has not for all dtypes: against the sum."""
    with sidelane_group(gloo) as ours:
        for dtype in (torch.float32, torch.bfloat16):
            tensor, output = data(24, dtype, ours.rank()), torch.zeros(24 // ours.size(), dtype=dtype)
            sums = tensor.float().cpu().clone()
            dist.all_reduce(sums, group=gloo)
            sums = sums.to(tensor.device)
            dist.reduce_scatter_tensor(output, tensor[: output.numel() * ours.size()], Sum.AVG, ours)
            dist.all_reduce(tensor, Sum.AVG, ours)
            expected = (sums / ours.size()).to(dtype)
            assert torch.allclose(tensor, expected)
            assert torch.allclose(output, expected.split(output.numel())[ours.rank()])
            # FSDP2's division by a factor of its caller's own, which Gloo has not. Calls of one kind have two factors.
            for factor in (0.25, 0.5, 1.0, 0.25):
                scaled = dist._make_nccl_premul_sum(factor)
                given = data(24, dtype, ours.rank())
                whole, parts, several = given.clone(), torch.zeros_like(output), torch.zeros_like(output)
                ended(dist.all_reduce(whole, scaled, ours, async_op=factor == 0.5), factor == 0.5)
                dist.reduce_scatter_tensor(parts, given[: output.numel() * ours.size()], scaled, ours)
                dist.reduce_scatter(several, [*given[: output.numel() * ours.size()].chunk(ours.size())], scaled, ours)
                expected = (sums * factor).to(dtype)
                assert torch.equal(whole, expected), factor
                assert torch.equal(parts, expected.split(output.numel())[ours.rank()])
                assert torch.equal(several, parts)
        assert {row.where for row in sidelane.report().rows} == {"sidelane"}


def elsewhere(gloo: dist.ProcessGroup) -> list[tuple[str, str, str]]:
    """What Sidelane does not do goes to Gloo, in between, with the same result on all ranks."""
    with sidelane_group(gloo) as ours:
        rank, size = ours.rank(), ours.size()
        for _ in range(3):
            work = dist.all_reduce(torch.ones(5), group=ours, async_op=True)
            flag = torch.tensor([rank == 1, False])
            dist.all_reduce(flag, Sum.MAX, ours)
            assert flag.tolist() == [size > 1, False]
            product = torch.full((3,), 2.0, dtype=torch.float64)
            dist.all_reduce(product, Sum.PRODUCT, ours)
            assert product.tolist() == [2.0**size] * 3
            double = torch.full((2,), float(rank), dtype=torch.float64)
            dist.reduce(double, group=ours, group_dst=0)
            assert rank or double.tolist() == [sum(range(size))] * 2
            sent, received = torch.full((4,), float(rank)), torch.empty(4)
            requests = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, group=ours, group_peer=(rank + 1) % size),
                    dist.P2POp(dist.irecv, received, group=ours, group_peer=(rank - 1) % size),
                ]
            )
            for request in requests:
                request.wait()
            assert received.tolist() == [(rank - 1) % size] * 4
            if rank == 0:
                token = torch.empty(1)
                assert dist.recv(token, None, group=ours) in dist.get_process_group_ranks(ours)
            elif rank == 1:
                dist.send(torch.ones(1), group=ours, group_dst=0)
            assert work is not None
            work.wait()
        rows = sidelane.report().rows
        return [(row.operation, row.where, row.why) for row in rows if row.where != "sidelane"]


def slower_staged(gloo: dist.ProcessGroup, mixes: bool) -> list[tuple[str, str]]:
    """Large exchanges of ordinary tensors, which the other backend makes as if it were NCCL, and of pooled ones; what
    the report says of each. ``mixes``: rank 1 comes with pooled tensors where the others have ordinary ones."""
    from sidelane.integrations import dispatch

    ours = dist.split_group(_wrapped(gloo), [list(range(gloo.size()))])
    assert isinstance(ours, SidelaneGroup)
    size, rank, count = ours.size(), ours.rank(), 5000
    ledger.reset()
    with (
        mock.patch.object(dispatch, "STAGED_BYTES", 20_000),
        mock.patch.dict(ours._dispatcher.names, {torch.get_default_device().type: "nccl"}),
    ):
        pool = sidelane.pool(ours.communicator(torch.get_default_device()), 1 << 20)
        for step, pooled, numel in [
            (0, False, count),
            (1, False, count),
            (2, True, count),
            (3, False, 10),
            (4, False, 3000),
        ]:
            with pool if pooled or (mixes and rank == 1) else contextlib.nullcontext():
                output, input = torch.empty(size, numel), torch.empty(size, numel)
            input.copy_(torch.arange(size)[:, None] + 10.0 * rank + 100 * step)
            dist.all_to_all_single(output, input, group=ours)
            assert torch.equal(output, (rank + 10.0 * torch.arange(size) + 100 * step)[:, None].expand(size, numel)), (
                step
            )
    return [(row.where, row.why) for row in sidelane.report().rows if row.operation == "all_to_all_single"]


def _wrapped(gloo: dist.ProcessGroup) -> dist.ProcessGroup:
    with sidelane_group(gloo) as wrapped:
        return wrapped


def objects(gloo: dist.ProcessGroup) -> None:
    with sidelane_group(gloo) as ours:
        rank, size = ours.rank(), ours.size()
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, {"rank": rank, "text": "x" * 100 * rank}, group=ours)
        assert [each["rank"] for each in everything] == list(range(size))
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(rank, gathered, group=ours, group_dst=0)
        assert rank or gathered == list(range(size))
        told = [("from", 1)] if rank == 1 else [None]
        dist.broadcast_object_list(told, group=ours, group_src=1)
        assert told == [("from", 1)]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {each}" for each in range(size)], group=ours, group_src=0)
        assert mine == [f"for {rank}"]


def many_back_to_back(gloo: dist.ProcessGroup) -> None:
    """Calls under way together, fulfilled in order; futures and their callbacks, which may make calls themselves."""
    with sidelane_group(gloo) as ours:
        size = ours.size()
        tensors = [torch.full((50 + number % 7,), float(ours.rank() + number)) for number in range(40)]
        works = [dist.all_reduce(tensor, group=ours, async_op=True) for tensor in tensors]
        for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            assert work is not None and work.wait(timedelta(seconds=20))
            assert tensor.eq(sum(range(size)) + size * number).all()
        late = torch.ones(3)

        def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            doubled = future.value()[0] * 2
            inner = dist.all_reduce(doubled, group=ours, async_op=True)
            assert inner is not None
            return inner.get_future().wait()[0]

        work = dist.all_reduce(late, group=ours, async_op=True)
        assert work is not None
        assert work.get_future().then(again).wait().tolist() == [2.0 * size * size] * 3
        assert work.is_success() and work.exception() is None and work.result()[0] is late
        dist.barrier(ours)
        waiting = dist.barrier(ours, async_op=True)
        assert waiting is not None
        waiting.wait()


def callbacks(gloo: dist.ProcessGroup) -> None:
    """Callbacks wait for later calls, and for later callbacks; they raise, and end their group."""
    ended = sidelane.wrap(gloo)
    with sidelane_group(gloo) as ours, sidelane.Communicator(gloo, device="cpu") as comm:
        size = ours.size()

        def start(maker: Any, tensor: torch.Tensor) -> dist.Work:
            if isinstance(maker, dist.ProcessGroup):
                return dist.all_reduce(tensor, group=maker, async_op=True)  # type: ignore[return-value]
            return maker.all_reduce(tensor, async_op=True)

        for maker in (gloo, ours, comm):
            tensors = [torch.full((9,), float(number)) for number in range(5)]
            works = [start(maker, tensor) for tensor in tensors]
            then = works[0].get_future().then(lambda done, last=works[-1]: last.wait() and done.value()[0] + 1)
            assert then.wait().eq(1).all() and tensors[4].eq(4 * size).all()
        for maker in (ours, comm):
            order: list[int] = []
            futures: list[Any] = [None] * 5

            def sums(
                done: torch.futures.Future[list[torch.Tensor]], number: int, order: list[int], futures: list[Any]
            ) -> torch.Tensor:
                order.append(number)
                return done.value()[0] + (futures[number + 1].wait() if number < 4 else 0)

            works = [start(maker, torch.ones(9)) for _ in futures]
            for number in reversed(range(5)):
                later = functools.partial(sums, number=number, order=order, futures=futures)
                futures[number] = works[number].get_future().then(later)
            assert futures[0].wait().eq(5 * size).all()
            assert sorted(order) == list(range(5))
            bad = start(maker, torch.ones(9)).get_future().then(lambda done: done.value()[0].view(2))
            with pytest.raises(RuntimeError, match="shape"):
                bad.wait()
        work = start(ended, torch.ones(9))
        assert work.get_future().then(lambda _: dist.destroy_process_group(ended)).wait() is None
        until = time.monotonic() + 20
        while any(thread.name == "sidelane-callbacks" for thread in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.01)


def strided_elsewhere(members: dist.ProcessGroup) -> None:
    """Columns of matrices in calls that Gloo makes: the right numbers, and nothing else written (pytorch 192920)."""
    rank, size, n = members.rank(), members.size(), 5
    own = [float(rank + each) for each in range(n)]
    summed = [float(sum(range(each, each + size))) for each in range(n)]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        matrices.append(torch.full((n, 3), -7, dtype=dtype))
        return matrices[-1][:, 1].copy_(torch.tensor(values, dtype=dtype))

    def end(*works: dist.Work | None) -> None:
        for work in works:
            if work is None:
                continue
            if how == "future":
                work.get_future().wait()
            while how == "polled" and not work.is_completed():
                time.sleep(1e-3)
            if how in ("at once", "waited"):
                work.wait()

    with sidelane_group(members) as group:
        for how in ("at once", "waited", "polled", "future"):
            matrices: list[torch.Tensor] = []
            a = how != "at once"
            total, product, at_root = column(own), column([2.0] * n, torch.float32), column(own)
            end(dist.all_reduce(total, group=group, async_op=a))
            end(dist.all_reduce(product, dist.ReduceOp.PRODUCT, group, a))
            end(dist.reduce(at_root, group_dst=0, group=group, async_op=a))
            assert (total.tolist(), product.tolist()) == (summed, [2.0**size] * n)
            assert rank > 0 or at_root.tolist() == summed
            assert all(matrix[:, ::2].eq(-7).all() for matrix in matrices), matrices
            if how in ("polled", "future"):  # in Gloo, what follows has neither an end without a wait nor a future
                continue
            scattered, given = column([0.0] * n), torch.tensor(own * size, dtype=torch.float64).repeat(2, 1).T[:, 0]
            end(dist.reduce_scatter_tensor(scattered, given, group=group, async_op=a))
            assert scattered.tolist() == summed
            came = column([0.0] * n)
            sent = dist.isend(column(own), group_dst=(rank + 1) % size, group=group)
            end(dist.irecv(came, group_src=(rank - 1) % size, group=group), sent)
            assert came.tolist() == [float((rank - 1) % size + each) for each in range(n)]
            assert all(matrix[:, ::2].eq(-7).all() for matrix in matrices), matrices
        row = torch.arange(12, dtype=torch.float64).view(3, 4)
        mine = row.clone() if rank == 0 else row.T.clone().T  # of one shape, in memory of two orders
        dist.all_reduce(mine, group=group)
        assert torch.equal(mine, row * size)
        with dist._coalescing_manager(group):
            dist.all_reduce(total, group=group)
        assert total.tolist() == [size * each for each in summed]


def alike(gloo: dist.ProcessGroup) -> None:
    """Calls like ones before, but for strides, signs, classes, dtypes, operations or roots."""
    shapes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x.view(-1, 4).t().contiguous().t(),  # of other strides
        lambda x: torch.nn.Parameter(x),
        lambda x: torch.complex(x, -x).conj().imag if x.dtype == torch.float32 else x,  # negated where it lies
        lambda x: x.requires_grad_() if x.is_floating_point() else x,
        lambda x: x,
    ]
    with sidelane_group(gloo) as ours, torch.no_grad():
        rank, size = ours.rank(), ours.size()
        before = {row.operation: row.calls for row in sidelane.report().rows}
        assert not before
        made = 0
        for number, (shape, dtype) in enumerate(
            itertools.product(shapes, (torch.float32, torch.int32, torch.bfloat16))
        ):
            given = [data(8 * size, dtype, 100 * number + peer) for peer in range(size)]
            if shape is shapes[2] and not dtype.is_floating_point:
                continue
            made += 1
            own = shape(given[rank].clone())
            whole = torch.empty(size * 8 * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, own.flatten() if own.dim() > 1 else own, ours)
            assert torch.equal(whole.cpu(), torch.cat([_flat(shape, each) for each in given]).cpu()), number
            for op, reduce in ((Sum.SUM, torch.sum), (Sum.MAX, torch.amax)):
                total = shape(given[rank].clone())
                dist.all_reduce(total, op, ours)
                expected = reduce(torch.stack([shape(each.clone()).detach().resolve_neg() for each in given]), 0)
                assert torch.equal(total.resolve_neg(), expected.to(dtype)), (number, op)
            for root in range(size):
                sent = shape(given[rank].clone())
                dist.broadcast(sent, root, ours)
                assert torch.equal(sent.resolve_neg(), shape(given[root].clone()).resolve_neg()), (number, root)
            part, swapped = torch.empty(8, dtype=dtype), torch.empty(8 * size, dtype=dtype)
            dist.reduce_scatter_tensor(part, given[rank].clone(), group=ours)
            assert torch.equal(part, torch.stack(given).sum(0).to(dtype)[8 * rank : 8 * rank + 8])
            dist.all_to_all_single(swapped, given[rank].clone(), group=ours)
            assert torch.equal(swapped, torch.cat([each[8 * rank : 8 * rank + 8] for each in given]))
        calls = {}
        for row in sidelane.report().rows:
            assert row.where == "sidelane", row
            calls[row.operation] = calls.get(row.operation, 0) + row.calls
        assert calls == {
            "all_gather_into_tensor": made,
            "all_reduce": 2 * made,
            "broadcast": size * made,
            "reduce_scatter_tensor": made,
            "all_to_all_single": made,
        }
        last = sidelane.report().last
        assert last is not None and (last.operation, last.nbytes) == ("all_to_all_single", 8 * size * 2)
        with torch.autograd.profiler.profile() as profile:
            dist.all_reduce(torch.ones(5), group=ours)
        assert any(event.name == "sidelane:all_reduce" for event in profile.function_events)
        with pytest.raises(ValueError, match="all_gather: output must hold"):
            dist.all_gather_into_tensor(torch.empty(3), torch.empty(2), ours)


def _flat(shape: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    return shape(given.clone()).detach().resolve_neg().flatten()


def coalesced(gloo: dist.ProcessGroup) -> None:
    with sidelane_group(gloo) as ours:
        rank, size = ours.rank(), ours.size()
        for device, is_async in itertools.product((None, torch.get_default_device()), (False, True)):
            tensors = [torch.full((4 + number,), float(rank)) for number in range(3)]
            with dist._coalescing_manager(ours, device, async_ops=is_async) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor, group=ours)
            if is_async:
                manager.wait()
            assert all(tensor.eq(sum(range(size))).all() for tensor in tensors)
            outputs = [torch.empty(size * (2 + number)) for number in range(3)]
            with dist._coalescing_manager(ours, device, async_ops=is_async) as manager:
                for output in outputs:
                    part = torch.full((output.numel() // size,), float(rank))
                    dist.all_gather_into_tensor(output, part, ours)
            if is_async:
                manager.wait()
            for output in outputs:
                assert output.view(size, -1).eq(torch.arange(size).view(-1, 1)).all()
            results = [torch.empty(3), torch.empty(5)]
            with dist._coalescing_manager(ours, device, async_ops=is_async) as manager:
                for result in results:
                    dist.reduce_scatter_tensor(result, torch.ones(size * result.numel()), group=ours)
            if is_async:
                manager.wait()
            assert all(result.eq(size).all() for result in results)


def batches(gloo: dist.ProcessGroup) -> None:
    """As where NCCL makes those of a batch together."""
    as_one = mock.patch.object(torch_world, "made_as_one", return_value=True)
    with sidelane_group(gloo) as ours, as_one:
        exchange_batches(ours, {(ours.rank() + 1) % ours.size(), (ours.rank() - 1) % ours.size()})


def exchange_batches(ours: dist.ProcessGroup, peers: set[int]) -> None:
    """All sends come before all receives."""
    rank = ours.rank()
    for step in range(3):
        sent = {peer: torch.full((5 + peer,), float(10 * rank + peer + step)) for peer in peers}
        received = {peer: torch.full((5 + rank,), -1.0) for peer in peers}
        operations = [dist.P2POp(dist.isend, sent[peer], group=ours, group_peer=peer) for peer in peers]
        operations += [dist.P2POp(dist.irecv, received[peer], group=ours, group_peer=peer) for peer in peers]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert all(received[peer].eq(10 * peer + rank + step).all() for peer in peers)


def functional_collectives(gloo: dist.ProcessGroup) -> None:
    with sidelane_group(gloo) as ours:
        rank, size = ours.rank(), ours.size()

        def everything(group: dist.ProcessGroup) -> list[torch.Tensor]:
            given = data(size * 6, torch.float32, rank).view(size * 2, 3)
            found = [
                functional.all_reduce(given, "sum", group),
                functional.all_reduce(given, "max", group),
                functional.all_gather_tensor(given, 1, group),
                functional.reduce_scatter_tensor(given, "sum", 0, group),
                functional.broadcast(given, size - 1, group),
                functional.all_to_all_single(given, [2] * size, [2] * size, group),
                *functional.all_gather_into_tensor_coalesced([given, given + 1], group),
                *functional.reduce_scatter_tensor_coalesced([given, given + 1], "sum", [0, 0], group),
            ]
            return [each.wait() if isinstance(each, functional.AsyncCollectiveTensor) else each for each in found]

        for one, other in zip(on_cpu(lambda: everything(gloo)), everything(ours), strict=True):
            assert torch.equal(one, other.cpu())
        weight = data(6, torch.float32, rank).requires_grad_()
        (functional.all_gather_tensor_autograd(weight, 0, ours) * 2).sum().backward()
        assert weight.grad is not None and weight.grad.eq(2 * size).all()


def compiled(gloo: dist.ProcessGroup) -> None:
    """A compiled function with collectives in it; the back end is the one without a C++ compiler."""
    with sidelane_group(gloo) as ours:
        size, name = ours.size(), ours.group_name

        def step(x: torch.Tensor) -> torch.Tensor:
            gathered = functional.all_gather_tensor(x * 2, 0, name)
            return functional.all_reduce(gathered + 1, "sum", name) * 3

        def in_place(x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            dist.all_reduce(doubled, group=ours)
            return doubled + 1

        x = data(8, torch.float32, ours.rank())
        assert torch.equal(torch.compile(in_place, backend="aot_eager")(x), in_place(x))
        assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))
        assert size * 8 == step(x).numel()
        grads = []
        for group in (gloo, ours):  # their reducer calls them from within what is compiled
            torch.manual_seed(4)
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 3), process_group=group)
            whole = torch.compile(net, backend="aot_eager")
            for _ in range(2):
                whole(x.view(1, 8)).square().sum().backward()
            grads.append([parameter.grad for parameter in net.parameters()])
        torch.testing.assert_close(*grads)


def compiled_as_gloos(gloo: dist.ProcessGroup, backend: str = "aot_eager") -> None:
    """What the compiler traces of a group in C++, and no more: the same graphs and breaks, and the same results."""
    from torch._dynamo.utils import counters

    peer, group = gloo.rank() ^ 1, gloo

    def broadcast(x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, 1, group=group)
        dist.barrier(group)
        return x + 1

    def asynchronous(x: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(x, group=group, async_op=True)
        y = x.new_ones(8) * 2
        assert work is not None
        work.wait()
        then = work.get_future().then(lambda done: done.value()[0] * 2)
        return y + then.wait()

    def lists(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x, group=group)
        if torch.__version__ >= "2.13":  # Gloo of torch 2.11 has none
            dist.all_to_all(list(parts[1].chunk(2)), list(parts[0].chunk(2)), group=group)
        return parts[0] + parts[1]

    def pairs(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.zeros_like(x), torch.empty_like(x)
        if peer:
            dist.send(x, peer, group)
        else:
            dist.recv(y, peer, group)
        works = [dist.isend(y, peer, group), dist.irecv(z, peer, group)]
        operations = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, x + 1, peer, group)]
        for work in (*works, *dist.batch_isend_irecv(operations)):
            assert work is not None
            work.wait()
        return y + z

    def trains(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    for function in (broadcast, asynchronous, lists, pairs, trains) if backend == "aot_eager" else (broadcast, trains):
        found = []
        with sidelane_group(gloo) as ours:
            for group in (gloo, ours):
                torch._dynamo.reset()
                counters.clear()
                torch.manual_seed(0)
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)

                def step(x: torch.Tensor) -> torch.Tensor:
                    made = function(x)  # noqa: B023
                    if made.requires_grad:
                        made.backward()
                    return made.detach()

                whole = torch.compile(step, backend=backend)
                results = [whole(data(8, torch.float32, gloo.rank())) for _ in range(2)]
                gradients = [each.grad for each in model.parameters()]
                graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
                found.append((results + gradients, graphs))
        (expected, gloos), (results, graphs) = found
        assert graphs == gloos, function
        for one, other in zip(results, expected, strict=True):
            assert one is other is None or torch.allclose(one, other), function


def distributed_tensors(gloo: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with sidelane_group(gloo) as ours:
        mesh = DeviceMesh.from_group(ours, torch.get_default_device().type)
        full = torch.arange(60.0).view(10, 6)
        split = distribute_tensor(full, mesh, [Shard(0)])
        assert torch.equal(split.redistribute(mesh, [Shard(1)]).full_tensor(), full)
        assert torch.equal(split.redistribute(mesh, [Replicate()]).to_local(), full)
        right = distribute_tensor(full.T.contiguous(), mesh, [Shard(0)])
        product = distribute_tensor(full, mesh, [Shard(1)]) @ right
        assert torch.allclose(product.full_tensor(), full @ full.T)
        assert {row.where for row in sidelane.report().rows if row.operation != "barrier"} == {"sidelane"}


def wrapped(gloo: dist.ProcessGroup) -> list[str]:
    """A group with Sidelane in front of it, and the group itself, in turn."""
    ours, again = sidelane.wrap(gloo), sidelane.wrap(gloo)
    assert ours.group_name != again.group_name and dist.get_backend(ours) == "sidelane", dist.get_backend(ours)
    ledger.reset()
    for group in (ours, gloo, again, ours):
        tensor = torch.ones(9)
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(gloo.size()).all()
    flag = torch.tensor([True])
    dist.all_reduce(flag, Sum.MIN, ours)
    x = functional.all_reduce(torch.ones(3), "sum", ours)
    assert x.eq(gloo.size()).all()
    dist.destroy_process_group(ours)
    dist.destroy_process_group(again)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=gloo)  # which is still there
    return [f"{row.operation} {row.dtype} {row.where} {row.calls}" for row in sidelane.report().rows]


def model() -> torch.nn.Module:
    device = torch.get_default_device()
    with torch.device("cpu"):
        torch.manual_seed(0)
        sizes = (13, 32, 31, 5)
        layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).to(device)


def losses_of(net: torch.nn.Module, group: dist.ProcessGroup) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(20):
        generator = torch.Generator("cpu").manual_seed(100 * step + group.rank())
        x = torch.randn(8, 13, generator=generator, device="cpu").to(torch.get_default_device())
        loss = (net(x) - x[:, :5]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach().clone()
        dist.all_reduce(told, group=group)
        losses.append(told.item())
    return losses


def profiled(gloo: dist.ProcessGroup) -> None:
    """A profiler shows calls by name, and with shapes what other groups' calls say of themselves."""
    with sidelane_group(gloo) as ours, torch.profiler.profile(record_shapes=True) as profiler:
        size, ranks = ours.size(), str(dist.get_process_group_ranks(ours))
        dist.all_reduce(torch.ones(3), group=ours)
        work = dist.all_gather_into_tensor(torch.empty(size), torch.ones(1), ours, async_op=True)
        assert work is not None
        work.wait()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    found = {event["name"]: event["args"] for event in events if str(event.get("name")).startswith("sidelane:")}
    assert set(found) == {"sidelane:all_reduce", "sidelane:all_gather_into_tensor"}
    for name, read, written in (("all_reduce", 3, 3), ("all_gather_into_tensor", 1, size)):
        said = found[f"sidelane:{name}"]
        assert (said["Collective name"], said["dtype"], said["Group size"]) == (name, "Float", size)
        assert (said["In msg nelems"], said["Out msg nelems"]) == (read, written)
        assert said["Process Group Ranks"] == ranks and [written] in said["Input Dims"]


def joins_ddp(gloo: dist.ProcessGroup) -> None:
    """Ranks with unequal numbers of batches, whose gradients are divided by the number of those that still train."""
    device = torch.get_default_device()
    with sidelane_group(gloo) as ours:
        rank = ours.rank()
        torch.manual_seed(0)
        ids = None if device.type == "cpu" else [device]
        net = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(5, 5, bias=False), device_ids=ids, process_group=ours
        )
        given = torch.ones(1, 5)
        for by_all in (False, True):
            with net.join(divide_by_initial_world_size=by_all):
                for step in range(3 + 2 * rank):
                    net(given).sum().backward()
                    gc.collect()
                    taking_part = sum(step < 3 + 2 * peer for peer in range(ours.size()))
                    expected = taking_part / ours.size() if by_all else 1.0
                    gradient = next(net.parameters()).grad
                    assert gradient is not None
                    torch.testing.assert_close(gradient, torch.full((5, 5), expected))
                    net.zero_grad()


def trains_ddp(gloo: dist.ProcessGroup) -> None:
    with sidelane_group(gloo) as ours:

        def losses(group: dist.ProcessGroup) -> list[float]:
            small = 1e-3  # MB a bucket: several of them
            return losses_of(
                torch.nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=small), group
            )

        expected, found = on_cpu(lambda: losses(gloo)), losses(ours)
        assert found[-1] < 0.7 * found[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        made = {row.operation: row for row in sidelane.report().rows if row.where == "sidelane"}
        assert made["all_reduce"].calls >= 40 and "broadcast" in made


def hooks_of_ddp(gloo: dist.ProcessGroup) -> None:
    """A communication hook makes calls of its own, and callbacks of their futures."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    with sidelane_group(gloo) as ours:

        def losses(group: dist.ProcessGroup) -> list[float]:
            net = torch.nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=1e-3)
            net.register_comm_hook(group, fp16_compress_hook)
            return losses_of(net, group)

        torch.testing.assert_close(losses(ours), on_cpu(lambda: losses(gloo)), rtol=1e-2, atol=0)
        made = {(row.operation, row.dtype): row.where for row in sidelane.report().rows}
        assert made["all_reduce", "float16"] == "sidelane"


def refused_in_graphs(gloo: dist.ProcessGroup) -> None:
    """What a graph would not hold is refused while one is captured; nothing of it has happened, and all goes on."""
    ours = sidelane.wrap(gloo)
    dispatcher, device = ours._dispatcher, torch.get_default_device()
    on_gpu = mock.Mock(device=torch.device("cuda"), dtype=torch.float32)
    on_gpu.numel.return_value = on_gpu.element_size.return_value = 4

    def refused(text: str, call: Callable[[], object]) -> None:
        with pytest.raises(sidelane.UnavailableError, match=f"not while a graph is captured: {text}"):
            call()

    def in_graph() -> None:
        host = torch.ones(3, device="cpu")
        refused("tensors of the CPU", lambda: dist.all_reduce(host, group=ours))
        refused("tensors of the CPU", lambda: dist.all_reduce(host, group=ours, async_op=True))
        refused("tensors of the CPU", lambda: dist.all_reduce(host.double(), group=ours))
        refused("tensors of the CPU", lambda: dist.send(host, group=ours, group_dst=(ours.rank() + 1) % 2))
        if device.type == "cuda":
            tensor = torch.ones(3)
            refused("the group's first call", lambda: dist.all_reduce(tensor, group=ours))
            if dispatcher.names["cuda"] == "gloo":
                refused("gloo makes it, on the host", lambda: dist.all_reduce(tensor.double(), group=ours))
            return
        call = calls.GroupCall(calls.ALL_REDUCE, [on_gpu], [], dist.AllreduceOptions(), ())
        call.refusal = ""  # the tensor is none
        refused("the group's first call", lambda: dispatcher._run(call, None))
        call.refusal = "product of float32"
        refused("gloo makes it, on the host .product of float32", lambda: dispatcher._run(call, None))

    try:
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                torch.ones(3).add_(1)
                in_graph()
        else:
            with (
                mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
                mock.patch.object(dispatcher, "_can_capture", True),
                mock.patch.dict(dispatcher.life.refusals, {"cuda": ""}),
                mock.patch.dict(dispatcher.names, {"cuda": "gloo"}),
            ):
                in_graph()
        assert not [row for row in sidelane.report().rows if row.group == ours.group_name]
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=ours)
        assert tensor.eq(ours.size()).all()
    finally:
        dist.destroy_process_group(ours)


def sharded(group: dist.ProcessGroup) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(), DeviceMesh.from_group(group, torch.get_default_device().type)
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def memory_for_fsdp(gloo: dist.ProcessGroup) -> None:
    """FSDP2 that asks the group for memory gets what the group's calls need not stage."""
    from torch.distributed.fsdp import FSDPModule

    def ask(net: torch.nn.Module) -> None:
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)

    train_in_symmetric_memory(gloo, ask)


def memory_without_a_line(gloo: dist.ProcessGroup) -> None:
    """FSDP2 takes the group's memory by itself where its calls are Sidelane's: on GPUs."""
    from sidelane.integrations import buffers

    with mock.patch.object(buffers, "DEVICES", (torch.get_default_device().type,)):
        train_in_symmetric_memory(gloo, lambda net: None)


def train_in_symmetric_memory(gloo: dist.ProcessGroup, ask: Callable[[torch.nn.Module], None]) -> None:
    """A model on a Sidelane group loses what it loses on Gloo, and all its buffers are symmetric."""
    device = torch.get_default_device()
    with sidelane_group(gloo) as wrapped:
        # The ranks keep it, too: torch remembers what it does with a mesh by the ranks of that, whatever its group.
        ours = dist.split_group(wrapped, [list(range(gloo.size()))])
    assert ours is not None
    assert ours._get_backend(device).supports_tensor_alloc(device)
    assert not wrapped._get_backend(torch.device("cpu")).supports_tensor_alloc(torch.device("cpu"))
    net, expected, symmetric = sharded(ours), on_cpu(lambda: losses_of(sharded(gloo), gloo)), []
    ask(net)
    kinds = ("all_gather", "reduce_scatter")
    made = {kind: getattr(sidelane.Communicator, kind) for kind in kinds}

    def noting(kind: str) -> Callable[..., Any]:
        def call(comm: sidelane.Communicator, output: Any, given: Any, **options: Any) -> Any:
            larger = output if kind == "all_gather" else given
            symmetric.append((kind, comm.heap.locate(larger).symmetric))
            return made[kind](comm, output, given, **options)

        return call

    with contextlib.ExitStack() as patched:
        for kind in kinds:
            patched.enter_context(mock.patch.object(sidelane.Communicator, kind, noting(kind)))
        found = losses_of(net, ours)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert len(symmetric) > 10 and set(symmetric) == {(kind, True) for kind in kinds}, symmetric


def lends_its_communicator(gloo: dist.ProcessGroup) -> None:
    """What is made in a pool of the group's communicator, its calls need not stage; and one call tells the memory."""
    device = torch.get_default_device()
    with sidelane_group(gloo) as ours:
        assert isinstance(ours, SidelaneGroup)
        comm = ours.communicator(device)
        assert comm is ours.communicator(device.type)
        before = comm.memory()
        with sidelane.pool(comm, 1 << 20):
            output, given = torch.zeros(3000 * ours.size()), torch.full((3000,), float(ours.rank() + 1))
            other = given + 1
        assert comm.memory().used > before.used
        for is_async in (False, True):
            output.zero_()
            ended(dist.all_gather_into_tensor(output, given, ours, is_async), is_async)
            assert output.view(ours.size(), -1)[:, 7].tolist() == [rank + 1 for rank in range(ours.size())]
            assert all(comm.heap.locate(one).symmetric for one in (output, given))
        preparer = comm.preparer
        with mock.patch.object(preparer, "prepare", side_effect=preparer.prepare) as prepare:
            for _ in range(3):  # on an input that nobody compares, since nobody else reads it
                dist.all_gather_into_tensor(output.zero_(), other, ours)
                assert output.view(ours.size(), -1)[:, 7].tolist() == [rank + 2 for rank in range(ours.size())]
        assert prepare.call_count == 1
        with pytest.raises(
            sidelane.UnavailableError, match="communicator: none for meta tensors of .*does not know meta"
        ):
            ours.communicator("meta")
        if not torch.cuda.is_available():
            assert comm is ours.communicator()
            with pytest.raises(sidelane.UnavailableError, match="communicator: none for cuda tensors of .*has no GPU"):
                ours.communicator("cuda")


def trains_fsdp(gloo: dist.ProcessGroup) -> None:
    with sidelane_group(gloo) as ours:
        expected, found = on_cpu(lambda: losses_of(sharded(gloo), gloo)), losses_of(sharded(ours), ours)
        assert found[-1] < 0.7 * found[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        made = {row.operation: row for row in sidelane.report().rows if row.where == "sidelane"}
        assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(made)
        assert not [row for row in sidelane.report().rows if row.where != "sidelane"]

        net = sharded(ours)
        with fsdp.enable(net) as enabled:
            torch.testing.assert_close(losses_of(net, ours), expected, rtol=1e-5, atol=0)
        assert enabled.calls and not enabled.elsewhere

        # What fsdp.enable hands on to the group is the group's to report, once, and by who has made it.
        refused = mock.patch.object(fsdp.GroupReduction, "of", return_value=fsdp.GroupReduction("none of ours"))
        with refused, fsdp.enable(net) as enabled:
            ledger.reset()
            params = fsdp._param_groups(net)[0]
            params._reduce_scatter_comm(torch.zeros(2), torch.zeros(2 * ours.size()), ours, Sum.PRODUCT)
        assert enabled.elsewhere
        assert not [row for row in sidelane.report().rows if row.operation.startswith("fsdp reduce")]
