"""Selections: one of several candidates by the least expected time, with the reason in words.

Choosers of collectives (``choice.choose``) and of operators (``choice.fused``) end here. They differ in their
candidates, and in where expected times come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Generic, TypeVar

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)  # with slots, no alias such as Selection[str] could be called in Python 3.11
class Selection(Generic[C]):
    """Selected candidate, with the reason.

    Attributes:
        candidate: selected candidate.
        reason: reason of the choice, in words.
        table: every candidate with its expected time in microseconds, the selected one and then the fastest first; None
            if it is not known.
        subject: what runs and how, in words that the reason follows; empty: the candidate.
        by: what the choice goes by, in words.

    >>> subject = "all_gather of 64K by copy engines (b2b)"
    >>> print(Selection("dma b2b", "32.9 us expected", subject=subject, by="the built-in table h200x4"))
    all_gather of 64K by copy engines (b2b): 32.9 us expected; by the built-in table h200x4
    """

    candidate: C
    reason: str
    table: tuple[tuple[C, float | None], ...] = ()
    subject: str = ""
    by: str = ""

    def __str__(self) -> str:
        return f"{self.subject or self.candidate}: {self.reason}" + (f"; by {self.by}" if self.by else "")


def select(
    expected: Iterable[tuple[C, float | None]],
    *,
    equal: float = 1.0,
    beside: str = "",
    basis: str = "",
) -> Selection[C]:
    """Take the candidate with the least expected time. Deterministic: equal arguments give the same on every rank.

    Args:
        expected: candidates in order of preference, with expected times in microseconds; None: not known. At least one
            is known.
        equal: ratio of times up to which they count as equal, so that the order of preference decides.
        beside: text behind the least time: what runs at the same time.
        basis: origin of the times, in words.

    >>> str(select([("b2b", 20.0), ("one_shot", 15.0), ("pcpy", None)], basis="measured here"))
    'one_shot: 15 us expected, next b2b 20 us; measured here'
    >>> select([("b2b", 20.1), ("one_shot", 20.0)], equal=1.01).reason
    '20.1 us expected, next one_shot 20 us (no faster than by 1%: the first in order of preference)'
    """
    entries = list(expected)
    times_us = [us for _, us in entries if us is not None]
    fastest_us = min(times_us)
    number = next(n for n, (_, us) in enumerate(entries) if us is not None and us <= equal * fastest_us)
    best, best_us = entries.pop(number)
    assert best_us is not None, "taken by its time"
    others = sorted(entries, key=lambda entry: (entry[1] is None, entry[1] or 0.0))
    reason = f"{_microseconds(best_us)} expected{beside}"
    if others and (second_us := others[0][1]) is not None:
        reason += f", next {others[0][0]} {_microseconds(second_us)}"
        if second_us < best_us:
            reason += f" (no faster than by {100 * (equal - 1):.2g}%: the first in order of preference)"
    return Selection(best, reason + (f"; {basis}" if basis else ""), ((best, best_us), *others))


def _microseconds(us: float) -> str:
    """Format a time with four digits, and without an exponent.

    >>> _microseconds(12.3456), _microseconds(13541.2)
    ('12.35 us', '13541 us')
    """
    return f"{us:.4g} us" if us < 9999.5 else f"{us:.0f} us"
