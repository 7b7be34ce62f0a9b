"""From a measured and a predicted number to a verdict, and from many verdicts to one on their errors."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from sidelane_lab.model.claims import TOLERANCE, Role, Verdict, error_of

AT_LEAST = "at least"
"""How the text of a verdict begins whose limit is a lower one."""
NEAR = 0.05
"""Share of a time within which it is one of two that were predicted."""


def judge(
    claim_id: str,
    measured: float | None,
    predicted: float | None,
    role: Role = Role.HELD_OUT,
    *,
    what: str = "time",
    unit: str = "us",
) -> Verdict | None:
    """The verdict on one row; None where nothing was measured, or the model does not speak to it."""
    if measured is None or predicted is None:
        return None
    error = error_of(measured, predicted)
    assert error is not None
    return Verdict(claim_id, f"measured {what}", measured, predicted, unit, error, role, error <= TOLERANCE)


def judge_ends(
    claim_id: str, measured: float | None, ends: Sequence[float], role: Role = Role.HELD_OUT
) -> Verdict | None:
    """The same where the prediction may be two times, one of which it is by chance: the nearer counts.

    A time between the two is the median of rounds that went either way, and is not comparable.
    """
    if measured is None or not ends:
        return None
    verdict = judge(claim_id, measured, nearest(measured, ends), role)
    assert verdict is not None
    low, high = min(ends), max(ends)
    if len(ends) > 1:
        verdict = dataclasses.replace(verdict, low=low, high=high)
    if in_between(measured, ends):
        why = f"either may come first ({low:.0f} or {high:.0f} us), and rounds went either way"
        return dataclasses.replace(verdict, ok=False, incomparable=why)
    return verdict


def nearest(measured: float, ends: Sequence[float]) -> float:
    """The end of a prediction that a measured time is nearer to."""
    return min(ends, key=lambda end: abs(end / measured - 1))


def in_between(measured: float, ends: Sequence[float]) -> bool:
    """True if a measured time lies between both ends of a prediction, and near neither."""
    return min(ends) < measured < max(ends) and abs(nearest(measured, ends) / measured - 1) > NEAR


def with_summary(
    name: str, judged: Sequence[Verdict | None], median: float | None, worst: float | None
) -> list[Verdict]:
    """The verdicts, and behind them those on their median and worst error, where these have a limit."""
    verdicts = [verdict for verdict in judged if verdict is not None]
    found = [*verdicts]
    # What was told is no prediction, and what cannot be compared has no error.
    verdicts = [verdict for verdict in verdicts if verdict.role is not Role.INPUT and not verdict.incomparable]
    roles = {verdict.role for verdict in verdicts}
    limits: list[tuple[str, Callable[[Sequence[float]], float], float | None]] = [
        ("median", statistics.median, median),
        ("worst", max, worst),
    ]
    for word, measure, limit in limits:
        if limit is None or not verdicts:
            continue
        found.append(_summary(f"{name}/{word}", word, measure, verdicts, limit))
        held_out = [verdict for verdict in verdicts if verdict.role is Role.HELD_OUT]
        if len(roles) > 1 and held_out:
            found.append(_summary(f"{name}/{word} of held out", word, measure, held_out, limit))
    return found


def _summary(
    claim_id: str,
    word: str,
    measure: Callable[[Sequence[float]], float],
    verdicts: Sequence[Verdict],
    limit: float,
) -> Verdict:
    """A target of the issue. Its role is that of the row that is the least of a prediction."""
    error = measure([verdict.error for verdict in verdicts if verdict.error is not None])
    role = min((verdict.role for verdict in verdicts), key=list(Role).index)
    text = f"{word} error of {len(verdicts)} predictions, at most"
    return Verdict(claim_id, text, 100 * limit, 100 * error, "percent", None, role, error <= limit)
