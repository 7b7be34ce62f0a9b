"""What each strategy is expected to take for a pair: from what was measured of the machine, or by constants.

Every estimate is ``longer + (1 - hidden) x shorter`` (``c3.choose``): of times with the units that the strategy leaves
to either, and of the share that it hides. Shares are those of the pairs that ``sidelane tune --study c3`` has measured;
where it has not, a strategy whose parts have units of their own hides everything, as the ConCCL paper's heuristic takes
it (V-C), and others nothing. Where no pair was measured at all, constants say what is hidden (``choice.hidden``), and
nothing that gives a collective units of its own is taken: on two H200s that hid half of what the heuristic takes for
granted. Equals are decided for serial, and then by preference.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence

from sidelane.c3.choose import StrategyCandidate, StrategyChoice, choose
from sidelane.c3.isolated_times import Isolated, PairTimes
from sidelane.c3.strategies import strategies as all_strategies
from sidelane.c3.strategy import LEAST_GAIN, Means, Mover, Strategy, ideal_speedup
from sidelane.c3.workload import Bound, Gemm, Workload
from sidelane.program.collective import REDUCING

MOST_SPREAD = 0.25
"""By how much shares of one way may differ, to be shares of one kind. On two H200s the library's kernels hid 5 to 87%
of the shorter operation where they were launched first (docs/lab/measured.md)."""

Movers = Mapping[Mover, tuple[str, ...]]
"""Implementations that are each mover, as the file of isolated times names them."""

OF_STUDIES: Movers = {mover: mover.implementations for mover in Mover}
OF_CALLS: Movers = {Mover.LIBRARY: (Mover.SM, Mover.DMA), Mover.DMA: (Mover.DMA,)}
"""In calls of a communicator Sidelane is the library, which takes what is fastest alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class PairRequest:
    """A computation and collectives, none of which depends on another.

    Attributes:
        gemm_us: of the computation alone.
        gemm: that it is; None: unknown, and then no strategy that takes units from it is a candidate.
        moves: the collectives, one after another, with ``bytes`` as in :class:`Workload`; one at least.
        in_place: they are calls in place.
    """

    gemm_us: float
    gemm: Gemm | None
    moves: tuple[Workload, ...]
    in_place: bool = True


def decide(
    asked: PairRequest,
    strategies: Sequence[Strategy],
    known: Isolated | None,
    constants: Mapping[str, float],
    comm_us: Mapping[str, float],
    movers: Movers = OF_STUDIES,
) -> StrategyChoice:
    """The strategy with the least expected time; serial is always among them, so none that is expected to be slower.

    Args:
        asked: what is to run.
        strategies: that can run here, ``serial`` among them.
        known: what was measured of this machine.
        constants: shares where it was not (``choose.hidden_shares``).
        comm_us: of all collectives alone by name of a mover, where the caller knows; others come from ``known``.
        movers: who is what.

    Raises:
        ValueError: there is no candidate.
    """
    ours = {mover: _implementation(known, asked, movers.get(mover, ())) for mover in Mover}
    found: list[StrategyCandidate] = []
    for strategy in sorted(strategies, key=lambda one: (one.concurrent, one.preference)):
        alone = comm_us.get(strategy.mover)
        if alone is None:
            alone = _alone(known, asked, ours[strategy.mover])
        if alone is None:
            continue
        if strategy.partition is None:
            found.append(StrategyCandidate(strategy, alone, asked.in_place))
        elif known is not None and asked.gemm is not None and (_telling(known) or not strategy.mover.takes_units):
            found += _partitioned(strategy, asked, known, alone, ours[strategy.mover])
    for number, one in enumerate(found):
        share = _share(one.strategy, one.units, asked, known, constants, ours[one.strategy.mover])
        found[number] = dataclasses.replace(one, hidden=share)
    chosen = choose(asked.gemm_us, asked.moves[0].collective, found)
    basis = "shares measured here" if known is not None and _telling(known) else "shares that are constants"
    return dataclasses.replace(chosen, reason=f"{chosen.reason}; {basis}")


def _implementation(known: Isolated | None, asked: PairRequest, among: tuple[str, ...]) -> str:
    """Of several the one that is fastest alone; empty where none was measured."""
    times = {name: us for name in among if (us := _alone(known, asked, name)) is not None}
    return min(times, key=times.__getitem__) if times else next(iter(among), "")


def _alone(known: Isolated | None, asked: PairRequest, implementation: str) -> float | None:
    """Time of all collectives alone; None where they were not measured."""
    try:
        return None if known is None else sum(known.comm_us(move, (implementation,)) for move in asked.moves)
    except ValueError:
        return None


def _partitioned(
    strategy: Strategy, asked: PairRequest, known: Isolated, comm_us: float, implementation: str
) -> list[StrategyCandidate]:
    """A candidate for each number of units that both tables have."""
    assert strategy.partition is not None
    assert asked.gemm is not None
    bound_by_memory = known.bound(asked.gemm, asked.gemm_us)[0] is Bound.MEMORY
    table = known.gemm_table(asked.gemm, strategy.partition.means, asked.gemm_us)
    if table is None:
        return []
    slower = table.slowdown()
    if not strategy.mover.takes_units:
        units = strategy.partition.taken(0, bound_by_memory)
        return [_with(strategy, asked, units, slower[units], comm_us)] if units in slower else []
    longest = max(asked.moves, key=lambda move: move.nbytes)
    comm = known.comm_table(longest, (implementation,))
    given = {} if comm is None else comm.slowdown()
    return [_with(strategy, asked, n, slower[n], comm_us * given[n]) for n in sorted(set(slower) & set(given))]


def _with(strategy: Strategy, asked: PairRequest, units: int, slower: float, comm_us: float) -> StrategyCandidate:
    return StrategyCandidate(strategy, comm_us, asked.in_place, units, asked.gemm_us * slower)


def _share(
    strategy: Strategy,
    units: int,
    asked: PairRequest,
    known: Isolated | None,
    constants: Mapping[str, float],
    implementation: str,
) -> float:
    """What a strategy hides of the shorter of the two."""
    measured = None if known is None else _measured(strategy, units, asked, known, implementation)
    if measured is not None:
        return measured
    if strategy.partition is None:
        return 0.0 if known is not None and _telling(known) else constants.get(strategy.name, 0.0)
    if strategy.mover.takes_units:
        return 1.0
    # Nobody touches its collective: that share is the one of the same without a partition.
    plain = dataclasses.replace(strategy, partition=None)
    twin = next((one for one in all_strategies() if _way(one) == _way(plain) and one.mover is strategy.mover), plain)
    return _share(twin, 0, asked, known, constants, implementation)


def _is_left_to_device(strategy: Strategy) -> bool:
    """True where blocks of the computation and of the collective may stand in line for the same units."""
    return strategy.concurrent and strategy.mover.takes_units and _means(strategy) not in (Means.SPLIT, Means.THREADS)


def _means(strategy: Strategy) -> Means | None:
    return None if strategy.partition is None else strategy.partition.means


def _way(strategy: Strategy) -> tuple[object, ...]:
    """What a strategy is but for who moves the bytes."""
    return strategy.order, strategy.priority, strategy.partition


def _nearest(pairs: list[PairTimes], asked: PairRequest, known: Isolated) -> list[PairTimes]:
    """Return the pairs of the same collective, else of one that adds too, else all; of these, of the same bound."""
    kinds = {move.collective for move in asked.moves}
    adds = {kind in REDUCING for kind in kinds}
    alike = [pair for pair in pairs if {pair.collective in REDUCING} == adds]
    pairs = [pair for pair in pairs if pair.collective in kinds] or alike or pairs
    if asked.gemm is None:
        return pairs
    bound = known.bound(asked.gemm, asked.gemm_us)[0]
    return [pair for pair in pairs if known.bound(pair.gemm)[0] is bound] or pairs


def _telling(known: Isolated) -> list[PairTimes]:
    """Pairs of which so much can be hidden that it is more than what times differ by from run to run."""
    return [
        pair
        for pair in known.pairs
        if pair.serial_us > pair.comm_us > 0
        and ideal_speedup(pair.serial_us - pair.comm_us, pair.comm_us) - 1 >= LEAST_GAIN
    ]


def _measured(strategy: Strategy, units: int, asked: PairRequest, known: Isolated, implementation: str) -> float | None:
    """The median over measured pairs: of the same collective (or one that adds, too), the same bound, the same units,
    if there are such. Where it is left to the device who gets units, the least of all pairs, if they differ: which it
    will be is not known.
    """
    names = {one.name for one in all_strategies() if _way(one) == _way(strategy)}
    pairs = [pair for pair in _telling(known) if pair.implementation == implementation]
    if _is_left_to_device(strategy):
        drawn = _with_units(units, [one for pair in pairs for one in _shares(names, strategy, pair, known)])
        if drawn and max(drawn) - min(drawn) > MOST_SPREAD:
            return min(drawn)
    pairs = [pair for pair in pairs if any(name in names for name, _ in pair.times_us)]
    found = [one for pair in _nearest(pairs, asked, known) for one in _shares(names, strategy, pair, known)]
    shares = _with_units(units, found)
    return statistics.median(shares) if shares else None


def _with_units(units: int, found: Sequence[tuple[int, float]]) -> list[float]:
    """Shares with these units, or all."""
    return [share for taken, share in found if taken == units] or [share for _, share in found]


def _shares(names: Collection[str], strategy: Strategy, pair: PairTimes, known: Isolated) -> list[tuple[int, float]]:
    """Units, and what a strategy, by any of these names, has hidden of a pair with them."""
    gemm_us = pair.serial_us - pair.comm_us
    found = []
    for (name, units), time_us in pair.times_us.items():
        if name not in names:
            continue
        ours, theirs = gemm_us, pair.comm_us
        if units and strategy.partition is not None:
            gemm = known.gemm_table(pair.gemm, strategy.partition.means)
            ours *= 1.0 if gemm is None else gemm.slowdown().get(units, 1.0)
            comm = known.comm_table(Workload(pair.gemm, pair.collective, pair.nbytes), (pair.implementation,))
            if strategy.mover.takes_units and comm is not None:
                theirs *= comm.slowdown().get(units, 1.0)
        # Nothing hides more than itself: what seems to is one of two times that differ from round to round.
        found.append((units, min(1.0, (ours + theirs - time_us) / min(ours, theirs))))
    return found
