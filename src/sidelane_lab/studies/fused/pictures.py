"""Timelines of fused operators as pictures (the fused operators paper, Figure 11)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane.execute.timeline import Interval
from sidelane_lab.harness.drawing import BLUE, GREEN, GREY, ORANGE, RC, SKY, save
from sidelane_lab.harness.study import Picture

MOST_WORKGROUPS = 32
"""Workgroups of a rank, as in the paper."""

COLOURS = {"compute": BLUE, "local": SKY, "send": ORANGE, "wait": GREY, "add": GREEN}


def draw_timeline(intervals: Sequence[Interval], title: str, folder: Path, name: str) -> Picture:
    """A lane for each of the first workgroups of each rank, over time: first those that end computing first."""
    groups = sorted({interval.group for interval in intervals})
    lanes = [(group, lane) for group in groups for lane in _first_lanes(intervals, group)]
    places = {lane: place for place, lane in enumerate(lanes)}
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for interval in intervals:
        place = places.get((interval.group, interval.lane))
        if place is not None:
            part = interval.start_us, interval.end_us - interval.start_us
            bars.setdefault((interval.label.split()[0], place), []).append(part)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, 1.4 + 0.16 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        for (kind, place), parts in bars.items():
            axes.broken_barh(parts, (place - 0.42, 0.84), color=COLOURS[kind], linewidth=0)
        kinds = [kind for kind in COLOURS if any(kind == other for other, _ in bars)]
        for kind in kinds:
            axes.plot([], [], color=COLOURS[kind], linewidth=6, label=kind)
        axes.set_yticks(range(len(lanes)), [f"{group} {lane}" for group, lane in lanes], fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("us")
        axes.set_title(title)
        axes.legend(ncols=len(kinds), fontsize=7, loc="lower right", bbox_to_anchor=(1, 1.0), borderaxespad=0.1)
        text = f"{title}: what each of {len(lanes)} workgroups does over time, {', '.join(kinds)}."
        return save(figure, name, title, text, folder)


def _first_lanes(intervals: Sequence[Interval], group: str) -> list[str]:
    """The first workgroups of a rank by number, in the order in which they have computed all that they compute."""
    computed = {interval.lane: 0.0 for interval in intervals if interval.group == group}
    first = sorted(computed, key=lambda lane: int(lane.split()[-1]))[:MOST_WORKGROUPS]
    for interval in intervals:
        if interval.group == group and interval.label.split()[0] in ("compute", "local"):
            computed[interval.lane] = max(computed[interval.lane], interval.end_us)
    return sorted(first, key=lambda lane: computed[lane])
