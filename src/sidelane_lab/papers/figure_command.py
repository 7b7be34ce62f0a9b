"""``sidelane figure``: figures and tables of the papers, published, predicted and measured in one picture."""

from __future__ import annotations

import dataclasses
import datetime
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from sidelane.cli.output import write_json
from sidelane_lab.harness import provenance
from sidelane_lab.harness.report import PAGE, STYLE, inline
from sidelane_lab.harness.study import Picture
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import progress, say, say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.papers import conccl_figures, dma_figures, figures, fused_figures, overlap_figures
from sidelane_lab.papers.files import FILES

FIGURES: Mapping[str, figures.PaperFigure] = {
    one.number: one
    for of_paper in (conccl_figures, fused_figures, dma_figures, overlap_figures)
    for one in of_paper.FIGURES
}
"""The 26 figures of data and the four tables of the papers, by number.

Papers have the numbers of their texts (docs/papers.md): ``000`` the ConCCL paper, whose other version ``002`` has the
same figures, ``001`` the fused operators paper, ``003`` the DMA collectives paper, ``004`` the overlap paper. Diagrams
and tables of equipment have no values, and are not here.
"""
FOLDER = Path("figures")
"""Folder of the pictures, where no other is asked for."""
RESULTS = Path("results")
DrawnFigure = tuple[figures.FigureValues, list[Table], Picture | None]
"""A figure, its tables, and its picture; None without one."""


@dataclasses.dataclass(frozen=True, slots=True)
class FigureOptions:
    """Options of ``sidelane figure``.

    Attributes:
        numbers: of figures and tables; empty without ``everything``: list them.
        everything: all figures and tables.
        machine: to predict, in the catalogue or a file; None: the paper's own.
        results: result files, and folders of them; empty: ``results``.
        version: of the ConCCL paper; "": that of the number, ``000`` or ``002``.
        ranges: predict over the plausible values of the machine's numbers as well.
        json: file for the numbers, or ``written.STDOUT``; None writes none.
        report: folder for the pictures and a page with all of them; None: ``FOLDER``, or with ``json`` none.
    """

    numbers: tuple[str, ...] = ()
    everything: bool = False
    machine: str | None = None
    results: tuple[Path, ...] = ()
    version: str = ""
    ranges: bool = False
    json: Path | None = None
    report: Path | None = None

    def __post_init__(self) -> None:
        if self.everything and self.numbers:
            raise ValueError(f"figure: --all (value={', '.join(self.numbers)}, allowed=numbers or --all)")


def main(options: FigureOptions) -> None:
    """Draw figures, and print their numbers.

    Raises:
        ValueError: no such figure, no such machine, or a named file that is no result file.
    """
    console = tables_console(options.json)
    if not options.numbers and not options.everything:
        console.print(list_table().to_rich())
        say_written(_write_json(options.json, list(_listed()), options))
        return
    asked = [(number, figure_of(number)) for number in options.numbers or FIGURES]
    machine = None if options.machine is None else find(options.machine)
    sources = options.results or ((RESULTS,) if RESULTS.is_dir() else ())
    folder = options.report or (None if options.json is not None else FOLDER)
    predictions: dict[str, figures.ClaimPredictions] = {}
    found: list[DrawnFigure] = []
    with progress("drawing") as update:
        for place, (number, figure) in enumerate(asked):
            update(f"{figure.number}, {place + 1} of {len(asked)}")
            version = options.version or ("002" if number.startswith(("002", "2/")) else "000")
            values = figure.evaluate(sources, machine, ranges=options.ranges, version=version)
            of_claims = predictions.setdefault(version, figures.ClaimPredictions(machine, version))
            tables = values.tables(of_claims.of(figure.claims))
            drawn = None if folder is None else values.draw(folder)
            picture = None if drawn is None else Picture(figure.file_name, values.title, values.title)
            found.append((values, tables, picture))
    for values, tables, _ in found:
        if not options.everything:
            _show(values, tables, console)
    files = _write_json(options.json, [values.to_dict() for values, _, _ in found], options)
    if options.everything:
        console.print(summary_table([values for values, _, _ in found]).to_rich())
    if folder is not None:
        files.append(write_page(folder, found, options) if len(found) > 1 or options.report else _only(folder, found))
    say_written(files)


def figure_of(text: str) -> figures.PaperFigure:
    """Return the figure or the table of a number: ``conccl/8``, ``003/13``, ``3/13``, ``dma/T2``, ``002/8``.

    Raises:
        ValueError: there is none, or it has no values.
    """
    paper, _, name = text.lower().replace(" ", "").rpartition("/")
    numbers = {words.split()[0].lower(): number for number, words in figures.NAMES_OF_PAPERS.items()} | {
        "002": "000",
        "2": "000",
    }
    paper = numbers.get(paper, paper and paper.zfill(3))
    name = re.sub(r"^(figure|fig\.?)|[()]", "", name).replace("table", "t").replace("t", "T")
    found = FIGURES.get(f"{paper}/{name}")
    if found is None:
        allowed = ", ".join(FIGURES)
        meant = " or ".join(number for number in FIGURES if number.endswith(f"/{name}"))
        question = f" (did you mean {meant}?)" if meant else ""
        text = f"(value={text!r}, allowed={allowed}: diagrams and equipment have no values)"
        raise ValueError(f"figure: number {text}{question}")
    return found


def _show(values: figures.FigureValues, tables: Iterable[Table], console: rich.console.Console) -> None:
    for table in tables:
        console.print(table.to_rich())
    if not values.figure.is_table:  # a table has these below it
        for line in values.missing_lines():
            say(console, line)


def _only(folder: Path, found: Sequence[DrawnFigure]) -> Path:
    """Return what was written for a single figure: its picture; of a table a page, as it has none."""
    _, _, picture = found[0]
    return folder / f"{picture.name}.png" if picture else write_page(folder, found, FigureOptions())


def _write_json(path: Path | None, rows: Sequence[dict[str, Any]], options: FigureOptions) -> list[Path]:
    if path is None:
        return []
    content = {
        "study": "figure",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "command": provenance.command_line(),
        "machine": options.machine or "",
        "rows": list(rows),
    }
    return [write_json(path, content)]


def _listed() -> Iterable[dict[str, str]]:
    """Yield what is known of each figure before it is drawn."""
    for one in FIGURES.values():
        measured = "" if one.measure is None else FILES[one.study]
        reasons = {source: one.missing.get(source, "") for source in (figures.PUBLISHED, figures.MEASURED)}
        yield {
            "figure": one.number,
            "caption": one.caption,
            "published": f"{len(one.claims)} value{'s' * (len(one.claims) > 1)}"
            if one.claims
            else reasons[figures.PUBLISHED],
            "predicted": one.machine or "several",
            "measured": measured or reasons[figures.MEASURED],
        }


def list_table() -> Table:
    """Make a table of all figures and tables, with who predicts and who measures each."""
    lines = [Line(tuple(one.values())) for one in _listed()]
    columns = ("<number", "<figure", "<published", "<predicted for", "<measured in")
    notes = ("`sidelane figure 003/13` draws one, `sidelane figure --all` makes a page of all",)
    return Table("Figures and tables of the papers", columns, tuple(lines), notes)


def summary_table(found: Sequence[figures.FigureValues]) -> Table:
    """Make a table of what each figure has, and of what is missing."""
    lines = []
    for values in found:
        machines = ", ".join(dict.fromkeys(file.where for file, _ in values.measured)) or "-"
        lines.append(
            Line(
                (
                    values.figure.number,
                    values.figure.caption,
                    values.where if values.predicted else "-",
                    machines,
                    "; ".join(values.missing_lines()),
                )
            )
        )
    columns = ("<number", "<figure", "<predicted", "<measured", "<missing")
    return Table("Figures and tables of the papers", columns, tuple(lines))


def write_page(folder: Path, found: Sequence[DrawnFigure], options: FigureOptions) -> Path:
    """Write a page that holds all pictures and tables, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = options.machine or "the papers' own machines"
    about = (
        f"Predictions are of {machine}, measurements of result files, published values of the papers' texts. "
        f"Made by <code>{html.escape(provenance.command_line())}</code> at commit {provenance.commit()}."
    )
    links = " ".join(f'<a href="#{v.figure.file_name}">{v.figure.number}</a>' for v, _, _ in found)
    parts = [f"<h1>Figures of the papers</h1><p class=note>{about}</p><p>{links}</p>"]
    for values, tables, picture in found:
        parts.append(f'<h2 id="{values.figure.file_name}">{html.escape(values.title)}</h2>')
        if picture is not None:
            code = inline(folder, picture)
            parts.append(f'<img alt="{html.escape(picture.text)}" src="data:image/svg+xml;base64,{code}">')
        parts += [f"<p class=note>{html.escape(line)}</p>" for line in values.missing_lines()]
        shown = "".join(table.to_html() for table in tables)
        parts.append(f"<details><summary>Numbers</summary>{shown}</details>" if picture else shown)
    page = folder / PAGE
    head = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Figures of the papers</title><style>{STYLE}</style>"
    )
    page.write_text(f"{head}{''.join(parts)}</html>\n", encoding="utf-8")
    return page
