"""Order of launches for a runtime that knows little (ConCCL paper, V-C). Pure, with reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class KernelDemand:
    """A kernel that a runtime is about to launch.

    Attributes:
        name: name of the kernel in texts.
        workgroups: number of workgroups of its grid, a proxy for the units that it wants; 0 on copy engines.
        priority: priority of its stream; the greater comes first, whatever the workgroups.
    """

    name: str
    workgroups: int
    priority: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Kernels in the order of their launches, with the reason."""

    kernels: tuple[KernelDemand, ...]
    reason: str


def launch_order(kernels: Sequence[KernelDemand]) -> LaunchOrder:
    """Launch by number of workgroups, low to high, so that none starves (ConCCL paper, V-C; for several, VII-B1).

    A priority supersedes that, and equals stay in the order given.

    Raises:
        ValueError: no kernel, or one of less than no workgroups.

    >>> launch_order([KernelDemand("GEMM", 1216), KernelDemand("all_gather", 64)]).reason
    'fewest workgroups first: all_gather (64), GEMM (1216)'
    """
    if not kernels or min(kernel.workgroups for kernel in kernels) < 0:
        raise ValueError(f"launch_order: kernels (value={list(kernels)}, allowed=one or more, of 0 workgroups or more)")
    ordered = tuple(sorted(kernels, key=lambda kernel: (-kernel.priority, kernel.workgroups)))
    by_priority = len({kernel.priority for kernel in kernels}) > 1
    rule = "highest priority, then fewest workgroups first" if by_priority else "fewest workgroups first"
    told = ", ".join(
        f"{kernel.name} ({kernel.workgroups}{f', priority {kernel.priority}' if by_priority else ''})"
        for kernel in ordered
    )
    return LaunchOrder(ordered, f"{rule}: {told}")
