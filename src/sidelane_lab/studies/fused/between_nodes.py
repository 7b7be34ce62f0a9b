r"""Fused embedding and all-to-all among nodes, next to bags and an all-to-all of the process group one after the other.

A program of its own, as each rank stands for a node: the study ``fused`` is for the ranks of one node. On two GPUs::

    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 torchrun --standalone --nproc-per-node 2 \
        -m sidelane_lab.studies.fused.between_nodes results.json [predicted.json ...]

Ways take turns in rounds. A time is the median over rounds of the slowest rank's time of a call. Files of ``sidelane
fused --machine ... --json``, one or more shapes each, stand next to what was measured. Each row names its transport:
files up to 29 November 2026 have a second one, TCP.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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

BUDGET_S = 1.5
"""Seconds of a way and shape, about, which its number of rounds and of calls in a round follow from."""

MOST_CALLS, LEAST_ROUNDS, MOST_ROUNDS, WARM_UP = 8, 5, 25, 2


PREDICTED = {
    "bags alone": (("compute", "one kernel"), "predicted: PyTorch's embedding_bag, not this kernel"),
    "process group alone": (("collective", "library"), ""),
    "embedding_bag, copy, process group, copy": (("unfused_nccl", "one kernel"), "predicted: without the copies"),
    "by default": (("fused", "remote_first"), ""),
}
"""Implementation and schedule that the model has for (the end of) a way's name, and how these differ; others have none.
"""


def main(path: Path | None = None, predicted: Sequence[Path] = ()) -> None:
    """Measure, print a line for each way, and write all of them, next to what was predicted, to a file of JSON."""
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
    shapes = ON_CPUS if on_cpu else ON_GPUS
    with scale_out(config=config) as ranks:
        for shape in shapes:
            for row in _rows(ranks, shape):
                rows.append(row)
                if ranks.rank == 0:
                    print(json.dumps(row), flush=True)
    if path is not None and dist.get_rank() == 0:
        record(path, rows, predicted)
    dist.destroy_process_group()


def record(path: Path, rows: Sequence[Mapping[str, Any]], predicted: Sequence[Path] = ()) -> None:
    """Write rows of the machine at hand with where they come from, and how far the prediction is off in percent of the
    measured time.
    """
    from sidelane.cli.output import write_json
    from sidelane.machine.inventory import machine_name
    from sidelane_lab.harness import provenance

    ranks = rows[0]["ranks"]
    on_cpu = not torch.cuda.is_available()
    device, gpus = (provenance.processor_name(), 0) if on_cpu else provenance.accelerator_name()
    command = f"torchrun --standalone --nproc-per-node {ranks} -m sidelane_lab.studies.fused.between_nodes {path.name}"
    content: dict[str, Any] = {
        "study": "fused_between_nodes",
        "machine": "cpu" if on_cpu else machine_name(device, gpus),
        "gpus": gpus,
        "device": device,
        "ranks": ranks,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": " ".join([command, *(one.name for one in predicted)]),
        "software": provenance.software_versions(),
        "rows": compare(rows, predicted),
    }
    write_json(path, content)


def compare(rows: Sequence[Mapping[str, Any]], predicted: Sequence[Path]) -> list[dict[str, Any]]:
    """Return measured rows with ``predicted_us`` and ``error_percent``; None for ways without prediction."""
    models: dict[tuple[str, str, str], float] = {}
    for path in predicted:
        for model in json.loads(path.read_text())["rows"]:
            models[model["shape"], model["implementation"], model["schedule"]] = model["time_us"]
    found = []
    for row in rows:
        shape = "batch {batch}, {tables} tables a rank, pooling {pooling}, dim 256".format(**row)
        way, note = next((found for way, found in PREDICTED.items() if row["way"].endswith(way)), (("", ""), ""))
        us, measured = models.get((shape, *way)), row["us"]
        error = None if us is None or measured is None else 100 * (us / measured - 1)
        note = row.get("note", "") or (note if us is not None else "")
        found.append({**row, "predicted_us": us, "error_percent": error, "note": note})
    return found


def _rows(ranks: Any, shape: tuple[int, int, int]) -> list[dict[str, object]]:
    batch, tables, pooling = shape
    fixed = {"transport": "group", "ranks": ranks.world_size, "batch": batch, "tables": tables, "pooling": pooling}
    ways, expected = _ways(ranks, *shape)
    errors = {name: _error(run(), expected()) for name, run in ways.items() if "alone" not in name}
    calls, rounds = {}, {}
    for name, run in ways.items():
        for _ in range(WARM_UP):
            call_s = _sample(ranks, run, 1) * 1e-6
        calls[name] = max(1, min(MOST_CALLS, int(BUDGET_S / LEAST_ROUNDS / call_s)))
        rounds[name] = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(BUDGET_S / call_s / calls[name])))
        if ranks.device.type == "cpu":
            calls[name], rounds[name] = 1, 2
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for number in range(max(rounds.values())):
        for name in order.sample(sorted(ways), len(ways)):
            if number < rounds[name]:
                times[name].append(_sample(ranks, ways[name], calls[name]))
    return [
        {**fixed, "way": name, "us": statistics.median(spent), "least_us": min(spent), "max_rel_err": errors.get(name)}
        for name, spent in times.items()
    ]


def _ways(ranks: Any, batch: int, tables: int, pooling: int) -> tuple[Mapping[str, Run], Run]:
    """Return the ways by name, and what makes the result of the last call in float64."""
    from sidelane.ops.scale_out import embedding_all_to_all
    from sidelane.ops.scale_out.words import slice_of
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

    def fused(cut: int | None) -> torch.Tensor:
        return embedding_all_to_all(ranks, some, lists.by_table().reshape(-1), offsets, slice_bags=cut)

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
    for cut in SLICE_BAGS:
        bags_of, tables_of = slice_of(part, tables, dim * dtype.itemsize, cut)
        size = f"{bags_of}" + (f" by {tables_of} tables" if tables_of > 1 else "")
        ways[f"fused, slices of {size}{'' if cut else ' by default'}"] = functools.partial(fused, cut)
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
    files = [Path(name) for name in sys.argv[1:]]
    main(files[0] if files else None, files[1:])
