"""Where a step's time goes: kernels of one step by what they do, from torch's profiler.

The stream of the computation is the one with the most GEMMs. What is on it, the pauses between and the two ends are
the whole step::

    computation   | first gather | GEMM copy-out GEMM ... pause GEMM | last scatter |
    other streams   gather           gather     copy-in ...            reduce, cast
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

import torch

from sidelane_lab.harness.launch import Rank

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
class TimedKernel:
    """A kernel or a copy on a device, in microseconds of one clock."""

    name: str
    begin_us: float
    end_us: float
    stream: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepGemm:
    """A GEMM of a step.

    Attributes:
        ms: that it took.
        beside_ms: of these, next to a collective or a copy between peers.
    """

    ms: float
    beside_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Profiled:
    """Milliseconds of one step.

    Attributes:
        by_group: kernels on all streams, by what they do; what runs at once counts twice.
        first_gather_ms: until the first GEMM begins.
        last_scatter_ms: after the last one has ended.
        on_stream: kernels on the stream of the computation, between the first GEMM and the last one.
        waits_ms: pauses of that stream between these.
        gemms: of that stream, in their order, which is the same for all who train one model.
    """

    by_group: dict[str, float]
    first_gather_ms: float
    last_scatter_ms: float
    on_stream: dict[str, float]
    waits_ms: float
    gemms: tuple[StepGemm, ...]

    @property
    def whole_ms(self) -> float:
        """Milliseconds of the step, from the begin of its first kernel to the end of its last one."""
        return self.first_gather_ms + sum(self.on_stream.values()) + self.waits_ms + self.last_scatter_ms

    def slower_gemms_ms(self, floor: Profiled) -> tuple[float, float] | None:
        """By how much GEMMs take longer than those of another step: those that run next to transfers for half of their
        time and more, and the others. None where the GEMMs are others.
        """
        if len(self.gemms) != len(floor.gemms):
            return None
        beside = apart = 0.0
        for mine, other in zip(self.gemms, floor.gemms, strict=True):
            if 2 * mine.beside_ms >= mine.ms:
                beside += mine.ms - other.ms
            else:
                apart += mine.ms - other.ms
        return beside, apart


def group_of(name: str) -> str:
    """Say what a kernel does.

    >>> group_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"), group_of("Memcpy PtoP (Device -> Device)")
    ('collective', 'peer_copy')
    """
    return next((group for group, pattern in PATTERNS if re.search(pattern, name)), OTHER)


def summed(kernels: Iterable[TimedKernel]) -> Profiled | None:
    """Sum up what ran on a device; None where no GEMM did."""
    every = list(kernels)
    by_group = dict.fromkeys(GROUPS, 0.0)
    for kernel in every:
        by_group[group_of(kernel.name)] += (kernel.end_us - kernel.begin_us) / 1e3
    found = [kernel for kernel in every if group_of(kernel.name) == GEMM]
    if not found:
        return None
    by_stream: dict[int, float] = {}
    for kernel in found:
        by_stream[kernel.stream] = by_stream.get(kernel.stream, 0.0) + kernel.end_us - kernel.begin_us
    stream = max(by_stream, key=lambda one: by_stream[one])
    gemms = [kernel for kernel in found if kernel.stream == stream]
    begin, end = min(kernel.begin_us for kernel in gemms), max(kernel.end_us for kernel in gemms)
    on_stream, waits_us, until = dict.fromkeys(GROUPS, 0.0), 0.0, begin
    for kernel in sorted(every, key=lambda one: one.begin_us):
        if kernel.stream == stream and begin <= kernel.begin_us < end:
            waits_us += max(0.0, kernel.begin_us - until)
            # One may begin before the last one has ended.
            on_stream[group_of(kernel.name)] += max(0.0, min(kernel.end_us, end) - max(kernel.begin_us, until)) / 1e3
            until = max(until, kernel.end_us)
    transfers = [kernel for kernel in every if group_of(kernel.name) in (COLLECTIVE, PEER_COPY)]
    return Profiled(
        by_group,
        (begin - min(kernel.begin_us for kernel in every)) / 1e3,
        (max(kernel.end_us for kernel in every) - end) / 1e3,
        on_stream,
        waits_us / 1e3,
        tuple(
            StepGemm((one.end_us - one.begin_us) / 1e3, _covered_us(one, transfers) / 1e3)
            for one in sorted(gemms, key=lambda one: one.begin_us)
        ),
    )


def _covered_us(kernel: TimedKernel, others: Iterable[TimedKernel]) -> float:
    """For how long others run next to it."""
    covered, until = 0.0, kernel.begin_us
    for other in sorted(others, key=lambda one: one.begin_us):
        begin, end = max(other.begin_us, until), min(other.end_us, kernel.end_us)
        if end > begin:
            covered += end - begin
            until = end
    return covered


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
        TimedKernel(event.name, event.time_range.start, event.time_range.end, event.device_resource_id or 0)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("nccl:", "c10d::", "FSDP::"))
    )
