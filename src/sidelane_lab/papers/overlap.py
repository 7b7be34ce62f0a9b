"""The overlap paper: priority and occupancy on four platforms. What it claims, and its figures, predicted; and the
command ``sidelane pipeline``, which predicts the same iterations for any machine.

The sizes of its GEMMs are lost in the text; it follows the ConCCL paper, so ``cb`` and ``mb`` are cb1 and mb1 of that
paper's Table I. Nothing was fitted to this paper: how blocks share a unit was fitted to a GEMM on an H100.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sidelane.program.collective import Kind
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import say_written, tables_console
from sidelane_lab.machines.load import find, named
from sidelane_lab.machines.numbers import write_numbers
from sidelane_lab.machines.ranges import Band, Curves, bands
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.panels import BANDS, Panel, PaperFigure, PublishedValue, draw_all, draw_timeline
from sidelane_lab.model.pipeline import (
    OPT1,
    OPT2,
    Pipeline,
    Tile,
    blocks_per_unit,
    overlap_rate,
    run_pipeline,
    sequential_us,
)
from sidelane_lab.pairs.workload import parse_gemm
from sidelane_lab.papers.claims import Check, ClaimRole, Paper
from sidelane_lab.sim import Interval, write_chrome_trace

PLATFORMS = {"A40": "a40x4", "A100": "a100x4", "H100": "h100x4", "MI250X": "mi250x8"}
NVIDIA = ("A40", "A100", "H100")
PAIRS = {
    "cb-ar": ("cb1", Kind.ALL_REDUCE),
    "mb-ar": ("mb1", Kind.ALL_REDUCE),
    "cb-a2a": ("cb1", Kind.ALL_TO_ALL),
    "mb-a2a": ("mb1", Kind.ALL_TO_ALL),
}
NBYTES = 896 << 20
BLOCKS = (16, 64, 256, 1024, 4096)
"""Thread-block counts; the paper's are not in the text but for 16 and 32."""
MANY = BLOCKS[-1]


class OverlapContext:
    """Numbers that claims are about, of the paper's own machines."""

    @functools.cached_property
    def rows(self) -> dict[tuple[str, str, int], dict[str, float]]:
        """Times relative to sequential execution, and overlap rates, by (platform, pair, blocks)."""
        return {
            (platform, pair, blocks): measure(named(name), pair, blocks)
            for platform, name in PLATFORMS.items()
            for pair in PAIRS
            for blocks in BLOCKS
        }

    def of(self, key: str, platforms: tuple[str, ...], blocks: tuple[int, ...] = BLOCKS, pair: str = "") -> list[float]:
        return [r[key] for (p, q, b), r in self.rows.items() if p in platforms and b in blocks and pair in ("", q)]

    def gain(self, platform: str, blocks: tuple[int, ...]) -> float:
        """Return what priority saves on a platform, percent of the time without it: the mean over pairs and blocks."""
        return statistics.fmean(self.of("reduction", (platform,), blocks))

    def lowest(self, key: str) -> str:
        """Return the platform where the mean of a figure over pairs and blocks is lowest."""
        return min(PLATFORMS, key=lambda platform: statistics.fmean(self.of(key, (platform,))))

    def rises_with_blocks(self) -> bool:
        """With more blocks, overlapped time comes closer to sequential time, on every platform with every pair."""
        curves = [self.of("base", (platform,), pair=pair) for platform in PLATFORMS for pair in PAIRS]
        return all(a <= b for curve in curves for a, b in itertools.pairwise(curve))

    def tiles_in_order(self) -> bool:
        """opt2 at or below opt1 over most block counts, and equal at the highest."""
        better, same = [], []
        for platform, pairs in (("A100", ("cb-ar", "mb-ar", "cb-a2a", "mb-a2a")), ("H100", ("cb-ar", "mb-ar"))):
            for pair in pairs:
                for blocks in BLOCKS:
                    small = self.rows[platform, pair, blocks]["priority_us"]
                    large = measure(named(PLATFORMS[platform]), pair, blocks, OPT2)["priority_us"]
                    better.append(large <= 1.01 * small)
                    if blocks == MANY:
                        same.append(abs(large / small - 1) < 0.1)
        return statistics.fmean(better) > 0.5 and statistics.fmean(same) > 0.5


@functools.lru_cache(maxsize=1024)
def measure(machine: Machine, pair: str, blocks: int, tile: Tile = OPT1) -> dict[str, float]:
    """One point: overlapped times over the sequential time, without and with priority, and the overlap rate."""
    tag, kind = PAIRS[pair]
    pipeline = Pipeline(parse_gemm(tag), kind, NBYTES, tile, blocks)
    whole = sequential_us(machine, pipeline)
    base = run_pipeline(machine, pipeline, priority=False)
    first = run_pipeline(machine, pipeline, priority=True)
    return {
        "base": base.time_us / whole,
        "priority": first.time_us / whole,
        "priority_us": first.time_us,
        "reduction": 100 * (1 - first.time_us / base.time_us),
        "overlap": 100 * overlap_rate(first, pipeline.iterations),
    }


def checks() -> list[Check[OverlapContext]]:
    """Every claim of the paper that the model speaks to.

    No number was fitted to one of them. All had been held against the model when its blocks, and the reading of how the
    GEMMs follow each other, went in: so none is held out.
    """
    seen = ClaimRole.SEEN
    found: list[Check[OverlapContext]] = [
        Check(
            "RA-HW-01",
            ClaimRole.INPUT,
            lambda c: {name: _platform(named(key)) for name, key in PLATFORMS.items()},
            incomparable="its last figure adds the L1 cache to shared memory, which the descriptions do not have",
        ),
        Check("RA-01", seen, lambda c: max(c.of("reduction", ("A40",), BLOCKS[2:], "cb-ar"))),
        Check(
            "RA-02",
            seen,
            lambda c: max(c.of("overlap", NVIDIA)),
            incomparable="the last of n collectives has no GEMM beside it, and the paper does not give n",
        ),
        Check(
            "RA-03",
            seen,
            lambda c: min(c.of("base", NVIDIA, BLOCKS[:1])),
            incomparable="n GEMMs of few blocks side by side come down to 1/n, and the paper does not give n",
        ),
        Check("RA-04", seen, lambda c: statistics.fmean(c.of("base", (*NVIDIA, "MI250X"), (MANY,)))),
        Check("RA-05", seen, lambda c: max(c.of("base", ("MI250X",), pair="mb-ar")) > 1.0),
        Check("RA-06", seen, lambda c: min(c.of("reduction", ("MI250X",), BLOCKS[3:])) < 0),
        Check("RA-07", seen, lambda c: c.tiles_in_order()),
        Check("RA-11", seen, lambda c: c.rises_with_blocks()),
        Check("RA-12", seen, lambda c: c.lowest("overlap") == "MI250X"),
        Check("RA-13", seen, lambda c: all(c.gain(platform, BLOCKS[2:]) > 0 for platform in NVIDIA)),
        Check("RA-14", seen, lambda c: all(c.gain(p, BLOCKS[2:]) > c.gain(p, BLOCKS[:2]) for p in NVIDIA)),
    ]
    return found


MISSES = {
    "RA-01": "the GEMM's sizes are lost in the text; with cb1's, an all-reduce over PCIe takes several times as long",
    "RA-05": "RCCL's blocks find no room beside the GEMM's, and two that take turns do not slow each other",
    "RA-06": "RCCL's blocks find no room beside the GEMM's at any priority, so that it changes nothing",
}

GIVEN = {
    "RA-WL-01": "NBYTES is this number",
    "RA-WL-02": "model.pipeline.OPT1 and OPT2 are these tiles",
}
"""Claims that the model repeats."""

NOT_MODELLED = {
    "RA-08": "a measured exception of a few percent",
    "RA-09": "prior work",
    "RA-10": "how the paper measured",
}


def _platform(machine: Machine) -> list[Any]:
    gpu = machine.gpu
    return [machine.gpus, int(gpu.units), float(gpu.l2_mb), float(gpu.memory_gb), float(gpu.shared_kb)]


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


TILES_KEY = "tiles"
"""Key of the time with the larger tiles over that with the smaller ones, with priority (figures 5 and 6)."""


def curves_of(machine: Machine, key: str, pairs: Sequence[str] = tuple(PAIRS)) -> Curves[str]:
    """Return a figure of :func:`measure` over the numbers of blocks, by pair."""
    return {pair: [_value(machine, key, pair, blocks) for blocks in BLOCKS] for pair in pairs}


def _value(machine: Machine, key: str, pair: str, blocks: int) -> float:
    if key != TILES_KEY:
        return measure(machine, pair, blocks)[key]
    small, large = (measure(machine, pair, blocks, tile)["priority_us"] for tile in (OPT1, OPT2))
    return large / small


@dataclasses.dataclass(frozen=True, slots=True)
class OverlapFigure:
    """A figure of the paper over the numbers of thread blocks.

    Attributes:
        number, name: of the figure, and of its picture.
        key: in :func:`measure`, or ``TILES_KEY``.
        words: of the axis of values.
        platforms: that it has.
        pairs: that it has.
        level: of a line across; None: none.
        from_zero: the axis of values begins at 0.
    """

    number: str
    name: str
    key: str
    words: str
    platforms: Sequence[str] = tuple(PLATFORMS)
    pairs: Sequence[str] = tuple(PAIRS)
    level: float | None = None
    from_zero: bool = True

    def panels(self, machine: Machine | None = None, ranges: bool = False) -> list[Panel]:
        """Return a panel for each platform of the paper; or one for another machine."""
        chosen = {name: named(PLATFORMS[name]) for name in self.platforms}
        if machine is not None:
            chosen = {machine.title: machine}
        return [
            self.panel(self._bands(one, ranges), BLOCKS, name, self.words if place == 0 else "")
            for place, (name, one) in enumerate(chosen.items())
        ]

    def panel(self, curves: Mapping[str, Band], x: Sequence[int], title: str, words: str) -> Panel:
        """Return a panel of curves by pair."""
        return Panel(
            curves=curves,
            x=x,
            marks=MARKS.get((self.key, title), MARKS.get((self.key, ""), [])),
            level=self.level,
            low=0 if self.from_zero else None,
            title=title,
            xlabel="thread blocks",
            ylabel=words,
        )

    def _bands(self, machine: Machine, ranges: bool) -> dict[str, Band]:
        def curves(changed: Machine) -> Curves[str]:
            try:
                return curves_of(changed, self.key, self.pairs)
            except ValueError:  # a block that no unit can hold: the library would have another
                return curves_of(machine, self.key, self.pairs)

        return bands(machine, curves, NUMBERS if ranges else ())


AR, A2A = ("cb-ar", "mb-ar"), ("cb-a2a", "mb-a2a")
OVERLAP_FIGURES = (
    OverlapFigure("2", "base", "base", "overlapped over sequential time"),
    OverlapFigure("3", "reduction", "reduction", "time saved by priority, %", from_zero=False),
    OverlapFigure("4", "overlap", "overlap", "overlap rate, %"),
    OverlapFigure("5", "tiles-ar", TILES_KEY, "time of opt2 over opt1", ("A100", "H100"), AR, level=1),
    OverlapFigure("6", "tiles-a2a", TILES_KEY, "time of opt2 over opt1", ("A40", "A100"), A2A, level=1),
)
FIGURES = tuple(
    PaperFigure(
        numbers=(one.number,),
        name=f"overlap-{one.name}",
        title=f"Pipelined GEMM and collective, predicted ({BANDS})",
        panels=lambda machine, ranges, one=one: one.panels(None, ranges),  # type: ignore[misc]
        shared=True,
    )
    for one in OVERLAP_FIGURES
)


def timeline_of(machine: Machine, pair: str, blocks: int, *, priority: bool, iterations: int = 4) -> list[Interval]:
    """Return which iterations ran when (figure 1(c))."""
    tag, kind = PAIRS[pair]
    pipeline = Pipeline(parse_gemm(tag), kind, NBYTES, OPT1, blocks, iterations=iterations)
    return list(run_pipeline(machine, pipeline, priority=priority, record=True).timeline)


PAPER = Paper(
    numbers=("004",),
    machine="",
    context=lambda machine, version: OverlapContext(),
    checks=checks(),
    misses=MISSES,
    given=GIVEN,
    not_modelled=NOT_MODELLED,
    figures=FIGURES,
)

TILES = {"opt1": OPT1, "opt2": OPT2}
DTYPE = "bfloat16"


def main(machine_name: str, report: Path | None = None, json: Path | None = None) -> None:
    """Predict overlap by tile, number of blocks and priority.

    Args:
        machine_name: in the catalogue, or a file.
        report: folder for figures (of the paper's four platforms) and a timeline of this machine.
        json: file for the numbers of this machine, or ``written.STDOUT``.

    Raises:
        ValueError: no such machine, or one of several nodes.
    """
    machine = find(machine_name)
    machine.refuse_nodes("pipeline")
    console = tables_console(json)
    rows = {name: rows_of(machine, name) for name in TILES}
    for name in TILES:
        console.print(blocks_table(machine, name, rows[name]).to_rich())
    write_numbers(json, "pipeline_predicted", machine, [row for some in rows.values() for row in some])
    if report is not None:
        draw_all(FIGURES, machine, report)
        blocks = BLOCKS[2]
        for priority in (False, True):
            name = "timeline-pipeline" + ("-priority" if priority else "")
            timeline = timeline_of(machine, "cb-ar", blocks, priority=priority)
            write_chrome_trace(report / f"{name}.trace.json", timeline)
            draw_timeline(timeline, f"cb-ar on {machine.title}, {blocks} blocks", report, name)
    say_written([path for path in (json, report) if path is not None])


def rows_of(machine: Machine, name: str) -> list[dict[str, Any]]:
    """Return what is predicted with a tile of ``TILES``: an object for each pair and number of blocks."""
    return [
        {"tile": name, "pair": pair, "blocks": blocks, **measure(machine, pair, blocks, TILES[name])}
        for pair in PAIRS
        for blocks in BLOCKS
    ]


def blocks_table(machine: Machine, name: str, rows: list[dict[str, Any]]) -> Table:
    """Make a table of times over sequential execution, without and with priority, and overlap rates."""
    formats = (("base", ".2f"), ("priority", ".2f"), ("reduction", ".1f"), ("overlap", ".0f"))
    lines = []
    for row in rows:
        figures = tuple(format(row[key], spec) for key, spec in formats)
        lines.append(Line((row["pair"], str(row["blocks"]), *figures), rule=row["blocks"] == BLOCKS[-1]))
    tile = TILES[name]
    resident = blocks_per_unit(machine, tile, DTYPE)
    title = f"{machine.title}, tile {name}: predicted"
    note = f"{tile.m}x{tile.n}x{tile.k}: {tile.shared_kb(DTYPE):g} KB, {resident} blocks a unit"
    columns = ("<pair", "blocks", "overlapped /\nsequential", "with\npriority", "saved\n%", "overlap\nrate %")
    return Table(title, columns, tuple(lines), (note,), keys=2)
