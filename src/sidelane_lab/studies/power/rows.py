"""The command ``sidelane power``: its options, and its rows as tables and as pictures."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sidelane.program.collective import Kind
from sidelane_lab.harness.help import HOW
from sidelane_lab.harness.options import (
    LAUNCHES,
    SPAN,
    WRITTEN,
    StudyOptions,
    count,
    implementations,
    kinds,
    loaded,
    names,
    option,
    places,
    size_span,
    study_command,
    word,
)
from sidelane_lab.harness.parameters import KINDS
from sidelane_lab.harness.report import Cell, tables_by
from sidelane_lab.harness.study import IMPLEMENTATIONS, MODEL, FlatRow, Picture
from sidelane_lab.harness.table import Table, grouped, place_of, verdict
from sidelane_lab.pairs.workload import TABLE_I

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETTLE_S = 0.15
"""Seconds at the beginning of a run that do not count: power follows load with a delay, and readings follow power."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerOptions(StudyOptions):
    """Measure power and energy of collectives, with the GPUs' counters.

    With --machine: predict them for a machine that need not be here: as the DMA collectives paper ran its variants, and
    reductions as Sidelane runs them on copy engines; with --gemm beside a GEMM, as `sidelane c3` has it.
    """

    study = "power"
    examples = (
        ("sidelane power --min-bytes 1G", "watts and energy at one size"),
        ("sidelane power --collective all_reduce --machine mi300x8", "predicted, for eight MI300X"),
        ("sidelane power --gemm cb1 --machine h200x4", "predicted, beside a GEMM under each strategy"),
    )

    collectives: tuple[Kind, ...] = kinds((Kind.ALL_GATHER, Kind.ALL_TO_ALL), KINDS)
    gemms: tuple[str, ...] = option(
        "--gemm",
        (),
        f"Next to it, predicted, with --machine: {', '.join(TABLE_I)} (ConCCL paper's Table I), or m,n,k. May be "
        "repeated.",
        multiple=True,
        predicted=True,
    )
    sizes: tuple[int, ...] = size_span(gpus=("64M", "1G"))
    variants: tuple[str, ...] = names(
        "--variants",
        ("b2b",),
        "Of Sidelane's copy engines: pcpy, striped, ...; reductions have b2b and pcpy. Kernels all take part.",
    )
    launch: str = word("--launch", LAUNCHES, "graph", "Call by call, or in a CUDA graph.")
    places: tuple[str, ...] = places()
    seconds: float = option("--seconds", 0.7, "Seconds that each implementation runs in a round.", group=HOW)
    rounds: int = count("--rounds", 2, "Rounds over all implementations.")
    implementations: tuple[str, ...] = implementations()
    idle_s: float = 1.5

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        if self.seconds <= 2 * SETTLE_S or self.idle_s < SETTLE_S:
            raise ValueError(
                f"PowerOptions: seconds and idle_s (value={self.seconds}, {self.idle_s}, "
                f"allowed=more than {2 * SETTLE_S}, {SETTLE_S} and more)"
            )


def _predict(machine: str, options: PowerOptions) -> None:
    loaded("studies.power.predict").main(machine, options)


power = study_command("power", PowerOptions, _predict, ("gemms", "collectives", *SPAN, *WRITTEN))

LIBRARY = "library"


@dataclasses.dataclass(frozen=True, slots=True)
class PowerRow(FlatRow):
    """Power and energy of a collective that runs back to back (method: results/notes/power.md).

    Attributes:
        bytes: bytes as in :class:`CollectiveRow`.
        implementation: implementation as in :class:`CollectiveRow`; ``library`` in predictions.
        launch: eager or graph; ``model`` in predictions.
        time_us: time of one call of the slowest rank.
        watts: mean power of a GPU, from the energy counters.
        watts_sampled: mean power of a GPU, from the power readings.
        idle_watts: mean power before the study, with everything set up and nothing running.
        energy_mj: energy of all GPUs for one call: watts x GPUs x time.
        energy_above_idle_mj: energy of one call above ``idle_watts``.
        counters_agree_percent: 100 x watts_sampled / watts.
        correct: True if outputs agreed with a reference in this run; None when nothing ran.
        note: reason why there are no figures, or a remark.
    """

    allowed = (("launch", (*LAUNCHES, MODEL)), ("implementation", (*IMPLEMENTATIONS, LIBRARY)))
    figures = ("time_us", "watts", "energy_mj")

    collective: str
    bytes: int
    implementation: str
    variant: str
    in_place: bool
    launch: str
    time_us: float | None = None
    watts: float | None = None
    watts_sampled: float | None = None
    idle_watts: float | None = None
    energy_mj: float | None = None
    energy_above_idle_mj: float | None = None
    counters_agree_percent: float | None = None
    correct: bool | None = None
    note: str = ""


COLUMNS: Mapping[str, Cell] = {
    "bytes": "bytes",
    "<implementation": "implementation",
    "<variant": "variant",
    "time\nus": "time_us",
    "W": "watts",
    "read/\ncount %": "counters_agree_percent:.0f",
    "energy\nmJ": "energy_mj",
    "above\nidle mJ": "energy_above_idle_mj",
    "<correct": lambda row, _: "" if row.launch == MODEL else verdict(row.correct),
}


def power_tables(rows: Sequence[PowerRow]) -> list[Table]:
    """Make one table for each way to call a collective; the least energy of each size is set off."""

    def title(row: PowerRow) -> str:
        idle = "" if row.idle_watts is None else f", idle {row.idle_watts:.0f} W"
        return f"{power_title(row)}: W a GPU{idle}, energy of all GPUs for one call"

    return tables_by(
        rows,
        lambda row: (row.collective, row.in_place, row.launch),
        title,
        COLUMNS,
        keys=3,
        groups=lambda row: row.bytes,
        least=lambda row: row.energy_mj,
        ordered=True,
    )


def power_title(row: PowerRow) -> str:
    """Return what rows of one table and one picture have in common."""
    return f"{row.collective}, {place_of(row.in_place)}" + (f", {row.launch}" if row.launch != MODEL else "")


def draw_power(rows: Sequence[PowerRow], where: str, directory: Path) -> list[Picture]:
    """Draw watts over size and energy of each GiB over size, one line an implementation and variant."""
    from matplotlib.figure import Figure

    from sidelane_lab.harness.drawing import COLOURS, GREY, STYLES, file_name, label_ends, plain_name, save, size_axis

    pictures = []
    for name, alike in grouped([row for row in rows if row.watts and row.energy_mj], power_title):
        lines = grouped(alike, lambda row: (row.implementation, row.variant))
        styles = {key: itertools.cycle(STYLES) for key in {row.implementation for row in alike}}
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        watts, energy = figure.subplots(1, 2)
        ends: dict[Axes, list[tuple[float, float, str, str]]] = {watts: [], energy: []}
        for (implementation, variant), points in lines:
            points = sorted(points, key=lambda row: row.bytes)
            style, marker = next(styles[implementation])
            colour, sizes = COLOURS.get(implementation, GREY), [row.bytes for row in points]
            looks = {"color": colour, "linestyle": style, "marker": marker, "markersize": 4, "linewidth": 1.4}
            for axes, values in (
                (watts, [row.watts or 0.0 for row in points]),
                (energy, [(row.energy_mj or 0.0) * 2**30 / row.bytes for row in points]),
            ):
                axes.plot(sizes, values, **looks)
                ends[axes].append(
                    (sizes[-1], values[-1], ", ".join(filter(None, [plain_name(implementation), variant])), colour)
                )
        idle = next((row.idle_watts for row in alike if row.idle_watts is not None), None)
        if idle is not None:
            watts.axhline(idle, color=GREY, linewidth=0.9, linestyle="--")
            watts.annotate(
                "idle", (0.01, idle), xycoords=("axes fraction", "data"), va="bottom", fontsize=8, color=GREY
            )
        heights = [height for _, height, _, _ in ends[energy]]
        if max(heights) > 10 * min(heights):  # from small sizes on, where the handshakes are everything
            energy.set_yscale("log")
        for axes, title in ((watts, "Power of a GPU, W"), (energy, "Energy of a GiB on all GPUs, mJ")):
            size_axis(axes, sorted({row.bytes for row in alike}))
            axes.set_title(f"{title} (less is better)")
            axes.set_ylabel(title.rpartition(", ")[2])
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_ylim(bottom=None if axes.get_yscale() == "log" else 0)
            label_ends(axes, ends[axes], side="right")
        title = f"{name}: {where}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        text = f"Power and energy over size for {name}, one line an implementation and variant."
        pictures.append(save(figure, file_name(f"power {name}"), title, text, directory))
    return pictures
