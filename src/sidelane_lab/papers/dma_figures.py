"""Figures 1, 6, 13 to 16 and Tables 1 and 2 of the DMA collectives paper: published, predicted and measured.

Figures 1, 6, 13 and 14 are curves over rows, which the model fills as a measurement does. The others have a reading for
each: the model's power rows are in place, its chain has no GEMM that reads the result, and a table of ours says which
variants are as good.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.drawing import BLUE, VERMILLION
from sidelane_lab.harness.study import AS_GOOD, PRELAUNCHED
from sidelane_lab.machines.ranges import Band, Curves, bands
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.panels import COLOURS, Panel, PublishedValue, over_sizes
from sidelane_lab.model.power import dma_power, library_power
from sidelane_lab.model.study import COLLECTIVES, SIZES
from sidelane_lab.papers import dma
from sidelane_lab.papers.claims import matching, published
from sidelane_lab.papers.figures import declared
from sidelane_lab.papers.files import ResultFile
from sidelane_lab.papers.measurements import ChainReadings, CollectiveReadings, PhaseReadings, PowerReadings
from sidelane_lab.papers.rows import RowFigure, by_size, model_rows, size_places

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
"""Numbers of a description that the figures depend on."""
SIDES = (1024, 4096, 8192)
"""Sides of the GEMM in front of the all_gather in the figure."""


def rows_of(study: str) -> Callable[[Machine, str], ResultFile]:
    """Return what makes the model's rows of a study of the paper."""
    return lambda machine, version: model_rows(machine, dma.OPTIONS[study])


def _phase_curves(file: ResultFile) -> dict[str, dict[int, float]]:
    readings = PhaseReadings(file)
    return {**readings.shares, "not copy": readings.not_copy()}


def _phase_panel(found: Mapping[str, Band], sizes: Sequence[int], marked: bool) -> Panel:
    phases = dict(found)
    values = [published()[f"DM-PH-0{number}"]["value"] for number in (1, 2)]
    last = len(dma.PHASED) - 1 + 0.12
    marks = [
        PublishedValue("published: no copy", (values[0],), (0.12,), line=""),
        PublishedValue("published: at most, above 1 MB", (values[1],), (last,), line="", point="v"),
    ]
    return Panel(
        total=phases.pop("not copy"),
        curves=phases,
        x=[format_bytes(n) for n in sizes],
        marks=marks if marked and tuple(sizes) == dma.PHASED else [],
        xlabel="bytes (lines: plausible share of what is no copy)",
        ylabel="share of the time, %",
        high=115,
        legend={"ncols": 6},
    )


PHASES = RowFigure(rows_of("phases"), _phase_curves, _phase_panel, dma.MI300X, NUMBERS)
"""Figure 6: phases from the bottom up: what is no copy lies below, as the paper counts it together."""


SPEEDUP: dict[str, Any] = {
    "level": 1,
    "low": 0,
    "ylabel": "speedup over the library",
    "legend": {"ncols": 3, "loc": "upper center"},
}
"""Axis of panels of speedups over the library."""


def _speedup_figure(kind: Kind) -> RowFigure:
    """Every variant, with and without prelaunch, over the library, and the published means (figures 13 and 14)."""
    variants = dma.all_variants(kind)
    styles = {word: (COLOURS[place // 2], place % 2) for place, word in enumerate(variants)}

    def curves(file: ResultFile) -> dict[str, dict[int, float]]:
        readings = CollectiveReadings(file)
        return {
            word: {n: 1 / readings.behind(kind, (word,), [n]) for n in readings.sizes(kind, variant=word)}
            for word in variants
        }

    word = next(name for name, known in dma.NAMES.items() if known is kind)
    gap, slow, faster = (published()[claim]["value"][word] for claim in ("DM-BB-05", "DM-PC-02", "DM-PC-01"))
    small, large = (float(SIZES[0]), float(dma.UP_TO)), (float(dma.FROM), float(SIZES[-1]))
    marks = [
        PublishedValue("published: best without prelaunch, mean to 32 MB", (1 / gap,), small),
        PublishedValue("published: pcpy, mean to 32 MB", (1 / slow,), small, line="--"),
        PublishedValue("published: pcpy, mean from 64 MB", (1 + faster / 100,), large, line="-."),
    ]
    panel = functools.partial(_speedup_panel, marks=marks, styles=styles)
    return RowFigure(rows_of("collectives"), curves, panel, dma.MI300X, NUMBERS)


def _speedup_panel(
    found: Mapping[str, Band],
    sizes: Sequence[int],
    marked: bool,
    marks: Sequence[PublishedValue],
    styles: Mapping[str, tuple[str, int]] = MappingProxyType({}),
) -> Panel:
    return Panel(curves=found, styles=styles, marks=marks if marked else (), **SPEEDUP, **size_places(sizes))


def _gap_curves(file: ResultFile) -> dict[str, dict[int, float]]:
    readings = CollectiveReadings(file)
    ways = {"baseline (pcpy)": dma.PCPY, "optimized (best of all)": dma.all_variants(dma.AG)}
    return {
        name: {n: 1 / readings.behind(dma.AG, variants, [n]) for n in readings.sizes(dma.AG)}
        for name, variants in ways.items()
    }


def _gap_marks() -> list[PublishedValue]:
    slow = published()["DM-PC-02"]["value"]["allgather"]
    final = dma.ratio_of_text(published()["DM-FIN-01"]["value"]["allgather"])
    small = (float(SIZES[0]), float(dma.UP_TO))
    return [
        PublishedValue("published: baseline, mean to 32 MB", (1 / slow,), small, line="--"),
        PublishedValue("published: optimized, mean to 32 MB", (1 / final,), small),
    ]


SPEEDUPS = {kind: _speedup_figure(kind) for kind in COLLECTIVES}
"""Figures 13 and 14."""
GAP = RowFigure(
    rows_of("collectives"), _gap_curves, functools.partial(_speedup_panel, marks=_gap_marks()), dma.MI300X, NUMBERS
)
"""Figure 1: the baseline and the best of all variants, over the library."""


def producer_mark(most: int) -> PublishedValue:
    """Return the mark of the bytes from which a GEMM and an all-gather on copy engines are as good, up to ``most``."""
    start = published()["DM-SY-01"]["value"]
    return PublishedValue(f"published: as good or better above {start} MB", (1,), (float(start * dma.MB), float(most)))


def _producer_panels(machine: Machine, ranges: bool, version: str) -> list[Panel]:
    def ratios(changed: Machine) -> Curves[str]:
        context, found = dma.DmaContext(changed), {}
        for side in SIDES:
            engines, library = (context.with_producer(side, on_engines) for on_engines in (True, False))
            found[f"GEMM {side}"] = [library[n] / engines[n] for n in SIZES]
        return found

    curves = bands(machine, ratios, NUMBERS if ranges else ())
    here = [producer_mark(SIZES[-1])] if machine.name == dma.MI300X else []
    return [Panel(curves=curves, marks=here, level=1, ylabel="library / DMA", **over_sizes(SIZES))]


POWER_STYLES = {"library": (VERMILLION, 0), "best DMA": (BLUE, 1)}


def _power_panels(machine: Machine, ranges: bool, version: str) -> list[Panel]:
    if machine.power is None:
        return []

    def watts(changed: Machine) -> Curves[str]:
        taken = {n: dma.DmaContext(changed).to_take(dma.AG, n).partition(", ") for n in SIZES}
        return {
            "library": [library_power(changed, dma.AG, n).total_w for n in SIZES],
            "best DMA": [dma_power(changed, dma.AG, n, v, bool(ahead)).total_w for n, (v, _, ahead) in taken.items()],
        }

    found: dict[str, Band] = bands(machine, watts, NUMBERS if ranges else ())
    large = [(n, watt) for n, watt in zip(SIZES, found["library"].values, strict=True) if n >= dma.FROM]
    mean = statistics.fmean(watt for _, watt in large) * (1 - published()["DM-PW-01"]["value"] / 100)
    ends = (float(large[0][0]), float(large[-1][0]))
    marks = [PublishedValue("published: best DMA below the library from 64 MB", (mean,), ends)]
    return [
        Panel(
            curves=found,
            styles=POWER_STYLES,
            marks=marks if machine.name == dma.MI300X else [],
            low=0,
            ylabel="W a GPU",
            **over_sizes(SIZES),
        )
    ]


def power(file: ResultFile) -> list[Panel]:
    """Figure 15 of the DMA collectives paper."""
    return by_size(PowerReadings(file).watts, styles=POWER_STYLES, low=0, ylabel="W a GPU")


def producer(file: ResultFile) -> list[Panel]:
    """Figure 16 of the DMA collectives paper."""
    ratios = ChainReadings(file).ratios
    curves = {"GEMM, all-gather, GEMM in one graph": ratios}
    return by_size(curves, marks=[producer_mark(max(ratios, default=0))], level=1, ylabel="library / DMA")


def _to_take(kind: Kind) -> Callable[[Machine, bool, str], Mapping[str, str]]:
    def predict(machine: Machine, ranges: bool, version: str) -> Mapping[str, str]:
        context = dma.DmaContext(machine)
        return {format_bytes(nbytes): context.to_take(kind, nbytes) for nbytes in SIZES}

    return predict


def _published_best(table: str) -> Callable[[], Mapping[str, str]]:
    def lines() -> Mapping[str, str]:
        found: dict[str, str] = {}
        for claim_id in matching(rf"DM-{table}-\d"):
            claim = published()[claim_id]
            low, high = dma.claimed_range(claim["claim"])
            found |= {format_bytes(n): claim["value"] for n in SIZES if low <= n < (high or 1 << 62)}
        return found

    return lines


def best_words(kind: Kind) -> Callable[[ResultFile], dict[str, str]]:
    """Tables 1 and 2 of the DMA collectives paper: the fastest variant of each size, and how many are as good."""

    def words(file: ResultFile) -> dict[str, str]:
        readings = CollectiveReadings(file)
        variants = dma.all_variants(kind)
        found = {}
        for nbytes in readings.sizes(kind):
            best, *others = readings.as_good(kind, variants, nbytes)
            rest = f" ({len(others)} more within {100 * AS_GOOD - 100:.0f}%)" if others else ""
            found[format_bytes(nbytes)] = best.replace(PRELAUNCHED, ", prelaunch") + rest
        return found

    return words


FIGURES = (
    declared("003/T1", predict=_to_take(dma.AG), measure=best_words(dma.AG), lines=_published_best("T1")),
    declared("003/T2", predict=_to_take(dma.AA), measure=best_words(dma.AA), lines=_published_best("T2")),
    declared("003/1", predict=GAP.predicted, measure=GAP.measured),
    declared("003/6", predict=PHASES.predicted, measure=PHASES.measured),
    declared("003/13", predict=SPEEDUPS[dma.AG].predicted, measure=SPEEDUPS[dma.AG].measured),
    declared("003/14", predict=SPEEDUPS[dma.AA].predicted, measure=SPEEDUPS[dma.AA].measured),
    declared("003/15", predict=_power_panels, measure=power),
    declared("003/16", predict=_producer_panels, measure=producer),
)
