"""Marks on pictures of predictions: what a paper says, and an axis that does not begin at 0."""

from __future__ import annotations

from matplotlib.axes import Axes

from sidelane_lab.harness.drawing import BLACK

PUBLISHED_OF = "mi300x8"
"""The machine of the ConCCL and DMA collectives papers, on whose pictures their values are drawn."""
PUBLISHED_PERCENTS = {
    "c3_base": "C3-BASE-02",
    "c3_sp": "C3-SP-01",
    "c3_rp": "C3-RP-01",
    "conccl": "CC-03",
    "conccl_rp": "CC-05",
}
"""Claims on the mean percent of ideal over all pairs."""
UP_TO, FROM = 32 << 20, 64 << 20
"""Bytes to which the gap to the library is published, and from which the power saved is."""


def draw_published_at(axes: Axes, sizes: tuple[float, float], value: float, words: str, line: str = ":") -> None:
    """What a paper says of some sizes."""
    axes.plot(sizes, (value, value), color=BLACK, linestyle=line, linewidth=1.5, label=words)


def mark_cut(axes: Axes) -> None:
    """Two strokes across the axis of values, if it does not begin at 0."""
    if axes.get_ylim()[0] > 0:
        for height in (0.025, 0.05):
            axes.plot(
                (-0.012, 0.012),
                (height - 0.012, height + 0.012),
                transform=axes.transAxes,
                color=BLACK,
                linewidth=1.2,
                clip_on=False,
                zorder=9,
            )
