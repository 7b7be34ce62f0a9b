"""Heuristics as a picture: what each choice loses, pair by pair, and how many are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sidelane.cli.table import grouped
from sidelane_lab.harness.drawing import BLACK, BLUE, ORANGE, save
from sidelane_lab.harness.study import Picture, Results
from sidelane_lab.studies.c3.heuristic_tables import share_of
from sidelane_lab.studies.c3.rows import HeuristicRow


def draw_heuristics(rows: Sequence[HeuristicRow], results: Results, directory: Path) -> list[Picture]:
    """One picture, a panel for each heuristic: percent lost, greatest first; none where nothing was judged."""
    judged = [row for row in rows if row.lost_percent is not None]
    by_name = grouped(judged, lambda row: row.heuristic, ordered=False)
    if not by_name:
        return []
    figure = Figure(figsize=(2.6 * len(by_name) + 0.6, 3.2), layout="constrained")
    panels = figure.subplots(1, len(by_name), squeeze=False, sharey=True)[0]
    for panel, (name, alike) in zip(panels, by_name, strict=True):
        found = share_of(alike)
        assert found is not None
        right, count, mean, _ = found
        ranked = sorted(alike, key=lambda row: -(row.lost_percent or 0.0))
        colours = [BLUE if row.seen else ORANGE for row in ranked]
        panel.bar(range(len(ranked)), [row.lost_percent or 0.0 for row in ranked], color=colours, width=0.8)
        panel.set_title(f"{name}\n{right} of {count} right, {mean:.1f}% lost", fontsize=9)
        panel.set_xlabel("pairs")
        panel.set_xticks([])
        panel.axhline(0.0, color=BLACK, linewidth=0.7)
    panels[0].set_ylabel("lost to the best of the sweep, %")
    for colour, label in ((BLUE, "GEMM was profiled"), (ORANGE, "was not")):
        panels[-1].bar([0], [0], color=colour, label=label)
    panels[-1].legend(fontsize=7, frameon=False)
    title = f"Heuristics: {results.where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    text = "Percent that each heuristic's choice takes longer than the best of the sweep, by pair."
    return [save(figure, "heuristics", title, text, directory)]
