"""The process group by CPU ranks and on GPUs: the same results as Gloo's, through every door that torch has."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import two_worlds
from made_up_gpus import MadeUpMark, MadeUpSide, made_up_gpus
from native_driver import NativeDriver
from on_ranks import default_stream, on_ranks
from process_groups import data, ended, on_cpu, sidelane_group
from ranks import RankError, RankPool
from torch.distributed import distributed_c10d as c10d

import sidelane
from sidelane import config
from sidelane.collectives import backend_cpu, backend_cuda
from sidelane.errors import UnavailableError
from sidelane.integrations import dispatch, ledger, lifetime, order, torch_world
from sidelane.integrations.calls import copy_bits
from sidelane.integrations.process_group import SidelaneGroup
from sidelane.integrations.works import EndedWork, JoinedWork, OtherWork
from sidelane.machine.peers import PeerMemory

BYTES = (torch.uint8, torch.float64, torch.int32, torch.bfloat16)
NOT_GLOOS = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16)
REDUCED = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
SIZES = (1, 7, 1000)
Sum = dist.ReduceOp


Collective = Callable[[dist.ProcessGroup, torch.dtype, int, bool], list[torch.Tensor]]


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
    # Megatron-core gives arrays.
    sizes = [np.array(each) if a else each for each in (received, sent)]
    ended(dist.all_to_all_single(uneven, given, *sizes, group=group, async_op=a), a)
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


@on_ranks(1, 2, (5, 1, 3), gpu=default_stream)
def test_every_collective_is_as_gloos(group: dist.ProcessGroup) -> None:
    """Every collective, dtype and size, synchronous and not, has the bytes that Gloo's has."""
    with sidelane_group(group) as ours:
        chosen = [(function, dtype) for function in MOVING for dtype in BYTES]
        chosen += [(function, dtype) for function in REDUCING for dtype in REDUCED]
        cases = [(*pair, SIZES[number % len(SIZES)], number % 2 == 0) for number, pair in enumerate(chosen)]
        for function, dtype, numel, is_async in cases:
            expected = on_cpu(functools.partial(function, group, dtype, numel, is_async))
            found = function(ours, dtype, numel, is_async)
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one, other.cpu()), (function.__name__, dtype, numel, is_async)
        where = {(row.operation, row.where) for row in sidelane.report().rows}
        assert where == {(function.__name__, "sidelane") for function in (*MOVING, *REDUCING)}, where


@on_ranks(2, gpu=default_stream)
def test_dtypes_that_gloo_does_not_have(group: dist.ProcessGroup) -> None:
    """Bytes are bytes: dtypes that Gloo refuses."""
    with sidelane_group(group) as ours:
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


@on_ranks(2, gpu=default_stream)
def test_averages(group: dist.ProcessGroup) -> None:
    """The average, which Gloo has not for all dtypes: against the sum."""
    with sidelane_group(group) as ours:
        for dtype in (torch.float32, torch.bfloat16):
            tensor, output = data(24, dtype, ours.rank()), torch.zeros(24 // ours.size(), dtype=dtype)
            sums = tensor.float().cpu().clone()
            dist.all_reduce(sums, group=group)
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


@on_ranks(3)
@pytest.mark.parametrize("debug", [False, True])
def test_what_sidelane_does_not_do_goes_to_gloo_and_is_reported(group: dist.ProcessGroup, debug: bool) -> None:
    """Gloo makes the calls that Sidelane does not, with the same result on all ranks; with debug they are compared."""
    with config.override(dataclasses.replace(config.current(), debug=debug)), sidelane_group(group) as ours:
        rank, size = ours.rank(), ours.size()
        for _ in range(3):
            work = dist.all_reduce(torch.ones(5), group=ours, async_op=True)
            flag = torch.tensor([rank == 1, False])
            dist.all_reduce(flag, Sum.MAX, ours)
            assert flag.tolist() == [size > 1, False]
            product = torch.full((3,), 2.0, dtype=torch.float64)
            dist.all_reduce(product, Sum.PRODUCT, ours)
            assert product.tolist() == [2.0**size] * 3
            for is_async in (False, True):
                sparse = torch.sparse_coo_tensor([[rank, 4]], [1.0, 2.0], (5,))
                ended(dist.all_reduce(sparse, group=ours, async_op=is_async), is_async)
                assert sparse.to_dense().tolist() == [float(peer < size) for peer in range(4)] + [2.0 * size]
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
        rows = [row for row in sidelane.report().rows if row.where != "sidelane"]
    gloos = {("all_reduce", "gloo"), ("reduce", "gloo"), ("send", "gloo"), ("recv", "gloo")}
    assert {(row.operation, row.where) for row in rows} <= gloos
    assert {row.why for row in rows} == {
        *("max of bool", "operation product", "layout torch.sparse_coo", "Sidelane has no such operation")
    }


@on_ranks(2)
def test_an_output_of_another_dtype_is_refused_before_anything_moves(group: dist.ProcessGroup) -> None:
    """By the rank that gives it, in words; and what Gloo refuses has a note about why Gloo got it."""
    with sidelane_group(group) as ours:
        whole, part, doubles = torch.ones(4, dtype=torch.int32), torch.ones(2), torch.zeros(4, dtype=torch.float64)
        for call in (
            lambda: ours.all_gather_single(whole, part).wait(),
            lambda: ours.all_gather_single(doubles, part).wait(),
            lambda: ours.allgather([list(whole.split(2))], [part]).wait(),
            lambda: ours.reduce_scatter_single(part, whole).wait(),
            lambda: ours.reduce_scatter_single(doubles[:2], torch.ones(4)).wait(),
            lambda: ours.reduce_scatter_single(part, doubles).wait(),
            lambda: ours.all_to_all_single(whole, torch.ones(4), [], []).wait(),
            lambda: ours.alltoall(list(whole.split(2)), list(torch.ones(4).split(2))).wait(),
        ):
            with pytest.raises(TypeError, match=r"input and output must have one dtype \(output=torch.*, input=torch"):
                call()
        wrong = ours.rank() == 1  # and the other rank need not wait
        with pytest.raises(TypeError if wrong else sidelane.PeerError, match="must have one dtype"):
            ours.all_gather_single(whole if wrong else torch.ones(4), part).wait()
        with pytest.raises(RuntimeError, match="Invalid scalar type") as found:
            ours.allreduce([torch.ones(4).to(torch.float8_e4m3fn)]).wait()
        assert found.value.__notes__ == [
            "all_reduce of float8_e4m3fn on cpu is made by gloo: sum of float8_e4m3fn",
            "See docs/guide/errors.md",
        ]
        assert whole.tolist() == [1] * 4 and not doubles.any()


def exchange_large(group: dist.ProcessGroup, mixes: bool) -> list[tuple[str, str]]:
    """Large exchanges of ordinary tensors, which the other backend makes as if it were NCCL, and of pooled ones; what
    the report says of each. ``mixes``: rank 1 comes with pooled tensors where the others have ordinary ones."""
    size, rank, count = group.size(), group.rank(), 5000
    with left_to_library(group, 20_000) as ours:
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


@contextlib.contextmanager
def left_to_library(group: dist.ProcessGroup, most: int | None = None) -> Iterator[SidelaneGroup]:
    """A new group whose library takes the name of NCCL, and ends coalesced calls with one work as NCCL does.

    ``most``: bytes of ordinary tensors that are staged.
    """
    inside: list[dist.Work] = []

    class NotedWork(OtherWork):
        def __init__(self, work: dist.Work, *given: Any, **options: Any) -> None:
            inside.append(work)
            super().__init__(work, *given, **options)

    library = mock.Mock(**{"name.return_value": "nccl"})
    kinds = mock.patch.object(lifetime, "kinds", return_value={torch.get_default_device(): (None, library)})
    with sidelane_group(group) as wrapped, kinds:
        ours = dist.split_group(wrapped, [list(range(group.size()))])
    assert isinstance(ours, SidelaneGroup)
    limits = dispatch.MOST_STAGED if most is None else dict.fromkeys(dispatch.MOST_STAGED, (most, most))
    with (
        mock.patch.object(dispatch, "MOST_STAGED", limits),
        mock.patch.object(dist.ProcessGroup, "_start_coalescing", return_value=None),  # Gloo has none
        mock.patch.object(dist.ProcessGroup, "_end_coalescing", side_effect=lambda *_: JoinedWork(inside)),
        mock.patch.object(dispatch, "OtherWork", NotedWork),
    ):
        yield ours


def test_the_bits_of_small_floats_are_copied() -> None:
    def as_on_gpus(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            output.copy_(input.float() if input.is_floating_point() else input)

    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2):
        copied = torch.zeros(bits.nbytes, dtype=torch.uint8).view(dtype)
        with mock.patch.object(torch, "_foreach_copy_", as_on_gpus):
            copy_bits(copied.split(1000), bits.view(dtype).split(1000))
        assert torch.equal(copied.view(torch.int16), bits)


@on_ranks(2)
def test_large_exchanges_of_ordinary_tensors_are_left_to_nccl(group: dist.ProcessGroup) -> None:
    rows = exchange_large(group, mixes=False)
    assert {where for where, _ in rows} == {"nccl", "sidelane"}
    (why,) = {why for where, why in rows if where == "nccl"}
    assert why.startswith("ordinary tensors of ") and "sidelane.pool" in why


def coalesced_calls(
    group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool, *, by_device: bool = True, one_by_one: bool = False
) -> list[torch.Tensor]:
    """Several calls of each kind at once. Without ``by_device`` torch does not tell the group where they begin."""
    size, rank, device = group.size(), group.rank(), torch.get_default_device() if by_device else None
    gathered = [torch.zeros(size * count, dtype=dtype) for count in (n, n + 2)]
    summed = [data(count, dtype, rank) for count in (n, n + 3)]
    parts = [torch.zeros(count, dtype=dtype) for count in (n, n + 4)]
    for function, calls in (
        (dist.all_gather_into_tensor, [(each, data(each.numel() // size, dtype, rank)) for each in gathered]),
        (dist.all_reduce, [(each,) for each in summed]),
        (dist.reduce_scatter_tensor, [(each, data(each.numel() * size, dtype, rank)) for each in parts]),
    ):
        at_once: Any = dist._coalescing_manager(group, device, async_ops=a)
        with contextlib.nullcontext() if one_by_one else at_once as manager:
            for tensors in calls:
                function(*tensors, group=group)
        if a and not one_by_one:
            manager.wait()
    return [*gathered, *summed, *parts]


def functional_calls(group: dist.ProcessGroup, dtype: torch.dtype, n: int, a: bool) -> list[torch.Tensor]:
    size, rank = group.size(), group.rank()
    made = [
        functional.all_gather_tensor(data(n, dtype, rank), 0, group),
        functional.all_reduce(data(n, dtype, rank), "sum", group),
        functional.reduce_scatter_tensor(data(n * size, dtype, rank), "sum", 0, group),
        functional.all_to_all_single(data(n * size, dtype, rank), None, None, group),
    ]
    return [functional.wait_tensor(each) for each in made]


LARGE_FORMS = (
    *(all_gather_into_tensor, all_gather, all_to_all_single, all_reduce, reduce_scatter_tensor, reduce_scatter),
    *(coalesced_calls, functional_calls),
)


@on_ranks(2, 3)
@pytest.mark.parametrize("a", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("form", LARGE_FORMS, ids=lambda form: form.__name__)
def test_every_form_of_a_large_call_is_left_to_nccl(group: dist.ProcessGroup, form: Any, a: bool) -> None:
    """Fresh inputs each time, between calls that Sidelane makes; the bytes are Gloo's, for sums within rounding."""
    with left_to_library(group, 20_000) as ours:
        for n in (7, 30_001, 7, 30_001, 30_002):
            with mock.patch.object(dispatch, "MOST_STAGED", dict.fromkeys(dispatch.MOST_STAGED, dispatch.NEVER)):
                expected = form(ours, torch.float32, n, a)  # by Sidelane, however large
            for found, wanted in zip(form(ours, torch.float32, n, a), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        rows = sidelane.report().rows
        assert {row.where for row in rows} == {"nccl", "sidelane"}
        for why in {row.why for row in rows if row.where == "nccl"}:
            begins = "ordinary tensors of more than 20000; in a sidelane.pool", "parts of sizes that peers do not know"
            assert why.removeprefix("asynchronous, ").startswith(begins), why


@on_ranks(3)
def test_parts_of_several_sizes_are_left_to_nccl(group: dist.ProcessGroup) -> None:
    """In every form, also on a rank without any bytes, and with tensors of a pool on some ranks."""
    draw = random.Random(5)
    with left_to_library(group) as ours:
        size, rank = ours.size(), ours.rank()
        pool = sidelane.pool(ours.communicator(torch.get_default_device()), 1 << 20)
        # Gloo, which stands for NCCL, takes no lists before torch 2.13.
        for step in (step for step in range(24) if step % 3 or torch.__version__ >= "2.13"):
            idle = draw.randrange(-1, size)
            sizes = [[draw.randrange(4) * (idle not in (src, dst)) for dst in range(size)] for src in range(size)]
            if step % 3 == 0:  # Gloo takes lists of equal sizes only
                sizes = [[step] * size] * size
            with pool if step % size == rank else contextlib.nullcontext():
                sent = [torch.full((count,), 10.0 * rank + step) for count in sizes[rank]]
                received = [torch.zeros(row[rank]) for row in sizes]
                output, is_async = torch.zeros(sum(map(len, received))), draw.random() < 0.5
            counts = [len(each) for each in received]
            if step % 3 == 0:
                ended(dist.all_to_all(received, sent, ours, async_op=is_async), is_async)
            elif step % 3 == 1:
                given = torch.cat(sent)
                ended(dist.all_to_all_single(output, given, counts, sizes[rank], ours, is_async), is_async)
            else:
                output = functional.all_to_all_single(torch.cat(sent), counts, sizes[rank], ours)
            found = torch.cat(received) if step % 3 == 0 else output
            assert found.tolist() == [10.0 * src + step for src in range(size) for _ in range(counts[src])], step
        assert {row.where for row in sidelane.report().rows} == {"nccl"}


@on_ranks(2)
def test_what_staging_makes_slower_is_decided_by_measured_sizes(group: dist.ProcessGroup) -> None:
    """Synchronous sums of any size and asynchronous ones of up to 4 MiB stay, and so do views with other strides when
    a peer's tensor has none; with ``beside`` and with ``deterministic`` nothing leaves."""
    count = (4 << 20) // 4
    cases = (
        (count, False, "sidelane"),
        (count + 1, False, "sidelane"),
        (count, True, "sidelane"),
        (count + 1, True, "nccl"),
    )
    orders = mock.patch.object(order.HostOrder, "other", autospec=True, side_effect=order.HostOrder.other)
    for options in ({}, {"beside": "compute"}, {"deterministic": True}):
        with config.override(config.Config(**options)), left_to_library(group) as ours, orders as other:
            for numel, is_async, where in cases:
                ledger.reset()
                tensor = torch.full((numel, 2), float(ours.rank() + numel % 5))[:, 0]
                tensor = tensor if ours.rank() else tensor.clone()
                ended(dist.all_reduce(tensor, group=ours, async_op=is_async), is_async)
                assert tensor.eq(1 + 2 * (numel % 5)).all()
                assert [row.where for row in sidelane.report().rows] == ["sidelane" if options else where], options
                if where == "nccl" and not options:  # in the order of asynchronous calls, with the tensors that it has
                    _, _, (given,), was_async = other.call_args.args
                    assert was_async and given.is_contiguous()


@on_ranks(2)
def test_through_host_memory_no_large_call_is_left_to_nccl(group: dist.ProcessGroup) -> None:
    """The sizes were measured between GPUs that reach each other's memory; without it, NCCL stages as well."""
    for through_host, where in ((True, "sidelane"), (False, "nccl")):
        peers = mock.patch.object(backend_cpu.CpuBackend, "peers", PeerMemory(through_host))
        with peers, left_to_library(group, 20_000) as ours:
            tensor = torch.full((30_001,), float(ours.rank()))
            dist.all_reduce(tensor, group=ours)
            assert tensor.eq(1).all() and [row.where for row in sidelane.report().rows] == [where]


@on_ranks(2)
def test_ranks_that_share_a_gpu_leave_no_call_to_nccl(group: dist.ProcessGroup) -> None:
    with (
        mock.patch.object(dispatch, "exchanged", return_value=["GPU-1"] * group.size()) as exchanged,
        left_to_library(group, 20_000) as ours,
    ):
        for _ in range(3):
            assert all_reduce(ours, torch.float32, 30_001, True)
        assert exchanged.call_count == 3  # once for each reduction
        assert {row.where for row in sidelane.report().rows} == {"sidelane"}


def test_ranks_whose_memory_differs_are_told(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match="ranks made different calls: rank 0: all_to_all_single of 40000 bytes of ordinary"
    ):
        pool.run(exchange_large, 2, True)


@on_ranks(2)
def test_objects(group: dist.ProcessGroup) -> None:
    with sidelane_group(group) as ours:
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


@on_ranks(2)
def test_a_group_without_a_communicator_makes_calls_of_its_thread_and_others_in_one_order(
    group: dist.ProcessGroup,
) -> None:
    """The rank whose thread was late had made Gloo's ``reduce`` first, and the other one Gloo's ``all_reduce``."""

    def refuse(*_: object, **__: object) -> None:
        time.sleep(0.2 * (1 - group.rank()))
        raise UnavailableError("no such memory")

    with mock.patch.object(lifetime, "Communicator", refuse):
        ours = sidelane.wrap(group)  # not the pool's, which has a communicator, and which later tests need
        one, other = torch.ones(8), torch.ones(4, dtype=torch.complex64)
        first = dist.all_reduce(one, group=ours, async_op=True)
        time.sleep(0.1 * group.rank())
        dist.reduce(other, group_dst=0, group=ours)
        assert first.wait() and one.eq(2).all() and (group.rank() or other.eq(2).all())


@on_ranks(2)
def test_an_asynchronous_call_of_gloo_does_not_wait_for_the_communicator_that_the_thread_makes(
    group: dist.ProcessGroup,
) -> None:
    """A peer may come to that communicator only after a message that the caller sends next."""
    returned, before = threading.Event(), list[bool]()

    def refuse(*_: object, **__: object) -> None:
        before.append(returned.wait(5))
        raise UnavailableError("no such memory")

    with mock.patch.object(lifetime, "Communicator", refuse):
        ours = sidelane.wrap(group)  # not the pool's, which has a communicator, and which later tests need
        one, others = torch.ones(8), torch.ones(3, 4, dtype=torch.complex64)
        works = [dist.all_reduce(one, group=ours, async_op=True)]
        works += [dist.reduce(other, group_dst=0, group=ours, async_op=True) for other in others]
        returned.set()
        for work in works:
            work.wait()
        assert before == [True] and one.eq(2).all() and (group.rank() or others.eq(2).all())


@on_ranks(2, gpu=default_stream)
def test_many_back_to_back(group: dist.ProcessGroup) -> None:
    """Calls under way together, fulfilled in order; futures and their callbacks, which may make calls themselves."""
    with sidelane_group(group) as ours:
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


@on_ranks(2)
def test_callbacks(group: dist.ProcessGroup) -> None:
    """Callbacks wait for later calls, and for later callbacks; they raise, and end their group."""
    ended = sidelane.wrap(group)
    with sidelane_group(group) as ours, sidelane.Communicator(group, device="cpu") as comm:
        size = ours.size()

        def start(maker: Any, tensor: torch.Tensor) -> dist.Work:
            if isinstance(maker, dist.ProcessGroup):
                return dist.all_reduce(tensor, group=maker, async_op=True)  # type: ignore[return-value]
            return maker.all_reduce(tensor, async_op=True)

        for maker in (group, ours, comm):
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


@on_ranks(2)
def test_strided_tensors_in_calls_that_gloo_makes(group: dist.ProcessGroup) -> None:
    """Columns of matrices in calls that Gloo makes: the right numbers, and nothing else written (pytorch 192920)."""
    rank, size, n = group.rank(), group.size(), 5
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

    with sidelane_group(group) as ours:
        for how in ("at once", "waited", "polled", "future"):
            matrices: list[torch.Tensor] = []
            a = how != "at once"
            total, product, at_root = column(own), column([2.0] * n, torch.float32), column(own)
            end(dist.all_reduce(total, group=ours, async_op=a))
            end(dist.all_reduce(product, dist.ReduceOp.PRODUCT, ours, a))
            end(dist.reduce(at_root, group_dst=0, group=ours, async_op=a))
            assert (total.tolist(), product.tolist()) == (summed, [2.0**size] * n)
            assert rank > 0 or at_root.tolist() == summed
            assert all(matrix[:, ::2].eq(-7).all() for matrix in matrices), matrices
            if how in ("polled", "future"):  # in Gloo, what follows has neither an end without a wait nor a future
                continue
            scattered, given = column([0.0] * n), torch.tensor(own * size, dtype=torch.float64).repeat(2, 1).T[:, 0]
            end(dist.reduce_scatter_tensor(scattered, given, group=ours, async_op=a))
            assert scattered.tolist() == summed
            came = column([0.0] * n)
            sent = dist.isend(column(own), group_dst=(rank + 1) % size, group=ours)
            end(dist.irecv(came, group_src=(rank - 1) % size, group=ours), sent)
            assert came.tolist() == [float((rank - 1) % size + each) for each in range(n)]
            assert all(matrix[:, ::2].eq(-7).all() for matrix in matrices), matrices
        row = torch.arange(12, dtype=torch.float64).view(3, 4)
        mine = row.clone() if rank == 0 else row.T.clone().T  # of one shape, in memory of two orders
        dist.all_reduce(mine, group=ours)
        assert torch.equal(mine, row * size)
        with dist._coalescing_manager(ours):
            dist.all_reduce(total, group=ours)
        assert total.tolist() == [size * each for each in summed]


@on_ranks(2, gpu=default_stream)
def test_tensors_that_are_not_contiguous_or_not_resolved(group: dist.ProcessGroup) -> None:
    """Calls like ones before, but for strides, signs, classes, dtypes, operations or roots."""
    shapes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x.view(-1, 4).t().contiguous().t(),  # of other strides
        lambda x: torch.nn.Parameter(x),
        lambda x: torch.complex(x, -x).conj().imag if x.dtype == torch.float32 else x,  # negated where it lies
        lambda x: x.requires_grad_() if x.is_floating_point() else x,
        lambda x: x,
    ]
    with sidelane_group(group) as ours, torch.no_grad():
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
            assert torch.equal(
                whole.cpu(), torch.cat([shape(each.clone()).detach().resolve_neg().flatten() for each in given]).cpu()
            ), number
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


@on_ranks(2, gpu=default_stream)
def test_coalesced_calls(group: dist.ProcessGroup) -> None:
    with sidelane_group(group) as ours:
        for by_device, is_async in itertools.product((False, True), (False, True)):
            expected = coalesced_calls(ours, torch.float32, 4, is_async, one_by_one=True)
            found = coalesced_calls(ours, torch.float32, 4, is_async, by_device=by_device)
            assert all(map(torch.equal, found, expected)), (by_device, is_async)


@on_ranks(2)
def test_batches_of_sends_and_receives(group: dist.ProcessGroup) -> None:
    """As where NCCL makes those of a batch together."""
    as_one = mock.patch.object(torch_world, "made_as_one", return_value=True)
    with sidelane_group(group) as ours, as_one:
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


@on_ranks(2)
def test_an_existing_group_is_wrapped_and_stays(group: dist.ProcessGroup) -> None:
    """A group with Sidelane in front of it, and the group itself, in turn."""
    ours, again = sidelane.wrap(group), sidelane.wrap(group)
    assert ours.group_name != again.group_name and dist.get_backend(ours) == "sidelane", dist.get_backend(ours)
    ledger.reset()
    for each_group in (ours, group, again, ours):
        tensor = torch.ones(9)
        dist.all_reduce(tensor, group=each_group)
        assert tensor.eq(group.size()).all()
    flag = torch.tensor([True])
    dist.all_reduce(flag, Sum.MIN, ours)
    x = functional.all_reduce(torch.ones(3), "sum", ours)
    assert x.eq(group.size()).all()
    dist.destroy_process_group(ours)
    dist.destroy_process_group(again)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)  # which is still there
    assert [f"{row.operation} {row.dtype} {row.where} {row.calls}" for row in sidelane.report().rows] == [
        "all_reduce float32 sidelane 3",
        "all_reduce bool gloo 1",
        "all_reduce float32 sidelane 1",
    ]


def orders_by_streams(ours: Any) -> Any:
    """Let calls of a group on the CPU take the path of GPUs; return its communicator."""
    life, made = ours._lifetime, ours.communicator("cpu")
    life.orders["cpu"], life.communicators["cuda"] = life.orders["cuda"], made
    return made


def forms_on_made_up_gpus(group: dist.ProcessGroup, seed: int, pooled: bool) -> int:
    """Every form of a call, in random turns on few tensors, on a group that orders calls by streams of a driver.

    Args:
        pooled: the tensors are those of a pool, where others take their place from time to time, at the same addresses
            or elsewhere, also on one rank only.

    Returns:
        How many calls compiled code has made.
    """
    draw, ops, n = random.Random(seed), torch.ops._c10d_functional, group.size()
    without_kernels = mock.patch.object(backend_cuda.CudaBackend, "kernels_move_bytes", False)
    with without_kernels, made_up_gpus(driver=NativeDriver(), is_async=True) as driver:
        ours: Any = sidelane.wrap(group)
        comm = orders_by_streams(ours)
        pool: Any = sidelane.pool(comm, 1 << 20) if pooled else contextlib.nullcontext()
        streams, name, rank = (driver.caller, driver.create_stream()), ours.group_name, ours.rank()
        with pool:
            wholes, parts = ([torch.zeros(size * 40, dtype=torch.int32) for _ in range(3)] for size in (n, 1))
        kept: list[Any] = []

        def waited(work: dist.Work | None) -> None:
            """Wait now, on another stream, later or never."""
            assert work is not None
            when = draw.randrange(4)
            if when == 0:
                driver.caller = streams[1]
            if when < 2:
                assert work.wait()
            elif when == 2:
                kept.append(work)
            driver.synchronize()
            assert work.is_completed()
            driver.caller = streams[0]

        def coalesced(call: Callable[[int], object]) -> None:
            with dist._coalescing_manager(group=ours, device=torch.device("cpu"), async_ops=True) as manager:  # type: ignore[attr-defined]
                for number in range(3):
                    call(number)
            manager.wait()

        def loose(call: Callable[[list[torch.Tensor]], dist.Work | None]) -> None:
            parted = [torch.zeros(40, dtype=torch.int32) for _ in range(n)]
            if (work := call(parted)) is not None:
                waited(work)
            wholes[0].copy_(torch.cat(parted))

        def taken(output: torch.Tensor, target: torch.Tensor) -> None:
            found = ops.wait_tensor(output)
            driver.synchronize()
            target.copy_(found)

        sums = {
            "sync": lambda: dist.all_reduce(parts[0], group=ours),
            "async": lambda: waited(dist.all_reduce(parts[0], group=ours, async_op=True)),
            "functional": lambda: taken(ops.all_reduce(parts[0], "sum", name), parts[0]),
        }
        gathers = {
            "sync": lambda: dist.all_gather_into_tensor(wholes[0], parts[0], group=ours),
            "async": lambda: waited(dist.all_gather_into_tensor(wholes[0], parts[0], group=ours, async_op=True)),
            "functional": lambda: taken(ops.all_gather_into_tensor(parts[0], n, name), wholes[0]),
            "row": lambda: dist.all_gather(list(wholes[0].split(40)), parts[0], group=ours),
            "parts": lambda: loose(lambda parted: dist.all_gather(parted, parts[0], group=ours)),
            "parts async": lambda: loose(lambda parted: dist.all_gather(parted, parts[0], ours, async_op=True)),
            "row async": lambda: waited(dist.all_gather(list(wholes[0].split(40)), parts[0], ours, async_op=True)),
        }
        scatters = {
            "sync": lambda: dist.reduce_scatter_tensor(parts[0], wholes[0], group=ours),
            "async": lambda: waited(dist.reduce_scatter_tensor(parts[0], wholes[0], group=ours, async_op=True)),
            "functional": lambda: taken(ops.reduce_scatter_tensor(wholes[0], "sum", n, name), parts[0]),
            "row": lambda: dist.reduce_scatter(parts[0], list(wholes[0].split(40)), group=ours),
            "parts": lambda: dist.reduce_scatter(parts[0], [part.clone() for part in wholes[0].split(40)], group=ours),
        }
        of_three = {
            "sums": lambda: coalesced(lambda number: dist.all_reduce(parts[number], group=ours)),
            "gathers": lambda: coalesced(
                lambda number: dist.all_gather_into_tensor(wholes[number], parts[number], group=ours)
            ),
            "functional": lambda: [
                taken(*each) for each in zip(ops.all_gather_into_tensor_coalesced(parts, n, name), wholes, strict=True)
            ],
        }
        total, forms = (
            n * (n - 1) // 2,
            (("sum", sums), ("gather", gathers), ("scatter", scatters), ("three", of_three)),
        )
        try:
            for step in range(160 + 160 * pooled):
                if pooled and step % 20 == 19:
                    changed, number = draw.choice((wholes, parts)), draw.randrange(3)
                    with pool:
                        kept += [torch.zeros(8) for _ in range(rank) if step % 60 == 59]
                        changed[number] = torch.zeros_like(changed[number])
                what, table = draw.choice(forms)
                form = draw.choice([*table])
                for number in range(3):
                    parts[number].fill_(rank + step + number)
                    wholes[number].fill_(rank + step)
                table[form]()
                driver.synchronize()
                is_sum = what == "sum" or (what, form) == ("three", "sums")
                expected = total + n * step if is_sum or what == "scatter" else None
                for number in range(3 if what == "three" else 1):
                    if expected is not None:
                        assert parts[number].eq(expected + is_sum * n * number).all(), (step, what, form)
                    else:
                        rows = wholes[number].view(n, -1)
                        assert rows[:, 0].tolist() == [peer + step + number for peer in range(n)], (step, what, form)
                        assert rows.eq(rows[:, :1]).all(), (step, what, form)
            ours.communicator("cpu").synchronize()
            assert all(work.wait() for work in kept if isinstance(work, dist.Work))
            driver.synchronize()
            return int(ours.communicator("cpu").repeated_calls())
        finally:
            ours.shutdown()


@pytest.mark.parametrize("pooled", [False, True])
def test_every_form_on_the_path_of_gpus(pool: RankPool, pooled: bool) -> None:
    for made in pool.run(forms_on_made_up_gpus, 2, 7, pooled):
        assert made > 80


@on_ranks(2)
@pytest.mark.parametrize("a", [False, True], ids=["sync", "async"])
def test_captured_calls_are_nccls_as_long_as_there_is_no_staging(group: dist.ProcessGroup, a: bool) -> None:
    """Calls that NCCL makes outside of graphs, behind calls like them. The made-up driver's graphs are not replayed."""
    forms = all_to_all_single, all_gather, reduce_scatter, all_reduce, functional_calls, functional_calls
    with (
        mock.patch.object(backend_cuda.CudaBackend, "kernels_move_bytes", False),
        made_up_gpus(driver=NativeDriver(), is_async=True) as driver,
        mock.patch.object(dispatch.GroupDispatcher, "_captures", side_effect=lambda: driver.graph is not None),
        mock.patch.object(dispatch.GroupDispatcher, "_refuse_in_graph"),  # of calls on the CPU
        mock.patch.object(MadeUpMark, "query", return_value=True),  # in a capture, too
    ):
        for form, staged in zip(forms, (*[0] * 5, 90_000), strict=True):
            with left_to_library(group, 4096) as ours:
                orders_by_streams(ours).all_to_all(*torch.zeros(2, 2 * staged))
                expected = form(ours, torch.float32, 4001, a)
                ledger.reset()
                driver.begin_capture()
                found = form(ours, torch.float32, 4001, a)
                driver.end_capture()
                makers = {row.where for row in sidelane.report().rows}
                assert makers == {"sidelane" if staged else "nccl"}, form
                assert staged or all(map(torch.equal, found, expected)), form


class LibraryWork(dist.Work):
    """A call of a library on a stream of the library's own, as NCCL's are, behind the current one."""

    def __init__(self, library: MadeUpSide, run: Callable[[], object]) -> None:
        super().__init__()
        library.run(lambda: library.driver.do(library.handle, run))
        self.end = MadeUpMark(library, mock.Mock(failure=None))

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return self.end.follow() is not None


def test_errors_of_a_call_that_a_later_one_is_behind_name_the_dead() -> None:
    failed, watch = (mock.Mock(**{f"{name}.side_effect": RuntimeError(name)}) for name in ("wait", "explain"))
    for ends in (lambda work: work.wait(), lambda work: work.precede()):
        with pytest.raises(RuntimeError, match="explain"):
            ends(OtherWork(failed, watch, (1,)))


@pytest.mark.parametrize("seed", range(6))
def test_calls_of_nccl_and_of_sidelane_run_in_one_order(seed: int) -> None:
    """From the first on, from two streams, on which their callers wait now, later or never; in a graph, in the capture.

    Synchronous calls come from one of the streams, for which the other one waits.
    """
    draw, done, kept, tensor = random.Random(seed), list[int](), list[dist.Work](), torch.zeros(1)

    def run(number: int, pause_s: float) -> None:
        time.sleep(pause_s)
        done.append(number)

    def call(library: MadeUpSide, job: Callable[[], None]) -> dist.Work:
        return OtherWork(LibraryWork(library, job), mock.Mock(), ())

    with made_up_gpus(is_async=True) as driver:
        streams, library = (driver.caller, driver.create_stream()), MadeUpSide(driver)
        order_of_calls = order.StreamOrder(mock.Mock)
        driver.begin_capture()
        order_of_calls.other(EndedWork, [tensor], True)
        driver.end_capture()
        for number in range(60):
            is_async = draw.random() < 0.7
            driver.caller = streams[is_async and draw.random() < 0.4]
            job = functools.partial(run, number, draw.choice((0, 0.002)))
            if draw.random() < 0.5:
                work = order_of_calls.other(functools.partial(call, library, job), [tensor], is_async)
                kept.append(work)
            else:
                queued = functools.partial(lambda job: driver.do(driver.caller, job), job)
                work = order_of_calls.run(queued, [tensor], [tensor], is_async, timedelta())
            if not is_async:
                work.wait()
                library.order(*streams)
            if kept and draw.random() < 0.3:
                driver.caller = draw.choice(streams)
                draw.choice(kept[-3:]).wait()
        driver.synchronize()
    assert done == list(range(60))


@on_ranks(gpu=default_stream)
def test_streams(group: dist.ProcessGroup) -> None:
    """Asynchronous and synchronous calls between kernels, on streams of the caller: each sees what came before it."""
    with sidelane_group(group) as ours:
        size, side = ours.size(), torch.cuda.Stream()
        for number in range(50):
            first, second = torch.zeros(1 << 18), torch.zeros(1 << 18)
            torch.cuda._sleep(200_000 * (number % 3))
            first += ours.rank() + number
            work = dist.all_reduce(first, group=ours, async_op=True)
            side.wait_stream(torch.cuda.current_stream())  # for its zeros
            with torch.cuda.stream(side):
                second += 1
                dist.all_reduce(second, group=ours)
                second *= 2
            assert work is not None
            work.wait()
            doubled = first * 2
            torch.cuda.current_stream().wait_stream(side)
            assert doubled.eq(2 * (sum(range(size)) + size * number)).all() and second.eq(2 * size).all()
            del first, second


@on_ranks(gpu=default_stream)
def test_memory_of_asynchronous_calls(group: dist.ProcessGroup) -> None:
    """A tensor that is freed while peers are late keeps its bytes; behind a wait, these are the next tensor's."""
    side, reused = torch.cuda.Stream(), dict.fromkeys(("behind", "elsewhere", "never"), 0)
    with sidelane_group(group) as ours:
        size, rank = ours.size(), ours.rank()
        for numel in (1 << 10, 1 << 22):
            expected = torch.arange(float(size)).repeat_interleave(numel)
            for way in reused:
                for number in range(12):
                    source, result = torch.full((numel,), float(rank + number)), torch.empty(size * numel)
                    address = source.data_ptr()
                    if rank == number % size:
                        torch.cuda._sleep(3_000_000)
                    work = dist.all_gather_into_tensor(result, source, ours, async_op=True)
                    assert work is not None
                    if way != "never":
                        with torch.cuda.stream(side if way == "elsewhere" else None):
                            work.wait()
                    del work, source
                    other = torch.full((numel,), -1.0)
                    reused[way] += other.data_ptr() == address
                    torch.cuda.synchronize()
                    assert torch.equal(result, expected + number), (numel, way, number)
                    del other, result
    print(reused)
    assert reused["behind"] > 12


@on_ranks(gpu=default_stream)
def test_in_a_graph(group: dist.ProcessGroup) -> None:
    """Collectives of the group, captured: replays are calls; what a graph cannot hold is refused, never dropped."""
    stream = torch.cuda.Stream()
    with sidelane_group(group) as ours, torch.cuda.stream(stream):
        tensor, output = torch.ones(3000), torch.empty(3000 * ours.size())

        def step() -> None:
            dist.all_reduce(tensor, group=ours)
            work = dist.all_gather_into_tensor(output, tensor, ours, async_op=True)
            assert work is not None
            work.wait()
            tensor.div_(ours.size())

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for number in range(5):
            tensor.fill_(ours.rank() + number)
            graph.replay()
            expected = sum(range(ours.size())) + ours.size() * number
            assert output.eq(expected).all() and tensor.eq(expected / ours.size()).all(), number
        torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
@on_ranks(gpu=default_stream)
def test_batches_of_sends_and_receives_by_nccl(group: dist.ProcessGroup) -> None:
    """Between all ranks, to oneself too: made one by one they would wait for ever."""
    sidelane.register()
    ours = dist.new_group(backend="sidelane")
    try:
        exchange_batches(ours, set(range(group.size())))
    finally:
        dist.destroy_process_group(ours)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
@on_ranks(gpu=default_stream)
def test_ranks_of_two_worlds(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """A group without a list of ranks, in which each rank has another number than in the default group."""
    sidelane.register()
    size, rank = group.size(), group.size() - 1 - group.rank()
    store = dist.FileStore(str(tmp_path / "joint"), size)
    ours, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("sidelane"), store, group_name=str(tmp_path), timeout=two_worlds.TIMEOUT
    )
    c10d._world.pg_group_ranks[ours] = {each: each for each in range(size)}
    try:
        two_worlds.check_calls(ours, size)
    finally:
        dist.destroy_process_group(ours)
