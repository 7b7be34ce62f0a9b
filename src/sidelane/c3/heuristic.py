"""Heuristics for a runtime that knows little (ConCCL paper, V-C and VI-G): the order of launches, and units for each.

Pure functions of numbers with reasons. ``model/heuristic.py`` feeds them the tables of a described machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

EFFICIENCY = 0.7
"""Share of peak compute, memory and network bandwidth that is reached (ConCCL paper, V-C)."""
TIE = 1.001
"""Ratio of times below which two allocations count as equal."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class UnitAllocation:
    """Units for a collective.

    Attributes:
        units: chosen number of units: the fewest of ``equal``.
        equal: allocations that are expected to be best, and equally good.
        expected_us: expected time of both together in microseconds, by allocation.
        reason: reason of the choice, in words.
    """

    units: int
    equal: tuple[int, ...]
    expected_us: tuple[tuple[int, float], ...]
    reason: str


def allocate(
    gemm_us: float, comm_us: float, gemm_slowdown: Mapping[int, float], comm_slowdown: Mapping[int, float]
) -> UnitAllocation:
    """Take the allocation with the least ``max(GEMM, collective)`` (ConCCL paper, V-C).

    Args:
        gemm_us: expected time of the GEMM with all units (:func:`expected_gemm_us`).
        comm_us: expected time of the collective with the units that it takes alone (:func:`expected_comm_us`).
        gemm_slowdown: slowdown of a profiled GEMM of the same bound, by the units that it lost; the look-up table.
        comm_slowdown: slowdown of the profiled collective of the nearer size, by the units that it has.

    Raises:
        ValueError: the two tables are empty, or not of the same units.

    >>> allocate(1000.0, 900.0, {32: 1.1, 64: 1.25}, {32: 1.5, 64: 1.0}).reason
    '64 units: GEMM 1000 x 1.25, collective 900 x 1.00 = 1250 us expected, next 32 units 1350 us'
    """
    if not gemm_slowdown or set(gemm_slowdown) != set(comm_slowdown):
        units = sorted(gemm_slowdown), sorted(comm_slowdown)
        raise ValueError(f"allocate: tables must be of the same units (value={units[0]}, {units[1]})")
    expected = {n: max(gemm_us * gemm_slowdown[n], comm_us * comm_slowdown[n]) for n in sorted(gemm_slowdown)}
    least = min(expected.values())
    equal = tuple(n for n, us in expected.items() if us <= least * TIE)
    chosen = equal[0]
    reason = (
        f"{chosen} units: GEMM {gemm_us:.0f} x {gemm_slowdown[chosen]:.2f}, "
        f"collective {comm_us:.0f} x {comm_slowdown[chosen]:.2f} = {expected[chosen]:.0f} us expected"
    )
    others = [n for n in expected if n != chosen]
    if others:
        following = min(others, key=lambda n: expected[n])
        reason += f", next {following} units {expected[following]:.0f} us"
    return UnitAllocation(chosen, equal, tuple(expected.items()), reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Spared:
    """Units that a GEMM next to copy engines does without, with the reason."""

    units: int
    reason: str


def spare(memory_bound: bool, slowdown: Mapping[int, float]) -> Spared:
    """Return the units to take from a GEMM whose collective needs none (ConCCL paper, VI-G).

    Args:
        memory_bound: the GEMM is limited by its bytes; one that is limited by its operations keeps all.
        slowdown: slowdown of a profiled memory-bound GEMM by the units that it lost, below 1 if it is faster. No other
            table is needed.

    >>> spare(True, {8: 0.95, 16: 0.97, 32: 1.0}).reason
    '8 units fewer: a memory-bound GEMM takes 0.95 of its time'
    """
    if not memory_bound:
        return Spared(0, "no units: the GEMM is compute-bound")
    least = min((1.0, *slowdown.values()))
    if least * TIE >= 1.0:
        return Spared(0, "no units: a memory-bound GEMM gains nothing here by having fewer")
    units = min(n for n, slower in slowdown.items() if slower <= least * TIE)
    return Spared(units, f"{units} units fewer: a memory-bound GEMM takes {slowdown[units]:.2f} of its time")


def expected_gemm_us(flops: float, traffic_bytes: float, peak_tflops: float, memory_gbps: float) -> float:
    """Return the roofline time of a GEMM in microseconds at ``EFFICIENCY`` of the peaks."""
    return max(flops / (peak_tflops * EFFICIENCY * 1e6), traffic_bytes / (memory_gbps * EFFICIENCY * 1e3))


def expected_comm_us(sent_bytes: float, peak_gbps: float) -> float:
    """Return the roofline time of a collective in microseconds, from a GPU's sent bytes and its links' bandwidth."""
    return sent_bytes / (peak_gbps * EFFICIENCY * 1e3)
