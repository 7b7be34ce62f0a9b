"""Claims of the papers: what a paper declares, and how a prediction is held against a published or measured number.

Each claim that the model speaks to has a role: ``input`` (the machine's description was told), ``fitted`` (a number of
it was chosen to meet the claim; the description names it), ``seen`` (no number was turned for it, but a rule or a
reading went in after the claim had been looked at), ``development`` (a prediction that a test holds: a change that
loses it does not land) or ``held_out`` (a prediction whose outcome no test asserts). A claim that the model can only
repeat, or that says too little to be compared like for like, is not judged, and a reason stands for it. One tolerance
holds for all: ``TOLERANCE`` of the published value, or ``POINTS`` for percentages of ideal. :func:`problems` finds
claims without a role, and predictions that a number was taken from after all.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from sidelane_lab.machines.ranges import ends, nearest
from sidelane_lab.machines.spec import Machine, NumberSource
from sidelane_lab.papers.files import ResultFile

Context = TypeVar("Context")


class ClaimRole(StrEnum):
    """Relation of a published number to the model."""

    INPUT = "input"
    FITTED = "fitted"
    SEEN = "seen"
    DEVELOPMENT = "development"
    HELD_OUT = "held_out"


PREDICTED = (ClaimRole.DEVELOPMENT, ClaimRole.HELD_OUT)
"""Roles of predictions that no number of a machine was taken from."""
TOLERANCE, POINTS = 0.25, 8.0
"""Error that is still right: as a share of the published value, and of percentages of ideal."""
STRICTER = ((1.0, "25%, 8 points"), (0.4, "10%, 3.2 points"), (0.2, "5%, 1.6 points"))
"""Shares of the tolerance at which claims are counted as well, in words."""
AT_LEAST = "at least"
"""Begin of the text of a verdict whose limit is a lower one."""


OF_THE_MACHINE = "describes the paper's own machine"
BY_CONSTRUCTION = "a count that programs have by construction; tests check it"


class PredictedStudies(Protocol):
    """Numbers of one machine that claims are about, with its predicted studies."""

    def rows(self, study: str) -> ResultFile:
        """Return the rows that the model fills."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimReading:
    """A claim's quantity, as a formula over rows. Called with what a paper predicts from, it reads the model's rows.

    Attributes:
        study: whose rows, a key of ``files.FILES``.
        read: the value, in the claim's form and unit.
        differs: what is not as in the paper in our files, in a few words, besides the machine.
        fuller: key of a file that is read instead on machines that have it; "" none.
    """

    study: str
    read: Callable[[ResultFile], Any]
    differs: str = ""
    fuller: str = ""

    def __call__(self, predicted: PredictedStudies) -> Any:
        return self.read(predicted.rows(self.study))


@dataclasses.dataclass(frozen=True, slots=True)
class Claim(Generic[Context]):
    """A claim of a paper: how the model and our result files speak to it, or the reasons why they do not.

    Attributes:
        claim_id: in ``claims.json``.
        role: see :class:`ClaimRole`; None of a claim that is ``given`` or ``not_modelled``.
        predict: the model's value, in the claim's form and unit; None of a claim without a role.
        measured: formula over rows of our files, where ``predict`` is none; or the reason why no file speaks to it,
            where ``not_modelled`` is none.
        exact: error that is still right of an input, as a share; other roles have the tolerance that all have.
        points: a percentage of ideal, whose error counts in its unit.
        within: for limits and orders: tells whether a prediction agrees; None: by error.
        incomparable: why the claim cannot be compared like for like; it is shown, and not counted.
        miss: why the prediction misses the claim, in a line.
        given: where the model has it from: it repeats the claim, so that nothing could come out otherwise.
        not_modelled: the reason why the model does not speak to it.
    """

    claim_id: str
    role: ClaimRole | None = None
    predict: Callable[[Context], Any] | None = None
    measured: ClaimReading | str = ""
    exact: float = 0.0
    points: bool = False
    within: Callable[[Any, Any], bool] | None = None
    incomparable: str = ""
    miss: str = ""
    given: str = ""
    not_modelled: str = ""

    @property
    def reading(self) -> ClaimReading | None:
        """The formula over rows of our files; None where no file speaks to the claim."""
        formula = self.measured or self.predict
        return formula if isinstance(formula, ClaimReading) else None

    @property
    def unmeasured(self) -> str:
        """The reason why no file of ours speaks to a claim without a reading."""
        return self.measured if isinstance(self.measured, str) and self.measured else self.not_modelled

    def predicted(self, context: Context) -> Any:
        """Return the model's value of a claim that has a role."""
        assert self.predict is not None, self.claim_id
        return self.predict(context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper(Generic[Context]):
    """Declaration of a paper: one stands at the end of each module of this folder that is about one.

    Attributes:
        numbers: of its texts (docs/papers.md); several where there are versions, which ``context`` is given.
        machine: of the catalogue, that the claims are about; "" where they are about several, each with its own.
        context: makes what claims are predicted from, of a machine and a version.
        claims: all of them.
        sections: of a description, whose numbers matter to them.
    """

    numbers: tuple[str, ...]
    machine: str
    context: Callable[[Machine, str], Context]
    claims: Sequence[Claim[Context]]
    sections: frozenset[str] = frozenset()

    @property
    def judged(self) -> list[Claim[Context]]:
        """The claims that have a role."""
        return [claim for claim in self.claims if claim.role is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """A claim, or a measured number, and its prediction.

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
    role: ClaimRole
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
        """Return the object that ``sidelane claims --json`` prints."""
        return {
            "id": self.claim_id,
            "claimed": self.claimed,
            "predicted": rounded(self.predicted),
            "unit": self.unit,
            "error": rounded(self.error),
            "role": str(self.role),
            "ok": self.ok,
            "comparable": not self.incomparable,
            "why": self.incomparable or self.why,
            "low": rounded(self.low),
            "high": rounded(self.high),
        }


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Return every claim by its id, with ``claim, value, unit, where, seed, conditions``."""
    entry = importlib.resources.files("sidelane_lab.papers") / "data" / "claims.json"
    return {claim["id"]: claim for claim in json.loads(entry.read_text(encoding="utf-8"))}


def unjudged(paper: str) -> list[Claim[Any]]:
    """Return the claims of a paper that no formula is about, with the reasons that ``data/unjudged.toml`` has."""
    entry = importlib.resources.files("sidelane_lab.papers") / "data" / "unjudged.toml"
    reasons: dict[str, dict[str, Any]] = tomllib.loads(entry.read_text(encoding="utf-8"))[paper]
    return [Claim(claim_id, **texts) for claim_id, texts in reasons.items()]


def matching(pattern: str) -> tuple[str, ...]:
    """Return the ids of the claims that a pattern fits."""
    return tuple(claim_id for claim_id in published() if re.fullmatch(pattern, claim_id))


def judge(claim: Claim[Any], predicted: Any) -> ClaimVerdict:
    """Hold a prediction against a claim that has a role."""
    assert claim.role is not None, claim.claim_id
    known = published()[claim.claim_id]
    claimed = known["value"]
    error = None if claim.within else error_of(claimed, predicted, points=claim.points)
    if claim.within is not None:
        ok = claim.within(claimed, predicted)
    elif error is None:
        ok = bool(claimed == predicted)
    elif claim.role is ClaimRole.INPUT:
        ok = error <= claim.exact + 1e-9
    else:
        ok = error <= (POINTS if claim.points else TOLERANCE) + 1e-9
    ok = ok and not claim.incomparable
    return ClaimVerdict(
        claim.claim_id,
        known["claim"],
        claimed,
        predicted,
        known["unit"],
        error,
        claim.role,
        ok,
        claim.points,
        claim.incomparable,
        "" if ok else claim.miss,
    )


def judge_row(
    claim_id: str,
    measured: float,
    predicted: Sequence[float],
    role: ClaimRole,
    *,
    what: str = "measured time",
    unit: str = "us",
    points: bool = False,
) -> ClaimVerdict | None:
    """Hold a prediction against a measured number; None where there is no prediction.

    Args:
        claim_id: of the verdict.
        measured: in the unit.
        predicted: the same; two numbers where chance decides which of them it is: the nearer counts; none: no model.
        role: of the row.
        what: text of the verdict.
        unit: of both.
        points: a percentage, whose error counts in its unit.
    """
    if not predicted:
        return None
    value = nearest(measured, predicted)
    error = error_of(measured, value, points=points)
    assert error is not None
    ok = error <= (POINTS if points else TOLERANCE)
    low, high = (min(predicted), max(predicted)) if len(predicted) > 1 else (None, None)
    return ClaimVerdict(claim_id, what, measured, value, unit, error, role, ok, points, low=low, high=high)


def with_summary(
    name: str, judged: Sequence[ClaimVerdict | None], median: float | None, worst: float | None
) -> list[ClaimVerdict]:
    """Return the verdicts, and behind them those on their median and worst error, where these have a limit."""
    found = [verdict for verdict in judged if verdict is not None]
    # What was told is no prediction, and what cannot be compared has no error.
    verdicts = [one for one in found if one.role is not ClaimRole.INPUT and not one.incomparable]
    held_out = [one for one in verdicts if one.role is ClaimRole.HELD_OUT]
    parts = [("", verdicts)]
    if len({one.role for one in verdicts}) > 1 and held_out:
        parts.append((" of held out", held_out))
    limits: tuple[tuple[str, Callable[[Sequence[float]], float], float | None], ...] = (
        ("median", statistics.median, median),
        ("worst", max, worst),
    )
    for word, measure, limit in limits:
        for among, some in parts:
            if limit is None or not some:
                continue
            error = measure([one.error for one in some if one.error is not None])
            text = f"{word} error of {len(some)} predictions, at most"
            errors = (100 * limit, 100 * error, "percent", None)
            found.append(ClaimVerdict(f"{name}/{word}{among}", text, *errors, least_role(some), error <= limit))
    return found


def least_role(verdicts: Sequence[ClaimVerdict]) -> ClaimRole:
    """Return the role of the row that is the least of a prediction, which is that of all together."""
    return min((verdict.role for verdict in verdicts), key=list(ClaimRole).index)


def with_ranges(verdict: ClaimVerdict, varied: Sequence[Any]) -> ClaimVerdict:
    """Add the range of a prediction from its values with one number of the machine changed at a time."""
    centre = numbers(verdict.predicted)
    if not centre:
        return verdict
    others = [numbers(value) for value in varied]
    around = {key: ends(value, [other.get(key, value) for other in others]) for key, value in centre.items()}
    low, high = (_reform(verdict.predicted, {key: pair[end] for key, pair in around.items()}) for end in (0, 1))
    return dataclasses.replace(verdict, low=low, high=high)


def problems(papers: Sequence[Paper[Any]], machines: Sequence[Machine]) -> list[str]:
    """Find what is wrong with the roles.

    Args:
        papers: that are judged.
        machines: that their claims are about.

    Returns:
        A line each; nothing when all is well.
    """
    claims = {claim.claim_id: claim for paper in papers for claim in paper.claims}
    times = Counter(claim.claim_id for paper in papers for claim in paper.claims)
    roles = {claim_id: claim.role for claim_id, claim in claims.items() if claim.role is not None}
    reasons = {claim_id: claim.given or claim.not_modelled for claim_id, claim in claims.items()}
    found = [f"{claim_id}: is declared twice" for claim_id, count in times.items() if count > 1]
    found += [f"{claim_id}: no such claim" for claim_id in claims if claim_id not in published()]
    found += [
        f"{claim_id}: has neither a role nor a reason why the model does not speak to it"
        for claim_id in published()
        if claim_id not in roles and not reasons.get(claim_id)
    ]
    found += [f"{claim_id}: has a role and a reason why it has none" for claim_id in roles if reasons[claim_id]]
    found += [
        f"{claim_id}: has neither a formula over our files nor a reason why none speaks to it"
        for claim_id, claim in claims.items()
        if claim.reading is None and not claim.unmeasured
    ]
    cited: set[str] = set()
    for place, machine in enumerate(machines):
        for name, quantity in machine.quantities().items():
            path = f"{machine.name} {name}" if place else name
            targets = cited_claims(quantity.of)
            found += [
                f"{claim_id}: {roles[claim_id]}, but {path} was taken from it"
                for claim_id in sorted(targets)
                if roles.get(claim_id) in PREDICTED
            ]
            if quantity.source is NumberSource.FITTED:
                cited |= targets
                if not targets:
                    found.append(f"{path}: fitted, and names no claim that it was fitted to")
    found += [
        f"{claim_id}: fitted, but no number of {', '.join(m.name for m in machines)} names it"
        for claim_id, role in roles.items()
        if role is ClaimRole.FITTED and claim_id not in cited
    ]
    return found


def cited_claims(text: str) -> set[str]:
    """Return the ids of the claims that a source names; ``C3-T2`` names all that begin so."""
    words = re.findall(r"[A-Z0-9]+(?:-[A-Za-z0-9.]+)+", text)
    return {
        claim_id for word in words for claim_id in published() if claim_id == word or claim_id.startswith(f"{word}-")
    }


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """Return the numbers inside a value, by their place; truth values and texts hold none."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {path: float(value)}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {key: number for name, part in items for key, number in numbers(part, f"{path}/{name}").items()}


def value_text(value: Any) -> str:
    """Write a value for readers: its numbers to four digits, with the names or the order that they have."""
    if value is None or isinstance(value, bool | str | int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(part)}" for name, part in value.items())
    return "[" + ", ".join(value_text(part) for part in value) + "]"


def error_of(claimed: Any, predicted: Any, *, points: bool = False) -> float | None:
    """Return the largest error of the numbers: relative to the published ones, or in their unit."""
    wanted, found = numbers(claimed), numbers(predicted)
    if not wanted or set(wanted) != set(found):
        return None
    differences = {key: abs(found[key] - value) for key, value in wanted.items()}
    return max(by if points or not wanted[key] else by / abs(wanted[key]) for key, by in differences.items())


def _reform(value: Any, values: Mapping[str, float]) -> Any:
    return _mapped(value, lambda path, number: values[path])


def rounded(value: Any) -> Any:
    """Return a value with its fractions to four digits."""
    return _mapped(value, lambda path, number: float(f"{number:.4g}") if isinstance(number, float) else number)


def _mapped(value: Any, change: Callable[[str, float], float], path: str = "") -> Any:
    """Return a value of the same form with its numbers changed."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return change(path, value)
    if isinstance(value, Mapping):
        return {name: _mapped(part, change, f"{path}/{name}") for name, part in value.items()}
    return [_mapped(part, change, f"{path}/{index}") for index, part in enumerate(value)]
