"""A figure or a table of a paper: published, predicted and measured values, or why one of the three is missing.

    PaperFigure --evaluate--> FigureValues --draw, tables, rows--> a picture, the terminal, the page, JSON

A picture has a row of panels of predictions, which carry marks of what is published, and below it a row of panels of
what was measured, one for each machine; where a figure has several panels, those of one machine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import RC, save_both
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.panels import Panel, TimelinePanel
from sidelane_lab.papers.claims import matching, published, value_text
from sidelane_lab.papers.command import CLAIMS, PAPERS
from sidelane_lab.papers.files import FILES, ResultFile, files_of
from sidelane_lab.papers.rows import MeasuredClaim, measure_claim

AnyPanel = Panel | TimelinePanel
SOURCES = PUBLISHED, PREDICTED, MEASURED = ("published", "predicted", "measured")
MOST_PANELS = 4
"""Number of panels beside each other that can be read."""
PANEL_INCHES = 3.4
"""Height of a row of panels."""
NO_POINTS = "the text of the paper gives only means and limits"
NAMES_OF_PAPERS = {
    "000": "ConCCL paper",
    "001": "Fused operators paper",
    "003": "DMA collectives paper",
    "004": "Overlap paper",
}
"""Names of the papers (docs/papers.md). The first word is a number's other form: ``conccl/8``."""
LACKING = {"prelaunch": "nothing prelaunched, without the prelaunch.json that `sidelane prelaunch` writes"}
"""Line about what a figure lacks without the file of its ``fuller`` study, by that study."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure or a table of a paper: what ``data/figures.toml`` says of it, and the functions that fill it.

    Attributes:
        number: of the paper and the figure: ``003/13``, ``000/T1``.
        caption: what it shows, in our words.
        machine: of the catalogue, that the paper measured on; "" where the panels are of several.
        claims: ids of the published values that stand in the text.
        predict: makes panels of a machine, with plausible ranges or without, for a version of the ConCCL paper; of a
            table, the words of each line.
        predict_several: makes panels of the paper's own machines, where there are several and no other is asked for.
        study: that measures it; "" none.
        fuller: study whose file has more of it, and is taken where there is one; "" none.
        measure: makes panels of a result file, or the words of each line. None: ``missing`` has the reason.
        further: key of files whose panels come before these; "" none.
        measure_further: makes their panels.
        lines: of a table, the published words of each; None: it is a figure.
        heading: of a table's first column.
        missing: why one of ``SOURCES`` is missing, or which part of it, in a line each.
    """

    number: str
    caption: str
    machine: str = ""
    claims: tuple[str, ...] = ()
    predict: Callable[[Machine, bool, str], Any]
    predict_several: Callable[[bool], Any] | None = None
    study: str = ""
    fuller: str = ""
    measure: Callable[[ResultFile], Any] | None = None
    further: str = ""
    measure_further: Callable[[ResultFile], Any] | None = None
    lines: Callable[[], Mapping[str, str]] | None = None
    heading: str = ""
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_table(self) -> bool:
        """True of a table, which has words in place of panels."""
        return self.lines is not None

    @property
    def file_name(self) -> str:
        """Name of its picture, without ending."""
        return self.number.replace("/", "-")

    def evaluate(
        self, sources: Sequence[Path], machine: Machine | None = None, *, ranges: bool = False, version: str = "000"
    ) -> FigureValues:
        """Predict it, and read what was measured.

        Args:
            sources: result files, and folders of them.
            machine: to predict; None: the paper's own.
            ranges: predict over the plausible values of the machine's numbers as well.
            version: of the ConCCL paper.

        Raises:
            ValueError: a named file is no result file.
        """
        missing = dict(self.missing)
        own = named(self.machine) if self.machine and machine is None else machine
        predicted: Any = ()
        try:
            if own is not None:
                predicted = self.predict(own, ranges, version)
            elif self.predict_several is not None:
                predicted = self.predict_several(ranges)
            if not ranges and not self.is_table:
                predicted = [_without_bands(panel) for panel in predicted]
            if not predicted:
                missing[PREDICTED] = f"the description of {own.name if own else 'it'} has not all of it"
        except ValueError as problem:  # what is not modelled on this machine
            missing[PREDICTED] = str(problem)
        measured = self._read(sources, missing) if self.measure is not None else []
        if self.measure_further is not None:
            files = files_of(self.further, sources)
            measured = [(file, panels) for file in files if (panels := self.measure_further(file))] + measured
        claims = {claim_id: measure_claim(CLAIMS[claim_id], sources) for claim_id in self.claims}
        where = own.title if own is not None else "the paper's machines"
        return FigureValues(self, where, predicted, measured, claims, missing)

    def _read(self, sources: Sequence[Path], missing: dict[str, str]) -> list[tuple[ResultFile, Any]]:
        assert self.measure is not None
        for study in filter(None, (self.fuller, self.study)):
            found = []
            for file in files_of(study, sources):
                try:
                    if values := self.measure(file):
                        found.append((file, values))
                except KeyError as problem:
                    raise ValueError(f"figure: {file.path} is no file of {study} (missing={problem})") from problem
            if found:
                if self.fuller and study == self.study:
                    missing[MEASURED] = LACKING[self.fuller]
                return found
        missing[MEASURED] = f"no {FILES[self.study]} that has it is in {', '.join(map(str, sources)) or 'any folder'}"
        return []


@functools.cache
def _declarations() -> dict[str, dict[str, Any]]:
    entry = importlib.resources.files("sidelane_lab.papers") / "data" / "figures.toml"
    return tomllib.loads(entry.read_text(encoding="utf-8"))


def declaration(number: str) -> dict[str, Any]:
    """Return what ``data/figures.toml`` says of a figure, by the attributes of :class:`PaperFigure`."""
    said = _declarations()[number]
    claims = said.get("claims", ())
    missing = {} if "heading" in said else {PUBLISHED: NO_POINTS}
    return said | {
        "number": number,
        "claims": matching(claims) if isinstance(claims, str) else tuple(claims),
        "missing": missing | said.get("missing", {}),
    }


def declared(number: str, **functions: Any) -> PaperFigure:
    """Return a figure with its functions."""
    return PaperFigure(**declaration(number), **functions)


@dataclasses.dataclass(frozen=True)
class FigureValues:
    """The values of a figure.

    Attributes:
        predicted: panels, or words by line.
        measured: the same for each file, the one with the most rows first.
        claims: what was measured of each published value.
        missing: why one of ``SOURCES`` is missing, or which part of it.
    """

    figure: PaperFigure
    where: str
    predicted: Any
    measured: Sequence[tuple[ResultFile, Any]]
    claims: Mapping[str, Sequence[MeasuredClaim]]
    missing: Mapping[str, str]

    @property
    def title(self) -> str:
        """Paper, number and caption."""
        paper, _, name = self.figure.number.partition("/")
        what = f"table {name.removeprefix('T')}" if self.figure.is_table else f"figure {name}"
        return f"{NAMES_OF_PAPERS[paper]}, {what}: {self.figure.caption}"

    def shown(self) -> list[tuple[str, AnyPanel]]:
        """Return the measured panels of the picture, each with where it is from."""
        found: list[tuple[str, AnyPanel]] = []
        for file, panels in self.measured:
            if found and len(found) + len(panels) > MOST_PANELS:
                break
            found += [(file.where, panel) for panel in panels]
            if len(panels) > 1:
                break
        return found[:MOST_PANELS]

    def draw(self, folder: Path) -> Path | None:
        """Write the picture, and return the PNG; an SVG lies next to it. None of a table, and without any panel."""
        if self.figure.is_table:
            return None
        where = self.where if len(self.predicted) == 1 or self.figure.machine else ""
        rows = [[(where, panel) for panel in self.predicted], self.shown()]
        named_rows = [(name, row) for name, row in zip((PREDICTED, MEASURED), rows, strict=True) if row]
        if not named_rows:
            return None
        heights = [max(_height(panel) for _, panel in row) for _, row in named_rows]
        lines = self.missing_lines()
        with mpl.rc_context(RC):
            size = (11.5, sum(heights) + 0.35 + 0.17 * len(lines))
            figure = Figure(figsize=size, layout="constrained")
            parts = figure.subfigures(len(named_rows), 1, height_ratios=heights, squeeze=False)[:, 0]
            for part, (source, row) in zip(parts, named_rows, strict=True):
                _draw_row(part, source, row)
            figure.suptitle(self.title, x=0.01, ha="left", fontweight="bold")
            if lines:
                figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8)
            return save_both(figure, self.figure.file_name, folder)

    def missing_lines(self) -> list[str]:
        """Return a line for each of ``SOURCES`` that is missing, or a part of it."""
        return [f"{source}: {self.missing[source]}" for source in SOURCES if source in self.missing]

    def tables(self, predictions: Mapping[str, Any]) -> list[Table]:
        """Return the published values beside ours, and the numbers of the panels.

        Args:
            predictions: of claims, by id.
        """
        if self.figure.is_table:
            return [self._words_table()]
        tables = [self._claims_table(predictions)] if self.figure.claims else []
        for panel in self.predicted:
            if isinstance(panel, Panel):
                tables.append(panel_table(panel, f"predicted, {panel.title or self.where}"))
        for where, panel in self.shown():
            if isinstance(panel, Panel):
                name = f", {panel.title}" if panel.title and panel.title != where else ""
                tables.append(panel_table(panel, f"measured, {where}{name}"))
        return tables

    def _claims_table(self, predictions: Mapping[str, Any]) -> Table:
        files = list(dict.fromkeys(one.where for found in self.claims.values() for one in found))
        lines = []
        for claim_id, found in self.claims.items():
            claim = published()[claim_id]
            unit = f" ({claim['unit']})" if claim["unit"].startswith(("percent", "x")) else ""
            values = {one.where: value_text(one.value) for one in found}
            predicted = value_text(predictions[claim_id]) if predictions.get(claim_id) is not None else ""
            cells = (claim_id, claim["claim"] + unit, value_text(claim["value"]), predicted)
            lines.append(Line((*cells, *(values.get(where, "") for where in files))))
        columns = ("<claim", "<what", "<published", "<predicted", *(f"<{where}" for where in files))
        return Table(f"{self.title}: values in the text", columns, tuple(lines))

    def _words_table(self) -> Table:
        assert self.figure.lines is not None
        lines = self.figure.lines()
        columns = [PUBLISHED, f"predicted\n{self.where}", *(f"measured\n{file.where}" for file, _ in self.measured)]
        sources = [lines, self.predicted or {}, *(words for _, words in self.measured)]
        cells = [Line((line, *(words.get(line, "") for words in sources))) for line in lines]
        headings = (f"<{self.figure.heading}", *(f"<{column}" for column in columns))
        return Table(self.title, headings, tuple(cells), tuple(self.missing_lines()))

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        found: dict[str, Any] = {
            "figure": self.figure.number,
            "caption": self.figure.caption,
            "missing": dict(self.missing),
            "published": {claim_id: published()[claim_id]["value"] for claim_id in self.figure.claims},
        }
        if self.figure.lines is not None:
            found |= {"lines": dict(self.figure.lines()), PREDICTED: dict(self.predicted or {})}
            return {**found, MEASURED: {file.machine: words for file, words in self.measured}}
        found[PREDICTED] = [_panel_rows(panel) for panel in self.predicted]
        found[MEASURED] = {}
        for file, panels in self.measured:
            found[MEASURED].setdefault(file.machine, []).extend(_panel_rows(panel) for panel in panels)
        return found


class ClaimPredictions:
    """Predictions of claims for the papers' own machines, or for another one."""

    def __init__(self, machine: Machine | None = None, version: str = "000") -> None:
        self._machine, self._version = machine, version
        self._contexts: dict[tuple[str, ...], Any] = {}
        self._papers = {claim.claim_id: paper for paper in PAPERS for claim in paper.judged}

    def of(self, claims: Sequence[str]) -> dict[str, Any]:
        """Return the predictions of claims; without those that the model does not speak to."""
        found = {}
        for claim_id in claims:
            paper = self._papers.get(claim_id)
            if paper is None or (not paper.machine and self._machine is not None):
                continue  # not judged, or about the paper's machines only
            context = self._contexts.get(paper.numbers)
            if context is None:
                machine = self._machine or named(paper.machine or "mi300x8")
                context = self._contexts[paper.numbers] = paper.context(machine, self._version)
            try:
                found[claim_id] = CLAIMS[claim_id].predicted(context)
            except (ValueError, AttributeError, StopIteration):
                continue  # the description has not all of it
        return found


def panel_table(panel: Panel, title: str) -> Table:
    """Return the numbers of a panel: a line a place, a column a curve."""
    lines = []
    for place, x in enumerate(panel.x):
        values = [band.values[place] for band in panel.curves.values()]
        cells = ("" if math.isnan(value) else f"{value:.3g}" for value in values)
        lines.append(Line((_place_text(panel, x), *cells)))
    return Table(title, (f"<{panel.xlabel.partition(' (')[0]}", *panel.curves), tuple(lines), (panel.ylabel,))


def _place_text(panel: Panel, x: Any) -> str:
    if isinstance(x, str):
        return ", ".join(x.split("\n"))
    return format_bytes(int(x)) if panel.xlabel.startswith("bytes") else f"{x:g}"


def _panel_rows(panel: AnyPanel) -> dict[str, Any]:
    if isinstance(panel, TimelinePanel):
        rows = [[i.group, i.lane, i.label, i.start_us, i.end_us] for i in panel.joined]
        return {"title": panel.title, "intervals": rows}
    curves = {
        name: [None if math.isnan(value) else value for value in band.values] for name, band in panel.curves.items()
    }
    return {"title": panel.title, "x": list(panel.x), "xlabel": panel.xlabel, "ylabel": panel.ylabel, "curves": curves}


def _without_bands(panel: AnyPanel) -> AnyPanel:
    """Return a panel whose axis speaks of no bands of plausible values, as there are none."""
    return dataclasses.replace(panel, xlabel=panel.xlabel.partition(" (")[0]) if isinstance(panel, Panel) else panel


def _height(panel: AnyPanel) -> float:
    return max(PANEL_INCHES, panel.height) if isinstance(panel, TimelinePanel) else PANEL_INCHES


def _draw_row(part: SubFigure, source: str, row: Sequence[tuple[str, AnyPanel]]) -> None:
    """Draw panels beside each other; those of one kind share the axis of values, and all share a legend beside them."""
    wheres = list(dict.fromkeys(where for where, _ in row))
    same = len(wheres) == 1
    part.suptitle(", ".join(filter(None, (source, wheres[0] if same else ""))), x=0.01, ha="left", fontsize=10)
    panels = [panel for _, panel in row if isinstance(panel, Panel)]
    alike = len({panel.ylabel for panel in panels if panel.ylabel}) == 1 and len(panels) == len(row)
    most = max((set(panel.curves) for panel in panels), key=len, default=set())
    one_legend = bool(panels) and all(set(panel.curves) <= most for panel in panels)
    many = part.subplots(1, len(row), sharey=alike, squeeze=False)[0]
    for axes, (_, panel) in zip(many, row, strict=True):
        panel.draw(axes)
    handles: dict[str, Any] = {}
    for axes, (where, panel) in zip(many, row, strict=True):
        panel.limit(axes)
        axes.set_title(panel.title or ("" if same else where))
        if isinstance(panel, Panel):
            _name_bars(axes, panel, len(row))
        if one_legend:
            known, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, known, strict=True))
            if (legend := axes.get_legend()) is not None:
                legend.remove()
    if alike and len(row) > 1:
        for axes in many[1:]:
            axes.set_ylabel("")
        if len({panel.xlabel for panel in panels}) == 1:
            for axes in many:
                axes.set_xlabel("")
            part.supxlabel(panels[0].xlabel, fontsize=9)
    if handles:
        folded = [textwrap.fill(name, LEGEND_LETTERS) for name in handles]
        part.legend(list(handles.values()), folded, loc="outside right upper", fontsize=7)


LEGEND_LETTERS = 26
"""Number of letters on a line of a legend."""
ROW_LETTERS = 130
"""Number of letters that bars beside each other have for their names, in a row of panels."""


def _name_bars(axes: Axes, panel: Panel, count: int) -> None:
    """Turn the names of bars where they have no room beside each other."""
    names = [x.split("\n") for x in panel.x if isinstance(x, str)]
    if names and len(names) * max(len(part) for name in names for part in name) > ROW_LETTERS / count:
        axes.set_xticks(range(len(names)), [" ".join(name) for name in names], fontsize=7, rotation=90)
