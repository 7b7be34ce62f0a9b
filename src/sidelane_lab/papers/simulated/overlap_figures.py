"""The overlap paper's figures 2 to 4, predicted for its four platforms."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane_lab.harness import drawing
from sidelane_lab.harness.drawing import BLACK, RC
from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims_overlap import BLOCKS, PAIRS, PLATFORMS, measure
from sidelane_lab.papers.simulated.bands import Band, Curves, bands
from sidelane_lab.papers.simulated.curves import BANDS, COLOURS, curve

OF_LIBRARY = ("all_reduce_gbps", "all_to_all_gbps", "default_units", "all_to_all_units", "traffic")
NUMBERS = ("occupancy", "interference.memory", *(f"library.{name}" for name in OF_LIBRARY))
"""Of a description, that a pipeline depends on most; GEMMs by themselves stand on both sides of each ratio."""
PANELS = {
    "base": "overlapped over sequential time",
    "reduction": "time saved by priority, %",
    "overlap": "overlap rate, %",
}
PUBLISHED: dict[tuple[str, str], tuple[tuple[float, str], ...]] = {
    ("base", ""): ((0.3, "published: 0.3 and 1"), (1.0, "_")),
    ("reduction", "A40"): ((25.5, "published, cb-ar at most"),),
    ("overlap", ""): ((90.0, "published, at most"),),
    ("overlap", "MI250X"): (),
}
"""What the text says of the figures: (panel, platform or "" for the others) -> value, words."""

Around = dict[tuple[str, str, str], Band]
"""Bands by panel, platform and pair."""


def draw_overlap(folder: Path) -> list[Path]:
    """A picture for each of ``PANELS``, with bands over the plausible values of each platform's numbers."""
    around: Around = {}
    for platform, name in PLATFORMS.items():
        machine = named(name)
        centre = _curves(machine)

        def curves(changed: Machine, centre: Curves[tuple[str, str]] = centre) -> Curves[tuple[str, str]]:
            try:
                return _curves(changed)
            except ValueError:  # a block that no unit can hold: the library would have another
                return centre

        for (panel, pair), band in bands(machine, curves, NUMBERS).items():
            around[panel, platform, pair] = band
    with mpl.rc_context(RC):
        return [_panels(key, around, folder) for key in PANELS]


def _curves(machine: Machine) -> Curves[tuple[str, str]]:
    points = {(pair, blocks): measure(machine, pair, blocks) for pair in PAIRS for blocks in BLOCKS}
    return {(key, pair): [points[pair, blocks][key] for blocks in BLOCKS] for key in PANELS for pair in PAIRS}


def _panels(key: str, around: Around, folder: Path) -> Path:
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, platform in zip(figure.subplots(1, len(PLATFORMS), sharey=True), PLATFORMS, strict=True):
        for index, pair in enumerate(PAIRS):
            curve(axes, BLOCKS, around[key, platform, pair], pair, COLOURS[index], index)
        for value, words in PUBLISHED.get((key, platform), PUBLISHED.get((key, ""), ())):
            axes.axhline(value, color=BLACK, linewidth=0.8, linestyle=":", label=words)
        axes.set_xscale("log", base=2)
        axes.set_title(platform)
        axes.set_xlabel("thread blocks")
    for axes in (figure.axes[0], figure.axes[-1]):
        axes.legend(fontsize=7)
    if key != "reduction":
        figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].set_ylabel(PANELS[key])
    figure.suptitle(f"Pipelined GEMM and collective, predicted ({BANDS})", x=0.01, ha="left", fontweight="bold")
    return drawing.save_both(figure, f"overlap-{key}", folder)
