"""Measure TransformerEngine's userbuffers at the shapes of docs/lab/anchors.md, beside cuBLAS + NCCL and Sidelane's.

    UB_SKIPMC=1 NVTE_FLASH_ATTN=0 torchrun --nproc-per-node 2 results/scripts/userbuffers.py OUT.json

Its layers ``Linear`` with ``ub_overlap_rs`` (a GEMM and a reduce-scatter, row-parallel) and ``ub_overlap_ag`` (an
all-gather and a GEMM, column-parallel), forward only, each by ``ring_exchange`` and the reduce-scatter by ``pipeline``
too, with copy engines and with SMs. All in CUDA graphs of one call, in turns, the median of nine samples of ten
replays, the slower rank. Results are compared with NCCL's before and after. ``pack_userbuffers.sh`` brings it along.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sidelane import Communicator, ops
from sidelane_lab.harness.provenance import heading

try:
    import transformer_engine.pytorch as engine
except ImportError as error:
    raise SystemExit(f"userbuffers: TransformerEngine is required (pack_userbuffers.sh packs it): {error}") from None

RS, AG = "gemm_reduce_scatter", "all_gather_gemm"
SHAPES = (
    *((RS, 4096, 4096, 8192), (RS, 4096, 14336, 8192), (AG, 2048, 8192, 4096), (AG, 2048, 8192, 14336)),
    *((RS, 8192, 14336, 8192), (AG, 4096, 8192, 14336)),
)
"""Rows, depth and columns of a rank; the first four have one size of the buffer, the last two another."""

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    RS: {
        "ring_exchange, copy engines": {"method": "ring_exchange", "use_ce": True},
        "ring_exchange, SMs": {"method": "ring_exchange", "use_ce": False, "num_sm": 4},
        "pipeline, 16 SMs": {"method": "pipeline", "num_sm": 16, "num_splits": 4},
    },
    AG: {
        "ring_exchange, copy engines": {"method": "ring_exchange", "use_ce": True},
        "ring_exchange, SMs": {"method": "ring_exchange", "use_ce": False, "num_sm": 4},
    },
}
NAMES = {RS: "proj", AG: "qkv"}
Call = Callable[[], torch.Tensor]


def layer(
    op: str, weight: torch.Tensor, group: dist.ProcessGroup, config: dict[str, Any], rows: int
) -> torch.nn.Module:
    """Return the layer of TransformerEngine, with buffers of its own. Collective."""
    n, hidden, name = dist.get_world_size(), weight.shape[0] if op == RS else weight.shape[1], NAMES[op]
    modes = [engine.UserBufferQuantizationMode.NONE]
    given = {f"{name}_fprop": {"is_reduce_scatter": op == RS, **config}}
    engine.initialize_ub([rows, hidden], n, quantization_modes=modes, ub_cfgs=given, bootstrap_backend="gloo")
    columns, depth = weight.shape
    sizes = (n * depth, columns) if op == RS else (depth, n * columns)
    more = {"ub_overlap_rs": True} if op == RS else {"ub_overlap_ag": True}
    found = engine.Linear(
        *sizes,
        bias=False,
        sequence_parallel=True,
        parallel_mode="row" if op == RS else "column",
        tp_group=group,
        tp_size=n,
        params_dtype=torch.bfloat16,
        ub_name=name,
        **more,
    )
    with torch.no_grad():
        found.weight.copy_(weight)
    return found


def captured(call: Call) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of one call, and its result."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        result = call()
    return graph, result


def sample(graph: torch.cuda.CUDAGraph, comm: Communicator, replays: int = 10) -> float:
    """Return microseconds of a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    graph.replay()
    comm.barrier()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays


def main(out: str) -> None:
    """Measure all shapes, print and write rows."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    group, n, found = dist.group.WORLD, dist.get_world_size(), list[dict[str, Any]]()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad(), Communicator() as comm:
        for op, rows, depth, columns in SHAPES:
            torch.manual_seed(rank)
            x, weight = (torch.randn(m, depth, device="cuda").bfloat16() for m in (rows, columns))
            whole = rows if op == RS else n * rows
            gathered, part = x.new_empty(n * rows, depth), x.new_empty(rows // n, columns)

            def library(op: str = op, x: torch.Tensor = x, weight: torch.Tensor = weight,
                        gathered: torch.Tensor = gathered, part: torch.Tensor = part) -> torch.Tensor:  # fmt: skip
                if op == AG:
                    dist.all_gather_into_tensor(gathered, x)
                    return gathered @ weight.T
                dist.reduce_scatter_tensor(part, x @ weight.T)
                return part

            ours = functools.partial(getattr(ops, op), comm, x, weight)
            shape, wanted = f"{rows}x{depth}x{columns} a rank", library().clone()
            ways: dict[str, Any] = {"nccl": library, "auto": ours} | dict(METHODS[op])
            for name, way in ways.items():
                theirs = isinstance(way, dict)
                try:
                    call = functools.partial(layer(op, weight, group, way, whole), x) if theirs else way
                    graph, result = captured(call)
                    before = float((result.float() - wanted.float()).norm() / wanted.float().norm())
                    times = [sample(graph, comm) for _ in range(9)]
                    off = max(before, float((result.float() - wanted.float()).norm() / wanted.float().norm()))
                    worst = torch.tensor([statistics.median(times), off], device="cuda")
                    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                    us, off = worst.tolist()
                    row = {"op": op, "shape": shape, "way": name, "time_us": round(us, 2), "correct": off < 1e-2}
                    del graph, result, call
                except Exception as problem:  # a way that a version does not have
                    row = {"op": op, "shape": shape, "way": name, "time_us": None, "note": str(problem)[:300]}
                if theirs:
                    torch.cuda.synchronize()
                    engine.destroy_ub()
                found.append(row)
                if rank == 0:
                    print(json.dumps(row), flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps({"heading": heading(), "rows": found}, indent=1), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
