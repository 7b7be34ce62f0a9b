"""The overlap paper: priority and occupancy on four platforms. What it claims, and its figures, predicted; and the
command ``sidelane pipeline``, which predicts the same iterations for any machine.

The sizes of its GEMMs are lost in the text; it follows the ConCCL paper, so ``cb`` and ``mb`` are cb1 and mb1 of that
paper's Table I. Nothing was fitted to this paper: how blocks share a unit was fitted to a GEMM on an H100.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sidelane.program.collective import Kind
from sidelane_lab.cli.c3 import OccupancyOptions
from sidelane_lab.machines.load import named
from sidelane_lab.machines.numbers import predict_study
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.pipeline import OPT1, Pipeline, run_pipeline
from sidelane_lab.pairs.workload import parse_gemm
from sidelane_lab.papers.claims import (
    OF_THE_MACHINE,
    Claim,
    ClaimReading,
    ClaimRole,
    Paper,
    unjudged,
)
from sidelane_lab.papers.measurements import PipelineReadings
from sidelane_lab.papers.rows import model_rows
from sidelane_lab.sim import Interval

PLATFORMS = {"A40": "a40x4", "A100": "a100-40x4", "H100": "h100x4", "MI250X": "mi250x8"}
NVIDIA = ("A40", "A100", "H100")
BLOCKS = (16, 64, 256, 1024, 4096)
"""Thread-block counts; the paper's are not in the text but for 16 and 32."""
MANY = BLOCKS[-1]
PAIRS = PipelineReadings.PAIRS
NBYTES = 896 << 20
AMD_ONLY = "about an AMD GPU, on which nothing of ours has been measured"
AR, A2A = ("cb-ar", "mb-ar"), ("cb-a2a", "mb-a2a")


ASKED = OccupancyOptions(
    workloads=("cb1_896M", "mb1_896M"), shapes=("opt1", "opt2"), blocks=BLOCKS, iterations=10, quiet=True
)
"""The paper's pairs, tiles and numbers of blocks."""


def readings_of(machine: Machine) -> PipelineReadings:
    """Return the curves of a machine that is described."""
    return PipelineReadings(model_rows(machine, ASKED))


class OverlapContext:
    """Numbers that claims are about, of the paper's own machines."""

    @functools.cached_property
    def readings(self) -> dict[str, PipelineReadings]:
        """Curves by platform."""
        return {platform: readings_of(named(name)) for platform, name in PLATFORMS.items()}

    def of(self, key: str, platforms: tuple[str, ...], blocks: tuple[int, ...] = BLOCKS, pair: str = "") -> list[float]:
        """Return values of a figure, on some platforms at some numbers of blocks, of one pair or of all."""
        curves = (self.readings[platform].curves(key) for platform in platforms)
        return [of[name][n] for of in curves for name in of if pair in ("", name) for n in blocks]

    def gain(self, platform: str, blocks: tuple[int, ...]) -> float:
        """Return what priority saves on a platform, percent of the time without it: the mean over pairs and blocks."""
        return statistics.fmean(self.of("reduction", (platform,), blocks))

    def lowest(self, key: str) -> str:
        """Return the platform where the mean of a figure over pairs and blocks is lowest."""
        return min(PLATFORMS, key=lambda platform: statistics.fmean(self.of(key, (platform,))))

    def rises_with_blocks(self) -> bool:
        """With more blocks, overlapped time comes closer to sequential time, on every platform with every pair."""
        return all(readings.rises() for readings in self.readings.values())

    def tiles_in_order(self) -> bool:
        """opt2 at or below opt1 over most block counts, and equal at the highest."""
        pairs = [("A100", pair) for pair in PAIRS] + [("H100", pair) for pair in AR]
        curves = [self.readings[platform].curve("tiles", pair) for platform, pair in pairs]
        better = [ratio <= 1.01 for curve in curves for ratio in curve.values()]
        same = [abs(curve[MANY] - 1) < 0.1 for curve in curves]
        return statistics.fmean(better) > 0.5 and statistics.fmean(same) > 0.5


def pipelines(read: Callable[[PipelineReadings], Any]) -> ClaimReading:
    """Return a formula over iterations that overlap."""
    return ClaimReading("occupancy", lambda file: read(PipelineReadings(file)))


def claims() -> list[Claim[OverlapContext]]:
    """Every claim of the paper.

    No number was fitted to one of them. All had been held against the model when its blocks, and the reading of how the
    GEMMs follow each other, went in: so none is held out. Predictions are of the paper's four platforms and numbers of
    blocks, which a file of ours does not have: a claim has a formula for each.
    """
    seen = ClaimRole.SEEN
    found: list[Claim[OverlapContext]] = [
        Claim(
            "RA-HW-01",
            ClaimRole.INPUT,
            lambda c: {name: _platform(named(key)) for name, key in PLATFORMS.items()},
            OF_THE_MACHINE,
            incomparable="its last figure adds the L1 cache to shared memory, which the descriptions do not have",
        ),
        Claim(
            "RA-01",
            seen,
            lambda c: max(c.of("reduction", ("A40",), BLOCKS[2:], "cb-ar")),
            pipelines(lambda p: max(p.curve("reduction", "cb-ar").values())),
            miss="the GEMM's sizes are lost in the text; with cb1's, an all-reduce over PCIe takes several times as "
            "long",
        ),
        Claim(
            "RA-02",
            seen,
            lambda c: max(c.of("overlap", NVIDIA)),
            pipelines(lambda p: max(_values(p, "overlap"))),
            incomparable="the last of n collectives has no GEMM beside it, and the paper does not give n",
        ),
        Claim(
            "RA-03",
            seen,
            lambda c: min(c.of("base", NVIDIA, BLOCKS[:1])),
            pipelines(lambda p: min(_values(p, "base"))),
            incomparable="n GEMMs of few blocks side by side come down to 1/n, and the paper does not give n",
        ),
        Claim(
            "RA-04",
            seen,
            lambda c: statistics.fmean(c.of("base", (*NVIDIA, "MI250X"), (MANY,))),
            pipelines(lambda p: statistics.fmean(_values(p, "base", max))),
        ),
        Claim(
            "RA-05",
            seen,
            lambda c: max(c.of("base", ("MI250X",), pair="mb-ar")) > 1.0,
            AMD_ONLY,
            miss="RCCL's blocks find no room beside the GEMM's, and two that take turns do not slow each other",
        ),
        Claim(
            "RA-06",
            seen,
            lambda c: min(c.of("reduction", ("MI250X",), BLOCKS[3:])) < 0,
            AMD_ONLY,
            miss="RCCL's blocks find no room beside the GEMM's at any priority, so that it changes nothing",
        ),
        Claim("RA-07", seen, lambda c: c.tiles_in_order(), pipelines(_tiles_in_order)),
        Claim("RA-11", seen, lambda c: c.rises_with_blocks(), pipelines(PipelineReadings.rises)),
        Claim("RA-12", seen, lambda c: c.lowest("overlap") == "MI250X", AMD_ONLY),
        Claim(
            "RA-13",
            seen,
            lambda c: all(c.gain(platform, BLOCKS[2:]) > 0 for platform in NVIDIA),
            pipelines(lambda p: _saved(p)[0] > 0),
        ),
        Claim(
            "RA-14",
            seen,
            lambda c: all(c.gain(p, BLOCKS[2:]) > c.gain(p, BLOCKS[:2]) for p in NVIDIA),
            pipelines(lambda p: _saved(p)[0] > _saved(p)[1]),
        ),
        *unjudged("004"),
    ]
    return found


def _tiles_in_order(pipelines: PipelineReadings) -> bool:
    curves = pipelines.curves("tiles")
    ratios = [ratio for curve in curves.values() for ratio in curve.values()]
    same = [abs(curve[max(curve)] - 1) < 0.1 for curve in curves.values()]
    return statistics.fmean(ratio <= 1.01 for ratio in ratios) > 0.5 and statistics.fmean(same) > 0.5


def _values(pipelines: PipelineReadings, key: str, choose: Callable[[Sequence[int]], int] | None = None) -> list[float]:
    curves = pipelines.curves(key).values()
    if choose is None:
        return [value for curve in curves for value in curve.values()]
    return [curve[choose(list(curve))] for curve in curves]


def _saved(pipelines: PipelineReadings) -> tuple[float, float]:
    """Return what priority saves with many thread blocks and with few, means over pairs."""
    curves = pipelines.curves("reduction").values()
    ordered = [[curve[n] for n in sorted(curve)] for curve in curves]
    many, few = ([value for curve in ordered for value in curve[part]] for part in (slice(-2, None), slice(2)))
    return statistics.fmean(many), statistics.fmean(few)


def _platform(machine: Machine) -> list[Any]:
    gpu = machine.gpu
    return [machine.gpus, int(gpu.units), float(gpu.l2_mb), float(gpu.memory_gb), float(gpu.shared_kb)]


def timeline_of(machine: Machine, pair: str, blocks: int, *, priority: bool, iterations: int = 4) -> list[Interval]:
    """Return which iterations ran when (figure 1(c))."""
    tag, kind = PAIRS[pair]
    pipeline = Pipeline(parse_gemm(tag), Kind(kind), NBYTES, OPT1, blocks, iterations=iterations)
    return list(run_pipeline(machine, pipeline, priority=priority, record=True).timeline)


PAPER = Paper(
    numbers=("004",),
    machine="",
    context=lambda machine, version: OverlapContext(),
    claims=claims(),
)


def main(machine_name: str, report: Path | None = None, json: Path | None = None) -> None:
    """Predict overlap by tile, number of blocks and priority.

    Args:
        machine_name: in the catalogue, or a file.
        report: folder for the numbers; `sidelane figure 004/2` and others draw them.
        json: file for the numbers of this machine, or ``written.STDOUT``.

    Raises:
        ValueError: no such machine, or one of several nodes.
    """
    predict_study(machine_name, dataclasses.replace(ASKED, report=report, json=json))
