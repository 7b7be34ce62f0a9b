"""Timelines of fused operators as pictures (the fused operators paper, Figure 11)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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
            kind = interval.label.split()[0]
            bars.setdefault((kind, place), []).append((interval.start_us, interval.end_us - interval.start_us))
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
        if kinds:
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


Times = tuple[float, ...]
"""Microseconds of a call, by rank."""


def times_of_ranks(intervals: Sequence[Interval]) -> Times:
    """Microseconds that each rank took in one call, in the order of ranks.

    >>> times_of_ranks([Interval("rank 1", "workgroup 0", "wait", 5.0, 9.0), Interval("rank 0", "", "local", 2.0, 3.5)])
    (1.5, 4.0)
    """
    ranks = sorted({interval.group for interval in intervals}, key=lambda group: int(group.split()[-1]))
    mine = [[interval for interval in intervals if interval.group == rank] for rank in ranks]
    return tuple(max(one.end_us for one in own) - min(one.start_us for one in own) for own in mine)


def skew_percent(calls: Sequence[Times]) -> float:
    """By how much the slowest rank of a call takes longer than the fastest, median over calls.

    >>> round(skew_percent([(10.0, 11.0), (10.0, 10.5), (12.0, 10.0)]), 6)
    10.0
    """
    return 100 * statistics.median(max(times) / min(times) - 1 for times in calls)


def draw_skew(calls: Mapping[str, Sequence[Times]], title: str, folder: Path, name: str) -> Picture:
    """Times of ranks by order, next to rank 0 in the first of them; medians over calls."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        medians = {order: [statistics.median(times) for times in zip(*of, strict=True)] for order, of in calls.items()}
        base = next(iter(medians.values()))[0]
        places: list[float] = []
        labels: list[str] = []
        for number, (order, times) in enumerate(medians.items()):
            for rank, time in enumerate(times):
                places.append(number * (len(times) + 1) + rank)
                labels.append(f"rank {rank}")
                axes.bar(places[-1], time / base, color=BLUE)
            middle = number * (len(times) + 1) + (len(times) - 1) / 2
            text = f"{order}: {skew_percent(calls[order]):.1f}% skew"
            axes.text(middle, 1.02, text, ha="center", fontsize=8, transform=axes.get_xaxis_transform())
        axes.set_xticks(places, labels, fontsize=7)
        axes.set_xlabel("rank, by order of the work")
        axes.set_ylabel("time over that of the first bar")
        axes.set_title(title, pad=22)
        text = f"{title}: the time of each rank, by the order of its work; skew is slowest over fastest."
        return save(figure, name, title, text, folder)
