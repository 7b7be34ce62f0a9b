"""Strategies of the C3 study as pictures."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import (
    BLACK,
    COLOURS,
    GREY,
    PLATE,
    VERMILLION,
    file_name,
    plain_name,
    save_titled,
)
from sidelane_lab.harness.study import Picture, Results
from sidelane_lab.harness.table import grouped
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.model.panels import draw_timeline
from sidelane_lab.pairs.spans import Trace
from sidelane_lab.pairs.workload import Workload
from sidelane_lab.sim import Interval, write_chrome_trace
from sidelane_lab.studies.c3.prediction import compare, draw_groups, speedups
from sidelane_lab.studies.c3.rows import C3Row, name_of_code, too_few_cores

PAIRS_A_PICTURE = 4


def draw_pairs(rows: Sequence[C3Row], results: Results, folder: Path) -> list[Picture]:
    """Pairs as groups of bars, next to predictions of a machine that is described; then a picture a collective."""
    pairs = [row for row in rows if row.speedup is not None]
    machine = named(results.machine) if results.machine in machine_names() else None
    predicted = {} if machine is None else speedups(compare(machine, pairs))
    return draw_groups(pairs, predicted, results, folder) + [
        picture
        for collective, alike in grouped(pairs, lambda row: row.collective)
        for picture in draw_strategies(collective, alike, results, folder)
    ]


def draw_strategies(collective: str, rows: Sequence[C3Row], results: Results, directory: Path) -> list[Picture]:
    """Speedup and percent of ideal by strategy, a column of panels for each pair, with axes in common."""
    pairs = grouped(rows, lambda row: (row.gemm, row.dtype, row.bytes), ordered=False)
    pictures = []
    for number, start in enumerate(range(0, len(pairs), PAIRS_A_PICTURE)):
        shown = [alike for _, alike in pairs[start : start + PAIRS_A_PICTURE]]
        # What could not run has no bar; the table has its reason.
        ran = [[row for row in alike if row.time_us is not None] for alike in shown]
        names = list(dict.fromkeys(row.strategy for alike in ran for row in alike if not row.chosen))
        size = (3.4 + 2.9 * len(shown), 1.9 + 2 * (0.5 + 0.3 * len(names)))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(2, len(shown), squeeze=False, sharex="row", sharey=True)
        limits: list[list[tuple[float, float]]] = [[], []]
        for column, alike in enumerate(shown):
            pair = alike[0]
            times = f"alone: GEMM {_time(pair.gemm_us)}, fastest collective {_time(pair.best_comm_us)}"
            shape = f"{pair.m}x{pair.n}x{pair.k}"
            panels[0][column].set_title(f"GEMM {shape} with {format_bytes(pair.bytes)}", pad=26)
            panels[0][column].annotate(
                times, (0, 1), (0, 17), "axes fraction", "offset points", fontsize=8, color=GREY, annotation_clip=False
            )
            ideal = f"ideal {pair.ideal:.2f}"
            upper, lower, bars = panels[0][column], panels[1][column], ran[column]
            limits[0].append(_bars(upper, names, bars, "speedup", "{:.2f}", pair.ideal, ideal, nothing=1.0))
            limits[1].append(_bars(lower, names, bars, "percent_of_ideal", "{:.0f}%", 100.0, "100%", nothing=0.0))
        for row, unit in enumerate(("speedup over the sum of both alone", "percent of ideal")):
            low, high = zip(*limits[row], strict=True)
            panels[row][0].set_xlim(min(low), max(high))
            for axes in panels[row]:
                axes.set_xlabel(unit)
        panels[0][0].set_ylim(len(names) - 0.4, -0.6)
        labels = [plain_name(name, on_cpu=results.on_cpu) for name in names]
        panels[0][0].set_yticks(range(len(names)), labels)
        title = f"A GEMM and a collective ({collective.replace('_', '-')}) at once: {results.where}"
        note = too_few_cores(results)
        if note:
            figure.supxlabel(textwrap.fill(note, round(14 * size[0])), x=0.01, ha="left", fontsize=8, color=VERMILLION)
        name = file_name(f"c3 {collective}") + (f"-{number + 1}" if len(pairs) > PAIRS_A_PICTURE else "")
        text = f"Speedup over serial execution and percent of the ideal speedup by strategy, next to {collective}."
        pictures.append(save_titled(figure, name, title, text, directory))
    return pictures


def _bars(
    axes: Axes,
    names: Sequence[str],
    rows: Sequence[C3Row],
    figure: str,
    pattern: str,
    mark: float | None,
    mark_name: str,
    nothing: float,
) -> tuple[float, float]:
    """Horizontal bars of a figure of ``rows``, a place a name; a dashed line at ``mark``, a solid one at ``nothing``.

    Returns:
        What the axis must show.
    """
    picked = {row.chosen for row in rows}
    drawn = [row for row in rows if not row.chosen]  # the row of auto repeats that of what it picked
    places = [names.index(row.strategy) for row in drawn]
    values = [getattr(row, figure) for row in drawn]
    numbers = [value if value is not None else nothing for value in values]
    colours = [COLOURS.get(row.strategy, GREY) for row in drawn]
    axes.barh(places, [number - nothing for number in numbers], left=nothing, color=colours, height=0.66)
    low, high = min([nothing, *numbers]), max([mark or nothing, *numbers])
    span = (high - low) or 1.0
    for place, number, value, row in zip(places, numbers, values, drawn, strict=True):
        text = "no ideal" if value is None else pattern.format(number)
        left = number < nothing
        # A white edge keeps the value readable where the dashed line runs through it.
        axes.annotate(
            f"{text} (auto)" if row.strategy in picked else text,
            (number, place),
            xytext=(-3 if left else 3, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            bbox=PLATE,
        )
    if mark is not None:
        axes.axvline(mark, color=BLACK, linestyle="--", linewidth=0.9, zorder=0)
        axes.annotate(mark_name, (mark, -0.62), ha="center", va="bottom", fontsize=8, annotation_clip=False)
    axes.axvline(nothing, color=BLACK, linewidth=0.9)
    axes.tick_params(axis="y", length=0)
    return low - (0.25 * span if low < nothing else 0.0), high + 0.35 * span


def _time(time_us: float | None) -> str:
    if time_us is None:
        return "-"
    return f"{time_us:.0f} us" if time_us < 1000 else f"{time_us / 1000:.3g} ms"


class Everyones(Protocol):
    """The meter, as far as traces need it."""

    def of_all_ranks(self, values: Sequence[float]) -> Sequence[Sequence[float]]: ...


def write_trace(folder: Path, workload: Workload, meter: Everyones, writes: bool, strategy: str, trace: Trace) -> None:
    """Write when the two parts of a pair ran on every rank, each rank from its own release on. Collective.

    Args:
        folder: made if need be.
        workload: the pair.
        meter: see there.
        writes: this rank does.
        strategy: code.
        trace: of this rank.
    """
    ends = [moment for span in (*trace.gemms, *trace.collectives) for moment in span]
    everyones = meter.of_all_ranks(ends)
    if not writes:
        return
    intervals = []
    for rank, (gemm_begins, gemm_ends, begins, ends_at) in enumerate(everyones):
        group = f"rank {rank}"
        intervals.append(Interval(group, "compute", f"GEMM {workload.gemm.name}", gemm_begins, gemm_ends))
        intervals.append(Interval(group, "communication", str(workload.collective), begins, ends_at))
    name = _name(workload.name, strategy)
    write_chrome_trace(folder / f"{name}.trace.json", intervals)
    draw_timeline(intervals, f"{workload.name} under {name_of_code(strategy)}, measured", folder, name)


def traced(folder: Path, rows: Sequence[C3Row], page: Path) -> list[Picture]:
    """Pictures of the traces of each pair under the fastest and the slowest of its strategies, for a page.

    Args:
        folder: where :func:`write_trace` has left them; what it has not is left out.
        rows: of the study.
        page: folder of the page, to which they are copied; made if need be.
    """
    page.mkdir(parents=True, exist_ok=True)
    pictures = []
    for _, alike in grouped(rows, lambda row: row.pair, ordered=False):
        times = {row.strategy: row.time_us for row in alike if row.time_us is not None and not row.chosen}
        pair = f"{alike[0].gemm}_{format_bytes(alike[0].bytes)} {alike[0].collective}"
        for strategy in dict.fromkeys(
            (min(times, key=times.__getitem__), max(times, key=times.__getitem__)) if times else ()
        ):
            name = _name(pair, strategy)
            files = [folder / f"{name}.{ending}" for ending in ("svg", "png")]
            if not all(file.exists() for file in files):
                continue
            for file in files:
                if file.parent.resolve() != page.resolve():
                    shutil.copy(file, page / file.name)
            under = f"under {name_of_code(strategy)}"
            text = f"When the GEMM and the collective of {pair} ran {under}, on every rank."
            pictures.append(Picture(name, f"{pair} {under}", text))
    return pictures


def _name(pair: str, strategy: str) -> str:
    return file_name(f"{pair} {strategy}")
