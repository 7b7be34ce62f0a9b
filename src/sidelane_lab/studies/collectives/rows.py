"""Rows of collectives that run alone, as nccl-tests has them, as tables and as pictures over size."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from matplotlib.figure import Figure

from sidelane.cli.table import (
    MISSING,
    Line,
    Table,
    grouped,
    number,
    place_of,
)
from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import (
    COLOURS,
    STYLES,
    file_name,
    label_ends,
    save,
    size_axis,
)
from sidelane_lab.harness.report import Cell, spread, table_of
from sidelane_lab.harness.rows import IMPLEMENTATIONS, LAUNCHES, OF_LIBRARY, SEPARATE, Allowed, FlatRow
from sidelane_lab.harness.study import Picture, Results


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveRow(FlatRow):
    """One line of a table like that of nccl-tests.

    Attributes:
        bytes: gathered size for an all_gather, the whole local buffer for the others.
        variant: algorithm within the implementation (``pcpy``, ``b2b``, ...; empty where there is one only). With
            ``separate`` or ``+separate``: a call for each tensor of the list, one behind the other, instead of one call
            (NCCL: one group of calls) with all of them.
        time_us: of all calls for the bytes, median over the rounds of the slowest rank's time; p10_us and p90_us
            likewise.
        bus_gbps: see :func:`bus_gbps`.
        energy_mj: of all GPUs for one call; None when it was not measured.
        correct: outputs were compared with a reference in this run; None when it could not run.
        note: why there is no time, or what to know about this one.
        tensors: that share the bytes: 1 where a call takes one tensor, as in files without this key; otherwise the
            length of a list.
    """

    allowed: ClassVar[Allowed] = (("launch", LAUNCHES), ("implementation", IMPLEMENTATIONS))
    figures: ClassVar[tuple[str, ...]] = ("time_us", "bus_gbps")

    collective: str
    bytes: int
    dtype: str
    in_place: bool
    launch: str
    implementation: str
    variant: str
    prelaunch: bool
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    bus_gbps: float | None
    energy_mj: float | None
    correct: bool | None
    note: str = ""
    tensors: int = 1

    def __post_init__(self) -> None:
        FlatRow.__post_init__(self)
        if self.bytes < 0:
            raise ValueError(f"CollectiveRow: bytes must not be negative (value={self.bytes})")
        if self.tensors < 1:
            raise ValueError(f"CollectiveRow: tensors (value={self.tensors}, allowed=1 and more)")

    @property
    def separate(self) -> bool:
        """A list, in a call for each tensor."""
        return self.variant.rpartition("+")[2] == SEPARATE


def bus_gbps(collective: str, nbytes: int, ranks: int, time_us: float) -> float:
    """Bus bandwidth as nccl-tests defines it (its PERFORMANCE.md): comparable over collectives and numbers of ranks.

    >>> bus_gbps("all_gather", 4_000_000_000, 4, 10_000.0)
    300.0
    """
    shares = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
    return nbytes / (time_us * 1e3) * shares.get(collective, (ranks - 1) / ranks)


COLLECTIVE_COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<implementation": "implementation",
    "<variant": lambda row, _: row.variant + ("+prelaunch" if row.prelaunch and "prelaunch" not in row.variant else ""),
    "time\nus": "time_us",
    "p10-p90\nus": spread,
    "bus\nGB/s": "bus_gbps",
    "energy\nmJ": "energy_mj",
    "<correct": "correct",
}
LIST_COLUMNS: tuple[str, ...] = (
    *("bytes", "<launch", "list\nus", "separate\nus", "saves\n%", "<fastest of\nthe library", "us", "ratio"),
)


def collective_tables(rows: Sequence[CollectiveRow]) -> list[Table]:
    """One table for each way to call a collective, ordered by size as in nccl-tests; each size's fastest is set off.

    Lists of tensors have one before these that holds them against separate calls and against the library.
    """
    listed = [row for row in rows if row.tensors > 1]
    calls = grouped(listed, lambda row: (row.collective, row.dtype, row.in_place, row.tensors))
    tables = [_list_summary(alike) for _, alike in calls]
    for _, alike in grouped(rows, lambda row: (row.collective, row.dtype, row.in_place, row.launch, row.tensors)):
        title = way_to_call(alike[0])
        tables.append(table_of(title, alike, COLLECTIVE_COLUMNS, by=lambda row: row.bytes, ordered=True, keys=3))
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
        cells = (format_bytes(nbytes), launch, number(one), number(each), saves, name, number(other), ratio)
        lines.append(Line(cells, best=bool(one and one <= min(each or one, other or one))))
    first = rows[0]
    title = f"{first.collective}, {first.dtype}, {place_of(first.in_place)}, lists of {first.tensors} tensors"
    note = (
        "list, separate: auto, in one call and in a call for each tensor; ratio: the library's time over that of list"
    )
    return Table(f"{title} against separate calls", LIST_COLUMNS, tuple(lines), (note,), keys=2)


def way_to_call(row: CollectiveRow) -> str:
    """What rows of one table and one picture have in common."""
    listed = f", lists of {row.tensors} tensors" if row.tensors > 1 else ""
    return f"{row.collective}, {row.dtype}, {place_of(row.in_place)}, {row.launch}{listed}"


def _time_of(row: CollectiveRow) -> float:
    return row.time_us or 0.0


R = TypeVar("R", bound=CollectiveRow)


def _variant(row: CollectiveRow) -> str:
    """The variant; one line for what auto chose, whatever that was at each size."""
    return row.variant if row.implementation != "auto" else SEPARATE if row.separate else ""


def draw_ways(rows: Sequence[CollectiveRow], results: Results, folder: Path) -> list[Picture]:
    """A picture for each way to call a collective."""
    return [
        draw_sizes(way, alike, results, folder) for way, alike in grouped([r for r in rows if r.time_us], way_to_call)
    ]


def draw_sizes(
    way: str, rows: Sequence[R], results: Results, directory: Path, *, line_of: Callable[[R], str] = _variant
) -> Picture:
    """Bus bandwidth over size and time over size, one line an implementation and what ``line_of`` says of a row."""
    lines = grouped(rows, lambda row: (row.implementation, line_of(row), row.prelaunch))
    lines.sort(key=lambda line: list(COLOURS).index(line[0][0]))
    styles = {name: itertools.cycle(STYLES) for name in COLOURS}
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    bandwidth, time = figure.subplots(1, 2)
    ends: list[tuple[float, float, str, str]] = []
    starts: list[tuple[float, float, str, str]] = []
    for (implementation, variant, prelaunch), points in lines:
        points = sorted(points, key=lambda row: row.bytes)
        style, marker = next(styles[implementation])
        colour = COLOURS[implementation]
        name = " ".join(filter(None, [implementation, variant]))
        name += "+prelaunch" if prelaunch and "prelaunch" not in name else ""
        sizes = [row.bytes for row in points]
        rates, times = [row.bus_gbps or 0.0 for row in points], [row.time_us or 0.0 for row in points]
        looks = {"color": colour, "linestyle": style, "marker": marker, "markersize": 4, "linewidth": 1.4}
        bandwidth.plot(sizes, rates, **looks)
        time.plot(sizes, times, **looks)
        ends.append((sizes[-1], rates[-1], name, colour))
        starts.append((sizes[0], times[0], name, colour))
    time.set_yscale("log")
    for axes, title in ((bandwidth, "Bus bandwidth, GB/s (more is better)"), (time, "Time, us (less is better)")):
        size_axis(axes, sorted({row.bytes for row in rows}))
        axes.set_title(title)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    bandwidth.set_ylim(bottom=0)
    label_ends(bandwidth, ends, side="right")
    label_ends(time, starts, side="left")
    title = f"{way}: {results.where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = f"Bus bandwidth and time over size for {way}, one line an implementation and variant."
    return save(figure, file_name(way), title, text, directory)
