"""Record an all-gather beside a matrix product in torch's profiler, and say how much of it the product hides.

Each rank writes a file for Perfetto (ui.perfetto.dev) into the folder.

torchrun --nproc-per-node 2 examples/profiler.py FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sidelane import Communicator

GATHER = "sidelane:all_gather"


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    size, elements = (8192, 64 << 20) if gpu else (256, 1 << 20)
    with Communicator(device=device) as comm:
        weights = comm.empty(comm.world_size, elements, dtype=torch.bfloat16)
        shard = weights[comm.rank].fill_(comm.rank)
        a = torch.ones(size, size, dtype=torch.bfloat16, device=device)

        def step() -> None:
            gather = comm.all_gather(weights, shard, beside="compute", async_op=True)
            a @ a
            gather.wait()

        step()
        comm.synchronize()
        with torch.profiler.profile(record_shapes=True) as profiler:
            comm.barrier()  # the profilers of the ranks do not start at the same time
            comm.synchronize()
            for _ in range(5):
                step()
            comm.synchronize()
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"trace-{comm.rank}.json"
        profiler.export_chrome_trace(str(file))
        said = summary(json.loads(file.read_text())["traceEvents"])
        print(f"rank {comm.rank} of {comm.world_size} on {device}: {said}")
    dist.destroy_process_group()


def summary(events: list[dict[str, Any]]) -> str:
    """Say what the calls took of the host, and how long copies between GPUs took, beside kernels or alone."""
    spans = [(str(event["name"]), event["ts"], event["ts"] + event["dur"], event) for event in events if "dur" in event]
    calls = [f"{end - begin:.0f}" for name, begin, end, _ in spans if name == GATHER]
    copies = [(begin, end) for name, begin, end, _ in spans if name.startswith("Memcpy PtoP")]
    kernels = merged([(begin, end) for _, begin, end, event in spans if event.get("cat") == "kernel"])
    beside = [min(end, k_end) - max(begin, k_begin) for begin, end in copies for k_begin, k_end in kernels]
    total, hidden = sum(end - begin for begin, end in copies), sum(part for part in beside if part > 0)
    said = f"the host took {', '.join(calls)} us for {len(calls)} calls of {GATHER}"
    return said + (f"; copies {total:.0f} us, {100 * hidden / total:.0f}% of them beside a kernel" if total else "")


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return when at least one of the spans runs, as spans of which no two overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            begin, last = found.pop()
            end = max(end, last)
        found.append((begin, end))
    return found


if __name__ == "__main__":
    main()
