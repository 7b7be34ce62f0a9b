"""Phases as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sidelane.cli.table import grouped
from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import BLUE, GREEN, ORANGE, VERMILLION, file_name, save
from sidelane_lab.harness.study import Picture
from sidelane_lab.studies.phases.rows import PREDICTED, PhaseRow
from sidelane_lab.studies.phases.tables import phase_title

PHASES = {"control": ORANGE, "schedule": VERMILLION, "copy": BLUE, "sync": GREEN}


def draw_phases(rows: Sequence[PhaseRow], where: str, directory: Path) -> list[Picture]:
    """Stacked bars over size: shares of the phases, the time above each bar; a panel a launch, and one predicted."""
    pictures = []
    timed = [row for row in rows if row.total_us]
    for name, alike in grouped(timed, phase_title, ordered=False):
        panels = grouped(alike, lambda row: (row.source == PREDICTED, row.launch))
        figure = Figure(figsize=(2.2 + 4.2 * len(panels), 3.6), layout="constrained")
        for axes, ((predicted, launch), bars) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            _stack(axes, sorted(bars, key=lambda row: row.bytes))
            axes.set_title(bars[0].note or PREDICTED if predicted else f"measured, {launch}", pad=20)
        figure.axes[0].set_ylabel("share of the call, %")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), ncols=len(PHASES), loc="outside lower center")
        title = f"Phases of {name}: {where}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        text = f"Shares of control, schedule, copy and sync in a call of {name} by size, with its time in microseconds."
        pictures.append(save(figure, file_name(f"phases {name}"), title, text, directory))
    return pictures


def _stack(axes: Axes, rows: Sequence[PhaseRow]) -> None:
    bottom = [0.0] * len(rows)
    for phase, colour in PHASES.items():
        shares = [100 * getattr(row, f"{phase}_us") / (row.total_us or 1.0) for row in rows]
        axes.bar(
            range(len(rows)), shares, 0.72, bottom=bottom, color=colour, label=phase, edgecolor="white", linewidth=0.6
        )
        for place, (low, share) in enumerate(zip(bottom, shares, strict=True)):
            if share > 9:
                axes.text(place, low + share / 2, f"{share:.0f}", ha="center", va="center", fontsize=7, color="white")
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for place, row in enumerate(rows):
        time_us = row.total_us or 0.0
        axes.text(
            place, 101, f"{time_us:.0f}" if time_us >= 10 else f"{time_us:.1f}", ha="center", va="bottom", fontsize=7
        )
    axes.text(-0.6, 107, "us:", ha="right", va="center", fontsize=7)
    axes.set_xticks(range(len(rows)), [format_bytes(row.bytes) for row in rows], fontsize=8, rotation=45)
    axes.set_ylim(0, 100)
    axes.set_xlabel("bytes")
