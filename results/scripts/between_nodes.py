r"""Fused embedding and all-to-all among nodes, next to bags and an all-to-all of the process group one after the other.

A program of its own, as each rank stands for a node: the study ``fused`` is for the ranks of one node. On two GPUs::

    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 torchrun --standalone --nproc-per-node 2 \
        results/scripts/between_nodes.py results.json

Ways are compared and timed as those of the study are. Files up to 29 November 2026 have times of the host, a second
transport, TCP, and what the model had predicted.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.fused import FusedOptions
from sidelane_lab.harness import provenance
from sidelane_lab.harness.launch import Rank
from sidelane_lab.studies.fused.study import BEST, rows_of

ON_GPUS = ((512, 16, 70), (1024, 64, 32), (4096, 64, 70), (8192, 26, 20))
ON_CPUS = ((4, 2, 2),)
"""Shapes: batch of all ranks, tables of a rank, pooling."""

SLICE_BAGS = (32, 128, None)
"""Samples of a slice; None for the operator's own choice."""


def main(path: Path) -> None:
    """Measure, and write a row for each way and shape to a file of JSON."""
    from sidelane.cli.output import write_json
    from sidelane.config import Config
    from sidelane.machine.inventory import machine_name

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    from sidelane.integrations.nodes.scale_out import scale_out

    count, rows = dist.get_world_size(), list[dict[str, Any]]()
    options, seeds = FusedOptions(repeats=2 if on_cpu else 25), itertools.count(1)
    with scale_out(config=Config(virtual_nodes=tuple(range(count)))) as ranks:
        meter = make_meter(Rank(ranks.rank, count, ranks.device, print), options.step_s)
        for batch, tables, pooling in ON_CPUS if on_cpu else ON_GPUS:
            with meter.on_stream():
                found = rows_of(meter, ranks, embedding(ranks, batch, tables, pooling), options, seeds, ("eager",))
            fixed = {"transport": "group", "ranks": count, "batch": batch, "tables": tables, "pooling": pooling}
            rows += [
                {**fixed, "way": row.schedule, "us": row.time_us, "max_rel_err": row.max_rel_err, "note": row.note}
                for row in found
                if row.implementation != BEST
            ]
        if ranks.rank == 0:
            device, gpus = (provenance.processor_name(), 0) if on_cpu else provenance.accelerator_name()
            content = {
                "study": "fused_between_nodes",
                "machine": "cpu" if on_cpu else machine_name(device, gpus),
                "gpus": gpus,
                "device": device,
                "ranks": count,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": provenance.commit(),
                "command": f"torchrun --standalone --nproc-per-node {count} {sys.argv[0]} {path.name}",
                "software": provenance.software_versions(),
                "rows": rows,
            }
            write_json(path, content)
    dist.destroy_process_group()


def embedding(ranks: Any, batch: int, tables: int, pooling: int) -> Any:
    """Make a case; ``batch`` samples of all ranks, ``tables`` on each."""
    from sidelane.ops.scale_out import embedding_all_to_all
    from sidelane.ops.scale_out.words import slice_of
    from sidelane_lab.studies.fused.case import NCCL, OperatorCase, ordinary
    from sidelane_lab.studies.fused.embedding_cases import BagsOfTables

    bags = BagsOfTables(ranks, batch, tables, pooling)
    shape = bags.ranks, bags.part, tables, bags.dim
    sent, received = ordinary(ranks, *shape), ordinary(ranks, *shape)
    out = ordinary(ranks, bags.part, bags.ranks, tables, bags.dim)

    def exchanged() -> torch.Tensor:
        dist.all_to_all_single(received, sent)
        return received

    def laid_out() -> torch.Tensor:
        return out.copy_(exchanged().transpose(0, 1)).view(bags.part, -1)

    def by_our_kernel() -> torch.Tensor:
        bags.by_ours(sent)
        return laid_out()

    def by_torch() -> torch.Tensor:
        sent.copy_(bags.at_once().transpose(1, 2))
        return laid_out()

    def fused(cut: int | None) -> torch.Tensor:
        indices = bags.by_table().reshape(-1)
        return embedding_all_to_all(ranks, bags.tables, indices, bags.offsets, slice_bags=cut)

    ways: dict[str, Callable[[], torch.Tensor]] = {}
    for cut in SLICE_BAGS:
        samples, of_tables = slice_of(bags.part, tables, bags.dim * sent.itemsize, cut)
        size = f"{samples}" + (f" by {of_tables} tables" if of_tables > 1 else "")
        ways[f"fused, slices of {size}{'' if cut else ' by default'}"] = functools.partial(fused, cut)
    return OperatorCase(
        "embedding_all_to_all",
        f"batch {batch}, {tables} tables a rank, pooling {pooling}, dim {bags.dim}",
        bags.refill,
        bags.expected,
        {"bags alone": functools.partial(bags.by_ours, sent)},
        {"process group alone": exchanged},
        {
            (NCCL, "our kernel, process group, copy"): by_our_kernel,
            (NCCL, "embedding_bag, copy, process group, copy"): by_torch,
        },
        ways,
        {},
        bags.read_bytes,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
