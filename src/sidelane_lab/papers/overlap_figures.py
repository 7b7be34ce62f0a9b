"""Figures 1(c) and 2 to 6 of the overlap paper: published, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidelane_lab.machines.load import named
from sidelane_lab.machines.ranges import Band, Curves, bands
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.panels import Panel, PublishedValue, TimelinePanel
from sidelane_lab.papers.figures import PaperFigure, declared
from sidelane_lab.papers.files import ResultFile
from sidelane_lab.papers.measurements import PipelineReadings
from sidelane_lab.papers.overlap import A2A, AR, BLOCKS, PAIRS, PLATFORMS, readings_of, timeline_of
from sidelane_lab.papers.rows import aligned

OF_LIBRARY = ("all_reduce_gbps", "all_to_all_gbps", "default_units", "all_to_all_units", "traffic")
NUMBERS = ("occupancy", "interference.memory", *(f"library.{name}" for name in OF_LIBRARY))
"""Numbers of a description that a pipeline depends on most; GEMMs by themselves stand on both sides of each ratio."""
MARKS: dict[tuple[str, str], list[PublishedValue]] = {
    ("base", ""): [PublishedValue("published: 0.3 and 1", (0.3, 1.0))],
    ("reduction", "A40"): [PublishedValue("published, cb-ar at most", (25.5,))],
    ("overlap", ""): [PublishedValue("published, at most", (90.0,))],
    ("overlap", "MI250X"): [],
}
"""Values in the text, by figure and platform; "" stands for the others."""


def _figure(
    number: str,
    key: str,
    words: str,
    platforms: Sequence[str] = tuple(PLATFORMS),
    pairs: Sequence[str] = tuple(PAIRS),
    level: float | None = None,
    *,
    from_zero: bool = True,
) -> PaperFigure:
    """Declare a figure over the numbers of thread blocks.

    Args:
        number: of the figure.
        key: in :class:`PipelineReadings`.
        words: of the axis of values.
        platforms: that it has.
        pairs: that it has.
        level: of a line across; None: none.
        from_zero: the axis of values begins at 0.
    """

    def panel(found: Mapping[str, Band], blocks: Sequence[int], title: str, ylabel: str) -> Panel:
        return Panel(
            curves=found,
            x=blocks,
            marks=MARKS.get((key, title), MARKS.get((key, ""), [])),
            level=level,
            low=0 if from_zero else None,
            title=title,
            xlabel="thread blocks",
            ylabel=ylabel,
        )

    def curves(machine: Machine, ranges: bool) -> dict[str, Band]:
        def values(changed: Machine) -> Curves[str]:
            try:
                found = readings_of(changed)
            except ValueError:  # a block that no unit can hold: the library would have another
                found = readings_of(machine)
            return {pair: list(found.curve(key, pair).values()) for pair in pairs}

        return bands(machine, values, NUMBERS if ranges else ())

    def predicted(machine: Machine, ranges: bool, version: str) -> list[Panel]:
        return [panel(curves(machine, ranges), BLOCKS, machine.title, words)]

    def of_platforms(ranges: bool) -> list[Panel]:
        chosen = [(name, named(PLATFORMS[name])) for name in platforms]
        return [panel(curves(one, ranges), BLOCKS, name, words * (one is chosen[0][1])) for name, one in chosen]

    def measured(file: ResultFile) -> list[Panel]:
        found = PipelineReadings(file).curves(key)
        blocks, known = aligned({pair: curve for pair, curve in found.items() if pair in pairs})
        return [panel(known, blocks, "", words)] if blocks else []

    return declared(number, predict=predicted, predict_several=of_platforms, measure=measured)


def _timeline(machine: Machine, ranges: bool, version: str) -> list[TimelinePanel]:
    pair, blocks = "mb-ar", BLOCKS[3]
    words = f"{pair} with priority, {blocks} thread blocks; G: a GEMM, C: a collective"
    return [TimelinePanel(intervals=timeline_of(machine, pair, blocks, priority=True), title=words)]


FIGURES = (
    declared("004/1c", predict=_timeline),
    _figure("004/2", "base", "overlapped over sequential time"),
    _figure("004/3", "reduction", "time saved by priority, %", from_zero=False),
    _figure("004/4", "overlap", "overlap rate, %"),
    _figure("004/5", "tiles", "time of opt2 over opt1", platforms=("A100", "H100"), pairs=AR, level=1),
    _figure("004/6", "tiles", "time of opt2 over opt1", platforms=("A40", "A100"), pairs=A2A, level=1),
)
