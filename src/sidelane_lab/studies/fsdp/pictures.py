"""Exposed communication of training steps as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sidelane.cli.table import grouped
from sidelane_lab.harness.drawing import BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION, save
from sidelane_lab.harness.study import Picture
from sidelane_lab.studies.fsdp.rows import FsdpRow
from sidelane_lab.studies.fsdp.tables import case_of, title_of

COLOURS = {
    "nccl": VERMILLION,
    "gloo": VERMILLION,
    "nccl_ce": ORANGE,
    "sidelane_ag": SKY,
    "sidelane": BLUE,
    "sidelane_copies": GREEN,
}
WIDTH = 0.8
GAP = 2
"""Points between a bar and its number."""


def draw_steps(rows: Sequence[FsdpRow], where: str, directory: Path) -> list[Picture]:
    """One picture: exposed milliseconds of each case, a bar an implementation; none where nothing was exposed.

    Args:
        rows: of the study.
        where: ranks and machine, for the title.
        directory: for the files, made if need be.
    """
    timed = [row for row in rows if row.exposed_ms is not None and row.implementation in COLOURS]
    cases = grouped(timed, case_of, ordered=False)
    names = [name for name in COLOURS if any(row.implementation == name for row in timed)]
    if not cases or not names:
        return []
    figure = Figure(figsize=(max(7.0, 2 + 1.8 * len(cases)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = WIDTH / len(names)
    for place, name in enumerate(names):
        for number, (_, alike) in enumerate(cases):
            for row in alike:
                if row.implementation == name and row.exposed_ms is not None:
                    x = number + (place - (len(names) - 1) / 2) * width
                    axes.bar(x, row.exposed_ms, 0.92 * width, color=COLOURS[name])
                    above = row.exposed_ms >= 0
                    axes.annotate(
                        f"{row.exposed_ms:.3g}",
                        (x, row.exposed_ms),
                        (0, GAP if above else -GAP),
                        textcoords="offset points",
                        ha="center",
                        va="bottom" if above else "top",
                        fontsize=6,
                    )
        axes.bar(0, 0, color=COLOURS[name], label=name)
    labels = [title_of(alike[0]).replace(", ", "\n") for _, alike in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=7)
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.set_ylabel("exposed, ms (less is better)")
    axes.margins(y=0.08)
    title = f"Exposed communication of a training step, {where}"
    axes.set_title(title)
    figure.legend(ncols=len(names), fontsize=7, frameon=False, loc="outside lower center")
    text = f"{title}: {', '.join(names)} in {len(cases)} cases; figures are in the table."
    return [save(figure, "fsdp-exposed", title, text, directory)]
