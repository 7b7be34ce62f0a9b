"""From a measured and a predicted number to a verdict, and from many verdicts to one on their errors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from sidelane.model.claims import TOLERANCE, Role, Verdict, error_of


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


def with_summary(
    name: str, judged: Sequence[Verdict | None], median: float | None, worst: float | None
) -> list[Verdict]:
    """The verdicts, and behind them those on their median and worst error, where these have a limit."""
    verdicts = [verdict for verdict in judged if verdict is not None]
    found = [*verdicts]
    verdicts = [verdict for verdict in verdicts if verdict.role is not Role.INPUT]  # those were told, not predicted
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
