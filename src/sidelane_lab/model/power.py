"""Watts of one GPU by component, where its description has them: during a collective, and of a GEMM next to one.

Of collectives: the DMA collectives paper, 5.4. It has no reductions. Those of the library are its kernels, and what is
said of a hybrid follows from its Program as a communicator runs it, with one figure more: the compute units that a
reduction takes.

Of pairs, energy adds up, whoever runs beside whom: a GEMM's operations and bytes and a collective's bytes cost what
they cost alone, spread over the time that they last in the pair. What lasts as long as anything does counts by time:
idle power, and links that are on. Times are those of ``model.strategies``.

    GEMM        |--------------------------|                  its units' time at the rate of operations or bytes
    collective  |---------------------------------------|     links_on_w x its time + what its bytes take
    idle        |---------------------------------------|

A GPU may draw more than ``cap_w`` for some milliseconds. If the mean of what a pair wants is more and the pair runs
again and again, the GPU lowers its clocks: the pair takes longer, and its operations less energy, by how much its
voltage follows. Energies are those of pairs that run again and again, with voltages in proportion to clocks, and times
those of one alone. How much slower operations are is told for both ends: energy of operations as the square of clocks,
or the same at all clocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from sidelane.c3.strategies import Mover, Strategy, named
from sidelane.choice.selection import Selection
from sidelane.program.collective import REDUCING, Kind
from sidelane.program.ir import MOVES, Engine, EngineKind, Program, reads, writes
from sidelane_lab.machines.ranges import ends, variations
from sidelane_lab.machines.spec import Machine, Power
from sidelane_lab.model.collectives import (
    IN_PLACE,
    REDUCE_UNITS,
    default_units,
    dma_run,
    executed_program,
    published_program,
)
from sidelane_lab.model.gemm import compute_us, gemm_kernel, traffic_bytes
from sidelane_lab.model.kernels import dma_us, library_gang, wire_gbps, wire_peak_gbps
from sidelane_lab.model.strategies import objection, predict, predictable
from sidelane_lab.pairs.workload import Workload
from sidelane_lab.sim import Interval, simulate

MOVERS = (Mover.LIBRARY, Mover.DMA)
"""Movers whose watts are described: the library's kernels and copy engines."""
VARIANTS = ("pcpy", "b2b")
"""Variants on copy engines: the faster is what runs beside a GEMM."""
STEEPEST = 2
"""Power of the clock that the energy of operations follows at most: voltage in proportion to it."""
MOST_STRETCH = 1000.0
"""Largest factor by which a cap makes anything longer: beyond it the cap leaves nothing for operations."""

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class PowerDraw:
    """Mean power over a collective.

    Attributes:
        compute_w: of the compute units, their idle power included.
        rest_w: of everything else.
        time_us: of the collective.
    """

    compute_w: float
    rest_w: float
    time_us: float

    @property
    def total_w(self) -> float:
        return self.compute_w + self.rest_w

    @property
    def energy_mj(self) -> float:
        """Energy of one GPU for one call."""
        return self.total_w * self.time_us / 1e3


def library_power(machine: Machine, kind: Kind, nbytes: int) -> PowerDraw:
    """During the vendor library's kernel collective. A reduce_scatter is taken for an all_gather: as many bytes over
    the same links, with no figures of its own.

    Raises:
        ValueError: the machine's description has no power figures.
    """
    gang = library_gang(machine, kind, nbytes)
    busy = default_units(machine.library, kind) / machine.gpu.units
    wire = wire_gbps(machine, kind, nbytes, gang.alone_us)
    return _draw(machine, busy, gang.memory_gbps, wire, 0.0, gang.alone_us)


def dma_power(machine: Machine, kind: Kind, nbytes: int, variant: str, prelaunched: bool = False) -> PowerDraw:
    """During a variant of the DMA collectives paper, from its Program: engines, and bytes read and written.

    Raises:
        ValueError: the machine's description has no power figures.
    """
    time = dma_run(machine, kind, nbytes, variant, prelaunched).time_us
    program = published_program(kind, nbytes, machine.gpus, variant)
    return _program_draw(machine, program, 0.0, wire_gbps(machine, kind, nbytes, time), time)


def hybrid_power(machine: Machine, kind: Kind, nbytes: int, variant: str) -> PowerDraw:
    """During a reduction whose bytes travel on copy engines: an all_reduce in place, a reduce_scatter out of place.

    Args:
        machine: one node of it.
        kind: reduce_scatter or all_reduce.
        nbytes: of the local buffer.
        variant: ``b2b`` or ``pcpy``.

    Raises:
        ValueError: the machine's description has no power figures, or another kind or variant.
    """
    if kind not in REDUCING:
        raise ValueError(f"hybrid_power: kind (value={kind}, allowed={', '.join(REDUCING)})")
    program = executed_program(kind, nbytes, machine.gpus, variant, kind in IN_PLACE)
    run = simulate(program, machine, record=True)
    reducing = sum(
        interval.end_us - interval.start_us
        for interval in run.timeline
        if interval.lane == str(Engine(EngineKind.COMPUTE)) and interval.label.startswith("reduce")
    )
    busy = min(1.0, REDUCE_UNITS / machine.gpu.units) * reducing / machine.gpus / run.time_us
    return _program_draw(machine, program, busy, wire_gbps(machine, kind, nbytes, run.time_us), run.time_us)


def _program_draw(machine: Machine, program: Program, busy: float, wire: float, time_us: float) -> PowerDraw:
    """Count the bytes that a program reads and writes, and its queues that move."""
    commands = [command for queue in program.queues for command in queue.commands]
    touched = sum(span.nbytes for command in commands for span in (*reads(command), *writes(command)))
    engines = sum(any(isinstance(command, MOVES) for command in queue.commands) for queue in program.queues)
    return _draw(machine, busy, touched / machine.gpus / time_us / 1e3, wire, engines / machine.gpus, time_us)


def _draw(
    machine: Machine, busy: float, memory_gbps: float, wire_gbps: float, engines: float, time_us: float
) -> PowerDraw:
    power = figures(machine)
    compute = power.compute_idle_w + power.compute_w * busy
    rest = power.idle_w - power.compute_idle_w
    rest += power.memory_w * min(1.0, memory_gbps / machine.gpu.memory_gbps)
    if wire_gbps > 0:
        rest += power.links_on_w + power.links_w * min(1.0, wire_gbps / wire_peak_gbps(machine))
    return PowerDraw(compute, rest + power.engine_w * engines, time_us)


def figures(machine: Machine) -> Power:
    """Return a machine's power figures.

    Raises:
        ValueError: its description has none.
    """
    if machine.power is None:
        raise ValueError(f"power: {machine.name} has no power figures (value=None, allowed=a section [power])")
    return machine.power


@dataclasses.dataclass(frozen=True, slots=True)
class PairDraw:
    """One GPU under one strategy.

    Attributes:
        strategy: its name.
        time_us: of both together.
        gemm_us, collective_us, both_us: in which the GEMM runs, the collective does, and both do.
        idle_w: that is drawn all the time.
        operations_w, gemm_bytes_w: that the GEMM adds while it runs.
        collective_w: that the collective adds while it runs, links that are on included.
        cap_w: that a GPU holds itself to.
        low_mj, high_mj: energy over the plausible values of the description's watts; as ``energy_mj`` where not asked.
        varied_mj: energy for each of these values, in the same order for all strategies.
    """

    strategy: str
    time_us: float
    gemm_us: float
    collective_us: float
    both_us: float
    idle_w: float
    operations_w: float
    gemm_bytes_w: float
    collective_w: float
    cap_w: float
    low_mj: float = math.nan
    high_mj: float = math.nan
    varied_mj: tuple[float, ...] = ()

    @property
    def gemm_w(self) -> float:
        """While the GEMM runs by itself, again and again, below the cap."""
        return self._repeated(self.gemm_us, 0.0).mean_w

    @property
    def wanted_w(self) -> float:
        """Mean watts of the pair without a cap."""
        return self._pair.wanted_w

    @property
    def repeated_us(self) -> float:
        """Time of the pair when it runs again and again, and the cap lowers clocks."""
        return self.time_us * self._pair.stretch(STEEPEST)

    @property
    def energy_mj(self) -> float:
        """Energy of one GPU for the pair when it runs again and again."""
        return self._pair.energy_mj(self._pair.stretch(STEEPEST), STEEPEST)

    @property
    def watts(self) -> float:
        """Mean of the pair when it runs again and again."""
        return self._pair.mean_w

    @property
    def slower(self) -> tuple[float, float]:
        """Share by which the cap makes operations last longer in the pair than alone, least and most, when both run
        again and again.

        Infinite where the cap leaves nothing for operations.
        """
        alone = self._repeated(self.gemm_us, 0.0)
        ends_of_range = [self._pair.stretch(power) / alone.stretch(power) - 1 for power in (STEEPEST, 0)]
        least, most = sorted(max(0.0, share) for share in ends_of_range)
        return least, math.inf if self._pair.stretch(0) >= MOST_STRETCH else most

    @property
    def _pair(self) -> _Repeated:
        return self._repeated(self.time_us, self.collective_w * self.collective_us / 1e3)

    def _repeated(self, time_us: float, collective_mj: float) -> _Repeated:
        others_mj = self.gemm_bytes_w * self.gemm_us / 1e3 + collective_mj
        return _Repeated(time_us, self.idle_w, self.operations_w * self.gemm_us / 1e3, others_mj, self.cap_w)


@dataclasses.dataclass(frozen=True, slots=True)
class _Repeated:
    """A computation, and what runs beside it, again and again under a cap.

    Attributes:
        time_us: of one run at full clocks.
        idle_w: that is drawn all the time.
        operations_mj, others_mj: of operations at full clocks, and of all else.
        cap_w: mean power that is not exceeded.
    """

    time_us: float
    idle_w: float
    operations_mj: float
    others_mj: float
    cap_w: float

    @property
    def wanted_w(self) -> float:
        return self.energy_mj(1.0, 0) / self.time_us * 1e3

    @property
    def mean_w(self) -> float:
        stretch = self.stretch(STEEPEST)
        return self.energy_mj(stretch, STEEPEST) / (self.time_us * stretch) * 1e3

    def energy_mj(self, stretch: float, power: float) -> float:
        """Return the energy of a run that lasts so many times longer; operations take less, as a power of clocks."""
        idle_mj = self.idle_w * self.time_us * stretch / 1e3
        return idle_mj + self.operations_mj / math.pow(stretch, power) + self.others_mj

    def stretch(self, power: float) -> float:
        """Return the least factor by which a run has to be longer to stay below the cap."""
        low, high = 1.0, MOST_STRETCH

        def fits(stretch: float) -> bool:
            return self.energy_mj(stretch, power) <= self.cap_w * self.time_us * stretch / 1e3

        if fits(low):
            return low
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


def pair_power(machine: Machine, workload: Workload, strategy: Strategy | str, *, ranges: bool = False) -> PairDraw:
    """Predict what a GPU draws while a GEMM and a collective run under a strategy.

    Args:
        machine: one node, with a section ``power``.
        workload: the pair.
        strategy: the value that runs, or its name.
        ranges: over the plausible values of the watts as well, one at a time; squares add. Times stay as they are.

    Raises:
        ValueError: no power figures, or a strategy whose times or watts no description has.
    """
    chosen = named(strategy) if isinstance(strategy, str) else strategy
    figures(machine)
    if reason := unspoken(chosen, machine):
        raise ValueError(f"pair_power: strategy (value={chosen.name!r}): {reason}")
    prediction = predict(machine, workload, chosen, record=True)
    gemm = gemm_kernel(machine, workload.gemm).name
    gemm_spans = _joined(i for i in prediction.timeline if i.lane == gemm)
    others = _joined(i for i in prediction.timeline if i.lane != gemm)
    times = (prediction.time_us, _length(gemm_spans), _length(others), _common(gemm_spans, others))
    variant = min(VARIANTS, key=lambda name: dma_us(machine, workload.collective, workload.nbytes, name))

    def draw(described: Machine) -> PairDraw:
        return _pair_draw(described, workload, chosen, variant, times)

    found = draw(machine)
    varied = [draw(one.machine).energy_mj for one in variations(machine, ("power",) if ranges else ())]
    low, high = ends(found.energy_mj, varied)
    return dataclasses.replace(found, low_mj=low, high_mj=high, varied_mj=tuple(varied))


def choose_for_energy(draws: Sequence[PairDraw]) -> Selection[str]:
    """Return the strategy that takes the least energy for a pair, of those that take no longer than serial.

    Watts of a description are uncertain, and alike for all strategies. A strategy is taken for its energy if it is the
    one that takes the least, whatever the plausible watts are; among several that may be it, the fastest is taken.

    Args:
        draws: of one pair, from :func:`pair_power` with ranges, serial among them.

    Raises:
        ValueError: serial is missing, or the ranges are.
    """
    serial = next((draw for draw in draws if draw.strategy == "serial"), None)
    if serial is None or len({len(draw.varied_mj) for draw in draws}) > 1 or math.isnan(serial.low_mj):
        raise ValueError("choose_for_energy: draws (allowed=of every strategy, serial too, over plausible watts)")
    able = [draw for draw in draws if draw.time_us <= serial.time_us]
    cases = [[draw.energy_mj for draw in able], *zip(*(draw.varied_mj for draw in able), strict=True)]
    winners = {case.index(min(case)) for case in map(list, cases)}
    chosen = min((able[place] for place in winners), key=lambda draw: draw.time_us)
    fastest = min(able, key=lambda draw: draw.time_us)
    others = [able[place].strategy for place in sorted(winners) if able[place] is not chosen]
    sure = f"it may be {', '.join(others)} by other plausible watts" if others else "by all plausible watts"
    reason = (
        f"{chosen.strategy}: {chosen.energy_mj:.0f} mJ in {chosen.time_us:.0f} us, serial {serial.energy_mj:.0f} mJ in "
        f"{serial.time_us:.0f}, the fastest is {fastest.strategy} ({fastest.energy_mj:.0f} mJ); {sure}"
    )
    return Selection(chosen.strategy, reason)


def powered(machine: Machine) -> tuple[Strategy, ...]:
    """Return strategies whose times and watts a description has."""
    return tuple(strategy for strategy in predictable(machine) if not unspoken(strategy, machine))


def unspoken(strategy: Strategy, machine: Machine) -> str:
    """Return why nothing is said of a strategy's watts on a machine; empty where something is."""
    if strategy.concurrent and strategy.mover not in MOVERS:
        return "not predicted: no description has watts of the library's other ways"
    return objection(strategy, machine)


def _pair_draw(
    machine: Machine, workload: Workload, strategy: Strategy, variant: str, times: tuple[float, float, float, float]
) -> PairDraw:
    power, gemm = figures(machine), workload.gemm
    time_us, gemm_us, collective_us, both_us = times
    alone = _alone(machine, workload.collective, workload.nbytes, strategy, variant)
    moved_mj = (alone.total_w - power.idle_w - power.links_on_w) * alone.time_us
    operating = compute_us(machine, gemm) / gemm_us
    streaming = traffic_bytes(machine, gemm) / (machine.gpu.memory_gbps * 1e3) / gemm_us
    return PairDraw(
        strategy.name,
        time_us,
        gemm_us,
        collective_us,
        both_us,
        idle_w=float(power.idle_w),
        operations_w=power.compute_w * max(operating, streaming) + power.boost_w * operating,
        gemm_bytes_w=power.memory_w * streaming,
        collective_w=power.links_on_w + moved_mj / collective_us,
        cap_w=float(power.cap_w),
    )


def _alone(machine: Machine, kind: Kind, nbytes: int, strategy: Strategy, variant: str) -> PowerDraw:
    if strategy.mover is Mover.DMA:
        return (hybrid_power if kind in REDUCING else dma_power)(machine, kind, nbytes, variant)
    return library_power(machine, kind, nbytes)


def _joined(intervals: Iterable[Interval]) -> list[Span]:
    """When any of them runs."""
    spans: list[Span] = []
    for start, end in sorted((i.start_us, i.end_us) for i in intervals):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)


def _common(first: list[Span], second: list[Span]) -> float:
    """Return the time that lies in both."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
