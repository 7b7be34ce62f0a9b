"""Measure TransformerEngine's userbuffers at the shapes of docs/lab/anchors.md, beside cuBLAS + NCCL and Sidelane's.

    UB_SKIPMC=1 NVTE_FLASH_ATTN=0 torchrun --nproc-per-node 2 results/scripts/userbuffers.py OUT.json

Its layers ``Linear`` with ``ub_overlap_rs`` (a GEMM and a reduce-scatter, row-parallel) and ``ub_overlap_ag`` (an
all-gather and a GEMM, column-parallel), forward only, each by ``ring_exchange`` and the reduce-scatter by ``pipeline``
too, with copy engines and with SMs. All in CUDA graphs of one call, in turns, the median of nine samples of ten
replays, the slower rank. ``pack_userbuffers.sh`` brings it along.

A capture computes nothing. So each check, before the samples and after them, overwrites the result, replays the graph,
and compares with products and sums in float32. CPU ranks check the library's way and Sidelane's, without times.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sidelane import Communicator, ops
from sidelane_lab.harness.provenance import heading

ON_GPU = torch.cuda.is_available()
if ON_GPU:
    try:
        import transformer_engine.pytorch as engine
    except ImportError as error:
        raise SystemExit(
            f"userbuffers: TransformerEngine is required (pack_userbuffers.sh packs it): {error}"
        ) from None

RS, AG = "gemm_reduce_scatter", "all_gather_gemm"
SHAPES = (
    *((RS, 4096, 4096, 8192), (RS, 4096, 14336, 8192), (AG, 2048, 8192, 4096), (AG, 2048, 8192, 14336)),
    *((RS, 8192, 14336, 8192), (AG, 4096, 8192, 14336)),
)
"""Rows, depth and columns of a rank; the first four have one size of the buffer, the last two another."""

CPU_SHAPES = ((RS, 24, 40, 16), (AG, 6, 16, 40))

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


class Eager:
    """A call where there are no graphs. Its replay writes to the same result."""

    def __init__(self, call: Call) -> None:
        self.call, self.result = call, torch.empty_like(call())

    def replay(self) -> None:
        """Make the call."""
        self.result.copy_(self.call())


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


def captured(call: Call) -> tuple[Any, torch.Tensor]:
    """Return a graph of one call, and its result, which no replay has written yet."""
    if not ON_GPU:
        eager = Eager(call)
        return eager, eager.result
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        result = call()
    return graph, result


def distance(graph: Any, result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how far a fresh replay's result is from ``wanted``, over its norm; infinite where none is written."""
    result.fill_(torch.inf)
    graph.replay()
    off = (result.float() - wanted).norm() / wanted.norm()
    return float(off.nan_to_num(nan=torch.inf, posinf=torch.inf))


def exact(op: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the operator's result in float32, of gathered operands. Collective."""
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(xs, x)
    if op == AG:
        return torch.cat(xs).float() @ weight.float().T
    weights = [torch.empty_like(weight) for _ in range(n)]
    dist.all_gather(weights, weight)
    own = slice(rank * len(x) // n, (rank + 1) * len(x) // n)
    return torch.stack([a[own].float() @ b.float().T for a, b in zip(xs, weights, strict=True)]).sum(0)


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
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if ON_GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    group, n, found = dist.group.WORLD, dist.get_world_size(), list[dict[str, Any]]()
    stream = torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else contextlib.nullcontext()
    with stream, torch.no_grad(), Communicator(device=device) as comm:
        for op, rows, depth, columns in SHAPES if ON_GPU else CPU_SHAPES:
            torch.manual_seed(rank)
            x, weight = (torch.randn(m, depth, device=device).bfloat16() for m in (rows, columns))
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
            shape, wanted = f"{rows}x{depth}x{columns} a rank", exact(op, x, weight)
            unwritten = types.SimpleNamespace(replay=lambda: None)
            if distance(unwritten, wanted.bfloat16(), wanted) < torch.inf:
                raise SystemExit("userbuffers: a graph that writes nothing must not pass the check")
            ways: dict[str, Any] = {"nccl" if ON_GPU else "gloo": library, "auto": ours}
            ways |= METHODS[op] if ON_GPU else {}
            for name, way in ways.items():
                theirs = isinstance(way, dict)
                row = {"op": op, "shape": shape, "way": name}
                try:
                    call = functools.partial(layer(op, weight, group, way, whole), x) if theirs else way
                    graph, result = captured(call)
                    offs = [distance(graph, result, wanted)]
                    times = [sample(graph, comm) for _ in range(9 if ON_GPU else 0)]
                    offs.append(distance(graph, result, wanted))
                    worst = torch.tensor([statistics.median(times or [0]), *offs], device=device)
                    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                    us, *offs = worst.tolist()
                    row |= {"time_us": round(us, 2) if times else None, "correct": max(offs) < 1e-2, "off": offs}
                    del graph, result, call
                except Exception as problem:  # a way that a version does not have
                    row |= {"time_us": None, "note": str(problem)[:300]}
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
