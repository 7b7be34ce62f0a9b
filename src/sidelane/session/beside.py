"""Time of the computation that runs next to a call: measured here or by the caller, and the same on every rank."""

from __future__ import annotations

import sys
import time

import torch

from sidelane.program.shape import Computation

RUNS = 5
"""Number of timed runs of a GEMM, after one that is not timed; the median counts."""

HIDDEN = {"mi300x": (0.66, 0.42), "h200": (0.92, 0.02), "h100": (0.95, 0.0)}
"""Shares of the shorter operation that disappear behind the longer one, on copy engines and by kernels that are
launched first, by device. MI300X: averages of the ConCCL paper, section V. H200: results/notes/hardware.md, "GEMM next
to a collective", and the all-gathers of results/h200x2/c3.json. H100: results/h100x2/c3.json, one pair."""

DTYPES = ("float16", "bfloat16", "float32", "float64")


def own_time_us(gemm: tuple[int, int, int, str] | None, us: float | None, device: torch.device) -> float:
    """Return the time of a computation on this rank: the caller's, or that of its GEMM (``Communicator.computation``).

    Raises:
        ValueError: both or none of them are given, or a dimension, dtype or time is wrong.
        RuntimeError: there is no memory for the matrices.
    """
    if (gemm is None) == (us is None):
        raise ValueError(f"computation: give one of gemm and us (gemm={gemm}, us={us})")
    if gemm is None:
        if not (isinstance(us, int | float) and 0 < us <= sys.float_info.max):
            raise ValueError(f"computation: us (value={us!r}, allowed=microseconds above 0)")
        return float(us)
    match gemm:
        case (int(m), int(n), int(k), str(dtype)) if min(m, n, k) >= 1 and dtype in DTYPES:
            if max(m * n, m * k, n * k) * getattr(torch, dtype).itemsize < 2**63:
                return _gemm_us(m, n, k, getattr(torch, dtype), device)
    allowed = f"(m, n, k, dtype), matrices of less than 2**63 bytes, dtype of {', '.join(DTYPES)}"
    raise ValueError(f"computation: gemm (value={gemm!r}, allowed={allowed})")


def computation_of(us: float, gemm: tuple[int, int, int, str] | None, device: torch.device) -> Computation:
    """Describe a computation that takes the slowest rank ``us`` microseconds."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    # Four digits: with more, equal computations would differ.
    return Computation(float(f"{us:.4g}"), gemm, *hidden_shares(name))


def hidden_shares(device_name: str) -> tuple[float, float]:
    """Return the shares of the shorter operation that copy engines and kernels hide, for ``Computation``.

    Args:
        device_name: name of the device, like the driver's; one that is not in ``HIDDEN`` counts as an MI300X.
    """
    name = device_name.lower()
    return next((shares for device, shares in HIDDEN.items() if device in name), HIDDEN["mi300x"])


def _gemm_us(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> float:
    """Measure the microseconds of a GEMM alone on the current stream."""
    # Random values: equal values take less power, and so less time.
    a, b = (torch.randn(size, dtype=dtype, device=device) for size in ((m, k), (k, n)))
    c = torch.empty(m, n, dtype=dtype, device=device)
    times = []
    with torch.no_grad():
        torch.mm(a, b, out=c)
        for _ in range(RUNS):
            times.append(_timed_us(a, b, c))
    return sorted(times)[RUNS // 2]  # without statistics, whose import takes 3 ms


def _timed_us(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    if a.device.type != "cuda":
        begin = time.perf_counter()
        torch.mm(a, b, out=c)
        return 1e6 * (time.perf_counter() - begin)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.mm(a, b, out=c)
    last.record()
    last.synchronize()
    return 1e3 * float(first.elapsed_time(last))
