"""All fused operators: which way ``auto`` takes, autograd, autocast, default devices and timelines."""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choices import keep
from fused_ops import check_close, communicator, fused, noting
from on_ranks import on_ranks
from torch.nn import functional

from sidelane import Communicator, Config, UnavailableError, ops
from sidelane.choice.fused import FusedTime
from sidelane.choice.key import HOST_MEMORY, key_here
from sidelane.machine.peers import PeerMemory
from sidelane.ops import dispatch_gemm, gemm, gemv, operator, pipelined_gemm, rms_norm
from sidelane.ops.gemm import TileSizes
from sidelane.ops.gemv import Tiling
from sidelane.ops.pipelined_gemm import GATHER, SCATTER, RoutedParts
from sidelane_lab.sim import Interval

SPLIT = ("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm")


@on_ranks(2, interpreted=True)
def test_fused_or_unfused(group: dist.ProcessGroup) -> None:
    """They give the same; auto uses rank 0's times on all ranks, and by thumb where there is none."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(Path(folder) / str(dist.get_rank(group))))  # others have nothing
        if dist.get_rank(group) == 0:
            name, n = "gemv_all_reduce", dist.get_world_size(group)
            times = [FusedTime(name, n, False, (70, 8 * n, 1), 4, {"fused": 2.0, "unfused": 1.0})]
            times.append(FusedTime(name, n, False, (1000, 8 * n, 1), 4, {"fused": 1.0, "unfused": 2.0}))
            in_parts = {"fused": 0.5, "split/1": 2.0, "split/3": 1.0, "unfused": 4.0}  # a kernel that there was
            times += [FusedTime(op, n, False, (6 * n, 8, 5), 4, in_parts) for op in SPLIT]
            assert os.fspath(keep(key_here("cpu", n), times)).startswith(folder)
        with communicator(group) as comm:
            slow, fast, unknown = compared(comm)
    times = "1 us expected, next fused 2 us; measured at 70, 16, 1, eager, fused-cpu.json"
    assert slow == f"False gemv_all_reduce: unfused: {times}"
    assert fast.startswith("True gemv_all_reduce: fused: 1 us expected, next unfused 2 us; measured at 1000")
    assert unknown.startswith("True gemv_all_reduce: fused: rule of thumb")


def compared(comm: Communicator) -> list[str]:
    n = comm.world_size
    for call in calls_of(comm):
        expected = call(method="fused").clone()
        result = call(method="unfused")
        check_close(result, expected.double(), "unfused")
        assert result.shape == expected.shape
    x, weight, residual = torch.randn(3, 8), torch.ones(8), torch.ones(3, 8)
    y, total = ops.all_reduce_rms_norm(comm, x, residual, weight, method="fused")
    out = torch.empty_like(x)
    unfused = ops.all_reduce_rms_norm(comm, x, residual, weight, method="unfused", out=out)
    assert unfused[0] is out
    check_close(out, y.double(), "norm")
    check_close(unfused[1], total.double(), "norm")
    for op in SPLIT:
        own = getattr(ops, op)
        x, weight = torch.randn(6 * n, 8), torch.randn(5, 8)
        expected = own(comm, x, weight, method="unfused").double()
        for method in ("split", "auto"):
            check_close(own(comm, x, weight, method=method), expected, (op, method))
        told = ops.explain(comm, op, 6 * n, 8, 5)
        assert told.startswith(f"{op}: split in 3 pieces: 1 us expected, next ")
        assert f"; measured at {6 * n}, 8, 5, eager" in told
        assert "rule of thumb" in ops.explain(comm, op, 6 * n, 8, 5, dtype=torch.float16)
    moved = [found for found in comm.cache.values() if isinstance(found, RoutedParts)]
    pieces = [[pieces for _, pieces in found.known] for found in moved]
    assert pieces == [[SCATTER.pieces, 3]], pieces
    gathers = [key for key in comm.cache if isinstance(key, tuple) and key[0] == GATHER.name]
    assert {key[-1] for key in gathers} == {GATHER.pieces, 3}
    large = ops.gemv_all_reduce(comm, torch.ones(70_000, 2), torch.ones(2, 2))  # no cells were made for it
    assert large.shape == (2, 70_000) and bool((large == 2 * n).all())
    assert "unfused: fused takes up to 131072" in ops.explain(comm, "gemv_all_reduce", 70_000, 2, 2)
    known_again(comm)
    done = []
    for rows in (70, 1000, 100_000):
        with ops.Timeline(comm) as timeline:  # of fused calls only
            ops.gemv_all_reduce(comm, torch.ones(min(rows, 1000), 8), torch.ones(8))
        done.append(f"{bool(timeline.intervals)} {ops.explain(comm, 'gemv_all_reduce', rows, 8 * n, 1)}")
    return done


def known_again(comm: Communicator) -> None:
    """A call like one before is not checked again; one of another layout, method, or at an odd address is."""
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    even, factor = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    odd = torch.ones(33, dtype=torch.bfloat16)[1:].view(4, 8)
    n = comm.world_size
    rows, routed = torch.randn(2 * n, 8), {"counts": [[2] * n] * n, "most_rows": 2 * n}
    calls: tuple[tuple[object, str, Callable[..., object]], ...] = (
        (gemv, "_check", lambda **o: ops.gemv_all_reduce(comm, weight, x, **o)),
        (rms_norm, "_check", lambda **o: ops.all_reduce_rms_norm(comm, x, None, weight[0], **o)),
        (pipelined_gemm, "check_operands", lambda **o: ops.gemm_all_reduce(comm, x, weight, **o)),
        (gemm, "check_routed", lambda **o: ops.gemm_all_to_all(comm, rows, weight, **routed, **o)),
        (
            dispatch_gemm,
            "check_routed",
            lambda **o: ops.all_to_all_gemm(comm, rows, weight, **routed, **o),
        ),
    )
    for where, name, call in calls:
        with pytest.MonkeyPatch.context() as patch:
            checked: list[str] = []
            patch.setattr(where, name, noting(getattr(where, name), name, checked))
            for method in ("auto", "unfused", "split" if where is pipelined_gemm else "fused"):
                checked.clear()
                call(method=method)
                assert checked, (name, method)
                checked.clear()
                call(method=method)
                assert not checked, (name, method)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "refuse", lambda *_: None)  # each rank raises, and goes on
        ops.all_reduce_rms_norm(comm, even, None, factor)
        with pytest.raises(ValueError, match="address of x"):
            ops.all_reduce_rms_norm(comm, odd, None, factor)
        with pytest.raises(ValueError, match="neighbours in a row of x"):
            ops.gemm_all_reduce(comm, torch.randn(8, 4).T, weight)
        with pytest.raises(ValueError, match="method"):
            ops.gemm_all_reduce(comm, x, weight, method=["split"])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="dtype of x"):
            ops.gemv_all_reduce(comm, weight, x.bfloat16())


@on_ranks(2, interpreted=True)
def test_autocast_changes_no_method(group: dist.ProcessGroup) -> None:
    """Every method computes in the dtype of its tensors, as it does outside; unfused ones with buffers and without."""
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        n, kind = comm.world_size, comm.device.type
        counts = torch.full((n, n), 2)
        x, weight = 1 + torch.rand(2 * n, 16) / 1000, torch.rand(5, 16)
        routed: dict[str, Any] = {"most_rows": 2 * n, "counts": counts}
        for most in (pipelined_gemm.MOST_SHAPES, 0):
            patch.setattr(pipelined_gemm, "MOST_SHAPES", most)
            for name, given, methods in (
                ("gemv_all_reduce", {}, ("fused", "unfused")),
                *((name, {}, ("split", "unfused")) for name in SPLIT),
                *((name, routed, ("fused", "unfused")) for name in ("gemm_all_to_all", "all_to_all_gemm")),
            ):
                pair = (weight, x) if name == "gemv_all_reduce" else (x, weight)
                for method in methods:
                    expected = getattr(ops, name)(comm, *pair, method=method, **given).clone()
                    with torch.autocast(kind, torch.bfloat16):
                        result = getattr(ops, name)(comm, *pair, method=method, **given)
                    assert torch.equal(result, expected), (name, method)
        norm, total_of = functional.rms_norm, torch.Tensor.sum
        patch.setattr(functional, "rms_norm", lambda x, *others: norm(x, *others).float())  # as GPUs do under autocast
        patch.setattr(torch.Tensor, "sum", lambda x, *dim, dtype=torch.float32: total_of(x, *dim, dtype=dtype))
        x, weight = torch.ones(2 * n, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16)
        assert ops.gemm_reduce_scatter(comm, x, weight, method="split").dtype == x.dtype
        for method in ("fused", "unfused"):
            x, weight = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
            y, total = ops.all_reduce_rms_norm(comm, x, x, weight, method=method)
            assert y.dtype == total.dtype == x.dtype, method


@on_ranks(2, interpreted=True)
def test_weights_that_autograd_follows(group: dist.ProcessGroup) -> None:
    """Weights and rows that autograd follows: no way gives a result with half of the gradients, or fails under way.

    Nor does one whose first call was made in inference mode, as that of a model which is evaluated first.
    """
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        n = comm.world_size
        counts = [[2] * n] * n
        x, weight = torch.randn(2 * n, 8).requires_grad_(), torch.nn.Parameter(torch.randn(5, 8))
        calls: list[Callable[[], torch.Tensor]] = [
            functools.partial(ops.all_gather_gemm, comm, x, weight, method="split"),
            functools.partial(ops.gemm_all_reduce, comm, x, weight, method="split"),
            functools.partial(ops.gemm_reduce_scatter, comm, x, weight, method="split"),
        ]
        for op in (ops.gemm_all_to_all, ops.all_to_all_gemm):
            for method in ("fused", "split", "unfused"):
                calls.append(functools.partial(op, comm, x, weight, counts, most_rows=2 * n, method=method))
        few, scale = torch.randn(2, 8).requires_grad_(), torch.nn.Parameter(torch.ones(8))
        bags = [few], torch.zeros(2 * n).int(), torch.arange(2 * n + 1)
        product, normal, gathered = (torch.empty(2, size) for size in (5, 8, 8 * n))
        for method, out in itertools.product(("fused", "unfused"), (False, True)):
            given: list[dict[str, Any]] = [{"out": each} if out else {} for each in (product, normal)]
            calls += [
                functools.partial(ops.gemv_all_reduce, comm, weight, few, method=method, **given[0]),
                functools.partial(norm, comm, few, scale, method=method, **given[1]),
                functools.partial(ops.embedding_all_to_all, comm, *bags, method=method),
            ]
        patch.setattr(pipelined_gemm, "MOST_SHAPES", 0)
        calls += [functools.partial(getattr(ops, name), comm, x, weight, method="unfused") for name in SPLIT]
        gathers = functools.partial(ops.all_gather_gemm, comm, few, weight, gathered=gathered.view(2 * n, 8))
        calls += [functools.partial(gathers, method=method) for method in ("split", "unfused")]
        for number, call in enumerate(calls):
            with torch.inference_mode():
                call()
            assert not call().requires_grad, number


def norm(comm: Communicator, x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    """The first result of a norm."""
    return ops.all_reduce_rms_norm(comm, x, x, weight, **options)[0]


@on_ranks(2, interpreted=True)
def test_default_devices_of_callers_do_not_matter(group: dist.ProcessGroup) -> None:
    """What operators make for a shape lies where the communicator is, whatever the caller's default device is."""
    with communicator(group) as comm:
        n, device = comm.world_size, comm.device
        x, weight, tables = torch.randn(2 * n, 8), torch.randn(4, 8), [torch.randn(5, 4) for _ in range(2)]
        indices, offsets = torch.arange(4 * n) % 5, torch.arange(4 * n + 1)
        grad = torch.ones(2, 4 * 2 * n)
        with torch.device("meta"):
            bags = ops.embedding_all_to_all(comm, tables, indices, offsets, method="fused")
            gradients, _ = ops.embedding_all_to_all_backward(comm, grad, tables, indices, offsets)
            rows = ops.all_to_all_gemm(comm, x, weight, [[2] * n] * n, most_rows=2 * n, method="fused")
            for result in (bags, rows, *gradients):
                assert result.device == device
        pooled = torch.nn.functional.embedding_bag(indices[: 2 * n], tables[0], offsets[: 2 * n], mode="sum")
        check_close(bags[:, 8 * comm.rank : 8 * comm.rank + 4], pooled[2 * comm.rank :][:2].double(), "bags")


@on_ranks(2, interpreted=True)
@on_ranks(gpu=fused)
def test_timelines(group: dist.ProcessGroup) -> None:
    """Every rank has those of all, with what each operator does; results are those without a timeline."""
    with communicator(group) as comm:
        found = []
        for call in (*calls_of(comm), *others_of(comm)):
            expected = call().clone()
            with ops.Timeline(comm) as timeline:
                result = call()
            assert not timeline.dropped
            check_close(result, expected.double(), "with stamps")
            found.append(
                [
                    {i.label.split()[0] for i in timeline.intervals if i.group == f"rank {rank}"}
                    for rank in range(comm.world_size)
                ]
            )
            check_order(timeline, gathers=len(found) == 7)  # the last one computes what comes
            with tempfile.TemporaryDirectory() as folder:
                trace = json.loads(timeline.write(Path(folder) / "trace.json").read_text())
            spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
            assert len(spans) == len(timeline.intervals)
        with ops.Timeline(comm, most_stamps=2) as short:
            call()
        assert short.dropped > 0 and len(short.intervals) > 0
        with ops.Timeline(comm) as empty, pytest.raises(RuntimeError, match="one is recorded at a time"):
            ops.Timeline(comm).__enter__()
        assert empty.intervals == ()
    sends, norm = {"local", "compute", "send", "wait"}, {"send", "wait", "compute"}
    kinds = [{"compute", "send", "wait", "add"}, sends, sends, norm, {*norm, "add"}, {"send", "wait", "add"}, sends]
    assert len(found) == 7
    if comm.device.type == "cpu":
        assert found == [[kind] * comm.world_size for kind in kinds]


def check_order(timeline: ops.Timeline, *, gathers: bool) -> None:
    """Of a lane: nothing begins before what came first has ended; what is for others is computed first, and what comes
    from others last."""
    lanes: dict[tuple[str, str], list[Interval]] = {}
    for interval in timeline.intervals:
        lanes.setdefault((interval.group, interval.lane), []).append(interval)
    for spans in lanes.values():
        spans.sort(key=lambda span: span.start_us)
        assert all(before.end_us <= after.start_us for before, after in itertools.pairwise(spans))
        computed = [span.label for span in spans if span.label.startswith(("compute for", "local"))]
        if gathers:
            computed.reverse()
        assert sorted(computed, key=lambda label: label == "local") == computed, computed


def calls_of(comm: Communicator) -> list[Callable[..., torch.Tensor]]:
    n = comm.world_size
    weight, x = torch.ones(70, 8), torch.ones(8)
    tables, bags = [torch.ones(5, 4)], (torch.arange(4 * n) % 5, torch.arange(4 * n + 1))
    counts, tiles = torch.full((n, n), 20), TileSizes(16, 16, 16, 1, 1)
    rows, square = torch.ones(20 * n, 16), torch.ones(16, 16)

    return [
        lambda **others: ops.gemv_all_reduce(comm, weight, x, tiling=Tiling(16, 16, 1, 1), **others),
        lambda **others: ops.embedding_all_to_all(comm, tables, *bags, **others),
        lambda **others: ops.gemm_all_to_all(comm, rows, square, counts, most_rows=20 * n, tiles=tiles, **others),
    ]


def others_of(comm: Communicator) -> list[Callable[[], torch.Tensor]]:
    """Results of what has several, or no ``method``."""
    n, rows, scale = comm.world_size, torch.randn(5, 8), torch.ones(8)
    tables, bags = [torch.ones(5, 4)], (torch.arange(4 * n) % 5, torch.arange(4 * n + 1))
    counts, tiles = torch.full((n, n), 20), TileSizes(16, 16, 16, 1, 1)
    x, square, grad = torch.ones(20 * n, 16), torch.ones(16, 16), torch.ones(4, 4 * n)
    return [
        lambda: ops.all_reduce_rms_norm(comm, rows, rows, scale, schedule="cells")[0],
        lambda: ops.all_reduce_rms_norm(comm, rows, rows, scale, schedule="pushed")[0],
        lambda: ops.embedding_all_to_all_backward(comm, grad, tables, *bags)[0][0],
        lambda: ops.all_to_all_gemm(comm, x, square, counts, most_rows=20 * n, tiles=tiles),
    ]


@on_ranks(3)
def test_all_ranks_have_what_rank_0_has_measured(group: dist.ProcessGroup) -> None:
    """Rank 0 alone reads them, once: those of the memory between the GPUs."""
    read = iter(({"é" * 1000: ()},) if dist.get_rank(group) == 0 else ())
    with Communicator(group, config=Config(timeout_s=30)) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(comm.backend), "peers", PeerMemory(True))
        patch.setattr(operator, "fused_times", lambda _, key: next(read) if key.links == HOST_MEMORY else {})
        with pytest.MonkeyPatch.context() as captured:
            captured.setattr(operator, "is_captured", lambda comm: True)
            with pytest.raises(UnavailableError, match="auto in a capture needs an eager call"):
                operator.tables_of(comm)
        for _ in range(2):
            assert operator.tables_of(comm) == {"é" * 1000: ()}
