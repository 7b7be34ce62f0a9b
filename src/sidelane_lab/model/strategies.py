"""C3 strategies on the device model: what a GEMM and a collective take together (ConCCL and overlap papers)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane.c3.strategies import Mover, Order, Strategy, named, strategies
from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import Gang, Tiled, run_device
from sidelane_lab.model.gangs import engine_gangs, gangs_us, library_gangs, stretched
from sidelane_lab.model.gemm import bound_of, gemm_kernel, gemm_us
from sidelane_lab.model.kernels import own_chunk_gang, own_gang
from sidelane_lab.pairs.workload import (
    Bound,
    C3Class,
    Workload,
    applies,
    classify,
    ideal_speedup,
    percent_of_ideal,
    possible_percent,
)
from sidelane_lab.sim import Interval

ROUNDING = 1e-9
"""Relative difference of times that is none: the fewest units of equal ones are taken."""


class ByKernel(Strategy):
    """A strategy of operators in parts, and of no caller: Sidelane's kernels in place of the library's."""


BY_KERNEL = ByKernel(**dataclasses.asdict(named("c3_base")))

# Percent of ideal below which a number says nothing more.
MOST_LOST = -100.0


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A pair under one strategy.

    Attributes:
        units: compute units of the collective where the strategy chose them, else 0.
        gemm_us, comm_us: alone; ``comm_us`` is the vendor library's, as in the papers' definition of ideal.
        engines_us: the collective on DMA engines, alone.
        time_us: both together.
        other_us: both together, if the other of the two gets the units first; None where nothing is left to chance.
    """

    workload: Workload
    strategy: str
    units: int
    gemm_us: float
    comm_us: float
    engines_us: float
    time_us: float
    timeline: tuple[Interval, ...] = ()
    other_us: float | None = None

    @property
    def best_comm_us(self) -> float:
        """The faster of the library's collective and that of DMA engines, alone."""
        return min(self.comm_us, self.engines_us)

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
        """Percent of the ideal gain with the faster collective. None: undefined.

        That is where there is next to nothing to gain (``percent_of_ideal``); where a strategy loses more than can be
        gained: then its collective is another one; and where a memory-bound GEMM gains more by fewer units than there
        is to hide. ``speedup`` says what either comes to.
        """
        return possible_percent(percent_of_ideal(self.gemm_us, self.best_comm_us, self.time_us), MOST_LOST)

    @property
    def c3_class(self) -> C3Class:
        """By the isolated times."""
        return classify(self.gemm_us, self.comm_us)


def predict(
    machine: Machine,
    workload: Workload,
    strategy: Strategy | str,
    *,
    units: int | None = None,
    write_back: bool = False,
    record: bool = False,
) -> Prediction:
    """Predict what a pair takes under a strategy.

    Args:
        machine: where.
        workload: the pair.
        strategy: the value that runs, too, or its name.
        units: of a partition that is swept; None takes the best power of two, as the paper's sweep does.
        write_back: kernels' caches are written back before DMA engines read (see ``kernels.dma_gangs``).
        record: keep the timeline.

    Raises:
        TypeError: no machine, or no workload.
        ValueError: unknown strategy, one that the model does not speak to (:func:`objection`), or units that the
            machine cannot give.
    """
    if not isinstance(machine, Machine):
        raise TypeError(f"predict: machine (value={machine!r}, allowed=a Machine, as machine.load.named returns)")
    if not isinstance(workload, Workload):
        raise TypeError(f"predict: workload (value={workload!r}, allowed=a Workload, as parse_workload returns)")
    chosen = named(strategy) if isinstance(strategy, str) else strategy
    if reason := objection(chosen, machine):
        raise ValueError(f"predict: strategy (value={chosen.name!r}): {reason}")
    tried = units_tried(machine, workload, chosen)
    swept = tried != [0]
    options = [units] if swept and units is not None else tried
    if swept and any(not 0 < option < machine.gpu.units for option in options):
        raise ValueError(f"predict: units (value={options}, allowed=1..{int(machine.gpu.units) - 1})")
    placed = {option: pair_kernels(machine, workload, chosen, option, write_back=write_back) for option in options}
    best = 0
    if swept:
        times = {option: run_device(machine, kernels[0]).time_us for option, kernels in placed.items()}
        best = min(option for option, time_us in times.items() if time_us <= min(times.values()) * (1 + ROUNDING))
    run, *others = (run_device(machine, kernels, record=record) for kernels in placed[best])
    alone, engines = (
        gangs_us(machine, made(machine, workload.collective, workload.nbytes)) for made in (library_gangs, engine_gangs)
    )
    alone_gemm = gemm_us(machine, workload.gemm)
    other_us = others[0].time_us if others else None
    return Prediction(workload, chosen.code, best, alone_gemm, alone, engines, run.time_us, run.timeline, other_us)


def predictable(machine: Machine | None = None) -> tuple[Strategy, ...]:
    """Return strategies that the model speaks to: on a machine, or wherever it is.

    Not every caller can do with another call.
    """
    return tuple(one for one in strategies() if not objection(one, machine) and one.mover.makes_whole_call)


def objection(strategy: Strategy, machine: Machine | None = None) -> str:
    """Return why the model does not speak to a strategy on a machine, or on some; empty where it does."""
    if machine is not None and machine.nodes > 1 and (reason := _objection_among_nodes(strategy)):
        return f"not predicted among nodes: {reason}"
    if strategy.partition is not None and strategy.partition.requested:
        return "not predicted: sums on units that cuBLAS leaves to them are not modelled"
    if strategy.mover is Mover.LIBRARY_DMA:
        return "not predicted: descriptions of machines have no times of the library's copy engines"
    return ""


def _objection_among_nodes(strategy: Strategy) -> str:
    if strategy.partition is not None:
        return "nothing says how many units the library's kernels need there"
    return "a process group copies own parts" if strategy.mover is Mover.DMA_LEFT else ""


def library_strategies() -> tuple[str, ...]:
    """Those whose best is the ConCCL paper's c3_best: the library's kernels, by launch order and by partition."""
    return tuple(s.code for s in predictable() if s.mover is Mover.LIBRARY and s.concurrent and not s.priority)


def partitions(machine: Machine) -> list[int]:
    """Return the powers of two of compute units that a collective can be given, from 8 (ConCCL paper, V-B)."""
    return [1 << k for k in range(3, 10) if (1 << k) <= machine.gpu.units / 2]


def units_tried(machine: Machine, workload: Workload, strategy: Strategy) -> list[int]:
    """Return the units that a strategy tries in a sweep; 0 alone if it has none, or takes none from such a GEMM."""
    partition = strategy.partition
    if partition is None or not applies(partition, bound_of(machine, workload.gemm) is Bound.MEMORY):
        return [0]
    return partitions(machine)


def arrange(strategy: Strategy, gemm: Tiled, gangs: Sequence[Gang]) -> list[Tiled | Gang]:
    """Return kernels of a pair in the order of their launches, with what holds them back and what comes before what.

    Args:
        strategy: its order and its priority.
        gemm: the computation.
        gangs: the collective; those that follow others in it have their ``after``.
    """
    ranked = [dataclasses.replace(gang, priority=strategy.priority) for gang in gangs]
    match strategy.order:
        case Order.SERIAL:
            return [gemm, *(dataclasses.replace(gang, after=(gemm.name, *gang.after)) for gang in ranked)]
        case Order.GEMM_FIRST:
            return [gemm, *ranked]
        case Order.COLLECTIVE_FIRST:
            return [*ranked, gemm]


def orders(machine: Machine, strategy: Strategy, gemm: Tiled, gangs: Sequence[Gang]) -> tuple[list[Tiled | Gang], ...]:
    """Return kernels of a pair in the order of their launches, and in the other one where either may come first.

    A GEMM has a workgroup a tile: a collective that was there before it, or goes before it as its workgroups end, runs
    beside what is left of the GPU; one that comes second waits for the GEMM's last wave. On machines with
    ``either_first`` launch order decides nothing. The first of the two that are returned is what to plan with: without
    priority that the GEMM wins, since a rank on which it does holds up all.

    Args:
        machine: its ``interference``.
        strategy: as in :func:`arrange`.
        gemm: the computation.
        gangs: the collective.
    """
    alike = not machine.interference.either_first or not strategy.concurrent or gangs[0].reserved
    if alike or not gangs[0].units:  # nobody is in anybody's way
        return (arrange(strategy, gemm, gangs),)
    behind: list[Tiled | Gang] = [gemm, *gangs]
    ahead: list[Tiled | Gang] = [*gangs, gemm]
    return (ahead, behind) if strategy.priority else (behind, ahead)


@dataclasses.dataclass(frozen=True, slots=True)
class PairAlone:
    """Measured times of both kernels of a pair, each alone, which a prediction may take for the description's.

    Attributes:
        gemm_us: of the GEMM, with all units.
        comm_us: of the collective as the strategy runs it, with all units.
        units: workgroups of the collective's kernels; None: those of the description.
        out_of_place: input and output of the collective are different buffers.
    """

    gemm_us: float
    comm_us: float
    units: int | None
    out_of_place: bool


def pair_kernels(
    machine: Machine,
    workload: Workload,
    strategy: Strategy,
    swept: int,
    *,
    write_back: bool = False,
    alone: PairAlone | None = None,
) -> tuple[list[Tiled | Gang], ...]:
    """Return the kernels of a pair in launch order, and in the other order where either may come first.

    Args:
        machine: where.
        workload: the pair.
        strategy: the value that runs.
        swept: units of a partition that is swept; with measured times those that it took.
        write_back: see :func:`predict`.
        alone: measured times alone; None: those of the description.
    """
    kind, nbytes, partition = workload.collective, workload.nbytes, strategy.partition
    taken = 0 if partition is None else swept
    # A measured pair took as many units as its row says, whatever its GEMM counts as.
    if partition is not None and alone is None:
        taken *= applies(partition, bound_of(machine, workload.gemm) is Bound.MEMORY)
    # Masks hold for the whole run: the GEMM does not get the units back when the collective has ended.
    gemm = gemm_kernel(machine, workload.gemm, limit=int(machine.gpu.units) - taken if taken else None)
    on_units, own_units = strategy.mover.takes_units, taken > 0

    def on(units: int | None) -> tuple[Gang, ...]:
        if isinstance(strategy, ByKernel):
            return (own_gang(machine, kind, nbytes, units=units, reserved=units is not None),)
        return library_gangs(machine, kind, nbytes, units=units, reserved=units is not None)

    whole = on(None) if on_units else engine_gangs(machine, kind, nbytes, write_back=write_back)
    gangs = on(taken) if on_units and own_units else whole
    # All-gathers are in place in all studies, all-to-alls are not.
    copies = (
        not on_units
        and strategy.mover.makes_whole_call
        and (kind is Kind.ALL_TO_ALL if alone is None else alone.out_of_place)
    )
    own = own_chunk_gang(machine, kind, nbytes) if copies else None
    if alone is not None:
        gemm = _stretched(gemm, alone.gemm_us / gemm_us(machine, workload.gemm))
        if on_units and not own_units:
            units = whole[0].units if alone.units is None else alone.units
            gangs = (dataclasses.replace(whole[0], units=units, need=min(whole[0].need, units)),)
        longer = alone.comm_us / run_device(machine, whole).time_us
        gangs = tuple(stretched(gang, longer) for gang in gangs)
    if own is not None and strategy.mover is Mover.LIBRARY_DMA:
        # NCCL queues the own chunk with the others: what waits for the GEMM holds up all.
        gangs, own = (dataclasses.replace(gangs[0], after=(gemm.name,)), *gangs[1:]), None
    if on_units:
        return orders(machine, strategy, gemm, gangs)
    kernels = arrange(strategy, gemm, gangs)
    return (kernels if own is None else [*kernels, own],)


def _stretched(gemm: Tiled, factor: float) -> Tiled:
    """Return a GEMM that takes longer by a factor, whatever it is limited by."""
    times = (gemm.compute_us * factor, gemm.traffic_bytes * factor, gemm.fixed_us * factor)
    return dataclasses.replace(gemm, compute_us=times[0], traffic_bytes=times[1], fixed_us=times[2])
