"""The look-up heuristics of the ConCCL paper, sections V-C and VI-G, on described machines; and a described machine as
one that was measured: its isolated times, and pairs under every strategy (``pairs.sweep``).

The arithmetic is in ``pairs.heuristics``; the tables of slowdowns by units come from the device model: two GEMMs and
two sizes of each collective, made once for a machine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from sidelane.c3.strategies import Mover, named
from sidelane.choice.selection import Selection
from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import Gang, Tiled, run_device
from sidelane_lab.model.gemm import bound_of, gemm_kernel, gemm_us, traffic_bytes
from sidelane_lab.model.kernels import dma_us, library_gang, wire_peak_gbps
from sidelane_lab.model.strategies import partitions, predict, predictable, units_tried
from sidelane_lab.pairs import heuristics
from sidelane_lab.pairs.heuristics import TIE, KernelDemand, SlowedKernel
from sidelane_lab.pairs.isolated import CollectiveTimes, GemmTimes, Isolated, PairTimes
from sidelane_lab.pairs.sweep import Sweep, Way
from sidelane_lab.pairs.workload import Bound, Workload, parse_gemm

PROFILED_GEMMS = {Bound.MEMORY: "mb1", Bound.COMPUTE: "cb5"}
PROFILED_SIZES = (1 << 20, 1 << 30)
KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)
OTHER_SIZES = (16 << 20, 128 << 20, 896 << 20)
"""Bytes of collectives that are profiled with all their units only."""
PAIR_BYTES = 896 << 20
"""Bytes of a collective, before it is made about as long as the GEMM beside it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationCost:
    """Units that the heuristic and the sweep chose for a pair, and what the heuristic's choice costs (0.01: 1%).

    ``alone``: so good are all allocations that the heuristic holds for equally good, so that no order of ties decides.
    """

    chosen: int
    best: int
    loss: float
    alone: bool

    @property
    def right(self) -> bool:
        return self.loss < TIE - 1


def allocate(machine: Machine, workload: Workload, *others: Workload) -> Selection[tuple[int, ...]]:
    """Return the units for the collective by the look-up heuristic, or for those of several workloads of one GEMM."""
    gemm, gpu = workload.gemm, machine.gpu
    bound, units = bound_of(machine, gemm), partitions(machine)
    alone_us = heuristics.expected_gemm_us(
        gemm.flops, traffic_bytes(machine, gemm), float(gpu.peak_tflops), float(gpu.memory_gbps)
    )
    return heuristics.allocate(
        SlowedKernel("GEMM", alone_us, {n: gemm_slowdown(machine, bound, n) for n in units}),
        [
            SlowedKernel(
                "collective" if not others else str(one.collective),
                heuristics.expected_comm_us(one.nbytes * (machine.gpus - 1) / machine.gpus, wire_peak_gbps(machine)),
                {n: comm_slowdown(machine, one.collective, one.nbytes, n) for n in units},
            )
            for one in (workload, *others)
        ],
    )


def split_times(machine: Machine, workload: Workload, *others: Workload) -> dict[tuple[int, ...], float]:
    """Predict a GEMM beside several collectives of the vendor's library, each on units of its own, by these units."""
    moves, units, found = (workload, *others), int(machine.gpu.units), {}
    for shares in itertools.product(partitions(machine), repeat=len(moves)):
        if sum(shares) > units / 2:  # as many as partitions take at most
            continue
        gangs = [
            dataclasses.replace(
                library_gang(machine, one.collective, one.nbytes, units=n, reserved=True),
                name=f"{one.collective} {place}",
            )
            for place, (one, n) in enumerate(zip(moves, shares, strict=True))
        ]
        gemm = gemm_kernel(machine, workload.gemm, limit=units - sum(shares))
        found[shares] = run_device(machine, [gemm, *gangs]).time_us
    return found


def judge(machine: Machine, workload: Workload) -> AllocationCost:
    """Compare the heuristic's choice with the best of all allocations."""
    times = {units: predict(machine, workload, "c3_rp", units=units).time_us for units in partitions(machine)}
    best = min(times, key=lambda units: times[units])
    found = allocate(machine, workload)
    least = min(us for _, us in found.table if us is not None)
    equal = [shares for shares, us in found.table if us is not None and us <= least * TIE]
    differ = max(times[sum(shares)] for shares in equal) > times[best] * TIE
    chosen = sum(found.candidate)
    return AllocationCost(chosen, best, times[chosen] / times[best] - 1, alone=not differ)


@functools.lru_cache(maxsize=256)
def gemm_slowdown(machine: Machine, bound: Bound, units_lost: int) -> float:
    """Return the slowdown of the profiled GEMM that has lost some units."""
    gemm = parse_gemm(PROFILED_GEMMS[bound])
    return gemm_us(machine, gemm, int(machine.gpu.units) - units_lost) / gemm_us(machine, gemm)


def comm_slowdown(machine: Machine, kind: Kind, nbytes: int, units: int) -> float:
    """Return the slowdown of the profiled collective of the nearer size with some units."""
    size = min(PROFILED_SIZES, key=lambda known: abs(known.bit_length() - nbytes.bit_length()))
    alone = library_gang(machine, kind, size).alone_us
    return library_gang(machine, kind, size, units=units).alone_us / alone


def sweep_of(machine: Machine, workload: Workload) -> Sweep:
    """Predict a pair under every strategy that the model speaks to, and three kernels in every order and partition.

    The third kernel is the other of all-gather and all-to-all, of as many bytes.
    """
    other = KINDS[1] if workload.collective is KINDS[0] else KINDS[0]
    gemm = gemm_kernel(machine, workload.gemm)
    gangs = [
        dataclasses.replace(library_gang(machine, kind, workload.nbytes), name=str(kind))
        for kind in (workload.collective, other)
    ]
    kernels: dict[str, Tiled | Gang] = {gemm.name: gemm, **{gang.name: gang for gang in gangs}}
    seen = [KernelDemand(gemm.name, gemm.workgroups), *(KernelDemand(gang.name, gang.units) for gang in gangs)]
    orders = {
        names: run_device(machine, [kernels[name] for name in names]).time_us
        for names in itertools.permutations(kernels)
    }
    second = dataclasses.replace(workload, collective=other)
    engines_us = dma_us(machine, workload.collective, workload.nbytes)
    return Sweep(
        workload,
        gemm_us(machine, workload.gemm),
        _ways(machine, workload),
        (seen[0], seen[1]),
        tuple(seen),
        orders,
        splits_us=split_times(machine, workload, second),
        second=second,
        alone_us=min(gangs[0].alone_us, engines_us),
        engines_us=engines_us,
    )


@functools.lru_cache(maxsize=8)
def isolated_of_machine(machine: Machine) -> Isolated:
    """Predict what ``sidelane tune --study c3`` would find: two GEMMs, each with its bound, few sizes, their pairs."""
    units = partitions(machine)
    gemms = tuple(
        GemmTimes(gemm, "split", int(machine.gpu.units), {
            0: gemm_us(machine, gemm), **{n: gemm_us(machine, gemm, int(machine.gpu.units) - n) for n in units},
        })
        for gemm in map(parse_gemm, PROFILED_GEMMS.values())
    )  # fmt: skip
    collectives = []
    for kind in KINDS:
        for nbytes in (*PROFILED_SIZES, *OTHER_SIZES):
            alone = {0: library_gang(machine, kind, nbytes).alone_us}
            given = {n: library_gang(machine, kind, nbytes, units=n).alone_us for n in units}
            times = {**alone, **(given if nbytes in PROFILED_SIZES else {})}
            collectives.append(CollectiveTimes(kind, nbytes, "nccl", times))
            collectives.append(CollectiveTimes(kind, nbytes, "dma", {0: dma_us(machine, kind, nbytes)}))
    pairs = tuple(_pair(machine, _as_long(machine, curve, kind)) for curve in gemms for kind in KINDS)
    predicted = functools.partial(bound_of, machine)
    peaks = float(machine.gpu.peak_tflops), float(machine.gpu.memory_gbps)
    return Isolated(*peaks, gemms, tuple(collectives), pairs, predicted=predicted)


def _as_long(machine: Machine, curve: GemmTimes, kind: Kind) -> Workload:
    alone_us = library_gang(machine, kind, PAIR_BYTES).alone_us
    return Workload(curve.gemm, kind, round(PAIR_BYTES * curve.times_us[0] / alone_us) // 4096 * 4096)


def _pair(machine: Machine, workload: Workload) -> PairTimes:
    """Return a pair of the library, as it is measured."""
    comm_us = library_gang(machine, workload.collective, workload.nbytes).alone_us
    ways = _ways(machine, workload)
    mine = {way: us for way, us in ways.items() if named(way[0]).mover is Mover.LIBRARY and named(way[0]).concurrent}
    pair = (workload.gemm, workload.collective, workload.nbytes, "nccl")
    return PairTimes(*pair, comm_us, gemm_us(machine, workload.gemm) + comm_us, mine)


def _ways(machine: Machine, workload: Workload) -> dict[Way, float]:
    times: dict[Way, float] = {}
    for strategy in predictable():
        for units in units_tried(machine, workload, strategy):
            times[strategy.code, units] = predict(machine, workload, strategy, units=units or None).time_us
    return times
