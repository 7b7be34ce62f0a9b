"""Parts of pictures: colours, lines, axes of sizes, names at the ends of lines, files.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; every line and bar also carries its
name or its value, so that no picture needs its colours. NCCL is red, on copy engines yellow, PyTorch pink; Sidelane is
blue.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from sidelane.c3.strategies import strategies
from sidelane.sizes import format_bytes
from sidelane_lab.harness.study import Picture, Results
from sidelane_lab.harness.table import grouped

BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
BLACK, GREY, NAVY = "#000000", "#666666", "#003A5D"
PALETTE = {
    "blue": BLUE,
    "sky": SKY,
    "green": GREEN,
    "orange": ORANGE,
    "vermillion": VERMILLION,
    "purple": PURPLE,
    "black": BLACK,
    "grey": GREY,
    "navy": NAVY,
}
SHOWN: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("drawing.toml").read_text("utf-8"))
COLOURS = {name: PALETTE[colour] for name, colour in SHOWN["colours"].items()}
# A strategy has the colour of whoever moves its bytes.
COLOURS |= {strategy.code: COLOURS[strategy.mover] if strategy.concurrent else GREY for strategy in strategies()}
NAMES: Mapping[str, str] = SHOWN["names"]
"""Plain names, for pictures, of the implementations, strategies and ways that result files name; see ``plain_name``."""
# Lines of one implementation differ in dash and mark.
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (5, 1, 1, 1, 1, 1)), "v"), ((0, (1, 3)), "P"))
PLATE: Any = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
"""White behind a number that a line runs through."""
RC: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "svg.fonttype": "path",
    "svg.hashsalt": "sidelane",  # the same rows give the same file
}


def plain_name(name: str, *, on_cpu: bool = False) -> str:
    """Return what a picture calls an implementation, a strategy or a way; the name itself where it has no other.

    Args:
        name: of a result file.
        on_cpu: the vendor's library is Gloo, not NCCL.

    >>> plain_name("nccl_ce"), plain_name("c3_sp", on_cpu=True), plain_name("new")
    ('NCCL on copy engines', 'Gloo, launched first', 'new')
    """
    first, *rest = name.split(", ")
    plain = NAMES.get(first, first).format(library="Gloo" if on_cpu else "NCCL").replace("Gloo kernels", "Gloo")
    return ", ".join([plain, *rest])


def size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Make the x-axis one of sizes in bytes, with no more marks than can be read."""
    axes.set_xscale("log", base=2)
    step = -(-len(sizes) // 8)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes[::step])))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(round(value))))
    axes.set_xlabel("bytes")


def label_ends(axes: Axes, points: Sequence[tuple[float, float, str, str]], side: str) -> None:
    """Write names next to the ends of lines, moved apart so that none covers another."""
    axes.figure.canvas.draw()  # limits and scale are final only then
    box = axes.get_window_extent()
    height = 11.0 * axes.figure.dpi / 72.0
    places = sorted((axes.transData.transform((x, y))[1], x, y, name, colour) for x, y, name, colour in points)
    spots = _spread([place[0] for place in places], height)
    outside, anchor = (1.03, 0.0) if side == "right" else (-0.03, 1.0)
    # A leader begins at the end of the name that faces the line, so that none runs through another's name.
    leader = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2, "relpos": (anchor, 0.5)}
    for spot, (_, x, y, name, colour) in zip(spots, places, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(outside, (spot - box.y0) / box.height),
            textcoords=("axes fraction", "axes fraction"),
            ha="left" if side == "right" else "right",
            va="center",
            fontsize=8,
            color=colour,
            arrowprops={**leader, "color": colour},
            annotation_clip=False,
        )
    if side == "left":
        axes.yaxis.tick_right()


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending places apart until each two are ``gap`` from each other, those in the middle the least.

    >>> _spread([0.0, 1.0, 2.0, 9.0], gap=2.0)
    [-1.0, 1.0, 3.0, 9.0]
    """
    clusters: list[tuple[float, int]] = []  # mean place and number of those that touch
    for place in places:
        mean, count = place, 1
        while clusters and mean - clusters[-1][0] < gap * (count + clusters[-1][1]) / 2:
            other_mean, other_count = clusters.pop()
            mean = (mean * count + other_mean * other_count) / (count + other_count)
            count += other_count
        clusters.append((mean, count))
    return [mean + gap * (index - (count - 1) / 2) for mean, count in clusters for index in range(count)]


def file_name(text: str) -> str:
    """A title as the name of a file, without ending."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")


def save_titled(figure: Figure, name: str, title: str, text: str, directory: Path) -> Picture:
    """Put the title above a figure, and save it."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return save(figure, name, title, text, directory)


def save(figure: Figure, name: str, title: str, text: str, directory: Path) -> Picture:
    """Write ``name.png`` and ``name.svg``; the same rows give the same files."""
    save_both(figure, name, directory)
    return Picture(name, title, text)


def save_both(figure: Figure, name: str, folder: Path, dpi: int = 150) -> Path:
    """Write ``name.png``, which is returned, and ``name.svg``; the same figures give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.set_dpi(dpi)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it is laid out: each file would do that twice again
    figure.savefig(folder / f"{name}.png", dpi=dpi)
    figure.savefig(folder / f"{name}.svg", dpi=dpi, metadata={"Date": None})
    return folder / f"{name}.png"


def draw_sizes(
    way: str, rows: Sequence[Any], results: Results, directory: Path, line_of: Callable[[Any], str]
) -> Picture:
    """Draw bus bandwidth and time over size: a line for each implementation, and for what ``line_of`` says of a row.

    Of the variants that share a line, the fastest of each size is drawn; tables have all of them.
    """
    lines = grouped(rows, lambda row: (row.implementation, line_of(row)))
    lines.sort(key=lambda line: list(COLOURS).index(line[0][0]))
    styles = {name: cycle(STYLES) for name in COLOURS}
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    bandwidth, time = figure.subplots(1, 2)
    ends: list[tuple[float, float, str, str]] = []
    starts: list[tuple[float, float, str, str]] = []
    for (implementation, variant), every in lines:
        points = [min(alike, key=lambda row: row.time_us) for _, alike in grouped(every, lambda row: row.bytes)]
        style, marker = next(styles[implementation])
        colour = COLOURS[implementation]
        name = ", ".join(filter(None, [plain_name(implementation, on_cpu=results.on_cpu), variant]))
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
    text = f"Bus bandwidth and time over size for {way}, a line for each implementation with its fastest variant."
    return save_titled(figure, file_name(way), title, text, directory)
