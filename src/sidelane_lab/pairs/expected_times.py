"""Choice of a strategy for a pair by the expected time of each, from measured curves of the machine.

Every estimate is ``longer + (1 - hidden) x shorter``: of times with the units that the strategy leaves to either, and
of the share that it hides. Shares are those of the pairs that ``sidelane tune --study c3`` has measured; without such a
pair, a strategy whose parts have units of their own hides everything, as the ConCCL paper's heuristic assumes (V-C),
and others nothing. Units are taken from a GEMM only by the slowdowns of one of the same bound. Equals are decided for
serial, and then by preference.

The library chooses by a rule instead (``sidelane.c3.strategies``), which loses less over the measured pairs
(docs/lab/measured.md, "Heuristics").
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Sequence

from sidelane.c3.strategies import LaunchMode, Mover, Strategy
from sidelane.c3.strategies import strategies as all_strategies
from sidelane.choice.selection import Selection, select
from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.pairs.ideal import LEAST_GAIN, ideal_speedup
from sidelane_lab.pairs.isolated_times import SPLIT, Isolated, PairTimes
from sidelane_lab.pairs.movers import implementations_of
from sidelane_lab.pairs.partition import applies
from sidelane_lab.pairs.workload import Bound, Workload

MOST_SPREAD = 0.25
"""Largest spread of shares of one way that count as shares of one kind. On two H200s the library's kernels hid 5 to 87%
of the shorter operation if they were launched first (docs/lab/measured.md)."""

OWN_CHUNK_HIDDEN = 0.03
"""Share of the shorter operation that ``nccl_ce`` hides if it copies the caller's own chunk inside the GPU, a copy that
waits for the GEMM (docs/lab/hardware.md: 2 to 4% of ideal out of place, and for every all-to-all)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StrategyCandidate:
    """A strategy that can run here, with the times of its parts.

    Attributes:
        mode: strategy, and the number of compute units that it takes from the GEMM.
        comm_us: isolated time of the collective as this strategy runs it, in microseconds.
        gemm_us: time of the GEMM alone without these units, in microseconds.
        hidden: share of the shorter of the two that disappears.
    """

    mode: LaunchMode
    comm_us: float
    gemm_us: float
    hidden: float = 0.0


def choose(candidates: Sequence[StrategyCandidate], collective: Kind) -> Selection[LaunchMode]:
    """Pick the candidate with the least expected time; ties go to the earlier one.

    The time of a concurrent strategy is ``longer + (1 - hidden) * shorter``, with the isolated times of the GEMM and of
    the collective *as that strategy runs it*; a serial one takes the sum.

    Args:
        candidates: legal candidates: available and correct.
        collective: kind of the collective, in place if that exists.

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("choose: no candidate (value=(), allowed=at least one)")
    estimates = {one.mode: _estimate(one, collective) for one in candidates}
    found = select(((mode, us) for mode, (us, _) in estimates.items()), basis="shares measured here")
    formula = f"{found.candidate}: {estimates[found.candidate][1]}"
    return dataclasses.replace(found, reason=f"{formula} = {found.reason}")


def _estimate(one: StrategyCandidate, collective: Kind) -> tuple[float, str]:
    """Return the expected time in microseconds, and how it is computed."""
    if not one.mode.strategy.concurrent:
        return one.gemm_us + one.comm_us, f"{one.gemm_us:.0f} + {one.comm_us:.0f}"
    hidden = one.hidden
    if one.mode.strategy.mover is Mover.LIBRARY_DMA and collective is not Kind.ALL_GATHER:
        hidden = min(hidden, OWN_CHUNK_HIDDEN)
    longer, shorter = max(one.gemm_us, one.comm_us), min(one.gemm_us, one.comm_us)
    return longer + (1.0 - hidden) * shorter, f"{longer:.0f} + {1.0 - hidden:.2f} x {shorter:.0f}"


def decide(
    workload: Workload, gemm_us: float, strategies: Sequence[Strategy], known: Isolated
) -> Selection[LaunchMode]:
    """Return the strategy with the least expected time, which is not above that of serial if that is among them.

    Args:
        workload: pair to run.
        gemm_us: time of its GEMM alone in microseconds.
        strategies: strategies that can run here.
        known: measurements of this machine.

    Raises:
        ValueError: there is no candidate, or no pair was measured whose shorter part is longer than the noise.
    """
    if not _telling(known):
        raise ValueError("decide: pairs (value=none, allowed=some that sidelane tune --study c3 has measured)")
    ours = {mover: _implementation(known, workload, mover) for mover in Mover}
    found: list[StrategyCandidate] = []
    for strategy in sorted(strategies, key=lambda one: (one.concurrent, one.preference)):
        implementation = ours[strategy.mover]
        alone = _alone(known, workload, implementation)
        if alone is None:
            continue
        if strategy.partition is None:
            found.append(StrategyCandidate(LaunchMode(strategy), alone, gemm_us))
        else:
            found += _partitioned(strategy, workload, gemm_us, known, alone, implementation)
    for number, one in enumerate(found):
        implementation = ours[one.mode.strategy.mover]
        share = _share(one.mode.strategy, one.mode.units, workload, gemm_us, known, implementation)
        found[number] = dataclasses.replace(one, hidden=share)
    return choose(found, workload.collective)


def _implementation(known: Isolated, workload: Workload, mover: Mover) -> str:
    """Return a mover's implementation that is fastest alone; its first one if none was measured."""
    times = {name: us for name in implementations_of(mover) if (us := _alone(known, workload, name)) is not None}
    return min(times, key=times.__getitem__) if times else implementations_of(mover)[0]


def _alone(known: Isolated, workload: Workload, implementation: str) -> float | None:
    """Return the time of the collective alone; None if it was not measured."""
    try:
        return known.comm_us(workload, (implementation,))
    except ValueError:
        return None


def _partitioned(
    strategy: Strategy, workload: Workload, gemm_us: float, known: Isolated, comm_us: float, implementation: str
) -> list[StrategyCandidate]:
    """Return a candidate for each number of units that both tables have; none if no GEMM of this bound was profiled."""
    assert strategy.partition is not None
    bound = known.bound(workload.gemm, gemm_us)[0]
    table = known.gemm_table(workload.gemm, SPLIT, gemm_us)
    # Slowdowns of a compute-bound GEMM do not hold for a memory-bound one: on two H200s, units were given away by them
    # and up to 37% was lost (docs/lab/measured.md, "Memory-bound pairs").
    if table is None or known.bound(table.gemm)[0] is not bound:
        return []
    slower = table.slowdown()
    if not strategy.mover.takes_units:
        given = dict.fromkeys(slower, 1.0) if applies(strategy.partition, bound is Bound.MEMORY) else {}
    else:
        comm = known.comm_table(workload, (implementation,))
        given = {} if comm is None else comm.slowdown()
    return [
        StrategyCandidate(LaunchMode(strategy, n), comm_us * given[n], gemm_us * slower[n])
        for n in sorted(set(slower) & set(given))
    ]


def _share(
    strategy: Strategy, units: int, workload: Workload, gemm_us: float, known: Isolated, implementation: str
) -> float:
    """Return the share of the shorter of the two that a strategy hides."""
    measured = _measured(strategy, units, workload, gemm_us, known, implementation)
    if measured is not None:
        return measured
    if strategy.partition is None:
        return 0.0
    if strategy.mover.takes_units:
        return 1.0
    # Its collective runs undisturbed: the share is that of the same strategy without a partition.
    plain = dataclasses.replace(strategy, partition=None)
    twin = next((one for one in all_strategies() if _way(one) == _way(plain) and one.mover is strategy.mover), plain)
    return _share(twin, 0, workload, gemm_us, known, implementation)


def _is_left_to_device(strategy: Strategy) -> bool:
    """Return True if blocks of the computation and of the collective may queue for the same units."""
    return strategy.concurrent and strategy.mover.takes_units and strategy.partition is None


def _way(strategy: Strategy) -> tuple[object, ...]:
    """Return the properties of a strategy except its mover."""
    return strategy.order, strategy.priority, strategy.partition


def _nearest(pairs: list[PairTimes], workload: Workload, gemm_us: float, known: Isolated) -> list[PairTimes]:
    """Return the pairs of the same collective, else of one that adds too, else all; of these, of the same bound."""
    adds = workload.collective in REDUCING
    alike = [pair for pair in pairs if (pair.collective in REDUCING) is adds]
    pairs = [pair for pair in pairs if pair.collective is workload.collective] or alike or pairs
    bound = known.bound(workload.gemm, gemm_us)[0]
    return [pair for pair in pairs if known.bound(pair.gemm)[0] is bound] or pairs


def _telling(known: Isolated) -> list[PairTimes]:
    """Return the pairs in which the shorter operation is longer than the noise from run to run."""
    return [
        pair
        for pair in known.pairs
        if pair.serial_us > pair.comm_us > 0
        and ideal_speedup(pair.serial_us - pair.comm_us, pair.comm_us) - 1 >= LEAST_GAIN
    ]


def _measured(
    strategy: Strategy, units: int, workload: Workload, gemm_us: float, known: Isolated, implementation: str
) -> float | None:
    """Return the median over measured pairs: of the same collective (or one that adds, too), the same bound, the same
    units, if there are such. If the device decides who gets units, return the least share of all pairs, if they differ:
    the outcome is not known.
    """
    names = {one.name for one in all_strategies() if _way(one) == _way(strategy)}
    pairs = [pair for pair in _telling(known) if pair.implementation == implementation]
    if _is_left_to_device(strategy):
        drawn = _with_units(units, [one for pair in pairs for one in _shares(names, strategy, pair, known)])
        if drawn and max(drawn) - min(drawn) > MOST_SPREAD:
            return min(drawn)
    pairs = [pair for pair in pairs if any(name in names for name, _ in pair.times_us)]
    found = [one for pair in _nearest(pairs, workload, gemm_us, known) for one in _shares(names, strategy, pair, known)]
    shares = _with_units(units, found)
    return statistics.median(shares) if shares else None


def _with_units(units: int, found: Sequence[tuple[int, float]]) -> list[float]:
    """Return the shares with these units, or all if there are none."""
    return [share for taken, share in found if taken == units] or [share for _, share in found]


def _shares(names: Collection[str], strategy: Strategy, pair: PairTimes, known: Isolated) -> list[tuple[int, float]]:
    """Return the units and hidden share of a strategy, by any of these names, for a pair."""
    gemm_us = pair.serial_us - pair.comm_us
    found = []
    for (name, units), time_us in pair.times_us.items():
        if name not in names:
            continue
        ours, theirs = gemm_us, pair.comm_us
        if units and strategy.partition is not None:
            gemm = known.gemm_table(pair.gemm, SPLIT)
            ours *= 1.0 if gemm is None else gemm.slowdown().get(units, 1.0)
            comm = known.comm_table(Workload(pair.gemm, pair.collective, pair.nbytes), (pair.implementation,))
            if strategy.mover.takes_units and comm is not None:
                theirs *= comm.slowdown().get(units, 1.0)
        # No operation hides more than itself: a greater share comes from times that differ from round to round.
        found.append((units, min(1.0, (ours + theirs - time_us) / min(ours, theirs))))
    return found
