"""Curves of predictions over sizes, with their bands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sidelane.sizes import format_bytes
from sidelane_lab.harness import drawing
from sidelane_lab.harness.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    STYLES,
    VERMILLION,
)
from sidelane_lab.model.study import SIZES
from sidelane_lab.papers.simulated.bands import Band

COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY, BLACK)
BANDS = "bands: plausible numbers"


def one(title: str) -> tuple[Figure, Axes]:
    """A figure with one panel."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontweight="bold")
    return figure, axes


def curve(axes: Axes, x: Sequence[float], band: Band, name: str, colour: str, style: int) -> None:
    """A line with marks, and what is plausible around it."""
    dash, marker = STYLES[style % len(STYLES)]
    axes.fill_between(x, band.low, band.high, color=colour, alpha=0.14, linewidth=0)
    axes.plot(x, band.values, color=colour, linestyle=dash, marker=marker, markersize=3.5, linewidth=1.3, label=name)


def whiskers(axes: Axes, band: Band) -> None:
    """What is plausible, on bars side by side."""
    below = [max(0.0, value - low) for value, low in zip(band.values, band.low, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(band.values, band.high, strict=True)]
    places = range(len(band.values))
    axes.errorbar(places, band.values, [below, above], fmt="none", ecolor=BLACK, elinewidth=0.8, capsize=2)


def over_sizes(figure: Figure, axes: Axes, folder: Path, name: str, legend: dict[str, Any] | None = None) -> Path:
    """Finish a figure whose curves go over bytes."""
    axes.set_xscale("log", base=2)
    least = min(float(np.min(np.asarray(line.get_xdata(), dtype=float))) for line in _curves(axes))
    shown = [n for n in SIZES[::4] if n >= least]
    axes.set_xticks(shown, [format_bytes(n) for n in shown])
    axes.set_xlabel(f"bytes ({BANDS})")
    axes.legend(fontsize=7, **(legend or {}))
    return drawing.save_both(figure, name, folder)


def _curves(axes: Axes) -> list[Line2D]:
    """Its lines over sizes: not those that cross the whole picture."""
    return [line for line in axes.lines if line.get_transform() == axes.transData]
