"""What the papers claim, held against what the model predicts.

Each claim that the model speaks to has a role: ``input`` (the machine's description was told), ``fitted`` (a number of
it was chosen to meet the claim; the description names it), ``seen`` (no number was turned for it, but a rule or a
reading went in after the claim had been looked at) or ``held_out`` (a prediction). A claim that the model can only
repeat, or that says too little to be compared like for like, is not judged, and a reason stands for it. One tolerance
holds for all: ``TOLERANCE`` of the published value, or ``POINTS`` for percentages of ideal. :func:`problems` finds
claims without a role, and held-out claims that a number was taken from after all.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar

from sidelane_lab.machines.spec import Machine, NumberSource

Context = TypeVar("Context")


class Role(StrEnum):
    """What a published number is to the model."""

    INPUT = "input"
    FITTED = "fitted"
    SEEN = "seen"
    HELD_OUT = "held_out"


TOLERANCE, POINTS = 0.25, 8.0
"""Error that is still right: as a share of the published value, and of percentages of ideal."""
STRICTER = ((1.0, "25%, 8 points"), (0.4, "10%, 3.2 points"), (0.2, "5%, 1.6 points"))
"""Shares of the tolerance at which claims are counted as well, in words."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check(Generic[Context]):
    """How the model speaks to a claim.

    Attributes:
        claim_id: in ``claims.json``.
        role: see :class:`Role`.
        predict: the model's value, in the claim's form and unit.
        exact: error that is still right of an input, as a share; other roles have the tolerance that all have.
        points: a percentage of ideal, whose error counts in its unit.
        within: for limits and orders: tells whether a prediction agrees; None: by error.
        incomparable: why the claim cannot be compared like for like; it is shown, and not counted.
        miss: why the prediction misses it, in a line; "" while it does not.
    """

    claim_id: str
    role: Role
    predict: Callable[[Context], Any]
    exact: float = 0.0
    points: bool = False
    within: Callable[[Any, Any], bool] | None = None
    incomparable: str = ""
    miss: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A claim and its prediction.

    Attributes:
        error: largest relative error of its numbers (0.1: 10%), or in points of percentages of ideal; None where it is
            not a number, or a limit.
        points: the error is in points.
        incomparable: why the claim is not compared; then ``ok`` is False and counts for nothing.
        why: of a miss, in a line.
        low, high: the prediction over the plausible values of the fitted and assumed numbers; None without numbers.
    """

    claim_id: str
    text: str
    claimed: Any
    predicted: Any
    unit: str
    error: float | None
    role: Role
    ok: bool
    points: bool = False
    incomparable: str = ""
    why: str = ""
    low: Any = None
    high: Any = None

    def met_at(self, share: float) -> bool:
        """True if the prediction is right at a share of the tolerance. What is no number is right or wrong at all."""
        if self.error is None or not self.ok:
            return self.ok
        return self.error <= share * (POINTS if self.points else TOLERANCE) + 1e-9

    def to_dict(self) -> dict[str, Any]:
        """As ``sidelane claims --json`` prints it."""
        return {
            "id": self.claim_id,
            "claimed": self.claimed,
            "predicted": _rounded(self.predicted),
            "unit": self.unit,
            "error": _rounded(self.error),
            "role": str(self.role),
            "ok": self.ok,
            "comparable": not self.incomparable,
            "why": self.incomparable or self.why,
            "low": _rounded(self.low),
            "high": _rounded(self.high),
        }


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Every claim by its id, with ``claim, value, unit, where, seed, conditions``."""
    entry = importlib.resources.files("sidelane_lab.papers") / "data" / "claims.json"
    return {claim["id"]: claim for claim in json.loads(entry.read_text(encoding="utf-8"))}


def judge(check: Check[Context], context: Context) -> Verdict:
    """Hold a prediction against its claim."""
    return verdict_on(check, check.predict(context))


def verdict_on(check: Check[Any], predicted: Any) -> Verdict:
    """Hold a value that has been predicted against a check's claim."""
    claim = published()[check.claim_id]
    claimed = claim["value"]
    error = None if check.within else error_of(claimed, predicted, points=check.points)
    if check.within is not None:
        ok = check.within(claimed, predicted)
    elif error is None:
        ok = bool(claimed == predicted)
    elif check.role is Role.INPUT:
        ok = error <= check.exact + 1e-9
    else:
        ok = error <= (POINTS if check.points else TOLERANCE) + 1e-9
    ok = ok and not check.incomparable
    why = "" if ok else check.miss
    return Verdict(
        check.claim_id,
        claim["claim"],
        claimed,
        predicted,
        claim["unit"],
        error,
        check.role,
        ok,
        check.points,
        check.incomparable,
        why,
    )


def with_ranges(verdict: Verdict, variations: Sequence[Any]) -> Verdict:
    """Add the range of a prediction from its values with one number of the machine changed at a time.

    Deviations on one side are independent, so their squares add.
    """
    centre = numbers(verdict.predicted)
    if not centre:
        return verdict
    ends: dict[int, dict[str, float]] = {-1: {}, 1: {}}
    for key, value in centre.items():
        others = [numbers(v).get(key, value) - value for v in variations]
        for side in (-1, 1):
            spread = math.sqrt(sum(d * d for d in others if d * side > 0))
            ends[side][key] = value + side * spread
    return dataclasses.replace(
        verdict, low=_reform(verdict.predicted, ends[-1]), high=_reform(verdict.predicted, ends[1])
    )


def problems(
    checks: Sequence[Check[Any]], machine: Machine, not_judged: Mapping[str, str], others: Sequence[Machine] = ()
) -> list[str]:
    """What is wrong with the roles.

    Args:
        checks: of all claims that are spoken to.
        machine: that they are about.
        not_judged: reasons why the others are not, by claim.
        others: machines that some of them are about instead.

    Returns:
        A line each; nothing when all is well.
    """
    roles = {check.claim_id: check.role for check in checks}
    found = [f"{check.claim_id}: no such claim" for check in checks if check.claim_id not in published()]
    found += [
        f"{claim_id}: has neither a role nor a reason why the model does not speak to it"
        for claim_id in published()
        if claim_id not in roles and claim_id not in not_judged
    ]
    found += [f"{claim_id}: has a role and a reason why it has none" for claim_id in roles if claim_id in not_judged]
    cited: set[str] = set()
    told = machine.quantities()
    told |= {f"{other.name} {path}": number for other in others for path, number in other.quantities().items()}
    for path, quantity in told.items():
        targets = cited_claims(quantity.of)
        found += [
            f"{claim_id}: held out, but {path} was taken from it"
            for claim_id in sorted(targets)
            if roles.get(claim_id) is Role.HELD_OUT
        ]
        if quantity.source is NumberSource.FITTED:
            cited |= targets
            if not targets:
                found.append(f"{path}: fitted, and names no claim that it was fitted to")
    found += [
        f"{claim_id}: fitted, but no number of {', '.join(m.name for m in (machine, *others))} names it"
        for claim_id, role in roles.items()
        if role is Role.FITTED and claim_id not in cited
    ]
    return found


def cited_claims(text: str) -> set[str]:
    """Ids of the claims that a source names; ``C3-T2`` names all that begin so."""
    words = re.findall(r"[A-Z0-9]+(?:-[A-Za-z0-9.]+)+", text)
    return {
        claim_id for word in words for claim_id in published() if claim_id == word or claim_id.startswith(f"{word}-")
    }


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """The numbers inside a value, by their place; truth values and texts hold none."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {path: float(value)}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {key: number for name, part in items for key, number in numbers(part, f"{path}/{name}").items()}


def error_of(claimed: Any, predicted: Any, *, points: bool = False) -> float | None:
    """Largest error of the numbers: relative to the published ones, or in their unit."""
    wanted, found = numbers(claimed), numbers(predicted)
    if not wanted or set(wanted) != set(found):
        return None
    errors = []
    for key, value in wanted.items():
        difference = abs(found[key] - value)
        errors.append(difference if points or value == 0 else difference / abs(value))
    return max(errors)


def _reform(value: Any, values: Mapping[str, float], path: str = "") -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return values[path]
    if isinstance(value, Mapping):
        return {name: _reform(part, values, f"{path}/{name}") for name, part in value.items()}
    return [_reform(part, values, f"{path}/{index}") for index, part in enumerate(value)]


def _rounded(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return float(f"{value:.4g}") if isinstance(value, float) else value
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value]
