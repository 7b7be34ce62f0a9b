"""The vendor's GEMMs alone, at the shapes of language models: what predictions of computation are held against.

A sample is a graph of calls one behind the other. Each call has matrices of its own, as layers have, and together they
are several times the size of the last-level cache: weights come from memory, as they do in a model. Inputs are normal
random numbers, since a GEMM of zeros draws less power and runs faster.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidelane_lab.harness.options import StudyOptions, count, names, require_all, study_command
from sidelane_lab.harness.report import Cell, tables_by
from sidelane_lab.harness.study import FlatRow, Results, Study
from sidelane_lab.harness.ways import Job, Rounds, Way, outcome
from sidelane_lab.pairs.workload import Gemm

if TYPE_CHECKING:
    import torch

    from sidelane_lab.harness.launch import Rank
    from sidelane_lab.harness.measure import Meter
    from sidelane_lab.harness.running import Sender

COLD_BYTES = 256 << 20
"""Matrices of a sample together: five times the last-level cache of the largest GPU here."""

MOST_CALLS, SAMPLE_FLOPS = 64, 1e11
"""Calls of a sample: so many that small ones take about 200 us together."""

CHECKED_ROWS = 16
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-3}
"""Largest error, next to the largest element. float32 may be rounded to TF32 by a program's own settings."""

FITTED = ("llama-8b", "llama-70b/8")
"""Models whose times a machine's description may be fitted to."""

SEEN = ("qwen-32b/4", "llama-405b/8", "deepseek-v3")
"""Models whose times were looked at before the rules of ``model/gemm.py`` went in. Those of the others are held out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmOptions(StudyOptions):
    """Time the GEMMs of language models alone, for predictions to be compared with.

    `sidelane claims --machine` compares them with what the machine's description predicts.
    """

    study = "gemms"
    examples = (
        ("sidelane gemms --json gemms.json", "the layers of eight models, on one GPU"),
        ("sidelane gemms --device cpu --models llama-8b", "those of one model, divided to suit a CPU core"),
    )

    models: tuple[str, ...] = names("--models", (), "Models whose GEMMs are timed.", shown="all")
    warmup: int = count("--warmup", 2, "Samples before the measured ones.", 0)
    repeats: int = count("--repeats", 9, "Measured samples.")


gemms = study_command("gemms", GemmOptions)


@dataclasses.dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of a model.

    Attributes:
        model: its name, behind a slash the GPUs that share a layer.
        layer: which one.
        gemm: its shape; ``m`` tokens, ``n`` outputs, ``k`` inputs.
    """

    model: str
    layer: str
    gemm: Gemm


MODELS: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""Layers of each model, with the outputs and inputs of each, and the numbers of tokens, by the model's name."""


def projections(models: tuple[str, ...] = ()) -> tuple[Projection, ...]:
    """Return all shapes of some models; without names of all.

    Raises:
        ValueError: no such model.
    """
    require_all("projections", "models", models, MODELS)
    return tuple(
        Projection(name, layer, Gemm(tokens, outputs, inputs))
        for name, model in MODELS.items()
        if not models or name in models
        for layer, (outputs, inputs) in model["layers"].items()
        for tokens in model["tokens"]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class GemmRow(FlatRow):
    """A linear layer of a model, alone: ``result[m, n] = input[m, k] @ weight[n, k].T``.

    Attributes:
        model: name, followed by a slash and the number of GPUs that share a layer.
        layer: name of the layer.
        m: number of tokens.
        n: number of outputs.
        k: number of inputs.
        time_us: time of one call, median over the samples.
        tflops: operations over the time.
        gbps: fewest bytes that can move (each input read once, the result written once) over the time.
        correct: True if rows of the result agreed with float64, before and after; None when it could not run.
        note: reason why there is no time.
    """

    figures = ("time_us",)

    model: str
    layer: str
    m: int
    n: int
    k: int
    dtype: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    tflops: float | None
    gbps: float | None
    correct: bool | None
    note: str = ""


def main(options: GemmOptions) -> Results | None:
    """Run the study on one GPU, or on a CPU core with GEMMs that are divided to suit it.

    Raises:
        ValueError: more than one rank, or options that do not fit this machine.
    """
    from sidelane.machine import local
    from sidelane_lab.harness.running import run_study

    if options.ranks not in (None, 1):
        raise ValueError(f"gemms: ranks (value={options.ranks}, allowed=1: nothing runs beside a GEMM here)")
    device = options.device
    if device == "auto":
        device = "gpu" if local.device_type_and_count()[1] else "cpu"
    options = dataclasses.replace(options, ranks=1, device=device)
    return run_study(STUDY, options)


def _measure(rank: Rank, options: GemmOptions, sender: Sender) -> Iterator[GemmRow]:
    """Make the rows."""
    from sidelane_lab.harness.measure import Meter

    on_cpu = rank.device.type == "cpu"
    asked = projections(options.models)
    sender.steps = len(asked)
    if on_cpu:
        sender.note("a CPU core takes GEMMs with every dimension divided, as the table says")
        asked = tuple(dataclasses.replace(one, gemm=one.gemm.for_cpu()) for one in asked)
    meter, seeds = (
        Meter(rank.device, device_barrier=lambda: None, timeout_s=options.step_s),
        itertools.count(options.seed),
    )
    for projection in asked:
        sender.step(f"{projection.model} {projection.layer} {projection.gemm.name}")
        yield row_of(meter, projection, options, seeds)


def calls_of(gemm: Gemm) -> int:
    """Calls of a sample, each with matrices of its own."""
    cold = math.ceil(COLD_BYTES / gemm.nbytes)
    return min(MOST_CALLS, max(1, cold, round(SAMPLE_FLOPS / gemm.flops)))


def row_of(meter: Meter, projection: Projection, options: GemmOptions, seeds: Iterator[int]) -> GemmRow:
    """Check the layers, time them and check them again."""
    gemm = projection.gemm
    make = functools.partial(LinearLayers, gemm, meter.device, next(seeds))

    def timed(ready: dict[str, LinearLayers]) -> Mapping[str, Rounds]:
        return meter.in_turns({label: layers.job() for label, layers in ready.items()}, options)

    (one,) = meter.compare({gemm.name: make}, itertools.count(), timed)
    columns = outcome(one.rounds, one.problem)
    time_us = columns["time_us"]
    return GemmRow(
        model=projection.model,
        layer=projection.layer,
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        dtype=gemm.dtype,
        tflops=None if time_us is None else gemm.flops / time_us / 1e6,
        gbps=None if time_us is None else gemm.nbytes / time_us / 1e3,
        **columns,
    )


class LinearLayers(Way):
    """Linear layers of one shape, each with its own matrices, whose inputs stay: one on a CPU, a sample on a GPU."""

    def __init__(self, gemm: Gemm, device: torch.device, seed: int) -> None:
        import torch

        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, gemm.dtype)

        def normal(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device).normal_(generator=generator)

        self.label, self._dtype = gemm.name, gemm.dtype
        self.as_graph = device.type != "cpu"
        self._all = [
            (
                normal(gemm.m, gemm.k),
                normal(gemm.n, gemm.k),
                torch.empty(gemm.m, gemm.n, dtype=dtype, device=device),
            )
            for _ in range(calls_of(gemm) if self.as_graph else 1)
        ]

    def fill(self, seed: int) -> None:
        """Poison the results."""
        for _, _, result in self._all:
            result.fill_(math.nan)

    def run(self) -> None:
        """All of them, on the current stream."""
        import torch

        if self.graphs:
            self.graphs[0].replay()
            return
        for given, weight, result in self._all:
            torch.mm(given, weight.t(), out=result)

    def capture(self) -> None:
        from sidelane_lab.baselines.candidate import captured

        self.graphs = (captured(self.run, 1),)

    def job(self) -> Job:
        from sidelane_lab.baselines.candidate import HIDDEN_LAUNCH_US

        return Job(self.run, calls=len(self._all), hide_launch_us=HIDDEN_LAUNCH_US if self.as_graph else 0.0)

    def error(self, seed: int) -> str | None:
        """Compare some rows of the first and the last result with float64."""
        import torch

        for given, weight, result in (self._all[0], self._all[-1]):
            rows = torch.linspace(0, len(given) - 1, CHECKED_ROWS, device=given.device).long()
            expected = given[rows].double() @ weight.double().t()
            error = (result[rows].double() - expected).abs().max() / expected.abs().max()
            if not error <= TOLERANCE[self._dtype]:  # or NaN
                return "the result differs from that in float64"
        return None


COLUMNS: Mapping[str, Cell] = {
    "<layer": "layer",
    "tokens": "m",
    "outputs": "n",
    "inputs": "k",
    "us": "time_us",
    "TFLOP/s": "tflops",
    "GB/s": "gbps",
    "<correct": "correct",
}

STUDY = Study(
    name="gemms",
    title="GEMMs of language models, alone",
    legend=(
        "A linear layer of a model, alone: the vendor's GEMM in a graph of calls that each have matrices of their "
        "own, more than the last-level cache holds. GB/s: the fewest bytes that it can move over its time."
    ),
    row=GemmRow,
    tables=lambda rows: tables_by(
        rows,
        lambda row: row.model,
        lambda row: f"{row.model}, {row.dtype}",
        COLUMNS,
        keys=2,
        groups=lambda row: row.layer,
    ),
    measure=_measure,
    check=lambda options, place: projections(options.models),
    main=main,
    progress="GEMMs",
)
