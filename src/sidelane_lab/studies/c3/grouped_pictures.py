"""Pairs together: ideal speedups, and means by collective and class (figures 7, 8 and 10 of the ConCCL paper)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sidelane.c3.strategies import named
from sidelane.c3.strategy import Mover
from sidelane.c3.workload import C3Class
from sidelane.cli.table import grouped
from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import BLACK, BLUE, COLOURS, GREY, save
from sidelane_lab.harness.study import Picture, Results
from sidelane_lab.studies.c3.rows import C3Row

FEWEST_PAIRS = 3
"""Below that there is nothing to average."""

Predicted = Mapping[tuple[str, str, int, str], float]
"""Speedups by GEMM, collective, bytes and strategy."""


def draw_groups(rows: Sequence[C3Row], predicted: Predicted, results: Results, directory: Path) -> list[Picture]:
    """Three pictures where there are pairs enough; none elsewhere.

    Args:
        rows: of the study.
        predicted: by a description of the machine; drawn as rings on the bars.
        results: where they are from.
        directory: for the files, made if need be.
    """
    timed = [row for row in rows if row.speedup is not None]
    pairs = grouped(timed, lambda row: (row.gemm, row.dtype, row.collective, row.bytes), ordered=False)
    if len(pairs) < FEWEST_PAIRS:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    by_name = {strategy: named(strategy) for strategy in dict.fromkeys(r.strategy for r in timed if not r.chosen)}
    kernels = [name for name, one in by_name.items() if one.concurrent and one.mover is Mover.LIBRARY]
    engines = [name for name, one in by_name.items() if not one.mover.takes_units]
    auto = ["auto"] if any(row.chosen for row in timed) else []
    pictures = [_ideal([alike for _, alike in pairs], results, directory)]
    figures = (
        ("c3-kernels", kernels, "by kernels"),
        ("c3-engines", [*kernels[:1], *engines, *auto], "by copy engines"),
    )
    for name, strategies, what in figures:
        if strategies:
            pictures.append(_mean_speedups(timed, strategies, what, predicted, results, directory, name))
    return pictures


def _ideal(pairs: Sequence[Sequence[C3Row]], results: Results, directory: Path) -> Picture:
    """The speedup of every pair if the shorter of the two were hidden entirely."""
    figure = Figure(figsize=(2 + 0.35 * len(pairs), 3.6), layout="constrained")
    axes = figure.subplots()
    ideals = [alike[0].ideal or 1.0 for alike in pairs]
    axes.bar(range(len(pairs)), [ideal - 1 for ideal in ideals], bottom=1.0, color=BLUE)
    names = [f"{a[0].gemm}_{format_bytes(a[0].bytes)} {a[0].collective}" for a in pairs]
    axes.set_xticks(range(len(pairs)), names, rotation=45, ha="right", fontsize=7)
    axes.set_ylabel("ideal speedup")
    axes.set_ylim(bottom=1.0)
    title = f"Ideal speedup: {results.where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return save(figure, "c3-ideal", title, "Ideal speedup of every pair over serial execution.", directory)


def _mean_speedups(
    rows: Sequence[C3Row],
    strategies: Sequence[str],
    what: str,
    predicted: Predicted,
    results: Results,
    directory: Path,
    name: str,
) -> Picture:
    groups: dict[str, list[C3Row]] = {}
    for collective, alike in grouped(rows, lambda row: row.collective, ordered=False):
        for c3_class in C3Class:
            mine = [row for row in alike if row.c3_class == c3_class]
            if mine:
                groups[f"{collective}\n{c3_class}"] = mine
    groups["all"] = list(rows)
    figure = Figure(figsize=(3 + 1.3 * len(groups), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(strategies)
    for number, strategy in enumerate(strategies):
        shift = (number - (len(strategies) - 1) / 2) * width
        shade = 0.35 + 0.65 * (number + 1) / len(strategies)
        for place, mine in enumerate(groups.values()):
            ran = [row for row in mine if _is(row, strategy)]
            if not ran:
                continue
            mean = statistics.fmean(row.speedup or 1.0 for row in ran)
            colour = COLOURS.get(strategy, GREY)
            axes.bar(place + shift, mean - 1, width, bottom=1.0, color=colour, alpha=shade,
                     label=strategy if place == len(groups) - 1 else None)  # fmt: skip
            told = [predicted.get((row.gemm, row.collective, row.bytes, row.strategy)) for row in ran]
            known = [value for value in told if value is not None]
            if len(known) == len(ran):
                axes.plot(place + shift, statistics.fmean(known), "o", color=BLACK, markersize=5, fillstyle="none")
    for place, mine in enumerate(groups.values()):
        pairs = {(row.gemm, row.collective, row.bytes): row.ideal or 1.0 for row in mine}
        axes.plot(place, statistics.fmean(pairs.values()), marker="_", markersize=28, color=BLACK)
    axes.plot([], [], color=BLACK, label="ideal")
    if predicted:
        axes.plot([], [], "o", color=BLACK, fillstyle="none", label="predicted")
    axes.axhline(1.0, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set_ylabel("mean speedup over serial")
    axes.legend(ncols=4, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.18))
    title = f"Computation and collectives {what}: {results.where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = "Mean speedup over serial execution by collective and class, with the ideal."
    return save(figure, name, title, text, directory)


def _is(row: C3Row, strategy: str) -> bool:
    return bool(row.chosen) if strategy == "auto" else row.strategy == strategy and not row.chosen
