"""The DMA collectives paper's figures, predicted: phases, speedups, a producer's collective, and power."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from sidelane.c3.workload import parse_gemm
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness import drawing
from sidelane_lab.harness.drawing import BLACK, BLUE, RC, VERMILLION
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import published
from sidelane_lab.model.claims_dma import DmaContext
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.power import dma_power, library_power
from sidelane_lab.model.published import PUBLISHED_VARIANTS, library_us
from sidelane_lab.model.study import COLLECTIVES, SIZES, DmaStudy, dma_study
from sidelane_lab.papers.simulated.bands import Curves, bands
from sidelane_lab.papers.simulated.curves import COLOURS, curve, one, over_sizes, whiskers
from sidelane_lab.papers.simulated.marks import FROM, PUBLISHED_OF, UP_TO, draw_published_at, mark_cut

OF_ENGINES = ("control", "doorbell", "fetch", "copy", "next_copy", "wait", "signal", "trigger", "sync")
NUMBERS = (
    "links.usable_gbps",
    "dma.engine_gbps",
    *(f"dma.{name}_us" for name in OF_ENGINES),
    "library",
    "matmul.efficiency",
    "matmul.launch_us",
    "power",
)
"""Of a description, that these figures depend on."""
SIDES = (1024, 4096, 8192)
"""Of the GEMM in front of the all_gather."""
PHASED = tuple(4096 << step for step in range(10))
PHASES = ("control", "schedule", "sync", "copy")
"""From the bottom up: what is no copy lies below, as the paper counts it together."""
LIBRARY, BEST = "library", "best DMA"
Name = tuple[str, ...]


def draw_dma(study: DmaStudy, machine: Machine, folder: Path) -> list[Path]:
    """Figures 6, 13, 14, 15 and 16 of the DMA collectives paper, with bands over the plausible values."""

    def curves(changed: Machine) -> Curves[Name]:
        if (changed.dma, changed.links) != (machine.dma, machine.links):
            return _curves(dma_study(changed), changed)
        times = {(kind, n): library_us(changed, kind, n) for kind, n in study.library_us}
        return _curves(dataclasses.replace(study, library_us=times), changed)

    found = bands(machine, curves, NUMBERS)
    here = machine.name == PUBLISHED_OF
    drawn = []
    with mpl.rc_context(RC):

        def plot(axes: Axes, name: Name, words: str, colour: str, style: int) -> None:
            curve(axes, SIZES, found[name], words, colour, style)

        figure, axes = one(f"Phases of one DMA copy: {machine.title}, predicted")
        bottom = [0.0] * len(PHASED)
        for colour, phase in zip(COLOURS, PHASES, strict=False):
            shares = found["phases", phase].values
            axes.bar(range(len(PHASED)), shares, 0.7, bottom=bottom, color=colour, label=phase)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
        whiskers(axes, found["phases", "not copy"])
        if here:
            axes.plot(
                0.12, published()["DM-PH-01"]["value"], "D", color=BLACK, markersize=5, label="published: no copy"
            )
            most = published()["DM-PH-02"]["value"]
            axes.plot(
                len(PHASED) - 1 + 0.12, most, "v", color=BLACK, markersize=5, label="published: at most, above 1 MB"
            )
        axes.set_xticks(range(len(PHASED)), [format_bytes(n) for n in PHASED])
        axes.set_xlabel("bytes (lines: plausible share of what is no copy)")
        axes.set_ylabel("share of the time, %")
        axes.set_ylim(0, 115)
        axes.legend(ncols=6, fontsize=7)
        drawn.append(drawing.save_both(figure, "dma-phases", folder))

        for kind in COLLECTIVES:
            figure, axes = one(f"DMA {kind} over the library: {machine.title}, predicted")
            for colour, variant in zip(COLOURS, PUBLISHED_VARIANTS[kind], strict=False):
                for prelaunched in (False, True):
                    words = _variant(variant, prelaunched)
                    plot(axes, (str(kind), words), words, colour, int(prelaunched))
            axes.axhline(1, color=BLACK, linewidth=0.8)
            axes.set_ylabel("speedup over the library")
            if here:
                word = "allgather" if kind is Kind.ALL_GATHER else "alltoall"
                gap, slow = (published()[claim]["value"][word] for claim in ("DM-BB-05", "DM-PC-02"))
                draw_published_at(axes, (SIZES[0], UP_TO), 1 / gap, "published: best without prelaunch, mean to 32 MB")
                draw_published_at(axes, (SIZES[0], UP_TO), 1 / slow, "published: pcpy, mean to 32 MB", "--")
                faster = 1 + published()["DM-PC-01"]["value"][word] / 100
                draw_published_at(axes, (FROM, SIZES[-1]), faster, "published: pcpy, mean from 64 MB", "-.")
            axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
            drawn.append(over_sizes(figure, axes, folder, f"dma-{kind}", legend={"ncols": 4, "loc": "upper center"}))

        figure, axes = one(
            f"GEMM, then all_gather: time with the library over time with DMA, {machine.title}, predicted"
        )
        for index, side in enumerate(SIDES):
            plot(axes, ("producer", str(side)), f"GEMM {side}", COLOURS[index], index)
        axes.axhline(1, color=BLACK, linewidth=0.8)
        if here:
            start = published()["DM-SY-01"]["value"] * 2**20
            draw_published_at(axes, (start, SIZES[-1]), 1, "published: as good or better above 4 MB")
        axes.set_ylabel("library / DMA")
        mark_cut(axes)
        drawn.append(over_sizes(figure, axes, folder, "dma-producer"))

        if machine.power is not None:
            figure, axes = one(f"Power during an all_gather: {machine.title}, predicted from assumed parts")
            plot(axes, ("power", LIBRARY), LIBRARY, VERMILLION, 0)
            plot(axes, ("power", BEST), BEST, BLUE, 1)
            if here:
                less = 1 - published()["DM-PW-01"]["value"] / 100
                large = [
                    (n, watts) for n, watts in zip(SIZES, found["power", LIBRARY].values, strict=True) if n >= FROM
                ]
                mean = statistics.fmean(watts for _, watts in large)
                words = "published: best DMA below the library from 64 MB"
                draw_published_at(axes, (large[0][0], large[-1][0]), less * mean, words)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("W a GPU")
            drawn.append(over_sizes(figure, axes, folder, "dma-power"))
    return drawn


def _curves(study: DmaStudy, machine: Machine) -> Curves[Name]:
    """Every curve of these figures, over sizes."""
    context, gather = DmaContext(machine), Kind.ALL_GATHER
    shares = [context.phases(n) for n in PHASED]
    found: dict[Name, list[float]] = {("phases", phase): [share[phase] for share in shares] for phase in PHASES}
    found["phases", "not copy"] = [100 - share["copy"] for share in shares]
    for (kind, variant, prelaunched, _), _ in study.dma_us.items():
        found[str(kind), _variant(variant, prelaunched)] = [
            study.library_us[kind, n] / study.dma_us[kind, variant, prelaunched, n] for n in SIZES
        ]
    relay = machine.dma.signal_us + machine.dma.wait_us
    for side in SIDES:
        gemm = gemm_us(machine, parse_gemm(f"{side}x{side}x{side}"))
        found["producer", str(side)] = [
            (gemm + study.library_us[gather, n]) / (gemm + relay + study.best_us(gather, n)) for n in SIZES
        ]
    if machine.power is not None:
        found["power", LIBRARY] = [library_power(machine, gather, n).total_w for n in SIZES]
        found["power", BEST] = [dma_power(machine, gather, n, *study.best(gather, n)).total_w for n in SIZES]
    return found


def _variant(variant: str, prelaunched: bool) -> str:
    return variant + ("+prelaunch" if prelaunched else "")
