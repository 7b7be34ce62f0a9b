"""Where a step's time goes: kernels of one step by what they do, from torch's profiler."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

import torch

from sidelane.bench.running.launch import Rank

GEMM, ATTENTION, COLLECTIVE, COPY_IN, COPY_OUT, PEER_COPY, OTHER = GROUPS = (
    *("gemm", "attention", "collective", "copy_in", "copy_out", "peer_copy", "other"),
)

PATTERNS = (
    (COPY_OUT, r"split_with_sizes_copy"),
    (COPY_IN, r"chunk_cat|multi_tensor_apply_kernel.*Copy"),
    (ATTENTION, r"flash|fmha|sdpa|attention"),
    (COLLECTIVE, r"^nccl|^_(reduce|broadcast|list|exchange|push|pull|relay)(_|$)"),
    (PEER_COPY, r"^Memcpy (PtoP|P2P)"),
    (GEMM, r"gemm|cutlass|nvjet|xmma|splitK|cublas"),
)
"""By names of kernels, the first that fits: of torch, NCCL, cuBLAS, and of Sidelane's own collectives. What a copy
engine moves is a copy between peers to the profiler."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel or a copy on a device, in microseconds of one clock."""

    name: str
    begin_us: float
    end_us: float


@dataclasses.dataclass(frozen=True, slots=True)
class Profiled:
    """Milliseconds of one step.

    Attributes:
        by_group: kernels on all streams, by what they do; what runs at once counts twice.
        first_gather_ms: until the first GEMM begins.
        last_scatter_ms: after the last one has ended.
    """

    by_group: dict[str, float]
    first_gather_ms: float
    last_scatter_ms: float


def group_of(name: str) -> str:
    """What a kernel does.

    >>> group_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"), group_of("Memcpy PtoP (Device -> Device)")
    ('collective', 'peer_copy')
    """
    return next((group for group, pattern in PATTERNS if re.search(pattern, name)), OTHER)


def summed(kernels: Iterable[Kernel]) -> Profiled | None:
    """Sum up what ran on a device; None where no GEMM did."""
    every = list(kernels)
    by_group = dict.fromkeys(GROUPS, 0.0)
    for kernel in every:
        by_group[group_of(kernel.name)] += (kernel.end_us - kernel.begin_us) / 1e3
    gemms = [kernel for kernel in every if group_of(kernel.name) == GEMM]
    if not gemms:
        return None
    return Profiled(
        by_group,
        (min(kernel.begin_us for kernel in gemms) - min(kernel.begin_us for kernel in every)) / 1e3,
        (max(kernel.end_us for kernel in every) - max(kernel.end_us for kernel in gemms)) / 1e3,
    )


def profiled(rank: Rank, step: Callable[[], None]) -> Profiled | None:
    """Run a step that waits for its end; on the first rank under a profiler.

    Returns:
        None on the other ranks, and on CPUs.
    """
    if rank.rank or rank.device.type == "cpu":
        step()
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    return summed(
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("nccl:", "c10d::", "FSDP::"))
    )
