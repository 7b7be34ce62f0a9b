"""The pictures of the demo: how much communication disappears behind a GEMM, an all-gather by size, two timelines.

The few measured figures beside predictions travel with the package in ``papers/data/measured.json``.
``python tests/lab/test_demo.py`` makes that file from ``results/``, and a test compares it with them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.harness.drawing import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    RC,
    STYLES,
    VERMILLION,
    label_ends,
    save,
    size_axis,
)
from sidelane_lab.harness.study import Picture
from sidelane_lab.harness.table import grouped
from sidelane_lab.machines.load import named
from sidelane_lab.model.panels import draw_timeline
from sidelane_lab.model.strategies import predict
from sidelane_lab.model.study import TABLE_II, percent_of_means
from sidelane_lab.pairs.workload import Workload, parse_gemm, parse_workload
from sidelane_lab.studies.c3.prediction import predicted_rows

PREDICTED, MEASURED_LIKE = "mi300x8", "h200x4"
PAPER = {"c3_base": 21.0, "c3_sp": 42.0, "conccl": 66.0, "conccl_rp": 72.0}
"""Percent of ideal in the ConCCL paper, sections IV-C, V-A, VI-D and VI-F, on eight MI300X.

The paper takes RCCL's collective for its ideal, which the model has 2 to 6% slower there than the fastest one.
"""

NAMES = {
    "c3_base": "NCCL / RCCL kernels,\nlaunched second",
    "c3_sp": "the same,\nlaunched first",
    "nccl_ce": "NCCL on\ncopy engines",
    "conccl": "Sidelane\n(copy engines)",
    "conccl_rp": "Sidelane, GEMM\non fewer units",
    "auto": "Sidelane\n(its choice)",
}
LINES = {"nccl": "NCCL at its best", "symm_mem": "PyTorch symmetric memory", "auto": "Sidelane"}
SHOWN_PAIR = "cb1_896M"


def measured() -> dict[str, Any]:
    """Read ``overlaps`` and ``gathers``, and where each is from: ``overlap_source``, ``gather_source``."""
    data = json.loads(files("sidelane_lab.papers.data").joinpath("measured.json").read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def draw(data: dict[str, Any], folder: Path) -> list[Picture]:
    """Draw all into a folder, which is made if need be."""
    with mpl.rc_context(RC):
        pictures = [_overlap(data, folder), _gathers(data, folder)]
    return [*pictures, *_timelines(folder)]


def overlap_percents(data: dict[str, Any]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return mean percents of ideal by strategy: predicted for MI300X, measured and predicted for H200."""
    pairs = predicted_rows(named(PREDICTED), C3Options(workloads=tuple(TABLE_II), strategies=tuple(PAPER)))
    predicted = {}
    for strategy, alike in grouped(pairs, lambda row: row.strategy, ordered=False):
        speedups, ideals = ([getattr(row, name) or 0.0 for row in alike] for name in ("speedup", "ideal"))
        predicted[strategy] = 100 * percent_of_means(speedups) / percent_of_means(ideals)
    found: dict[str, list[float]] = {}
    again: dict[str, list[float]] = {}
    machine = named(MEASURED_LIKE)
    for gemm, kind, nbytes, strategy, percent in data["overlaps"]:
        found.setdefault(strategy, []).append(percent)
        if strategy in ("c3_base", "conccl"):
            predicted_too = predict(machine, Workload(parse_gemm(gemm), Kind(kind), nbytes), strategy).percent
            assert predicted_too is not None, "the pairs that were measured have something to gain"
            again.setdefault(strategy, []).append(predicted_too)
    return (
        predicted,
        {strategy: statistics.fmean(values) for strategy, values in found.items()},
        {strategy: statistics.fmean(values) for strategy, values in again.items()},
    )


def _overlap(data: dict[str, Any], folder: Path) -> Picture:
    predicted, measured, again = overlap_percents(data)
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, predicted, PAPER, "Predicted for 8 x MI300X", "measured in the paper")
    _bars(right, measured, again, f"Measured on {data['overlap_source']['machine']}", "predicted by the model")
    left.set_ylabel("percent of ideal")
    title = "How much of a collective disappears behind a GEMM"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    text = "Mean percent of ideal by strategy, for eight MI300X as predicted and four H200 as measured."
    return save(figure, "overlap", title, text, folder)


def _bars(axes: Axes, bars: dict[str, float], dots: dict[str, float], title: str, dotted: str) -> None:
    colours = {"c3_base": VERMILLION, "c3_sp": ORANGE, "nccl_ce": PURPLE}
    order = [name for name in NAMES if name in bars]
    for place, name in enumerate(order):
        axes.bar(place, bars[name], 0.6, color=colours.get(name, BLUE))
        above = max(bars[name], 0.0, *([dots[name]] if name in dots else []))
        axes.text(place, above + 4, f"{bars[name]:.0f}", ha="center", fontsize=9, fontweight="bold")
    marked = [place for place, name in enumerate(order) if name in dots]
    axes.plot(marked, [dots[order[place]] for place in marked], "D", color=BLACK, markersize=5, label=dotted)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    axes.axhline(100, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(order)), [NAMES[name] for name in order], fontsize=8)
    axes.set_ylim(-25, 150)
    axes.set_title(title)
    axes.legend(fontsize=8, loc="upper left", frameon=False)


def _gathers(data: dict[str, Any], folder: Path) -> Picture:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    colours = {"nccl": VERMILLION, "symm_mem": PURPLE, "auto": BLACK}
    ends: list[tuple[float, float, str, str]] = []
    sizes: Sequence[int] = ()
    for index, (name, by_size) in enumerate(data["gathers"].items()):
        times = {int(nbytes): us for nbytes, us in by_size.items()}
        sizes = sorted(times)
        line, mark = STYLES[index]
        look: Any = {"linestyle": line, "marker": mark, "markersize": 4, "color": colours[name], "linewidth": 1.5}
        axes.plot(sizes, [times[n] for n in sizes], **look)
        ends.append((sizes[0], times[sizes[0]], LINES[name], colours[name]))
    axes.set_yscale("log")
    size_axis(axes, sizes)
    axes.set_ylabel("us, in a CUDA graph")
    axes.yaxis.set_label_position("right")
    title = f"all_gather by size, measured on {data['gather_source']['machine']}"
    axes.set_title(title)
    label_ends(axes, ends, "left")
    text = "Time of an all-gather by gathered size: NCCL, PyTorch's symmetric memory and Sidelane."
    return save(figure, "all-gather", title, text, folder)


def _timelines(folder: Path) -> list[Picture]:
    workload = parse_workload(SHOWN_PAIR)
    machine = named(PREDICTED)
    shown = {"c3_base": "the library's kernels", "conccl": "copy engines"}
    predicted = {strategy: predict(machine, workload, strategy, record=True) for strategy in shown}
    end_us = max(prediction.time_us for prediction in predicted.values())
    made = []
    for strategy, prediction in predicted.items():
        size, percent = format_bytes(workload.nbytes), f"{prediction.percent or 0:.0f}% of ideal"
        title = f"GEMM and all_gather of {size} by {shown[strategy]}: {percent}, predicted for MI300X"
        draw_timeline(prediction.timeline, title, folder, f"timeline-{strategy}", end_us=end_us)
        made.append(Picture(f"timeline-{strategy}", title, title))
    return made
