r"""Fused embedding and all-to-all among nodes, next to bags and an all-to-all of the process group one after the other.

A program of its own, as each rank stands for a node: the study ``fused`` is for the ranks of one node. On two GPUs::

    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 torchrun --standalone --nproc-per-node 2 \
        -m sidelane_lab.studies.fused.between_nodes results.json

Ways take turns in rounds. A time is the median over rounds of the slowest rank's time of a call.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

Run = Callable[[], torch.Tensor]

ON_GPUS = ((512, 16, 70), (1024, 64, 32), (4096, 64, 70), (8192, 26, 20))
ON_CPUS = ((4, 2, 2),)
"""Shapes: batch of all ranks, tables of a rank, pooling."""

SLICE_BAGS = (32, 128, None)
"""Samples of a slice; None for the operator's own choice."""

CALLS, ROUNDS, WARM_UP = 8, 25, 3


def main(path: Path | None = None) -> None:
    """Measure, print a line for each way, and write all of them to a file of JSON."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    from sidelane.config import Config
    from sidelane.integrations.nodes.scale_out import scale_out

    rows: list[dict[str, object]] = []
    config = Config(virtual_nodes=tuple(range(dist.get_world_size())))
    for transport in ("sockets",) if on_cpu else ("group", "sockets"):
        with scale_out(config=config, transport=transport) as ranks:
            for shape in ON_CPUS if on_cpu else ON_GPUS:
                for row in _rows(ranks, transport, shape, rounds=2 if on_cpu else ROUNDS):
                    rows.append(row)
                    if ranks.rank == 0:
                        print(json.dumps(row), flush=True)
    if path is not None and dist.get_rank() == 0:
        path.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def _rows(ranks: Any, transport: str, shape: tuple[int, int, int], rounds: int) -> list[dict[str, object]]:
    ways, expected = _ways(ranks, *shape)
    errors = {name: _error(run(), expected()) for name, run in ways.items() if "alone" not in name}
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for number in range(WARM_UP + rounds):
        for name in order.sample(sorted(ways), len(ways)):
            spent_us = _sample(ranks, ways[name], 1 if ranks.device.type == "cpu" else CALLS)
            if number >= WARM_UP:
                times[name].append(spent_us)
    batch, tables, pooling = shape
    fixed = {"transport": transport, "ranks": ranks.world_size, "batch": batch, "tables": tables, "pooling": pooling}
    return [
        {**fixed, "way": name, "us": statistics.median(spent), "least_us": min(spent), "max_rel_err": errors.get(name)}
        for name, spent in times.items()
    ]


def _ways(ranks: Any, batch: int, tables: int, pooling: int) -> tuple[Mapping[str, Run], Run]:
    """Return the ways by name, and what makes the result of the last call in float64."""
    from sidelane.ops.scale_out import EmbeddingAcrossNodes
    from sidelane_lab.studies.fused.embedding_cases import (
        CPU_DIM,
        CPU_TABLE_ROWS,
        DIM,
        TABLE_ROWS,
        IndexLists,
        lists_of,
    )
    from sidelane_lab.studies.fused.single_rank import BagKernel

    device, n = ranks.device, ranks.world_size
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    dim, rows = (CPU_DIM, CPU_TABLE_ROWS) if on_cpu else (DIM, TABLE_ROWS)
    part, options = batch // n, {"dtype": dtype, "device": device}
    whole = torch.randn(tables * rows, dim, **options)
    some = list(whole.view(tables, rows, dim))
    call_bytes = batch * tables * pooling * dim * dtype.itemsize
    lists = IndexLists(ranks, (tables, n, part, pooling), rows, lists_of(call_bytes, on_cpu=on_cpu))
    lists.refill(1)
    offsets = torch.arange(tables * batch + 1, device=device) * pooling
    sent, received = (torch.zeros(n, part, tables, dim, **options) for _ in range(2))
    out = torch.zeros(part, n, tables, dim, **options)
    pool = BagKernel(ranks, some, batch)
    handles = {cut: EmbeddingAcrossNodes(ranks, some, batch, slice_bags=cut) for cut in SLICE_BAGS}

    def bags() -> torch.Tensor:
        return pool(lists.by_table().reshape(-1), offsets, sent)

    def exchanged() -> torch.Tensor:
        dist.all_to_all_single(received, sent)
        return received

    def by_our_kernel() -> torch.Tensor:
        bags()
        return out.copy_(exchanged().transpose(0, 1)).view(part, -1)

    def by_torch() -> torch.Tensor:
        indices = lists.of_one_table().reshape(-1)
        pooled = functional.embedding_bag(indices, whole, offsets, mode="sum", include_last_offset=True)
        sent.copy_(pooled.view(n, tables, part, dim).transpose(1, 2))
        return out.copy_(exchanged().transpose(0, 1)).view(part, -1)

    def fused(handle: EmbeddingAcrossNodes) -> torch.Tensor:
        return handle(lists.by_table().reshape(-1), offsets)

    def expected() -> torch.Tensor:
        wide = torch.empty(n, part, tables, dim, dtype=torch.float64, device=device)
        for number, (own, table) in enumerate(zip(lists.latest, some, strict=True)):
            wide[:, :, number] = table[own].sum(-2, dtype=torch.float64)
        came = torch.empty_like(wide)
        dist.all_to_all_single(came, wide)
        return came.transpose(0, 1).reshape(part, -1)

    ways: dict[str, Run] = {
        "bags alone": bags,
        "process group alone": exchanged,
        "our kernel, process group, copy": by_our_kernel,
        "embedding_bag, copy, process group, copy": by_torch,
    }
    for cut, handle in handles.items():
        name = f"fused, slices of {handle.slice_bags}{'' if cut else ' by default'}"
        ways[name] = functools.partial(fused, handle)
    return ways, expected


def _sample(ranks: Any, run: Run, calls: int) -> float:
    """Return the slowest rank's time of a call in microseconds."""
    _wait(ranks.device)
    dist.barrier()
    _wait(ranks.device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(ranks.device)
    spent = torch.tensor([(time.perf_counter() - began) / calls * 1e6], device=ranks.device, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
