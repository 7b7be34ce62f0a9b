"""``sidelane claims``: what the papers claim, what the model predicts, and whether that was fitted or foretold."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.padding
import rich.text

from sidelane.cli.output import write_json
from sidelane.cli.table import Line, Table, without_empty_columns
from sidelane.cli.terminal import progress_console, say_written, tables_console
from sidelane_lab.machines.load import find, named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model import claims_c3, claims_dma, claims_fused, claims_overlap, claims_slowdown
from sidelane_lab.model.claims import (
    STRICTER,
    Check,
    Role,
    Verdict,
    judge,
    problems,
    published,
    verdict_on,
    with_ranges,
)
from sidelane_lab.model.fused_study import FusedStudy
from sidelane_lab.papers.claims.figures import draw_claims
from sidelane_lab.papers.claims.results import compare, role_problems
from sidelane_lab.papers.claims.sensitivity import Survival, draw_sensitivity, sensitivity_table, survival
from sidelane_lab.papers.claims.slowdown import draw_slowdown
from sidelane_lab.papers.claims.verdicts import AT_LEAST
from sidelane_lab.papers.simulated.study import write_numbers

MI300X = "mi300x8"
VERSIONS = ("000", "002")
FAMILIES = (claims_c3, claims_dma, claims_overlap, claims_fused, claims_slowdown)
"""A module for each paper."""


def not_modelled() -> dict[str, str]:
    """Claims that the model does not speak to, with the reason."""
    return {claim_id: reason for family in FAMILIES for claim_id, reason in family.NOT_MODELLED.items()}


def given() -> dict[str, str]:
    """Claims that the model only repeats, with where it has them from."""
    return {claim_id: where for family in FAMILIES for claim_id, where in family.GIVEN.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What ``sidelane claims`` takes.

    Attributes:
        machine: name in the catalogue, or a file.
        json: file for a list of objects, or ``written.STDOUT``; None writes none.
        results: folder of measurements, with one folder for each machine; used where no paper is about the machine.
        version: of the ConCCL paper, where its two versions disagree: ``000`` or ``002``.
        report: folder for ``claims.json``, which says what it was made with, and a picture of predicted against
            published; with ranges about a paper's machine, for the sensitivity as well. None: nothing.
        ranges: predict over the plausible values of the machine's numbers as well (some twenty times the work).
    """

    machine: str = MI300X
    json: Path | None = None
    results: Path = Path("results")
    version: str = "000"
    report: Path | None = None
    ranges: bool = True

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise ValueError(f"claims: version (value={self.version!r}, allowed={', '.join(VERSIONS)})")


def main(options: Options) -> int:
    """Print every claim with its prediction: the papers' for the machine that they are about, else our measurements.

    Returns:
        0; 1 if a role is missing or a number was fitted to a held-out claim. Wrong predictions are shown, not punished.

    Raises:
        ValueError: no such machine, or one that neither a paper nor a measurement is about.
    """
    machine = find(options.machine)
    progress = progress_console()
    survivals: list[Survival] = []
    with progress.status("simulating") as status:
        if machine.name != MI300X:
            folder = options.results / machine.name
            verdicts = compare(machine, folder, ranges=options.ranges, progress=status.update)
            wrong = role_problems(machine)
        else:
            verdicts, wrong, survivals = _evaluate(machine, options.version, options.ranges, status.update)
    met = sum(verdict.ok for verdict in verdicts if verdict.role is Role.HELD_OUT)
    rows = [verdict.to_dict() for verdict in verdicts]
    files = [] if options.json is None else [write_json(options.json, rows)]
    if options.report is not None:
        draw_claims(verdicts, f"Claims about {machine.title}", options.report)
        others = _others(_families(machine, options.version)) if machine.name == MI300X else []
        files.append(write_numbers(options.report / "claims.json", "claims", machine, rows, others))
        if survivals:
            draw_slowdown(options.report)
            draw_sensitivity(survivals, met, f"Held-out claims about {machine.title}", options.report)
            rows = [survival.to_dict() for survival in survivals]
            path = options.report / "claims-sensitivity.json"
            files.append(write_numbers(path, "claims_sensitivity", machine, rows, others))
    tables = tables_console(options.json)
    show(verdicts, tables)
    if survivals:
        tables.print(sensitivity_table(survivals, met).to_rich())
    say_written(files)
    for line in wrong:
        progress.print(f"claims: {line}", style="red")
    return 1 if wrong else 0


def evaluate(
    machine: Machine,
    *,
    version: str = "000",
    ranges: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[Verdict], list[str]]:
    """Predict every claim that is about a machine.

    Args:
        machine: of the catalogue, or with changed numbers; its name decides which claims are about it.
        version: of the ConCCL paper.
        ranges: add ranges over the plausible values of its uncertain numbers.
        progress: told what is being done.

    Returns:
        The verdicts, and what is wrong with the roles.
    """
    return _evaluate(machine, version, ranges, progress)[:2]


def _evaluate(
    machine: Machine, version: str, ranges: bool, progress: Callable[[str], None] | None
) -> tuple[list[Verdict], list[str], list[Survival]]:
    """As :func:`evaluate`, and with ranges what becomes of held-out claims at both ends of each of them."""
    families = _families(machine, version)
    checks = [check for family in families for check in family.checks]
    contexts = [(family, family.context(family.machine or machine)) for family in families]
    verdicts = [judge(check, context) for family, context in contexts for check in family.checks]
    wrong = problems(checks, machine, {**not_modelled(), **given()}, _others(families))
    if not ranges:
        return verdicts, wrong, []
    variations = _vary(machine, families, [verdict.predicted for verdict in verdicts], progress)
    survivals = []
    for place, (varied, path, value) in enumerate(_ends(machine, families)):
        changed = [verdict_on(check, found[place]) for check, found in zip(checks, variations, strict=True)]
        quantity = varied.quantities()[path]
        name = path if varied is machine else f"{varied.name} {path}"
        survivals.append(survival(name, str(quantity.source), value, value == quantity.high, verdicts, changed))
    ranged = [with_ranges(verdict, found) for verdict, found in zip(verdicts, variations, strict=True)]
    return ranged, wrong, survivals


def _ends(machine: Machine, families: Sequence[_Family]) -> list[tuple[Machine, str, float]]:
    """Every uncertain number at both ends of its range; of other machines those that their claims depend on."""
    others = [(family.machine, family.depends_on) for family in families if family.machine is not None]
    numbers = [(machine, path, quantity) for path, quantity in machine.quantities().items()]
    numbers += [
        (other, path, quantity)
        for other, sections in others
        for path, quantity in other.quantities().items()
        if path.partition(".")[0] in sections
    ]
    ends = ((varied, path, value) for varied, path, q in numbers for value in (q.low, q.high))
    return [(varied, path, value) for varied, path, value in ends if value is not None]


def _vary(
    machine: Machine,
    families: Sequence[_Family],
    unchanged: Sequence[Any],
    progress: Callable[[str], None] | None = None,
) -> list[list[Any]]:
    """Predictions of every check with one uncertain number at one end of its range, all in turn."""
    variations: list[list[Any]] = [[] for _ in unchanged]
    for varied, path, value in _ends(machine, families):
        if progress is not None:
            progress(f"{path} = {value:g}")
        changed = varied.with_value(path, value)
        place = 0
        for family in families:
            concerned = (family.machine or machine) is varied and path.partition(".")[0] in family.depends_on
            context = family.context(changed) if concerned else None
            for check in family.checks:
                variations[place].append(check.predict(context) if concerned else unchanged[place])
                place += 1
    return variations


def show(verdicts: Sequence[Verdict], console: rich.console.Console) -> None:
    """Print every prediction, and how many of each role are right."""
    if any("/" in verdict.claim_id for verdict in verdicts):
        console.print(measured_table(verdicts).to_rich())
    else:
        _show_published(verdicts, console)
    for line in counted(verdicts):
        console.print(line)


def counted(verdicts: Sequence[Verdict]) -> list[str]:
    """How many claims of each role are met, at the tolerance and at stricter ones, and how many are not judged."""
    lines = []
    for role in Role:
        of_role = [verdict for verdict in verdicts if verdict.role is role and not verdict.incomparable]
        right = sum(verdict.ok for verdict in of_role)
        if role is Role.INPUT or not of_role:
            lines.append(f"{role}: {right} of {len(of_role)} right")
            continue
        shares = [f"{sum(v.met_at(share) for v in of_role)} at {words}" for share, words in STRICTER]
        lines.append(f"{role}: {right} of {len(of_role)} right ({'; '.join(shares)})")
    # A rule that mends a miss makes it "seen": this sum is what no change of role can better.
    told = [v for v in verdicts if v.role in (Role.SEEN, Role.HELD_OUT) and not v.incomparable]
    if any(verdict.role is Role.SEEN for verdict in told):
        lines.append(f"seen and held out together: {sum(verdict.ok for verdict in told)} of {len(told)} right")
    apart = [verdict for verdict in verdicts if verdict.incomparable]
    lines += [f"not comparable: {len(apart)}"] if apart else []
    if not any("/" in verdict.claim_id for verdict in verdicts):
        lines.append(f"repeated, so not judged: {len(given())}")
        reasons = Counter(not_modelled().values())
        lines.append(f"not spoken to: {reasons.total()} of {len(published())}")
        lines += [f"  {count}: {reason}" for reason, count in reasons.most_common()]
    return lines


def _show_published(verdicts: Sequence[Verdict], console: rich.console.Console) -> None:
    """What a claim says takes a line or two; what is held against it stands below, indented."""
    for verdict in verdicts:
        console.print(rich.text.Text(f"{verdict.claim_id}  {verdict.text}", "bold"))
        parts = [f"published {_text(verdict.claimed)}", f"predicted {_text(verdict.predicted)}"]
        if verdict.low is not None and verdict.low != verdict.high:
            parts.append(f"plausible {_text(verdict.low)} .. {_text(verdict.high)}")
        if verdict.error is not None:
            parts.append(f"error {verdict.error:.3g}" + (" points" if verdict.points else ""))
        line = rich.text.Text("; ".join([*parts, f"{verdict.role}: "])).append_text(_mark(verdict))
        if verdict.incomparable or verdict.why:
            line.append(f" ({verdict.incomparable or verdict.why})")
        console.print(rich.padding.Padding(line, (0, 0, 0, 4), expand=False))


def measured_table(verdicts: Sequence[Verdict]) -> Table:
    """A line for each row of a result file, whose id says what it is."""
    lines = []
    for verdict in verdicts:
        claimed, predicted = f"{verdict.claimed:.0f}", f"{verdict.predicted:.0f}"
        error = "" if verdict.error is None else f"{verdict.error:.1%}"
        if verdict.points:
            claimed, predicted, error = f"{claimed}%", f"{predicted}%", f"{verdict.error:.1f} points"
        plausible = "" if verdict.low is None else f"{verdict.low:.0f} .. {verdict.high:.0f}"
        if verdict.error is None:  # a limit
            side = ">=" if verdict.text.startswith(AT_LEAST) else "<="
            claimed, predicted = f"{side} {claimed}%", f"{verdict.predicted:.1f}%"
            plausible = f"{verdict.low:.1f} .. {verdict.high:.1f}%" if plausible else ""
        name = verdict.claim_id.partition("/")[2].replace("/", " ")
        ok = "yes" if verdict.ok else "NO"
        lines.append(Line((name, claimed, predicted, plausible, error, str(verdict.role), ok)))
    columns = ("<us", "measured", "predicted", "plausible", "error", "<role", "<ok")
    return without_empty_columns(Table("Predicted and measured times", columns, tuple(lines)))


def _mark(verdict: Verdict) -> rich.text.Text:
    if verdict.incomparable:
        return rich.text.Text("not comparable", "yellow")
    return rich.text.Text("yes") if verdict.ok else rich.text.Text("NO", "red")


@dataclasses.dataclass(frozen=True, slots=True)
class _Family:
    """Claims of one paper.

    Attributes:
        context: what they are predicted from.
        checks: of them.
        depends_on: sections of a machine that matter to them.
        machine: that they are about, where it is not the one that is asked for.
    """

    context: Callable[[Machine], Any]
    checks: Sequence[Check[Any]]
    depends_on: frozenset[str]
    machine: Machine | None = None


def _others(families: Sequence[_Family]) -> list[Machine]:
    """Machines that claims are about instead of the one that is asked for."""
    return [family.machine for family in families if family.machine is not None]


def _families(machine: Machine, version: str) -> list[_Family]:
    if machine.name != MI300X:
        raise ValueError(f"claims: no claim is about this machine (value={machine.name!r}, allowed={MI300X})")
    overlap, slowdown = claims_overlap.OverlapContext(), claims_slowdown.SlowdownContext()  # of other machines
    shared = frozenset({"gpu", "links", "dma", "library", "matmul"})
    return [
        _Family(lambda changed: claims_c3.C3Context(changed, version), claims_c3.checks(), shared | {"interference"}),
        _Family(claims_dma.DmaContext, claims_dma.checks(), shared | {"power"}),
        _Family(lambda changed: overlap, claims_overlap.checks(), frozenset()),
        _Family(FusedStudy, claims_fused.checks(), claims_fused.SECTIONS, named(claims_fused.MACHINE)),
        _Family(lambda changed: slowdown, claims_slowdown.checks(), frozenset()),
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, int | float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return "[" + ", ".join(_text(part) for part in value) + "]"
