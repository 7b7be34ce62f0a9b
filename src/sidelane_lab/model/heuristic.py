"""The look-up heuristics of the ConCCL paper, sections V-C and VI-G, on described machines.

The arithmetic is in ``c3.heuristic``; the tables of slowdowns by units come from the device model: two GEMMs and two
sizes of each collective, made once for a machine.
"""

from __future__ import annotations

import dataclasses
import functools

from sidelane.c3 import heuristic
from sidelane.c3.heuristic import TIE
from sidelane.c3.workload import Gemm, Workload, parse_gemm
from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.gemm import gemm_us, is_memory_bound, traffic_bytes
from sidelane_lab.model.kernels import library_gang, wire_peak_gbps
from sidelane_lab.model.strategies import partitions, predict

PROFILED_GEMMS = {True: "mb1", False: "cb5"}
PROFILED_SIZES = (1 << 20, 1 << 30)


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


def allocate(machine: Machine, workload: Workload) -> heuristic.UnitAllocation:
    """Units for the collective by the look-up heuristic."""
    gemm, gpu = workload.gemm, machine.gpu
    gemm_alone = heuristic.expected_gemm_us(
        gemm.flops, traffic_bytes(machine, gemm), float(gpu.peak_tflops), float(gpu.memory_gbps)
    )
    sent = workload.nbytes * (machine.gpus - 1) / machine.gpus
    comm_alone = heuristic.expected_comm_us(sent, wire_peak_gbps(machine))
    bound = is_memory_bound(machine, gemm)
    return heuristic.allocate(
        gemm_alone,
        comm_alone,
        {units: gemm_slowdown(machine, bound, units) for units in partitions(machine)},
        {units: comm_slowdown(machine, workload.collective, workload.nbytes, units) for units in partitions(machine)},
    )


def spare(machine: Machine, gemm: Gemm) -> heuristic.Spared:
    """Units to take from a GEMM next to copy engines."""
    table = {units: gemm_slowdown(machine, True, units) for units in partitions(machine)}
    return heuristic.spare(is_memory_bound(machine, gemm), table)


def judge(machine: Machine, workload: Workload) -> Allocation:
    """Compare the heuristic's choice with the best of all allocations."""
    times = {units: predict(machine, workload, "c3_rp", units=units).time_us for units in partitions(machine)}
    best = min(times, key=lambda units: times[units])
    found = allocate(machine, workload)
    differ = max(times[units] for units in found.equal) > times[best] * TIE
    return Allocation(found.units, best, times[found.units] / times[best] - 1, alone=not differ)


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
