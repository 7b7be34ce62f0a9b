"""The look-up heuristic of the ConCCL paper, section V-C: how many compute units to give to a collective.

A table of slowdowns by units, made once for a machine from two GEMMs and two sizes of each collective, scales
roofline times; the allocation with the least max(GEMM, collective) is taken.
"""

from __future__ import annotations

import dataclasses
import functools

from sidelane.c3.workload import Gemm, Workload, parse_gemm
from sidelane.machine.spec import Machine
from sidelane.model.gemm import gemm_us, is_memory_bound, traffic_bytes
from sidelane.model.kernels import library_gang, wire_peak_gbps
from sidelane.model.strategies import partitions, predict
from sidelane.program.collective import Kind

EFFICIENCY = 0.7
"""Of peak compute, memory and network bandwidth (ConCCL paper, V-C)."""
PROFILED_GEMMS = {True: "mb1", False: "cb5"}
PROFILED_SIZES = (1 << 20, 1 << 30)
TIE = 1.001
"""Allocations whose times differ by less are one and the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """What the heuristic and the sweep chose for a pair, and what the heuristic's choice costs (0.01: 1%).

    ``alone``: so good are all allocations that the heuristic holds for equally good, so that no order of ties decides.
    """

    chosen: int
    best: int
    loss: float
    alone: bool

    @property
    def right(self) -> bool:
        return self.loss < TIE - 1


def allocate(machine: Machine, workload: Workload) -> int:
    """Units for the collective by the look-up heuristic; the fewest of those that it expects to be equally good."""
    return min(candidates(machine, workload))


def candidates(machine: Machine, workload: Workload) -> list[int]:
    """Allocations that the heuristic expects to be best, and equally good."""
    gemm = _roofline_gemm_us(machine, workload.gemm)
    comm = workload.nbytes * (machine.gpus - 1) / machine.gpus / (wire_peak_gbps(machine) * EFFICIENCY * 1e3)
    bound = is_memory_bound(machine, workload.gemm)

    def longer(units: int) -> float:
        slower = comm_slowdown(machine, workload.collective, workload.nbytes, units)
        return max(gemm * gemm_slowdown(machine, bound, units), comm * slower)

    expected = {units: longer(units) for units in partitions(machine)}
    return [units for units, us in expected.items() if us <= min(expected.values()) * TIE]


def judge(machine: Machine, workload: Workload) -> Allocation:
    """Compare the heuristic's choice with the best of all allocations."""
    times = {units: predict(machine, workload, "c3_rp", units=units).time_us for units in partitions(machine)}
    best = min(times, key=lambda units: times[units])
    equal = candidates(machine, workload)
    chosen = min(equal)
    differ = max(times[units] for units in equal) > times[best] * TIE
    return Allocation(chosen, best, times[chosen] / times[best] - 1, alone=not differ)


@functools.lru_cache(maxsize=256)
def gemm_slowdown(machine: Machine, memory_bound: bool, units_lost: int) -> float:
    """Of the profiled GEMM that has lost some units."""
    gemm = parse_gemm(PROFILED_GEMMS[memory_bound])
    return gemm_us(machine, gemm, int(machine.gpu.units) - units_lost) / gemm_us(machine, gemm)


def comm_slowdown(machine: Machine, kind: Kind, nbytes: int, units: int) -> float:
    """Of the profiled collective of the nearer size with some units."""
    size = min(PROFILED_SIZES, key=lambda known: abs(known.bit_length() - nbytes.bit_length()))
    alone = library_gang(machine, kind, size).alone_us
    return library_gang(machine, kind, size, units=units).alone_us / alone


def _roofline_gemm_us(machine: Machine, gemm: Gemm) -> float:
    compute = gemm.flops / (machine.gpu.peak_tflops * EFFICIENCY * 1e6)
    return max(compute, traffic_bytes(machine, gemm) / (machine.gpu.memory_gbps * EFFICIENCY * 1e3))
