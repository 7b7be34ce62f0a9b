"""Time an FSDP2 step by who communicates: NCCL, Sidelane's group as it is by default and staged, ``fsdp.enable``.

Run by hand on GPUs of one node (on CPUs it only tries itself, with --case 8b:1x64 --small):

    torchrun --nproc-per-node 2 tests/device/learn_fsdp_step.py

It prints the median step of the slowest rank, what the group's report says of its all-gathers, and how long the device
takes to have the memory of the model back once it is freed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sidelane
from sidelane import config as settings
from sidelane import fsdp
from sidelane.integrations import ledger
from sidelane.integrations.registration import register
from sidelane_lab.studies.fsdp.cases import parse_case
from sidelane_lab.studies.fsdp.step import rotary, sharded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="8b:2x4096")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ways", default="nccl,staged,default,enabled")
    options = parser.parse_args()
    case, gpu = parse_case(options.case), torch.cuda.is_available()
    if options.small:
        case = dataclasses.replace(
            case, model=dataclasses.replace(case.model, layers=2, hidden=256, feed=512, heads=4, kv_heads=4)
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    register()
    for way in options.ways.split(","):
        measure(way, case, device, options.steps)
    dist.destroy_process_group()


def measure(way: str, case, device: torch.device, steps: int) -> None:  # type: ignore[no-untyped-def]
    gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if gpu else lambda: None
    plain = way in ("nccl", "enabled")
    asked = dataclasses.replace(settings.current(), map_memory=None if way == "default" else False)
    ledger.reset()
    with settings.override(asked):
        group = dist.group.WORLD if plain else dist.new_group(backend="sidelane" if gpu else "cpu:sidelane")
        model = sharded(case.model, DeviceMesh.from_group(group, device.type), torch.float32, device, 1)
        cos, sin = rotary(case.seq, case.model.hidden // case.model.heads, device)
        x = torch.randn(
            case.batch, case.seq, case.model.hidden, dtype=torch.bfloat16, device=device, requires_grad=True
        )
        times = []
        with fsdp.enable(model) if way == "enabled" else contextlib.nullcontext():
            for _ in range(steps):
                dist.barrier()
                synchronize()
                began = time.perf_counter()
                model(x, cos, sin).sum(dtype=torch.float32).backward()
                synchronize()
                times.append(1e3 * (time.perf_counter() - began))
                model.zero_grad(set_to_none=True)
        del model, x
        gc.collect()
        back_s = time_until_back(device) if gpu else 0.0
        if not plain:
            dist.destroy_process_group(group)
    slowest = torch.tensor(statistics.median(times[steps // 2 :]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{way:8} {slowest.item():8.1f} ms a step; memory back after {back_s:.2f} s", flush=True)
        for row in sidelane.report().rows:
            if "gather" in row.operation:
                print(f"         {row.operation} {row.calls} calls by {row.where}: {row.why}", flush=True)
    dist.barrier()


def time_until_back(device: torch.device) -> float:
    """Seconds until what torch gives back is free; 20 if it is not."""
    free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    freed, began = reserved - torch.cuda.memory_reserved(device), time.monotonic()
    while torch.cuda.mem_get_info(device)[0] < free + freed and time.monotonic() < began + 20:
        time.sleep(0.01)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
