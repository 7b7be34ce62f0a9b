"""A study for readers: tables on the terminal, and a folder with one page, pictures and the figures themselves.

The page ``index.html`` holds everything it shows, so that it can be sent as one file; ``report.md`` says the same in
Markdown, with the pictures next to it.
"""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from sidelane.sizes import format_bytes
from sidelane_lab.harness import study as result_files
from sidelane_lab.harness.study import Picture, R, Results, study_of
from sidelane_lab.harness.table import MISSING, Line, Table, grouped, notes_of, number, verdict

CPU_WARNING = (
    "Ranks were CPU processes: real bytes through shared memory, moved by one thread for each engine. "
    "These figures show that the machinery works. They do not predict what GPUs do."
)
PAGE = "index.html"
"""The file to open in the folder of a report."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 1180px; margin: 2em auto; padding: 0 1em }
h1 { margin-bottom: 0 } h2 { margin-top: 2em; border-bottom: 1px solid #bbb }
h3 { margin: 1.6em 0 .4em; font-size: 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th { border-bottom: 1px solid #444 } th, td { padding: .15em .7em; text-align: right } .l { text-align: left }
tr.best td { font-weight: 600; background: #e8f1f8 } tr.rule td { border-bottom: 1px solid #ccc }
.warn { background: #fff3d6; padding: .6em 1em } .about td { text-align: left } img { max-width: 100%; margin: .6em 0 }
code { background: #f2f2f2; padding: .1em .3em } .note { color: #555; font-size: 13px }
"""


Cell = str | Callable[[Any, Sequence[Any]], str]
"""A column of a row: the name of a field, behind a colon how it is written (``speedup:.2f``); or what makes the text of
a row and of those in its group."""


def text_of(row: Any, group: Sequence[Any], cell: Cell) -> str:
    """Return the text of a column for a row, ``MISSING`` where the field is null."""
    if not isinstance(cell, str):
        return cell(row, group)
    name, _, written = cell.partition(":")
    value = getattr(row, name)
    if name == "correct":
        return verdict(value)
    if value is None:
        return MISSING
    if written:
        return format(value, written)
    if name == "bytes":
        return format_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, float) else str(value or "")


def spread(row: Any, group: Sequence[Any] = ()) -> str:
    """Return the tenth and the ninetieth percentile of a row's time."""
    return MISSING if row.p10_us is None else f"{number(row.p10_us)}-{number(row.p90_us)}"


def table_of(
    title: str,
    rows: Sequence[Any],
    columns: Mapping[str, Cell],
    *,
    keys: int = 1,
    by: Callable[[Any], Any] | None = None,
    value: Callable[[Any], float | None] | None = lambda row: row.time_us,
    ordered: bool = False,
    shown: Callable[[Any], bool] = lambda row: True,
    noted: Callable[[Any], bool] = lambda row: True,
    notes: tuple[str, ...] = (),
) -> Table:
    """Make a table of rows. Columns in which no row has anything are left out; rows' notes stand below it.

    Args:
        title: of the table.
        rows: to show.
        columns: by heading (see ``Table``).
        keys: columns, the first ones, that say what a line is about.
        by: what rows of a group have in common, behind which there is a rule; None: there are no groups.
        value: the least of a group is set off; None: nothing is.
        ordered: groups by ``by`` and their rows by ``value``, one of which is set off; else all stand as they come.
        shown: which rows have a line; the others only serve the columns of these.
        noted: which of these show their notes.
        notes: further ones.
    """
    lines: list[Line] = []
    said: list[tuple[str, str]] = []
    for _, same in grouped(rows, by or (lambda row: None), ordered=ordered):
        worth = {id(row): None if value is None else value(row) for row in same}
        if ordered:
            same = sorted(same, key=lambda row: (worth[id(row)] is None, worth[id(row)] or 0.0))
        least = min((one for one in worth.values() if one is not None), default=None)
        best = [row for row in same if least is not None and worth[id(row)] == least][: 1 if ordered else None]
        for row in filter(shown, same):
            cells = tuple(text_of(row, same, cell) for cell in columns.values())
            is_best = any(row is one for one in best)
            lines.append(Line(cells, is_best, rule=by is not None and row is same[-1]))
            said += [(" ".join(filter(None, cells[:keys])), row.note)] if noted(row) else []
    kept = [place for place in range(len(columns)) if any(line.cells[place] not in ("", MISSING) for line in lines)]
    return Table(
        title,
        tuple(name for place, name in enumerate(columns) if place in kept),
        tuple(dataclasses.replace(line, cells=tuple(line.cells[place] for place in kept)) for line in lines),
        (*notes_of(said), *notes),
        keys=sum(place < keys for place in kept),
    )


def tables_by(
    rows: Iterable[R],
    by: Callable[[R], Any],
    title: Callable[[R], str],
    columns: Mapping[str, Cell],
    *,
    keys: int,
    groups: Callable[[R], Any],
    least: Callable[[R], float | None] = lambda row: None,
    ordered: bool = False,
) -> list[Table]:
    """Make a table of the rows that have ``by`` in common, without columns that are empty.

    Args:
        rows: the rows of a study.
        by: key of a table, in whose order, or that of their first rows, tables come.
        title: the heading of a table, from its first row.
        columns: by heading (see ``Table``).
        keys: columns, the first ones, that name a row.
        groups: key of rows that stand together, a rule below them.
        least: figure, of which the least of a group is set off.
        ordered: tables by ``by``, and lines by ``groups`` and ``least``; else in the order of the rows.
    """
    tables = []
    for _, alike in grouped(rows, by, ordered=ordered):
        said = [str(getattr(row, "note", "")) for row in alike]
        differ = len(set(said)) > 1
        table = table_of(
            *(title(alike[0]), alike, columns),
            keys=keys,
            by=groups,
            value=least,
            ordered=ordered,
            noted=(lambda _: True) if differ else (lambda _: False),
            notes=() if differ else notes_of([("all", said[0])]),
        )
        tables.append(table)
    return tables


def tables_of(results: Results) -> list[Table]:
    """The tables of a study."""
    study = study_of(results.study)
    return study.tables(study.rows_of(results))


def draw(results: Results, folder: Path) -> list[Picture]:
    """Draw every picture of a study into a folder, as ``name.png`` and ``name.svg``."""
    import matplotlib as mpl  # takes a while, and tables do without

    from sidelane_lab.harness.drawing import RC

    study = study_of(results.study)
    with mpl.rc_context(RC):
        return study.plots(study.rows_of(results), results, folder)


def show(results: Results, console: rich.console.Console) -> None:
    """Print the tables of a study."""
    for table in tables_of(results):
        console.print(table.to_rich())
    console.print(study_of(results.study).legend, style="dim")
    if results.on_cpu:
        console.print(_warning(results), style="yellow")


def write(directory: str | Path, studies: Results | Sequence[Results], further: Sequence[Picture] = ()) -> Path:
    """Write the report of one or more studies.

    Args:
        directory: made if need be; files of earlier reports that carry the same names are replaced.
        studies: at least one, of different names.
        further: pictures of the last of them that lie there already.

    Returns:
        The page, ``directory/index.html``.

    Raises:
        ValueError: no study, or two of one name.
    """
    chosen = [studies] if isinstance(studies, Results) else list(studies)
    names = [results.study for results in chosen]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"report.write: studies of different names are needed, at least one (value={names})")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    page, text = [], []
    for results in chosen:
        result_files.write(folder / f"{results.study}.json", results)
        pictures, tables = draw(results, folder), tables_of(results)
        pictures += further if results is chosen[-1] else ()
        page.append(_html_section(results, tables, pictures, folder))
        text.append(_markdown_section(results, tables, pictures))
    (folder / "report.md").write_text("# Sidelane report\n\n" + "\n".join(text), encoding="utf-8")
    index = folder / PAGE
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>Sidelane report</title><style>{STYLE}</style>"
    index.write_text(f"{head}<h1>Sidelane report</h1>{''.join(page)}</html>\n", encoding="utf-8")
    return index


def _warning(results: Results) -> str:
    """Say what readers must know about figures from CPU processes."""
    return " ".join(filter(None, (CPU_WARNING, study_of(results.study).warning(results))))


def _about(results: Results) -> list[tuple[str, str]]:
    where = "CPU processes" if results.on_cpu else "GPUs"
    return [
        ("machine", f"{results.machine}: {results.device}"),
        ("ranks", f"{results.ranks} {where}"),
        ("command", results.command),
        ("date", results.date),
        ("commit", results.commit),
        ("software", ", ".join(f"{name} {version}" for name, version in results.software.items())),
    ]


def _html_section(results: Results, tables: Sequence[Table], pictures: Sequence[Picture], folder: Path) -> str:
    about = "".join(
        f"<tr><td>{html.escape(name)}</td><td>"
        + (f"<code>{html.escape(value)}</code>" if name == "command" else html.escape(value))
        + "</td></tr>"
        for name, value in _about(results)
    )
    warning = f"<p class=warn>{html.escape(_warning(results))}</p>" if results.on_cpu else ""
    images = "".join(
        f'<img alt="{html.escape(picture.text)}" src="data:image/svg+xml;base64,{inline(folder, picture)}">'
        for picture in pictures
    )
    return (
        f"<h2>{html.escape(study_of(results.study).title)}</h2><table class=about>{about}</table>{warning}{images}"
        f"<p class=note>{html.escape(study_of(results.study).legend)}</p>{''.join(table.to_html() for table in tables)}"
    )


def inline(folder: Path, picture: Picture) -> str:
    """The picture as base64, for a page that holds all it shows."""
    return base64.b64encode((folder / f"{picture.name}.svg").read_bytes()).decode()


def _markdown_section(results: Results, tables: Sequence[Table], pictures: Sequence[Picture]) -> str:
    about = "\n".join(f"- {name}: {f'`{value}`' if name == 'command' else value}" for name, value in _about(results))
    warning = [f"> {_warning(results)}"] if results.on_cpu else []
    images = [f"![{picture.text}]({picture.name}.png)" for picture in pictures]
    parts = [f"## {study_of(results.study).title}", about, *warning, *images, study_of(results.study).legend]
    return "\n\n".join([*parts, *(table.to_markdown() for table in tables)]) + "\n"
