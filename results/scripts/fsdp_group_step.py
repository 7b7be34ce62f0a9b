"""Time FSDP2 steps by who communicates: NCCL, a Sidelane group that stages or enables FSDP2, ``fsdp.enable``.

Run by hand on GPUs of one node:

    torchrun --nproc-per-node 2 results/scripts/fsdp_group_step.py

It prints the median step of the slowest rank and what the group's report says of its all-gathers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sidelane
from sidelane import fsdp
from sidelane.integrations import ledger, torch_world
from sidelane.integrations.registration import register
from sidelane_lab.studies.fsdp.cases import StepCase, parse_case
from sidelane_lab.studies.fsdp.step import rotary, sharded


def measure(way: str, case: StepCase, device: torch.device, steps: int) -> None:
    """Time the steps of one way, and print them."""
    plain = way in ("nccl", "enabled")
    ledger.reset()
    torch_world.FSDP_DEVICES = () if way == "staged" else ("cuda",)
    group = dist.group.WORLD if plain else dist.new_group(backend="sidelane")
    model = sharded(case.model, DeviceMesh.from_group(group, device.type), torch.float32, device, 1)
    cos, sin = rotary(case.seq, case.model.hidden // case.model.heads, device)
    x = torch.randn(case.batch, case.seq, case.model.hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    times = []
    with fsdp.enable(model) if way == "enabled" else contextlib.nullcontext():
        for _ in range(steps):
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(x, cos, sin).sum(dtype=torch.float32).backward()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
            model.zero_grad(set_to_none=True)
    del model, x
    gc.collect()
    rows = (
        []
        if plain
        else [row for row in sidelane.report().rows if row.operation.removeprefix("fsdp ")[:6] in ("all_ga", "reduce")]
    )
    if not plain:
        dist.destroy_process_group(group)
    slowest = torch.tensor(times[steps // 2 :], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{way:8}{slowest.median():8.1f} ms a step ({slowest.min():.1f} to {slowest.max():.1f})", flush=True)
        for row in rows:
            print(f"        {row.operation} {row.calls} calls by {row.where}: {row.why}", flush=True)
    dist.barrier()
    torch.cuda.empty_cache()


def main() -> None:
    """Time every way that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="8b:2x4096")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", default="nccl,staged,group,enabled,nccl,staged,group,enabled")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    register()
    for way in options.ways.split(","):
        measure(way, parse_case(options.case), device, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
