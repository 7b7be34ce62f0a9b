"""Tables independent of their output (terminal, Markdown, HTML), and formats of their cells."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import rich.box
import rich.padding
import rich.table
import rich.text
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType

MOST_BLOCKS = 3
"""Largest number of blocks of columns below each other. With more, paragraphs read better."""

MOST_FOLDS = 3
"""Largest number of lines of a cell's text."""

INDENT, GAP = "    ", "   "


class TableRow(Protocol):
    """Interface of a line of a table, such as :class:`Line`."""

    @property
    def cells(self) -> tuple[str, ...]: ...

    @property
    def best(self) -> bool: ...

    @property
    def rule(self) -> bool: ...


class Tabular(Protocol):
    """Interface of a table, such as :class:`Table`."""

    @property
    def title(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def lines(self) -> Sequence[TableRow]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def keys(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column with its widths: ``natural`` shows it in full, ``least`` folds it between words."""

    heading: str
    side: str
    cells: tuple[str, ...]
    natural: int
    least: int


@dataclasses.dataclass(frozen=True)
class FittedTable:
    """Renderer of a table for the terminal that it is printed on."""

    table: Tabular

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table, width = self.table, options.max_width
        yield rich.text.Text(table.title, style="table.title")
        columns = [_column(name, [line.cells[n] for line in table.lines]) for n, name in enumerate(table.columns)]
        blocks = _blocks(columns, table.keys, width)
        for block in blocks:
            yield self._block(block)
        if not blocks:
            yield from self._paragraphs(columns, width)
        for note in table.notes:
            yield rich.padding.Padding(rich.text.Text(note, style="dim"), (0, 0, 0, 1), expand=False)
        yield ""

    def _block(self, block: Sequence[tuple[_Column, int]]) -> rich.table.Table:
        drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=0)
        for column, width in block:
            justify: Any = column.side
            drawn.add_column(column.heading, justify=justify, width=width, no_wrap=width >= column.natural)
        for number, line in enumerate(self.table.lines):
            # As text: square brackets in a cell are no markup.
            cells = [rich.text.Text(column.cells[number]) for column, _ in block]
            drawn.add_row(*cells, style="bold" if line.best else None, end_section=line.rule)
        return drawn

    def _paragraphs(self, columns: Sequence[_Column], width: int) -> Iterator[RenderableType]:
        keys, others = columns[: self.table.keys], columns[self.table.keys :]
        yield ""
        for number, line in enumerate(self.table.lines):
            style = "bold" if line.best else ""
            name = " " + "  ".join(filter(None, (column.cells[number] for column in keys)))
            named = [(" ".join(column.heading.split()), column.cells[number]) for column in others]
            items = [f"{heading}: {cell}" for heading, cell in named if cell]
            whole = GAP.join([name, *items])
            if cell_len(whole) <= width:
                yield rich.text.Text(whole, style=style)
            else:
                texts = _packed(items, width - len(INDENT) - 1)
                yield from (rich.text.Text(text, style=style) for text in (name, *(INDENT + text for text in texts)))
            if line.rule:
                yield ""
        if not (self.table.lines and self.table.lines[-1].rule):
            yield ""


def _column(name: str, cells: Sequence[str]) -> _Column:
    heading = name.removeprefix("<")
    natural = max(map(cell_len, (*heading.split("\n"), *cells)))
    least = natural
    if name.startswith("<"):
        words = max((cell_len(word) for text in (heading, *cells) for word in text.split()), default=0)
        least = max(words, *map(cell_len, heading.split("\n")), -(-natural // MOST_FOLDS))
    return _Column(heading, "left" if name.startswith("<") else "right", tuple(cells), natural, least)


def _blocks(columns: Sequence[_Column], keys: int, width: int) -> list[list[tuple[_Column, int]]]:
    """Return blocks of columns with their widths, below each other; none if too many or impossible."""
    if whole := _widths(columns, width):
        return [whole]
    first, left = list(columns[:keys]), list(columns[keys:])
    blocks: list[list[tuple[_Column, int]]] = []
    while left and len(blocks) < MOST_BLOCKS:
        taken = max((n for n in range(1, len(left) + 1) if _widths([*first, *left[:n]], width)), default=0)
        block = _widths([*first, *left[:taken]], width)
        if not taken or not block:
            return []
        blocks.append(block)
        left = left[taken:]
    return [] if left else blocks


def _widths(columns: Sequence[_Column], width: int) -> list[tuple[_Column, int]]:
    """Return the widths side by side, the widest text folded first; none if they do not fit."""
    widths = [column.natural for column in columns]
    excess = sum(widths) + len(columns) + 1 - width
    for _ in range(excess):
        spare = [n for n, column in enumerate(columns) if widths[n] > column.least]
        if not spare:
            return []
        widths[max(spare, key=lambda n: widths[n])] -= 1
    return list(zip(columns, widths, strict=True))


def _packed(items: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines of items, each item whole if a line can hold it, else folded between words."""
    line = ""
    for item in items:
        if line and cell_len(line) + len(GAP) + cell_len(item) <= width:
            line += GAP + item
            continue
        if line:
            yield line
        *folded, line = textwrap.wrap(item, max(width, 8), break_long_words=False, break_on_hyphens=False) or [""]
        yield from folded
    if line:
        yield line


R = TypeVar("R")
K = TypeVar("K", bound=Any)  # hashable, and comparable where groups are ordered
MISSING = "-"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Cells of one line. ``best``: it is emphasised; ``rule``: a group of lines ends with this one."""

    cells: tuple[str, ...]
    best: bool = False
    rule: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table independent of its output.

    Attributes:
        title: subject of the lines.
        columns: headings; one that begins with ``<`` has its cells to the left, others to the right. Line breaks in
            them keep columns narrow on a terminal.
        lines: the lines.
        notes: notes for the reader, one line each.
        keys: number of leading columns that identify a line; if a terminal is too narrow for all columns, these are
            repeated.
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    keys: int = 1

    def to_rich(self) -> FittedTable:
        """Return the table for a terminal of any width."""
        return FittedTable(self)

    def to_markdown(self) -> str:
        """Return the table for a Markdown file; the best lines are bold."""
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
        """Return the table for an HTML page; classes: ``l`` for cells to the left, ``best`` and ``rule`` for lines."""
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
    """Return rows with equal keys together: sorted by key, or in the order of their first rows."""
    groups: dict[K, list[R]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda group: group[0]) if ordered else list(groups.items())


def notes_of(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the notes of rows, for below the table, as they may be long. Rows with the same note share a line."""
    alike = grouped([row for row in rows if row[1]], lambda row: row[1], ordered=False)
    return tuple(f"{', '.join(name for name, _ in members)}: {note}" for note, members in alike)


def without_empty_columns(table: Table) -> Table:
    """Return the table without the columns that are empty in all lines."""
    kept = [index for index in range(len(table.columns)) if any(line.cells[index] for line in table.lines)]
    lines = tuple(dataclasses.replace(line, cells=tuple(line.cells[index] for index in kept)) for line in table.lines)
    columns, keys = tuple(table.columns[index] for index in kept), sum(index < table.keys for index in kept)
    return dataclasses.replace(table, columns=columns, lines=lines, keys=keys)


def place_of(in_place: bool) -> str:
    """Return the words for input and output in one memory, or in two."""
    return "in place" if in_place else "out of place"


def number(value: float | None) -> str:
    """Format a number with three significant digits or as a whole number, whichever is longer."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def verdict(correct: bool | None) -> str:
    """Return the result of comparing a row's outputs with a reference, in words."""
    return {True: "yes", False: "WRONG", None: "not run"}[correct]


def _heading(column: str) -> str:
    return column.removeprefix("<").replace("\n", " ")


def _side(column: str) -> Any:
    return "left" if column.startswith("<") else "right"
