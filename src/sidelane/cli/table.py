"""A table that does not know where it will be shown (terminal, Markdown, HTML), and what fills its cells."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from sidelane.cli.fitted import FittedTable

R = TypeVar("R")
K = TypeVar("K", bound=Any)  # hashable, and comparable where groups are ordered
MISSING = "-"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Cells of one line. ``best``: to be set off from the others; ``rule``: a group of lines ends with this one."""

    cells: tuple[str, ...]
    best: bool = False
    rule: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table that does not know where it will be shown.

    Attributes:
        title: what the lines are about.
        columns: headings; one that begins with ``<`` has its cells to the left, others to the right. Line breaks in
            them keep columns narrow on a terminal.
        lines: the lines.
        notes: what a reader must know, one line each.
        keys: columns, the first ones, that say what a line is about; where a terminal is too narrow for all columns,
            these are repeated.
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    keys: int = 1

    def to_rich(self) -> FittedTable:
        """For a terminal of any width."""
        return FittedTable(self)

    def to_markdown(self) -> str:
        """For a Markdown file; the best lines are bold."""
        marks = {"left": ":--", "right": "--:"}
        rows = [
            [_heading(column) for column in self.columns],
            [marks[_side(column)] for column in self.columns],
            *([f"**{cell}**" if line.best else cell for cell in line.cells] for line in self.lines),
        ]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(filter(None, [f"### {self.title}", body, notes]))

    def to_html(self) -> str:
        """For an HTML page; classes: ``l`` for cells to the left, ``best`` and ``rule`` for lines."""
        sides = ["l" if _side(column) == "left" else "r" for column in self.columns]
        head = "".join(
            f'<th class="{side}">{html.escape(_heading(column))}</th>'
            for side, column in zip(sides, self.columns, strict=True)
        )
        body = ""
        for line in self.lines:
            names = " ".join(name for name, on in (("best", line.best), ("rule", line.rule)) if on)
            cells = "".join(
                f'<td class="{side}">{html.escape(cell)}</td>' for side, cell in zip(sides, line.cells, strict=True)
            )
            body += f'<tr class="{names}">{cells}</tr>\n'
        notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in self.notes)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<h3>{html.escape(self.title)}</h3>{table}{notes}"


def grouped(rows: Iterable[R], key: Callable[[R], K], *, ordered: bool = True) -> list[tuple[K, list[R]]]:
    """Rows with equal keys together: sorted by key, or in the order of their first rows."""
    groups: dict[K, list[R]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda group: group[0]) if ordered else list(groups.items())


def notes_of(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """What rows say about themselves, under the table: it may be long. Rows that say the same share a line."""
    alike = grouped([row for row in rows if row[1]], lambda row: row[1], ordered=False)
    return tuple(f"{', '.join(name for name, _ in members)}: {note}" for note, members in alike)


def without_empty_columns(table: Table) -> Table:
    """The table less the columns in which no line has anything."""
    kept = [index for index in range(len(table.columns)) if any(line.cells[index] for line in table.lines)]
    lines = tuple(dataclasses.replace(line, cells=tuple(line.cells[index] for index in kept)) for line in table.lines)
    columns, keys = tuple(table.columns[index] for index in kept), sum(index < table.keys for index in kept)
    return dataclasses.replace(table, columns=columns, lines=lines, keys=keys)


def place_of(in_place: bool) -> str:
    """Whether input and output share their memory, in words."""
    return "in place" if in_place else "out of place"


def number(value: float | None) -> str:
    """Three significant digits or whole numbers, whichever is longer."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def verdict(correct: bool | None) -> str:
    """What became of comparing a row's outputs with a reference."""
    return {True: "yes", False: "WRONG", None: "not run"}[correct]


def _heading(column: str) -> str:
    return column.removeprefix("<").replace("\n", " ")


def _side(column: str) -> Any:
    return "left" if column.startswith("<") else "right"
