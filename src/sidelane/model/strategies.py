"""C3 strategies on the device model: what a GEMM and a collective take together (ConCCL and overlap papers)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from sidelane.c3.strategy import ideal_speedup, percent_of_ideal
from sidelane.c3.workload import C3Class, Workload, classify
from sidelane.execute.sim import Interval
from sidelane.machine.spec import Machine
from sidelane.model.device import Gang, Tiled, run_device
from sidelane.model.gemm import gemm_kernel, gemm_us, is_memory_bound
from sidelane.model.kernels import dma_gangs, dma_us, library_gang, own_chunk_gang
from sidelane.program.collective import Kind

STRATEGIES = ("serial", "c3_base", "c3_sp", "c3_rp", "c3_sp_rp", "priority", "conccl", "conccl_rp")
C3_VARIANTS = ("c3_base", "c3_sp", "c3_rp", "c3_sp_rp")
RP_UNITS = 8
"""Compute units that conccl_rp takes from a memory-bound GEMM (ConCCL paper, VI-G)."""


MOST_LOST = -100.0
"""Percent of ideal below which a number says nothing more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A pair under one strategy.

    Attributes:
        units: compute units of the collective where the strategy chose them, else 0.
        gemm_us, comm_us: alone; ``comm_us`` is the vendor library's, as in the papers' definition of ideal.
        best_comm_us: the faster of the library's and that of DMA engines.
        time_us: both together.
    """

    workload: Workload
    strategy: str
    units: int
    gemm_us: float
    comm_us: float
    best_comm_us: float
    time_us: float
    timeline: tuple[Interval, ...] = ()

    @property
    def speedup(self) -> float:
        """Over serial execution."""
        return (self.gemm_us + self.comm_us) / self.time_us

    @property
    def ideal(self) -> float:
        """Speedup if the shorter were hidden entirely."""
        return ideal_speedup(self.gemm_us, self.comm_us)

    @property
    def percent(self) -> float | None:
        """Of the ideal gain with the faster collective. None: undefined.

        That is where there is next to nothing to gain (``percent_of_ideal``), and where a strategy loses more than can
        be gained: then its collective is another one, and ``speedup`` says what it costs.
        """
        percent = percent_of_ideal(self.gemm_us, self.best_comm_us, self.time_us)
        return None if percent is None or percent < MOST_LOST else percent

    @property
    def percent_of_library(self) -> float | None:
        """The papers' number: of the ideal gain with the library's collective. A faster one can pass 100."""
        return percent_of_ideal(self.gemm_us, self.comm_us, self.time_us)

    @property
    def c3_class(self) -> C3Class:
        """By the isolated times."""
        return classify(self.gemm_us, self.comm_us)


def predict(
    machine: Machine,
    workload: Workload,
    strategy: str,
    *,
    units: int | None = None,
    write_back: bool = False,
    record: bool = False,
) -> Prediction:
    """What a pair takes under a strategy.

    Args:
        machine: where.
        workload: the pair.
        strategy: one of ``STRATEGIES``.
        units: of the collective, for c3_rp and c3_sp_rp; None takes the best power of two, as the paper's sweep does.
        write_back: kernels' caches are written back before DMA engines read (see ``kernels.dma_gangs``).
        record: keep the timeline.

    Raises:
        ValueError: unknown strategy, or units that the machine cannot give.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"predict: strategy (value={strategy!r}, allowed={', '.join(STRATEGIES)})")
    gemm, kind, nbytes = workload.gemm, workload.collective, workload.nbytes
    alone_gemm = gemm_us(machine, gemm)
    library = library_gang(machine, kind, nbytes)
    chosen = 0
    if strategy in ("c3_rp", "c3_sp_rp"):
        options = partitions(machine) if units is None else [units]
        if any(not 0 < option < machine.gpu.units for option in options):
            raise ValueError(f"predict: units (value={options}, allowed=1..{int(machine.gpu.units) - 1})")
        chosen = min(options, key=lambda n: run_device(machine, _partitioned(machine, workload, n)).time_us)
    kernels = _kernels(machine, workload, strategy, chosen, library, write_back)
    run = run_device(machine, kernels, record=record)
    best = min(library.alone_us, dma_us(machine, kind, nbytes))
    return Prediction(workload, strategy, chosen, alone_gemm, library.alone_us, best, run.time_us, run.timeline)


def predict_all(machine: Machine, workload: Workload, strategies: Iterable[str] = STRATEGIES) -> list[Prediction]:
    """A pair under several strategies."""
    return [predict(machine, workload, strategy) for strategy in strategies]


def partitions(machine: Machine) -> list[int]:
    """Powers of two of compute units that a collective can be given, from 8 (ConCCL paper, V-B)."""
    return [1 << k for k in range(3, 10) if (1 << k) <= machine.gpu.units / 2]


def _kernels(
    machine: Machine, workload: Workload, strategy: str, units: int, library: Gang, write_back: bool
) -> list[Tiled | Gang]:
    gemm = gemm_kernel(machine, workload.gemm)
    match strategy:
        case "serial":
            return [gemm, dataclasses.replace(library, after=(gemm.name,))]
        case "c3_base":
            return [gemm, library]
        case "c3_sp":
            return [library, gemm]
        case "priority":
            return [gemm, dataclasses.replace(library, priority=1)]
        case "conccl" | "conccl_rp":
            bound = is_memory_bound(machine, workload.gemm)
            limit = int(machine.gpu.units) - RP_UNITS if strategy == "conccl_rp" and bound else None
            collective = dma_gangs(machine, workload.collective, workload.nbytes, write_back=write_back)
            own = None
            if workload.collective is Kind.ALL_TO_ALL:  # out of place, as in all studies; an all_gather is in place
                own = own_chunk_gang(machine, workload.collective, workload.nbytes)
            computation = gemm_kernel(machine, workload.gemm, limit=limit)
            return [computation, *collective, *([] if own is None else [own])]
        case _:
            return _partitioned(machine, workload, units)


def _partitioned(machine: Machine, workload: Workload, units: int) -> list[Tiled | Gang]:
    # Masks hold for the whole run: the GEMM does not get the units back when the collective has ended.
    gemm = gemm_kernel(machine, workload.gemm, limit=int(machine.gpu.units) - units)
    return [gemm, library_gang(machine, workload.collective, workload.nbytes, units=units, reserved=True)]
