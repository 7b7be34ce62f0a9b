"""Choice of a strategy for a pair by the expected time of each: from measurements of the machine, or by constants.

Every estimate is ``longer + (1 - hidden) x shorter``: of times with the units that the strategy leaves
to either, and of the share that it hides. Shares are those of the pairs that ``sidelane tune --study c3`` has measured;
without such a pair, a strategy whose parts have units of their own hides everything, as the ConCCL paper's heuristic
assumes (V-C), and others nothing. If no pair was measured at all, constants give the hidden shares (``choice.hidden``),
and no strategy that gives a collective units of its own is taken: on two H200s such strategies hid half of the
heuristic's assumption. Units are taken from a GEMM only by the slowdowns of one of the same bound. Equals are decided
for serial, and then by preference.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence

from sidelane.c3.isolated_times import Isolated, PairTimes
from sidelane.c3.strategies import strategies as all_strategies
from sidelane.c3.strategy import LEAST_GAIN, LaunchMode, Means, Mover, Strategy, ideal_speedup
from sidelane.c3.workload import Bound, Gemm, Workload
from sidelane.choice.selection import Selection, select
from sidelane.program.collective import REDUCING, Kind

MOST_SPREAD = 0.25
"""Largest spread of shares of one way that count as shares of one kind. On two H200s the library's kernels hid 5 to 87%
of the shorter operation if they were launched first (docs/lab/measured.md)."""

OWN_CHUNK_HIDDEN = 0.03
"""Share of the shorter operation that ``nccl_ce`` hides if it copies the caller's own chunk inside the GPU, a copy that
waits for the GEMM (docs/lab/hardware.md: 2 to 4% of ideal out of place, and for every all-to-all)."""


Movers = Mapping[Mover, tuple[str, ...]]
"""Type of the implementations of each mover, as the file of isolated times names them."""

OF_STUDIES: Movers = {mover: mover.implementations for mover in Mover}
OF_CALLS: Movers = {Mover.LIBRARY: (Mover.SM, Mover.DMA), Mover.DMA: (Mover.DMA,)}
"""Implementations of movers in calls of a communicator: Sidelane is the library, which takes the fastest one alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class PairRequest:
    """A computation and collectives, none of which depends on another.

    Attributes:
        gemm_us: time of the computation alone in microseconds.
        gemm: shape of the computation; None: unknown, and then no strategy that takes units from it is a candidate.
        moves: collectives, one after another, with ``bytes`` as in :class:`Workload`; at least one.
        in_place: the collectives are calls in place.
    """

    gemm_us: float
    gemm: Gemm | None
    moves: tuple[Workload, ...]
    in_place: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class StrategyCandidate:
    """A strategy that can run here, with the times of its parts.

    Attributes:
        mode: strategy, and the number of compute units that it takes from the GEMM.
        comm_us: isolated time of the collective as this strategy runs it, in microseconds.
        in_place: the isolated time is of an in-place call.
        gemm_us: time of the GEMM alone without these units, in microseconds.
        hidden: share of the shorter of the two that disappears.
    """

    mode: LaunchMode
    comm_us: float
    in_place: bool
    gemm_us: float
    hidden: float = 0.0


def choose(candidates: Sequence[StrategyCandidate], collective: Kind, basis: str = "") -> Selection[LaunchMode]:
    """Pick the candidate with the least expected time; ties go to the earlier one.

    The time of a concurrent strategy is ``longer + (1 - hidden) * shorter``, with the isolated times of the GEMM and of
    the collective *as that strategy runs it*; a serial one takes the sum.

    Args:
        candidates: legal candidates: available and correct.
        collective: kind of the collective.
        basis: origin of the shares, in words.

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("choose: no candidate (value=(), allowed=at least one)")
    estimates = {one.mode: _estimate(one, collective) for one in candidates}
    return select(
        ((mode, us) for mode, (us, _) in estimates.items()),
        formula=lambda mode: f"{mode}: {estimates[mode][1]} = ",
        basis=basis,
    )


def _estimate(one: StrategyCandidate, collective: Kind) -> tuple[float, str]:
    """Return the expected time in microseconds, and how it is computed."""
    if not one.mode.strategy.concurrent:
        return one.gemm_us + one.comm_us, f"{one.gemm_us:.0f} + {one.comm_us:.0f}"
    hidden = one.hidden
    copies_own_chunk = not (collective is Kind.ALL_GATHER and one.in_place)
    if one.mode.strategy.mover is Mover.LIBRARY_DMA and copies_own_chunk:
        hidden = min(hidden, OWN_CHUNK_HIDDEN)
    longer, shorter = max(one.gemm_us, one.comm_us), min(one.gemm_us, one.comm_us)
    return longer + (1.0 - hidden) * shorter, f"{longer:.0f} + {1.0 - hidden:.2f} x {shorter:.0f}"


def decide(
    asked: PairRequest,
    strategies: Sequence[Strategy],
    known: Isolated | None,
    constants: Mapping[str, float],
    comm_us: Mapping[str, float],
    movers: Movers = OF_STUDIES,
) -> Selection[LaunchMode]:
    """Return the strategy with the least expected time; serial is always among them, so none is expected to be slower.

    Args:
        asked: computation and collectives to run.
        strategies: strategies that can run here, ``serial`` among them.
        known: measurements of this machine.
        constants: shares of strategies without measurements (``choice.hidden.hidden_shares``).
        comm_us: time of all collectives alone in microseconds, by name of a mover, as far as the caller knows; others
            come from ``known``.
        movers: implementations of each mover.

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
            found.append(StrategyCandidate(LaunchMode(strategy), alone, asked.in_place, asked.gemm_us))
        elif known is not None and asked.gemm is not None and (_telling(known) or not strategy.mover.takes_units):
            found += _partitioned(strategy, asked, known, alone, ours[strategy.mover])
    for number, one in enumerate(found):
        share = _share(one.mode.strategy, one.mode.units, asked, known, constants, ours[one.mode.strategy.mover])
        found[number] = dataclasses.replace(one, hidden=share)
    basis = "shares measured here" if known is not None and _telling(known) else "shares that are constants"
    return choose(found, asked.moves[0].collective, basis)


def _implementation(known: Isolated | None, asked: PairRequest, among: tuple[str, ...]) -> str:
    """Return the implementation that is fastest alone, of several; empty if none was measured."""
    times = {name: us for name in among if (us := _alone(known, asked, name)) is not None}
    return min(times, key=times.__getitem__) if times else next(iter(among), "")


def _alone(known: Isolated | None, asked: PairRequest, implementation: str) -> float | None:
    """Return the time of all collectives alone; None if they were not measured."""
    try:
        return None if known is None else sum(known.comm_us(move, (implementation,)) for move in asked.moves)
    except ValueError:
        return None


def _partitioned(
    strategy: Strategy, asked: PairRequest, known: Isolated, comm_us: float, implementation: str
) -> list[StrategyCandidate]:
    """Return a candidate for each number of units that both tables have; none if no GEMM of this bound was profiled."""
    assert strategy.partition is not None
    assert asked.gemm is not None
    bound = known.bound(asked.gemm, asked.gemm_us)[0]
    table = known.gemm_table(asked.gemm, strategy.partition.means, asked.gemm_us)
    # Slowdowns of a compute-bound GEMM do not hold for a memory-bound one: on two H200s, `auto` gave away units by them
    # and lost up to 37% (docs/lab/measured.md, "Memory-bound pairs").
    if table is None or known.bound(table.gemm)[0] is not bound:
        return []
    bound_by_memory = bound is Bound.MEMORY
    slower = table.slowdown()
    if not strategy.mover.takes_units:
        tried = [units for units in slower if strategy.partition.taken(units, bound_by_memory) == units]
        return [_with(strategy, asked, units, slower[units], comm_us) for units in tried]
    longest = max(asked.moves, key=lambda move: move.nbytes)
    comm = known.comm_table(longest, (implementation,))
    given = {} if comm is None else comm.slowdown()
    return [_with(strategy, asked, n, slower[n], comm_us * given[n]) for n in sorted(set(slower) & set(given))]


def _with(strategy: Strategy, asked: PairRequest, units: int, slower: float, comm_us: float) -> StrategyCandidate:
    return StrategyCandidate(LaunchMode(strategy, units), comm_us, asked.in_place, asked.gemm_us * slower)


def _share(
    strategy: Strategy,
    units: int,
    asked: PairRequest,
    known: Isolated | None,
    constants: Mapping[str, float],
    implementation: str,
) -> float:
    """Return the share of the shorter of the two that a strategy hides."""
    measured = None if known is None else _measured(strategy, units, asked, known, implementation)
    if measured is not None:
        return measured
    if strategy.partition is None:
        return 0.0 if known is not None and _telling(known) else constants.get(strategy.name, 0.0)
    if strategy.mover.takes_units:
        return 1.0
    # Its collective runs undisturbed: the share is that of the same strategy without a partition.
    plain = dataclasses.replace(strategy, partition=None)
    twin = next((one for one in all_strategies() if _way(one) == _way(plain) and one.mover is strategy.mover), plain)
    return _share(twin, 0, asked, known, constants, implementation)


def _is_left_to_device(strategy: Strategy) -> bool:
    """Return True if blocks of the computation and of the collective may queue for the same units."""
    return strategy.concurrent and strategy.mover.takes_units and _means(strategy) not in (Means.SPLIT, Means.THREADS)


def _means(strategy: Strategy) -> Means | None:
    return None if strategy.partition is None else strategy.partition.means


def _way(strategy: Strategy) -> tuple[object, ...]:
    """Return the properties of a strategy except its mover."""
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
    """Return the pairs in which the shorter operation is longer than the noise from run to run."""
    return [
        pair
        for pair in known.pairs
        if pair.serial_us > pair.comm_us > 0
        and ideal_speedup(pair.serial_us - pair.comm_us, pair.comm_us) - 1 >= LEAST_GAIN
    ]


def _measured(strategy: Strategy, units: int, asked: PairRequest, known: Isolated, implementation: str) -> float | None:
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
    found = [one for pair in _nearest(pairs, asked, known) for one in _shares(names, strategy, pair, known)]
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
            gemm = known.gemm_table(pair.gemm, strategy.partition.means)
            ours *= 1.0 if gemm is None else gemm.slowdown().get(units, 1.0)
            comm = known.comm_table(Workload(pair.gemm, pair.collective, pair.nbytes), (pair.implementation,))
            if strategy.mover.takes_units and comm is not None:
                theirs *= comm.slowdown().get(units, 1.0)
        # No operation hides more than itself: a greater share comes from times that differ from round to round.
        found.append((units, min(1.0, (ours + theirs - time_us) / min(ours, theirs))))
    return found
