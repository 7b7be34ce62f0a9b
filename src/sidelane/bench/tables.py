"""Rows of a study as tables, for a terminal, for Markdown and for HTML.

Over 400 lines, since the tables of all studies stand together.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import rich.box
import rich.console
import rich.table
import rich.text

from sidelane.bench.results import (
    MODEL,
    PRELAUNCHED,
    C3Row,
    ChainRow,
    CollectiveRow,
    HostRow,
    PhaseRow,
    PowerRow,
    Results,
)
from sidelane.c3.workload import format_bytes

R = TypeVar("R")
K = TypeVar("K", bound=Any)  # hashable, and comparable where groups are ordered
MISSING = "-"
COLLECTIVE_COLUMNS: tuple[str, ...] = (
    "bytes",
    "<implementation",
    "<variant",
    "time\nus",
    "p10-p90\nus",
    "bus\nGB/s",
    "energy\nmJ",
    "<correct",
)
LIST_COLUMNS: tuple[str, ...] = (
    *("bytes", "<launch", "list\nus", "separate\nus", "saves\n%", "<fastest of\nthe library", "us", "ratio"),
)
C3_COLUMNS: tuple[str, ...] = (
    "<strategy",
    "collective\nalone us",
    "together\nus",
    "speedup",
    "% of\nideal",
    "% of ideal\n(library)",
    "<correct",
)
PHASE_COLUMNS: tuple[str, ...] = (
    "bytes",
    "<launch",
    "control\nus",
    "schedule\nus",
    "copy\nus",
    "slot\nus",
    "sync\nus",
    "total\nus",
    "no stamps\nus",
    "host\nus",
    "<correct",
)
CHAIN_COLUMNS: tuple[str, ...] = (
    *("bytes", "<implementation", "<variant", "<place", "chain\nus", "GEMMs\nalone us", "between\nus", "<correct"),
)
CHAIN_BEST_COLUMNS: tuple[str, ...] = (
    *(
        "bytes",
        "<launch",
        "<fastest of\nSidelane",
        "us",
        "auto\nus",
        "<fastest of\nthe library",
        "us",
        "ratio",
    ),
)
OWN, OF_LIBRARY = ("dma", "sm", "auto"), ("nccl", "nccl_ce", "gloo")
HOST_COLUMNS: tuple[str, ...] = (
    "bytes",
    "<implementation",
    "<variant",
    "<tensors",
    "driver\ncalls",
    "host\nus",
    "p10-p90\nus",
    "best\nus",
    "<correct",
)
PREDICTED = "predicted"
POWER_COLUMNS: tuple[str, ...] = (
    "bytes",
    "<implementation",
    "<variant",
    "time\nus",
    "W",
    "read/\ncount %",
    "energy\nmJ",
    "above\nidle mJ",
    "<correct",
)


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
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    def to_rich(self) -> rich.console.Group:
        """For a terminal."""
        table = rich.table.Table(title=self.title, title_justify="left", box=rich.box.SIMPLE_HEAD, padding=0)
        for column in self.columns:
            table.add_column(column.removeprefix("<"), justify=_side(column), no_wrap=True)
        for line in self.lines:
            # As text: square brackets in a cell are no markup.
            cells = [rich.text.Text(cell) for cell in line.cells]
            table.add_row(*cells, style="bold" if line.best else None, end_section=line.rule)
        return rich.console.Group(table, *(rich.text.Text(f" {note}", style="dim") for note in self.notes), "")

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


def tables_of(results: Results) -> list[Table]:
    """The tables of a study."""
    if results.study == "collectives":
        return _collective_tables([row for row in results.rows if isinstance(row, CollectiveRow)])
    if results.study == "phases":
        return phase_tables([row for row in results.rows if isinstance(row, PhaseRow)])
    if results.study == "power":
        return power_tables([row for row in results.rows if isinstance(row, PowerRow)])
    if results.study == "chain":
        return _chain_tables([row for row in results.rows if isinstance(row, ChainRow)])
    if results.study == "host":
        return _host_tables([row for row in results.rows if isinstance(row, HostRow)])
    return _c3_tables([row for row in results.rows if isinstance(row, C3Row)])


def _collective_tables(rows: Sequence[CollectiveRow]) -> list[Table]:
    """One table for each way to call a collective, ordered by size as in nccl-tests; each size's fastest is set off.

    Lists of tensors have one before these that holds them against separate calls and against the library.
    """
    listed = [row for row in rows if row.tensors > 1]
    calls = grouped(listed, lambda row: (row.collective, row.dtype, row.in_place, row.tensors))
    tables = [_list_summary(alike) for _, alike in calls]
    for _, alike in grouped(rows, lambda row: (row.collective, row.dtype, row.in_place, row.launch, row.tensors)):
        lines = []
        for _, same in grouped(alike, lambda row: row.bytes):
            ranked = sorted(same, key=lambda row: (row.time_us is None, row.time_us or 0.0))
            lines += [
                Line(_collective_cells(row), best=place == 0 and row.time_us is not None, rule=row is ranked[-1])
                for place, row in enumerate(ranked)
            ]
        notes = _notes([(f"{' '.join(_collective_cells(row)[:3]).rstrip()}", row.note) for row in alike])
        tables.append(_without_empty_columns(Table(way_to_call(alike[0]), COLLECTIVE_COLUMNS, tuple(lines), notes)))
    return tables


def _list_summary(rows: Sequence[CollectiveRow]) -> Table:
    """What a list saves: ``auto`` with it in one call, ``auto`` in a call for each tensor, and the library's best."""
    lines = []
    for (nbytes, launch), same in grouped(rows, lambda row: (row.bytes, row.launch)):
        timed = [row for row in same if row.time_us is not None]
        auto = {row.separate: row.time_us for row in timed if row.implementation == "auto"}
        theirs = min((row for row in timed if row.implementation in OF_LIBRARY), key=_time_of, default=None)
        one, each, other = auto.get(False), auto.get(True), None if theirs is None else theirs.time_us
        saves = f"{100 * (1 - one / each):.0f}" if one and each else MISSING
        ratio = f"{other / one:.3f}" if one and other else MISSING
        name = f"{theirs.implementation} {theirs.variant}".rstrip() if theirs else ""
        cells = (format_bytes(nbytes), launch, _number(one), _number(each), saves, name, _number(other), ratio)
        lines.append(Line(cells, best=bool(one and one <= min(each or one, other or one))))
    first = rows[0]
    title = f"{first.collective}, {first.dtype}, {_place(first)}, lists of {first.tensors} tensors"
    note = (
        "list, separate: auto, in one call and in a call for each tensor; ratio: the library's time over that of list"
    )
    return Table(f"{title} against separate calls", LIST_COLUMNS, tuple(lines), (note,))


def _place(row: CollectiveRow) -> str:
    return "in place" if row.in_place else "out of place"


def _time_of(row: CollectiveRow) -> float:
    return row.time_us or 0.0


def way_to_call(row: CollectiveRow) -> str:
    """What rows of one table and one picture have in common."""
    listed = f", lists of {row.tensors} tensors" if row.tensors > 1 else ""
    return f"{row.collective}, {row.dtype}, {_place(row)}, {row.launch}{listed}"


def _collective_cells(row: CollectiveRow) -> tuple[str, ...]:
    spread = f"{_number(row.p10_us)}-{_number(row.p90_us)}" if row.p10_us is not None else ""
    return (
        format_bytes(row.bytes),
        row.implementation,
        row.variant + ("+prelaunch" if row.prelaunch and "prelaunch" not in row.variant else ""),
        _number(row.time_us),
        spread,
        _number(row.bus_gbps),
        "" if row.energy_mj is None else _number(row.energy_mj),
        _verdict(row.correct),
    )


def _c3_tables(rows: Sequence[C3Row]) -> list[Table]:
    """One table a pair of GEMM and collective; the strategy with the highest percent of ideal is set off."""
    tables = []
    for _, same in grouped(rows, lambda row: (row.gemm, row.dtype, row.collective, row.bytes), ordered=False):
        first = next((row for row in same if row.gemm_us is not None), same[0])
        best = max((row.percent_of_ideal for row in same if row.percent_of_ideal is not None), default=None)
        ideal = f"ideal speedup {first.ideal:.2f}" if first.ideal is not None else "no ideal"
        title = (
            f"{first.gemm} ({first.m}x{first.n}x{first.k} {first.dtype}) with {first.collective} of "
            f"{format_bytes(first.bytes)}: {first.c3_class}, GEMM alone {_number(first.gemm_us)} us, best collective "
            f"alone {_number(first.best_comm_us)} us, {ideal}"
        )
        picked = {row.chosen for row in same}
        lines = tuple(
            Line(_c3_cells(row, picked), best=best is not None and row.percent_of_ideal == best)
            for row in same
            if not row.chosen  # the row of auto repeats that of the strategy that it picked, which says so
        )
        notes = _notes([(row.strategy, row.note) for row in same])
        tables.append(_without_empty_columns(Table(title, C3_COLUMNS, lines, notes)))
    return tables


def too_few_cores(results: Results) -> str:
    """What readers of a study of pairs between CPU processes must know if there was nothing to run both at once on."""
    found = re.search(r"(\d+) cores$", results.device) if results.on_cpu and results.study == "c3" else None
    needed = 2 * results.ranks
    if found is None or int(found[1]) >= needed:
        return ""
    return (
        f"This machine has {found[1]} cores and would need {needed} (each rank computes on one and moves bytes on "
        "another), so the two take turns here, and a speedup of about 1, 0% of ideal, is the best to expect."
    )


def _c3_cells(row: C3Row, picked: Collection[str]) -> tuple[str, ...]:
    return (
        row.strategy + (" (auto)" if row.strategy in picked else ""),
        _number(row.comm_us),
        _number(row.time_us),
        MISSING if row.speedup is None else f"{row.speedup:.2f}",
        MISSING if row.percent_of_ideal is None else f"{row.percent_of_ideal:.0f}",
        "" if row.percent_of_ideal_nccl is None else f"{row.percent_of_ideal_nccl:.0f}",
        _verdict(row.correct),
    )


def phase_tables(rows: Sequence[PhaseRow]) -> list[Table]:
    """One table an operation and variant: what was measured, and what is predicted, size by size."""
    tables = []
    for title, alike in grouped(rows, phase_title, ordered=False):
        sizes = grouped(alike, lambda row: row.bytes)
        rule = any(len(same) > 1 for _, same in sizes)
        lines = [Line(_phase_cells(row), rule=rule and row is same[-1]) for _, same in sizes for row in same]
        predicted = [row for row in alike if row.source == PREDICTED and row.total_us is not None]
        notes = _notes([(f"{format_bytes(row.bytes)} {row.launch}", row.note) for row in alike if row not in predicted])
        notes += tuple(dict.fromkeys(row.note for row in predicted if row.note))
        tables.append(_without_empty_columns(Table(title, PHASE_COLUMNS, tuple(lines), notes)))
    return tables


def phase_title(row: PhaseRow) -> str:
    """What rows of one table and one picture have in common."""
    return f"{row.operation} {row.variant}"


def _phase_cells(row: PhaseRow) -> tuple[str, ...]:
    before, after = (row.control_us, row.schedule_us, row.copy_us), (row.sync_us, row.total_us)
    times = (*map(_number, before), _number(row.stage_us) if row.stage_us else "", *map(_number, after))
    if row.source == PREDICTED:
        return (format_bytes(row.bytes), PREDICTED, *times, "", _number(row.host_us), "")
    looked = (_number(row.total_unstamped_us), _number(row.host_us), _verdict(row.correct))
    return (format_bytes(row.bytes), row.launch, *times, *looked)


def power_tables(rows: Sequence[PowerRow]) -> list[Table]:
    """One table for each way to call a collective; the least energy of each size is set off."""
    tables = []
    for _, alike in grouped(rows, lambda row: (row.collective, row.in_place, row.launch)):
        lines = []
        for _, same in grouped(alike, lambda row: row.bytes):
            ranked = sorted(same, key=lambda row: (row.energy_mj is None, row.energy_mj or 0.0))
            lines += [
                Line(_power_cells(row), best=place == 0 and row.energy_mj is not None, rule=row is ranked[-1])
                for place, row in enumerate(ranked)
            ]
        idle = next((f", idle {row.idle_watts:.0f} W" for row in alike if row.idle_watts is not None), "")
        notes = _notes([(" ".join(_power_cells(row)[:3]).rstrip(), row.note) for row in alike])
        title = f"{power_title(alike[0])}: W a GPU{idle}, energy of all GPUs for one call"
        tables.append(_without_empty_columns(Table(title, POWER_COLUMNS, tuple(lines), notes)))
    return tables


def power_title(row: PowerRow) -> str:
    """What rows of one table and one picture have in common."""
    place = "in place" if row.in_place else "out of place"
    return f"{row.collective}, {place}" + (f", {row.launch}" if row.launch != MODEL else "")


def _power_cells(row: PowerRow) -> tuple[str, ...]:
    return (
        format_bytes(row.bytes),
        row.implementation,
        row.variant,
        _number(row.time_us),
        _number(row.watts),
        "" if row.counters_agree_percent is None else f"{row.counters_agree_percent:.0f}",
        _number(row.energy_mj),
        _number(row.energy_above_idle_mj),
        "" if row.launch == MODEL else _verdict(row.correct),
    )


def _chain_tables(rows: Sequence[ChainRow]) -> list[Table]:
    """Sidelane's best against the library's, then one table for each way to launch; each size's fastest is set off."""
    tables = [_chain_summary(rows)] if rows else []
    for launch, alike in grouped(rows, lambda row: row.launch):
        lines = []
        for _, same in grouped(alike, lambda row: row.bytes):
            ranked = sorted(same, key=lambda row: (row.time_us is None, row.time_us))
            lines += [
                Line(_chain_cells(row), best=place == 0 and row.time_us is not None, rule=row is ranked[-1])
                for place, row in enumerate(ranked)
            ]
        notes = _notes([(" ".join(_chain_cells(row)[:4]).rstrip(), row.note) for row in alike])
        tables.append(Table(f"GEMM, all_gather, GEMM, {alike[0].dtype}, {launch}", CHAIN_COLUMNS, tuple(lines), notes))
    return tables


def _chain_summary(rows: Sequence[ChainRow]) -> Table:
    """The fastest of both sides, size by size. Libraries have no prelaunched calls: there it is their eager one."""

    def fastest(nbytes: int, launch: str, names: Collection[str]) -> ChainRow | None:
        found = [row for row in rows if (row.bytes, row.launch) == (nbytes, launch) and row.implementation in names]
        return min((row for row in found if row.time_us), key=lambda row: row.time_us or 0.0, default=None)

    lines = []
    for (nbytes, launch), _ in grouped(rows, lambda row: (row.bytes, row.launch)):
        ours, auto = fastest(nbytes, launch, OWN), fastest(nbytes, launch, ("auto",))
        theirs = fastest(nbytes, "eager" if launch == PRELAUNCHED else launch, OF_LIBRARY)
        us = [_number(row.time_us if row else None) for row in (ours, auto, theirs)]
        # On our side without the implementation: the variant tells it.
        names = [" ".join(filter(None, _chain_cells(row)[a:4])) if row else "" for row, a in ((ours, 2), (theirs, 1))]
        ratio = theirs.time_us / ours.time_us if theirs and theirs.time_us and ours and ours.time_us else None
        cells = (format_bytes(nbytes), launch, names[0], us[0], us[1], names[1], us[2])
        lines.append(Line((*cells, MISSING if ratio is None else f"{ratio:.3f}"), best=ratio is not None and ratio > 1))
    return Table(f"GEMM, all_gather, GEMM, {rows[0].dtype}: the fastest", CHAIN_BEST_COLUMNS, tuple(lines))


def _chain_cells(row: ChainRow) -> tuple[str, ...]:
    return (
        format_bytes(row.bytes),
        row.implementation,
        row.variant,
        "in" if row.in_place else "out",
        _number(row.time_us),
        _number(row.gemms_us),
        _number(None if row.time_us is None else row.time_us - row.gemms_us),
        _verdict(row.correct),
    )


def _host_tables(rows: Sequence[HostRow]) -> list[Table]:
    """One table an operation, in the order of the rows; what takes the host least at each size is set off."""
    tables = []
    for operation, alike in grouped(rows, lambda row: row.operation, ordered=False):
        lines = []
        for _, same in grouped(alike, lambda row: row.bytes):
            best = min((row.host_us for row in same if row.host_us is not None), default=None)
            lines += [
                Line(_host_cells(row), best=best is not None and row.host_us == best, rule=row is same[-1])
                for row in same
            ]
        of_all = {row.note for row in alike}
        names = [" ".join(_host_cells(row)[:4]) if len(of_all) > 1 else "all" for row in alike]
        notes = _notes(list(dict.fromkeys(zip(names, (row.note for row in alike), strict=True))))
        tables.append(_without_empty_columns(Table(f"{operation}: host time", HOST_COLUMNS, tuple(lines), notes)))
    return tables


def _host_cells(row: HostRow) -> tuple[str, ...]:
    return (
        format_bytes(row.bytes),
        row.implementation,
        row.variant,
        "symmetric" if row.symmetric else "ordinary",
        "" if row.driver_calls is None else str(row.driver_calls),
        _number(row.host_us),
        "" if row.p10_us is None else f"{_number(row.p10_us)}-{_number(row.p90_us)}",
        _number(row.best_us),
        _verdict(row.correct),
    )


def _notes(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """What rows say about themselves, under the table: it may be long. Rows that say the same share a line."""
    alike = grouped([row for row in rows if row[1]], lambda row: row[1], ordered=False)
    return tuple(f"{', '.join(name for name, _ in members)}: {note}" for note, members in alike)


def _without_empty_columns(table: Table) -> Table:
    kept = [index for index in range(len(table.columns)) if any(line.cells[index] for line in table.lines)]
    lines = tuple(dataclasses.replace(line, cells=tuple(line.cells[index] for index in kept)) for line in table.lines)
    return dataclasses.replace(table, columns=tuple(table.columns[index] for index in kept), lines=lines)


def grouped(rows: Iterable[R], key: Callable[[R], K], *, ordered: bool = True) -> list[tuple[K, list[R]]]:
    """Rows with equal keys together: sorted by key, or in the order of their first rows."""
    groups: dict[K, list[R]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda group: group[0]) if ordered else list(groups.items())


def _number(value: float | None) -> str:
    """Three significant digits or whole numbers, whichever is longer."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _verdict(correct: bool | None) -> str:
    return {True: "yes", False: "WRONG", None: "not run"}[correct]


def _heading(column: str) -> str:
    return column.removeprefix("<").replace("\n", " ")


def _side(column: str) -> Any:
    return "left" if column.startswith("<") else "right"
