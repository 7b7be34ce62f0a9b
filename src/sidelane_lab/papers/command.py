"""``sidelane claims``: what the papers claim, what the model predicts, and whether that was fitted or predicted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.padding
import rich.text

from sidelane.cli.output import write_json
from sidelane_lab.harness.table import Line, Table, without_empty_columns
from sidelane_lab.harness.terminal import progress, progress_console, say_written, tables_console
from sidelane_lab.machines.load import find, named
from sidelane_lab.machines.numbers import write_numbers
from sidelane_lab.machines.ranges import Variation, predict_each, variations
from sidelane_lab.machines.spec import Machine
from sidelane_lab.papers import conccl, dma, fused, overlap, slowdown
from sidelane_lab.papers.claims import (
    AT_LEAST,
    PREDICTED,
    STRICTER,
    Claim,
    ClaimRole,
    ClaimVerdict,
    Paper,
    judge,
    problems,
    published,
    value_text,
    with_ranges,
)
from sidelane_lab.papers.files import FILES
from sidelane_lab.papers.results import compare, role_problems
from sidelane_lab.papers.rows import measure_claim

PAPERS: tuple[Paper[Any], ...] = (conccl.PAPER, dma.PAPER, overlap.PAPER, fused.PAPER, slowdown.PAPER)
CLAIMS: Mapping[str, Claim[Any]] = {claim.claim_id: claim for paper in PAPERS for claim in paper.claims}
"""All claims, by id."""
MI300X, VERSIONS = conccl.MI300X, conccl.PAPER.numbers


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimsOptions:
    """Options of ``sidelane claims``.

    Attributes:
        machine: name in the catalogue, or a file.
        json: file for a list of objects, or ``written.STDOUT``; None writes none.
        results: folder of measurements, with one folder for each machine; used where no paper is about the machine.
        version: of the ConCCL paper, where its two versions disagree: ``000`` or ``002``.
        report: folder for ``claims.json``, which says what it was made with; with ranges about a paper's machine, for
            the sensitivity as well. None: nothing.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Survival:
    """Held-out claims with one number at one end of its range.

    Attributes:
        path: of the number, ``dma.trigger_us`` for example.
        source: of the number.
        value: at this end.
        high: which end.
        met: held-out claims that are met.
        of: held-out claims that are comparable.
        lost, won: ids of those that are missed, or met, at this end only.
    """

    path: str
    source: str
    value: float
    high: bool
    met: int
    of: int
    lost: tuple[str, ...] = ()
    won: tuple[str, ...] = ()


def main(options: ClaimsOptions) -> int:
    """Print every claim with its prediction: the papers' for the machine that they are about, else our measurements.

    Returns:
        0; 1 if a role is missing or a number was fitted to a held-out claim. Wrong predictions are shown, not punished.

    Raises:
        ValueError: no such machine, or one that neither a paper nor a measurement is about.
    """
    machine = find(options.machine)
    survivals: list[Survival] = []
    others: list[Machine] = []
    with progress("simulating") as update:
        if machine.name != MI300X:
            folder = options.results / machine.name
            verdicts = compare(machine, folder, ranges=options.ranges, progress=update)
            wrong = role_problems(machine)
        else:
            others = machines_of(machine)[1:]
            verdicts, wrong, survivals = evaluate(machine, options.version, options.ranges, update)
    met = sum(verdict.ok for verdict in verdicts if verdict.role in PREDICTED)
    rows = [verdict.to_dict() for verdict in verdicts]
    files = [] if options.json is None else [write_json(options.json, rows)]
    if options.report is not None:
        files += write_numbers(options.report / "claims.json", "claims", machine, rows, others)
        if survivals:
            found = [dataclasses.asdict(survival) for survival in survivals]
            path = options.report / "claims-sensitivity.json"
            files += write_numbers(path, "claims_sensitivity", machine, found, others)
    tables = tables_console(options.json)
    show(verdicts, tables)
    if survivals:
        tables.print(sensitivity_table(survivals, met).to_rich())
    say_written(files)
    for line in wrong:
        progress_console().print(f"claims: {line}", style="red")
    return 1 if wrong else 0


def machines_of(machine: Machine) -> list[Machine]:
    """Return the machines that claims are about, the one that is asked for first."""
    others = {paper.machine for paper in PAPERS if paper.machine} - {machine.name}
    return [machine, *map(named, sorted(others))]


def evaluate(
    machine: Machine,
    version: str = "000",
    ranges: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    papers: Sequence[Paper[Any]] = PAPERS,
) -> tuple[list[ClaimVerdict], list[str], list[Survival]]:
    """Predict every claim that is about a machine.

    Args:
        machine: of the catalogue, or with changed numbers; its name decides which claims are about it.
        version: of the ConCCL paper.
        ranges: add ranges over the plausible values of its uncertain numbers.
        progress: told what is being done.
        papers: whose claims.

    Returns:
        The verdicts; what is wrong with the roles; and with ranges what becomes of held-out claims at both ends of the
        range of each number.

    Raises:
        ValueError: no claim is about this machine.
    """
    if machine.name not in {paper.machine for paper in papers}:
        raise ValueError(f"claims: no claim is about this machine (value={machine.name!r}, allowed={MI300X})")
    machines = machines_of(machine)
    about = {one.name: one for one in machines} | {"": machine}
    contexts = [paper.context(about[paper.machine], version) for paper in papers]
    claims = [(one, context) for paper, context in zip(papers, contexts, strict=True) for one in paper.judged]
    verdicts = [judge(claim, claim.predicted(context)) for claim, context in claims]
    wrong = problems(papers, machines)
    if not ranges:
        return verdicts, wrong, []
    survivals, varied = [], []
    for variation, predicted in vary(papers, machines, version, [one.predicted for one in verdicts], progress):
        varied.append(predicted)
        changed = [judge(claim, value) for (claim, _), value in zip(claims, predicted, strict=True)]
        name = (
            variation.path if variation.machine.name == machine.name else f"{variation.machine.name} {variation.path}"
        )
        survivals.append(survival(name, variation, verdicts, changed))
    ranged = [with_ranges(one, [values[place] for values in varied]) for place, one in enumerate(verdicts)]
    return ranged, wrong, survivals


def vary(
    papers: Sequence[Paper[Any]],
    machines: Sequence[Machine],
    version: str,
    unchanged: Sequence[Any],
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Variation, list[Any]]]:
    """Predict every claim that is judged with one uncertain number at one end of its range, all in turn.

    Of machines behind the first only the numbers that their claims depend on are varied. Claims that do not depend on a
    number keep what is ``unchanged``.
    """
    varied: list[Variation] = []
    for place, machine in enumerate(machines):
        mine = [paper.sections for paper in papers if paper.machine == machine.name]
        varied += variations(machine, frozenset().union(*mine) if place else None)

    def predict(variation: Variation) -> list[Any]:
        predicted, before = [], iter(unchanged)
        for paper in papers:
            section = variation.path.partition(".")[0]
            concerned = paper.machine == variation.machine.name and section in paper.sections
            context = paper.context(variation.machine, version) if concerned else None
            for claim in paper.judged:
                known = next(before)
                predicted.append(claim.predicted(context) if concerned else known)
        return predicted

    yield from predict_each(varied, predict, progress)


def survival(
    path: str, variation: Variation, before: Sequence[ClaimVerdict], after: Sequence[ClaimVerdict]
) -> Survival:
    """Compare verdicts with a number at an end of its range with those at its value."""
    quantity = variation.machine.quantities()[variation.path]
    known = [(a, b) for a, b in zip(before, after, strict=True) if a.role in PREDICTED and not a.incomparable]
    lost = tuple(a.claim_id for a, b in known if a.ok and not b.ok)
    won = tuple(a.claim_id for a, b in known if b.ok and not a.ok)
    met = sum(b.ok for _, b in known)
    return Survival(path, str(quantity.source), variation.value, variation.high, met, len(known), lost, won)


def show(verdicts: Sequence[ClaimVerdict], console: rich.console.Console) -> None:
    """Print every prediction, and how many of each role are right."""
    if any("/" in verdict.claim_id for verdict in verdicts):
        console.print(measured_table(verdicts).to_rich())
    else:
        _show_published(verdicts, console)
    for line in counted(verdicts):
        console.print(line)


def counted(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    """Say how many claims of each role are met, at the tolerance and at stricter ones, and how many are not judged."""
    lines = []
    for role in ClaimRole:
        of_role = [verdict for verdict in verdicts if verdict.role is role and not verdict.incomparable]
        right = sum(verdict.ok for verdict in of_role)
        line = f"{role}: {right} of {len(of_role)} right"
        if role is not ClaimRole.INPUT and of_role:
            shares = [f"{sum(v.met_at(share) for v in of_role)} at {words}" for share, words in STRICTER]
            line += f" ({'; '.join(shares)})"
        lines.append(line)
    # A rule that mends a miss makes it "seen": this sum is what no change of role can better.
    told = [v for v in verdicts if v.role in (ClaimRole.SEEN, *PREDICTED) and not v.incomparable]
    if any(verdict.role is ClaimRole.SEEN for verdict in told):
        lines.append(f"seen and predicted together: {sum(verdict.ok for verdict in told)} of {len(told)} right")
    apart = [verdict for verdict in verdicts if verdict.incomparable]
    lines += [f"not comparable: {len(apart)}"] if apart else []
    if not any("/" in verdict.claim_id for verdict in verdicts):
        lines.append(f"repeated, so not judged: {sum(bool(claim.given) for claim in CLAIMS.values())}")
        reasons = Counter(claim.not_modelled for claim in CLAIMS.values() if claim.not_modelled)
        lines.append(f"not spoken to: {reasons.total()} of {len(published())}")
        lines += [f"  {count}: {reason}" for reason, count in reasons.most_common()]
    return lines


def _show_published(verdicts: Sequence[ClaimVerdict], console: rich.console.Console) -> None:
    """Print a line or two for what a claim says; what is held against it stands below, indented."""
    for verdict in verdicts:
        console.print(rich.text.Text(f"{verdict.claim_id}  {verdict.text}", "bold"))
        parts = [f"published {value_text(verdict.claimed)}", f"predicted {value_text(verdict.predicted)}"]
        if verdict.low is not None and verdict.low != verdict.high:
            parts.append(f"plausible {value_text(verdict.low)} .. {value_text(verdict.high)}")
        if verdict.error is not None:
            parts.append(f"error {verdict.error:.3g}" + (" points" if verdict.points else ""))
        mark = ("not comparable", "yellow") if verdict.incomparable else ("yes", "") if verdict.ok else ("NO", "red")
        line = rich.text.Text("; ".join([*parts, f"{verdict.role}: "])).append(*mark)
        if verdict.incomparable or verdict.why:
            line.append(f" ({verdict.incomparable or verdict.why})")
        console.print(rich.padding.Padding(line, (0, 0, 0, 4), expand=False))


def show_measured(
    sources: Sequence[Path], json: Path | None = None, console: rich.console.Console | None = None
) -> None:
    """Print every claim with what our files say of it, or the reason why they say nothing."""
    console = console or tables_console(json)
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for claim_id, known in published().items():
        claim = CLAIMS[claim_id]
        reading, found = claim.reading, measure_claim(claim, sources)
        why = "" if found else claim.unmeasured if reading is None else f"no {FILES[reading.study]} has it"
        counts["measured" if found else "missing" if reading else "not comparable"] += 1
        rows.append(
            {
                "id": claim_id,
                "claim": known["claim"],
                "claimed": known["value"],
                "unit": known["unit"],
                "measured": [one.to_dict() for one in found],
                "differs": "" if reading is None else reading.differs,
                "why": why,
            }
        )
        console.print(rich.text.Text(f"{claim_id}  {known['claim']}", "bold"))
        lines = [f"published {value_text(known['value'])} ({known['unit']})" + (f"; {why}" if why else "")]
        for one in found:
            ratio = "" if one.ratio is None else f", {one.ratio:g} of the published"
            file = Path(one.path).name
            other = f" ({file})" if reading is not None and file != FILES[reading.study] else ""
            lines.append(f"measured {value_text(one.value)} on {one.where}{other}{ratio}")
        if found and reading is not None and reading.differs:
            lines.append(f"but {reading.differs}")
        for line in lines:
            console.print(rich.padding.Padding(rich.text.Text(line), (0, 0, 0, 4), expand=False))
    console.print(
        f"measured: {counts['measured']} of {len(rows)}; in no file that was given: {counts['missing']}; "
        f"not comparable: {counts['not comparable']}"
    )
    if json is not None:
        say_written([write_json(json, rows)])


def measured_table(verdicts: Sequence[ClaimVerdict]) -> Table:
    """Make a line for each row of a result file, whose id says what it is."""
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


def sensitivity_table(found: Sequence[Survival], met: int) -> Table:
    """Make a line for each number whose range changes a verdict, the most sensitive first."""
    lines = []
    moving, others = _moving(found)
    for path, (low, high) in moving.items():
        lost = sorted({*low.lost, *high.lost})
        names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        values = (f"{low.value:.4g}", str(low.met), f"{high.value:.4g}", str(high.met))
        lines.append(Line((path, low.source, *values, names)))
    columns = ("<number", "<source", "low", "met", "high", "met", "<missed there")
    title = f"Held-out claims met with one number at an end of its range ({met} of {found[0].of} at its value)"
    note = f"{others} other uncertain numbers change none"
    return Table(title, columns, tuple(lines), (note,))


def _moving(found: Sequence[Survival]) -> tuple[dict[str, tuple[Survival, Survival]], int]:
    """Pick both ends of each number that changes a verdict, most lost claims first; count those that change none."""
    ends: dict[str, list[Survival]] = {}
    for one in found:
        ends.setdefault(one.path, []).append(one)
    order = sorted(ends, key=lambda path: min(one.met for one in ends[path]))
    moving = [path for path in order if any(one.lost or one.won for one in ends[path])]
    return {path: (ends[path][0], ends[path][1]) for path in moving}, len(ends) - len(moving)
