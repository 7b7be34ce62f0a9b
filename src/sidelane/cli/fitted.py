"""A table in as many columns as a terminal has. No number is ever cut: what does not fit stands elsewhere.

From wide to narrow: the table as it is; its texts folded between words; blocks of columns below each other, each of
which repeats what names the lines; and each line as a small paragraph.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import rich.box
import rich.padding
import rich.table
import rich.text
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType

MOST_BLOCKS = 3
"""Of columns below each other. With more of them paragraphs read better."""

MOST_FOLDS = 3
"""Lines that the text of a cell may take."""

INDENT, GAP = "    ", "   "


class Row(Protocol):
    """What ``table.Line`` has."""

    @property
    def cells(self) -> tuple[str, ...]: ...

    @property
    def best(self) -> bool: ...

    @property
    def rule(self) -> bool: ...


class Tabular(Protocol):
    """What ``table.Table`` has."""

    @property
    def title(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def lines(self) -> Sequence[Row]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def keys(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column with its widths: ``natural`` shows it as it is, ``least`` folds it between words."""

    heading: str
    side: str
    cells: tuple[str, ...]
    natural: int
    least: int


@dataclasses.dataclass(frozen=True)
class FittedTable:
    """Renders a table for the terminal that it is printed on."""

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
    """Columns below each other with the widths that they get; none if that takes too many blocks, or is impossible."""
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
    """Widths side by side, the widest text folded first; none if they do not fit."""
    widths = [column.natural for column in columns]
    excess = sum(widths) + len(columns) + 1 - width
    for _ in range(excess):
        spare = [n for n, column in enumerate(columns) if widths[n] > column.least]
        if not spare:
            return []
        widths[max(spare, key=lambda n: widths[n])] -= 1
    return list(zip(columns, widths, strict=True))


def _packed(items: Iterable[str], width: int) -> Iterator[str]:
    """Items on lines, each whole where a line can hold it, else folded between words."""
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
