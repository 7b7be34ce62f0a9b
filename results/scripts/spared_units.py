"""Measure what hides of a reduction beside GEMMs if cuBLAS is asked to leave SMs to its sums.

    torchrun --nproc-per-node 2 results/scripts/spared_units.py OUT.json [SECONDS]

A GEMM of cuBLAS has a block on each SM of an H200 from its begin to its end, so that the sums of a reduction on copy
engines wait for that end (results/notes/overlap.md, "Reductions"). ``cublasSetSmCountTarget`` makes it launch fewer.
The pairs are those of c3-reductions.json, four that no rule has seen, and GEMMs in turn as in a backward. Prints
percent of ideal by rounds, as the study c3, for each number of SMs. It needs about 45 seconds.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sidelane import Communicator
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.provenance import heading
from sidelane_lab.harness.ways import Job
from sidelane_lab.pairs.beside import RoundTimes
from sidelane_lab.pairs.pair import in_turn

MB = 1 << 20
SPARED = (0, 2, 4, 8, 16)
GEMMS = {
    "cb1": [(8192, 8192, 8192)],
    "mb1": [(8192, 57344, 8192)],
    "cb4": [(18432, 8192, 16384)],
    "cb3": [(16384, 16384, 8192)],
    "u1": [(8192, 28672, 8192)],
    "u2": [(16384, 4096, 14336)],
    "u3": [(5120, 16384, 8192)],
    "u4": [(12288, 12288, 4096)],
    "backward": [(8192, 4096, 14336), (4096, 14336, 8192)] * 4,
    "small": [(4096, 4096, 4096)] * 24,
}
MIB = dict(zip(GEMMS, (896, 896, 1024, 512, 640, 384, 512, 256, 448, 128), strict=True))

Launch = Callable[[], object]


def ask(units: int) -> None:
    """Ask cuBLAS for a number of SMs, 0 for all, for GEMMs that this thread launches from now on."""
    (path, *_) = re.findall(r"/\S+/libcublas\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    ctypes.CDLL(path).cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), units)


def main(out: str, seconds: str = "60") -> None:
    """Measure all pairs within so many seconds."""
    began, rank = time.monotonic(), int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    meter = Meter(device, device_barrier=lambda: dist.all_reduce(torch.zeros(1, device=device)), timeout_s=15)
    usual, compute = torch.cuda.Stream(device), torch.cuda.Stream(device)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[str, Any] = {"heading": heading()}
    with Communicator() as comm, meter.on_stream():
        whole_of_all, part_of_all = (comm.empty(count * MB, dtype=torch.bfloat16) for count in (512, 256))
        pairs = [(name, kind) for name in GEMMS for kind in ("reduce_scatter", "all_reduce")]
        for name, kind in meter.within(pairs, float(seconds) - (time.monotonic() - began), lambda left: None):
            whole, part = whole_of_all[: MIB[name] * MB // 2], part_of_all[: MIB[name] * MB // 4]
            whole.normal_().mul_(1e-30)  # an all-reduce in place doubles it each time
            operands = {
                one: tuple(torch.randn(*sizes, device=device).bfloat16() for sizes in (one[::2], one[:0:-1], one[:2]))
                for one in dict.fromkeys(GEMMS[name])
            }

            def reduced(kind: str, whole: torch.Tensor, part: torch.Tensor, **options: str) -> object:
                if kind == "all_reduce":
                    return comm.all_reduce(whole, **options)
                return comm.reduce_scatter(part, whole, **options)

            def multiplied(fewer: int, operands: dict[Any, tuple[torch.Tensor, ...]], order: list[Any]) -> None:
                ask(units - fewer if fewer else 0)
                for a, b, c in (operands[one] for one in order):
                    torch.mm(a, b, out=c)
                ask(0)

            engines: Launch = functools.partial(reduced, kind, whole, part, variant="b2b", beside="compute")
            gemms = {fewer: functools.partial(multiplied, fewer, operands, GEMMS[name]) for fewer in SPARED}
            runs: dict[str, Launch] = {"engines": engines, "wide": functools.partial(reduced, kind, whole, part)}
            runs |= {f"gemm -{fewer}": gemm for fewer, gemm in gemms.items()}
            runs |= {
                f"both -{fewer}": functools.partial(in_turn, [(usual, engines), (compute, gemm)])
                for fewer, gemm in gemms.items()
            }
            jobs = {label: Job(run, hide_launch_us=900.0) for label, run in runs.items()}
            times = {label: one.times_us for label, one in meter.rounds(jobs, warmup=1, repeats=5).items()}
            best = min(times["engines"], times["wide"], key=statistics.median)
            rows: dict[str, Any] = {label: round(statistics.median(series), 1) for label, series in times.items()}
            for fewer in SPARED:
                rounds = RoundTimes(times["gemm -0"], best, best, times[f"both -{fewer}"])
                rows[f"percent -{fewer}"] = rounds.percent_of_ideal()
            found[f"{name} {kind} {MIB[name]} MiB"] = rows
            if rank == 0:
                print(name, kind, rows, flush=True)
                Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
