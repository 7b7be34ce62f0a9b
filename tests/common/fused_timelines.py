"""What ranks do with timelines of fused operators in tests; see ``fused_ops``."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fused_ops import check_close, communicator

from sidelane import Communicator, ops
from sidelane.ops.gemm import TileSizes
from sidelane.ops.gemv import Tiling
from sidelane_lab.sim import Interval

Kinds = list[set[str]]


def timelines(group: dist.ProcessGroup) -> list[Kinds]:
    """Of each operator, the kinds of what each rank did; results are those without a timeline."""
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
    return found


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
