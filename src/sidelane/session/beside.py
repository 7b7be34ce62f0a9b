"""Time of the computation that runs next to a call: measured here or by the caller, and the same on every rank."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch

from sidelane.errors import UnavailableError
from sidelane.program.shape import Computation

RUNS = 5
"""Number of timed runs of a GEMM, after one that is not timed; the median counts."""

HIDDEN = {"mi300x": (0.66, 0.42), "h200": (0.92, 0.02), "h100": (0.95, 0.0)}
"""Shares of the shorter operation that disappear behind the longer one, on copy engines and by kernels that are
launched first, by device. MI300X: averages of the ConCCL paper, section V. H200: docs/lab/hardware.md, "GEMM next to a
collective", and the all-gathers of results/h200x2/c3.json. H100: results/h100x2/c3.json, one pair."""

DTYPES = ("float16", "bfloat16", "float32", "float64")


def beside(
    gemm: tuple[int, int, int, str] | None,
    us: float | None,
    device: torch.device,
    *,
    capturing: bool,
    slowest_of: Callable[[torch.Tensor], object],
) -> Computation:
    """See ``Communicator.beside``.

    Args:
        gemm: see there.
        us: see there.
        device: device of the communicator.
        capturing: a graph is being captured.
        slowest_of: replaces each value of a tensor by the greatest of all ranks. Collective.
    """
    if capturing:
        raise UnavailableError("beside: the ranks cannot agree while a graph is captured (allowed=before)")
    problem: Exception | None = _problem(gemm, us)
    mine = math.inf  # tells the peers, which wait for this rank's time, that it has none
    if problem is None:
        try:
            mine = _gemm_us(gemm, device) if gemm is not None else float(us or 0.0)
        except RuntimeError as error:  # no memory for the matrices
            problem = error
    slowest = torch.tensor([mine, float(_digest(gemm)), -float(_digest(gemm))], dtype=torch.float32, device=device)
    slowest_of(slowest)
    agreed, most, least = slowest.tolist()
    if problem is not None:
        raise problem
    if not math.isfinite(agreed):
        raise ValueError("beside: another rank has no time to give and says why (value=inf, allowed=one on each rank)")
    if most != -least:
        raise ValueError(f"beside: gemm (value={gemm}, allowed=the same on all ranks)")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    # Four digits: with more, equal computations would differ.
    return Computation(float(f"{agreed:.4g}"), gemm, *hidden_shares(name))


def hidden_shares(device_name: str) -> tuple[float, float]:
    """Return the shares of the shorter operation that copy engines and kernels hide, for ``Computation``.

    Args:
        device_name: name of the device, like the driver's; one that is not in ``HIDDEN`` counts as an MI300X.
    """
    name = device_name.lower()
    return next((shares for device, shares in HIDDEN.items() if device in name), HIDDEN["mi300x"])


def _problem(gemm: tuple[int, int, int, str] | None, us: float | None) -> ValueError | None:
    """Return the error of wrong arguments; None if they are right."""
    if (gemm is None) == (us is None):
        return ValueError(f"beside: gemm, us (value={gemm}, {us}, allowed=one of the two)")
    if us is not None:
        fine = isinstance(us, int | float) and 0 < us <= sys.float_info.max
        return None if fine else ValueError(f"beside: us (value={us!r}, allowed=microseconds, more than 0)")
    match gemm:
        case (int(m), int(n), int(k), str(dtype)) if min(m, n, k) >= 1 and dtype in DTYPES:
            if max(m * n, m * k, n * k) * getattr(torch, dtype).itemsize < 2**63:
                return None
    allowed = f"(m, n, k, dtype), matrices of less than 2**63 bytes, dtype of {', '.join(DTYPES)}"
    return ValueError(f"beside: gemm (value={gemm!r}, allowed={allowed})")


def _digest(gemm: tuple[int, int, int, str] | None) -> int:
    """Return a hash of the GEMM that float32 represents exactly, to compare it between ranks."""
    if gemm is None:
        return 0
    m, n, k, dtype = gemm if _problem(gemm, None) is None else (0, 0, 0, DTYPES[0])
    return (m * 1_000_003 + n * 10_007 + k * 101 + DTYPES.index(dtype)) % (1 << 24)


def _gemm_us(gemm: tuple[int, int, int, str], device: torch.device) -> float:
    """Measure the microseconds of a GEMM alone on the current stream."""
    m, n, k, name = gemm
    dtype = getattr(torch, name)
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
