"""Bytes that a computation moves to and from memory, and its hits in the last-level cache, by Nsight Compute.

``ncu`` runs this module in a process of its own, and counts the kernels of one run after two others. It empties the
caches before each kernel.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

import torch

from sidelane_lab.pairs.pair import GemmRun
from sidelane_lab.pairs.workload import ComputeKind, Gemm, parse_gemm

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
SECTORS, HITS, NANOSECONDS = "lts__t_sectors.sum", "lts__t_sector_hit_rate.pct", "gpu__time_duration.sum"
COUNT = (
    *("ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"),
    *("--metrics", ",".join((READ, WRITTEN, SECTORS, HITS, NANOSECONDS))),
)


def count(gemm: Gemm, timeout_s: float) -> dict[str, float]:
    """Return columns of a row: time, bytes and percent of hits of a computation.

    Raises:
        FileNotFoundError: there is no ``ncu``.
        ValueError: it counted nothing, with the end of what it said.
        TimeoutExpired: it took longer.
    """
    refuse_without()
    is_product = gemm.operation is ComputeKind.PRODUCT
    name = f"{gemm.m}x{gemm.n}x{gemm.k}" if is_product else gemm.tag
    ran = subprocess.run(
        [*COUNT, sys.executable, "-m", __name__, name, gemm.dtype], capture_output=True, text=True, timeout=timeout_s
    )
    return counted(ran.stdout + ran.stderr)


def refuse_without() -> None:
    """Raise FileNotFoundError where there is no ``ncu``."""
    if shutil.which(COUNT[0]) is None:
        raise FileNotFoundError("ncu (Nsight Compute) must be in PATH")


def counted(text: str) -> dict[str, float]:
    """Return columns of a row from what ``ncu --csv`` printed: a line for each metric of each kernel.

    Raises:
        ValueError: it has no such lines.
    """
    lines = text.splitlines()
    begin = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        kernels.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    if not kernels:
        raise ValueError(f"counted: ncu must count a kernel, but said: {' '.join(lines[-4:])}")

    def total(*metrics: str) -> float:
        return sum(kernel[metric] for kernel in kernels.values() for metric in metrics)

    moved, time_us = total(READ, WRITTEN), total(NANOSECONDS) / 1e3
    hits = sum(kernel[HITS] * kernel[SECTORS] for kernel in kernels.values()) / total(SECTORS)
    return {"time_us": time_us, "moved_bytes": moved, "hit_percent": hits, "gbps": moved / time_us / 1e3}


def main(name: str, dtype: str) -> None:
    """Run a computation twice, and once more for the counters."""
    run = GemmRun(parse_gemm(name, dtype), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    run.fill(1)
    run.run()
    if torch.cuda.is_available():
        with torch.cuda.profiler.profile():
            run.run()
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
