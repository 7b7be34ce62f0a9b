"""The vendor's GEMMs alone, at the shapes of language models: what predictions of computation are held against.

A sample is a graph of calls one behind the other. Each call has matrices of its own, as layers have, and together they
are several times the size of the last-level cache: weights come from memory, as they do in a model. Inputs are normal
random numbers, since a GEMM of zeros draws less power and runs faster.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from sidelane.c3.workload import CPU_GEMM_FLOPS, Gemm
from sidelane.cli.launch import Rank
from sidelane.machine import local
from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US
from sidelane_lab.harness.results.files import Results
from sidelane_lab.harness.results.rows.operators import GemmRow
from sidelane_lab.harness.running.measure import Job, Meter
from sidelane_lab.harness.running.study import Sender, StudyOptions, run_study
from sidelane_lab.studies.gemms.shapes import Projection, projections

COLD_BYTES = 256 << 20
"""Matrices of a sample together: five times the last-level cache of the largest GPU here."""

MOST_CALLS, SAMPLE_FLOPS = 64, 1e11
"""Calls of a sample: so many that small ones take about 200 us together."""

CHECKED_ROWS = 16
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-3}
"""Largest error, next to the largest element. float32 may be rounded to TF32 by a program's own settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmOptions(StudyOptions):
    """What to measure.

    Attributes:
        models: whose projections; empty takes all.
        warmup: samples before the measured ones.
        repeats: measured samples.
    """

    models: tuple[str, ...] = ()
    warmup: int = 2
    repeats: int = 9

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        projections(self.models)


def main(options: GemmOptions) -> Results | None:
    """Run the study on one GPU, or on a CPU core with GEMMs that are divided to suit it.

    Raises:
        ValueError: more than one rank, or options that do not fit this machine.
    """
    if options.ranks not in (None, 1):
        raise ValueError(f"gemms: ranks (value={options.ranks}, allowed=1: nothing runs beside a GEMM here)")
    device = options.device
    if device == "auto":
        device = "gpu" if local.device_type_and_count()[1] else "cpu"
    options = dataclasses.replace(options, ranks=1, device=device)
    return run_study("gemms", GemmRow, _measure, options, "GEMMs")


def _measure(rank: Rank, options: GemmOptions) -> int:
    """Returns the number of rows."""
    on_cpu = rank.device.type == "cpu"
    asked = projections(options.models, "float32" if on_cpu else "bfloat16")
    sender = Sender(rank, len(asked))
    if on_cpu:
        sender.note("a CPU core takes GEMMs with every dimension divided, as the table says")
        asked = tuple(dataclasses.replace(one, gemm=_divided(one.gemm)) for one in asked)
    meter = Meter(rank.device, device_barrier=lambda: None, timeout_s=options.step_s)
    for number, projection in enumerate(asked):
        sender.step(f"{projection.model} {projection.layer} {projection.gemm.name}")
        with meter.on_stream():
            sender.row(_row(meter, projection, options, options.seed + number))
    return len(asked)


def _divided(gemm: Gemm) -> Gemm:
    divisor = 1
    while gemm.scaled(divisor).flops > CPU_GEMM_FLOPS:
        divisor *= 2
    return gemm.scaled(divisor)


def calls_of(gemm: Gemm) -> int:
    """Calls of a sample, each with matrices of its own."""
    cold = math.ceil(COLD_BYTES / gemm.nbytes)
    return min(MOST_CALLS, max(1, cold, round(SAMPLE_FLOPS / gemm.flops)))


def _row(meter: Meter, projection: Projection, options: GemmOptions, seed: int) -> GemmRow:
    gemm = projection.gemm
    layers = _Layers(gemm, 1 if meter.device.type == "cpu" else calls_of(gemm), meter.device, seed)
    layers.run()
    meter.finish("the first run")
    correct = layers.correct()
    job = Job(layers.run)
    if meter.device.type != "cpu":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            layers.run()
        job = Job(graph.replay, calls=len(layers), hide_launch_us=HIDDEN_LAUNCH_US)
    rounds = meter.rounds({"gemm": job}, warmup=options.warmup, repeats=options.repeats)["gemm"]
    correct = layers.correct() and correct
    time_us = rounds.median_us if correct else None
    return GemmRow(
        model=projection.model,
        layer=projection.layer,
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        dtype=gemm.dtype,
        time_us=time_us,
        p10_us=rounds.p10_us if correct else None,
        p90_us=rounds.p90_us if correct else None,
        tflops=None if time_us is None else gemm.flops / time_us / 1e6,
        gbps=None if time_us is None else gemm.nbytes / time_us / 1e3,
        correct=correct,
        note="" if correct else "the result differs from that in float64",
    )


class _Layers:
    """Linear layers of one shape, each with its own matrices."""

    def __init__(self, gemm: Gemm, count: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, gemm.dtype)

        def normal(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device).normal_(generator=generator)

        self._dtype = gemm.dtype
        self._all = [
            (
                normal(gemm.m, gemm.k),
                normal(gemm.n, gemm.k),
                torch.empty(gemm.m, gemm.n, dtype=dtype, device=device),
            )
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self._all)

    def run(self) -> None:
        """All of them, on the current stream."""
        for given, weight, result in self._all:
            torch.mm(given, weight.t(), out=result)

    def correct(self) -> bool:
        """Compare some rows of each result with float64, and poison them all."""
        good = True
        for given, weight, result in (self._all[0], self._all[-1]):
            rows = torch.linspace(0, len(given) - 1, CHECKED_ROWS, device=given.device).long()
            expected = given[rows].double() @ weight.double().t()
            error = (result[rows].double() - expected).abs().max() / expected.abs().max()
            good = good and bool(error <= TOLERANCE[self._dtype])  # False of NaN
        for _, _, result in self._all:
            result.fill_(math.nan)
        return good
