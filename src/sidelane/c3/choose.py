"""Choice of a strategy for a pair: a pure function of isolated times and of the available strategies, with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sidelane.c3.strategy import Mover, Strategy
from sidelane.choice.hidden import DEFAULT_MACHINE, HIDDEN
from sidelane.program.collective import Kind

OWN_CHUNK_HIDDEN = 0.03
"""Share of the shorter operation that ``nccl_ce`` hides if it copies the caller's own chunk inside the GPU, a copy that
waits for the GEMM (docs/lab/hardware.md: 2 to 4% of ideal out of place, and for every all-to-all)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StrategyCandidate:
    """A strategy that can run here.

    Attributes:
        strategy: strategy of the candidate.
        comm_us: isolated time of the collective as this strategy runs it, in microseconds.
        in_place: the isolated time is of an in-place call.
        units: number of compute units that it takes from the GEMM.
        gemm_us: time of the GEMM alone without these units, in microseconds; None if it has all.
        hidden: share of the shorter of the two that disappears; None takes the table's entry by name.
    """

    strategy: Strategy
    comm_us: float
    in_place: bool
    units: int = 0
    gemm_us: float | None = None
    hidden: float | None = None

    def __str__(self) -> str:
        return self.strategy.name + (f" with {self.units} units" if self.units else "")


@dataclasses.dataclass(frozen=True, slots=True)
class StrategyChoice:
    """Chosen strategy, predictions for every candidate (fastest first), the reason, and units taken from the GEMM."""

    strategy: str
    predicted_us: tuple[tuple[str, float], ...]
    reason: str
    units: int = 0


def choose(
    gemm_us: float, collective: Kind, candidates: Sequence[StrategyCandidate], hidden: Mapping[str, float] | None = None
) -> StrategyChoice:
    """Pick the candidate with the least predicted time.

    The prediction for a concurrent strategy is ``longer + (1 - hidden) * shorter``, with the isolated times of the GEMM
    and of the collective *as that strategy runs it*; a serial one takes the sum. Ties go to the earlier candidate.

    Args:
        gemm_us: isolated time of the GEMM in microseconds.
        collective: kind of the collective.
        candidates: legal candidates: available and correct.
        hidden: share of the shorter operation that each strategy hides, 0 to 1; None takes the table's default machine.

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("choose: no candidate (value=(), allowed=at least one)")
    table = HIDDEN[DEFAULT_MACHINE] if hidden is None else hidden
    scored = [(_predict(gemm_us, collective, candidate, table), candidate) for candidate in candidates]
    ranking = sorted(scored, key=lambda pair: pair[0])
    predicted, best = ranking[0]
    reason = f"{best}: {_explain(gemm_us, collective, best, table)} = {predicted:.0f} us expected"
    if len(ranking) > 1:
        reason += f", next {ranking[1][1]} {ranking[1][0]:.0f} us"
    return StrategyChoice(best.strategy.name, tuple((str(c), us) for us, c in ranking), reason, best.units)


def _share(collective: Kind, candidate: StrategyCandidate, hidden: Mapping[str, float]) -> float:
    share = hidden.get(candidate.strategy.name, 0.0) if candidate.hidden is None else candidate.hidden
    copies_own_chunk = not (collective is Kind.ALL_GATHER and candidate.in_place)
    if candidate.strategy.mover is Mover.LIBRARY_DMA and copies_own_chunk:
        return min(share, OWN_CHUNK_HIDDEN)
    return share


def _predict(gemm_us: float, collective: Kind, candidate: StrategyCandidate, hidden: Mapping[str, float]) -> float:
    gemm_us = gemm_us if candidate.gemm_us is None else candidate.gemm_us
    if not candidate.strategy.concurrent:
        return gemm_us + candidate.comm_us
    longer, shorter = max(gemm_us, candidate.comm_us), min(gemm_us, candidate.comm_us)
    return longer + (1.0 - _share(collective, candidate, hidden)) * shorter


def _explain(gemm_us: float, collective: Kind, candidate: StrategyCandidate, hidden: Mapping[str, float]) -> str:
    gemm_us = gemm_us if candidate.gemm_us is None else candidate.gemm_us
    if not candidate.strategy.concurrent:
        return f"{gemm_us:.0f} + {candidate.comm_us:.0f}"
    longer, shorter = max(gemm_us, candidate.comm_us), min(gemm_us, candidate.comm_us)
    return f"{longer:.0f} + {1.0 - _share(collective, candidate, hidden):.2f} x {shorter:.0f}"
