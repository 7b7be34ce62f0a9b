"""Predictions held against this project's own measurements: files of ``results/<machine>``.

A :class:`RowJudge` declares for one study how rows of its files are named, what was measured, and what a row is to the
model; the study itself predicts it (``Study.predict_row``). Rows that the description was fitted to (``fitted_to``) are
not called predictions.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from sidelane.program.builders import variants
from sidelane.program.collective import REDUCING, Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness import study as result_files
from sidelane_lab.machines.ranges import in_between, predict_each, variations
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import KINDS
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.pipeline import sequential_us
from sidelane_lab.pairs.workload import ComputeKind, Gemm, gemm_of
from sidelane_lab.papers.claims import (
    AT_LEAST,
    ClaimRole,
    ClaimVerdict,
    judge_row,
    least_role,
    with_ranges,
    with_summary,
)
from sidelane_lab.studies.c3.occupancy_predict import pipeline_of
from sidelane_lab.studies.c3.occupancy_rows import OccupancyRow
from sidelane_lab.studies.c3.prediction import OUT_OF_PLACE
from sidelane_lab.studies.c3.rows import C3Row, strategy_of
from sidelane_lab.studies.chain import ChainRow, chain_gemms
from sidelane_lab.studies.collectives import ENGINES, CollectiveRow, predict_alone
from sidelane_lab.studies.fsdp.cases import SHORT, STRATEGIES
from sidelane_lab.studies.fsdp.cases import predict_row as predict_step
from sidelane_lab.studies.fsdp.rows import FsdpRow, case_of
from sidelane_lab.studies.gemms import FITTED, SEEN, GemmRow
from sidelane_lab.studies.power.rows import PowerRow

WINNERS = 0.95
"""Share of the cases in which the prediction must name the faster of copy engines and NCCL (issue 25)."""
SMALLEST = 64 << 10
"""Bytes from which collective times are compared (issue 25)."""
SMALL, LARGE = 64 << 10, 256 << 20
"""Bytes up to which latency decides, and from which bandwidth does: ``fit_machine`` uses these rows."""
FIRST_COMPARED = ("h200x4", "h200x2")
CLASSES = "c3-classes"
"""File with pairs of every class and bound."""
AGAIN = "c3-strategies"
"""File with the GEMMs of ``c3.json`` once more: as rows alone they would count twice."""
SET_APART = ("cb1_896M", "cb3_896M")
"""Pairs of ``h200x2/isolated.json``, to which interference among two was fitted: their rows are no predictions."""
SEEN_VARIANTS = ("striped",)
"""Variants that a rule went in for after their rows had been compared: flags between a rank's engines are a graph's
dependencies (``model.collectives.dependencies``)."""
OWN_STEPS = ("sidelane_ag", "sidelane", "sidelane_copies")
GEMM_LIMITS = 0.05, 0.15
"""Targets of issue 25 for GEMMs alone: median and worst error."""

R = TypeVar("R")
Judged = list[tuple[R, ClaimVerdict | None]]
"""Rows that have a measured number, each with its verdict."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowJudge(Generic[R]):
    """How rows of a study's files are held against what the study predicts of them.

    Attributes:
        study: name of the study, which predicts rows.
        name: of a row, in the ids of verdicts.
        measured: number of a row; None leaves it out.
        role: of a row, for a machine and what was predicted.
        limits: targets for the median and the worst error.
        what, unit: of the numbers, in words.
        part: of the file, in ids; "" takes the file's name.
        further: makes verdicts on all rows together, or on other numbers of them.
        change: finishes the verdict on a row.
    """

    study: str
    name: Callable[[R], str]
    measured: Callable[[R], float | None]
    role: Callable[[Machine, R, Sequence[float]], ClaimRole]
    limits: tuple[float | None, float | None] = (None, None)
    what: str = "measured time"
    unit: str = "us"
    part: str = ""
    further: Callable[[Machine, str, Judged[Any]], list[ClaimVerdict]] | None = None
    change: Callable[[ClaimVerdict], ClaimVerdict] | None = None

    def verdicts(self, machine: Machine, rows: Sequence[object], file: str) -> list[ClaimVerdict]:
        """Return a verdict for each row that the model speaks to, then those on all of them."""
        study, whole = result_files.study_of(self.study), f"{machine.name}/{self.part or file}"
        predict = study.predict_row
        assert predict is not None, self.study
        judged: Judged[R] = []
        for row in rows:
            if not isinstance(row, study.row) or (measured := self.measured(row)) is None:
                continue
            found = predict(machine, row)
            name, role = f"{whole}/{self.name(row)}", self.role(machine, row, found)
            verdict = judge_row(name, measured, found, role, what=self.what, unit=self.unit)
            judged.append((row, self.change(verdict) if verdict is not None and self.change else verdict))
        summed = with_summary(whole, [verdict for _, verdict in judged], *self.limits)
        return summed + (self.further(machine, whole, judged) if self.further else [])


def compare(
    machine: Machine, folder: Path, *, ranges: bool = False, progress: Callable[[str], None] = lambda text: None
) -> list[ClaimVerdict]:
    """Hold predictions against every row of the machine's result files that the model speaks to.

    Args:
        machine: the description of what was measured on.
        folder: with a file of ``JUDGES``: ``c3.json``, ``collectives.json``, ``occupancy.json`` and others.
        ranges: predict over the plausible values of the machine's numbers as well.
        progress: told what is being done.

    Returns:
        A verdict for each row, and for each file the median and the worst error.

    Raises:
        ValueError: neither file is there, or one is no result file.
    """
    verdicts: list[ClaimVerdict] = []
    known = [study for study in JUDGES if (folder / f"{study}.json").is_file()]
    alone: list[object] = []
    for study in known:
        rows = result_files.read(folder / f"{study}.json").rows
        alone += rows if study != AGAIN else ()
        verdicts += JUDGES[study].verdicts(machine, rows, study)
    own = f"results/{machine.name}"
    role = ClaimRole.FITTED if fitted_from(machine, f"{own}/chain.json") else ClaimRole.HELD_OUT
    verdicts += judge_gemms(machine, gemm_times(alone, machine.gpus), role)
    layers = layers_file(machine, folder)
    if layers.is_file():
        fitted = fitted_from(machine, f"results/{layers.parent.name}/{layers.name}")
        verdicts += judge_layers(machine, result_files.read(layers).rows, fitted=fitted)
    elif not known:
        files = ", ".join(f"{study}.json" for study in JUDGES)
        allowed = f"--results with a folder {folder.name} of any of {files}"
        raise ValueError(f"claims: no measurements of {machine.name} (value={folder.resolve()}, allowed={allowed})")
    if not ranges:
        return verdicts
    values = predict_each(
        variations(machine), lambda one: [found.predicted for found in compare(one.machine, folder)], progress
    )
    varied = [found for _, found in values]
    return [with_ranges(one, [found[place] for found in varied]) for place, one in enumerate(verdicts)]


def layers_file(machine: Machine, folder: Path) -> Path:
    """Return where GEMMs alone were measured, which takes one such GPU: ``h200x1/gemms.json`` beside ``h200x4``."""
    return folder.parent / re.sub(r"x\d+$", "x1", machine.name) / "gemms.json"


def role_problems(machine: Machine) -> list[str]:
    """Find numbers of a description that were taken from runs side by side: one line each; empty when all is well.

    A C3 file may only give a GEMM's time alone.
    """
    return [
        f"{path}: taken from {quantity.of}, which holds C3 times that are predictions (allowed=[matmul] alone)"
        for path, quantity in machine.quantities().items()
        if re.search(r"\bc3(-\w+)?\.json", quantity.of) and not path.startswith("matmul.")
    ]


def fitted_from(machine: Machine, file: str) -> bool:
    """True if numbers of the description were fitted to a file."""
    return any(file in quantity.of for quantity in machine.quantities().values())


def fitted_to(row: CollectiveRow) -> bool:
    """True if ``fit_machine`` turns this row into numbers of the description."""
    if row.tensors > 1:
        return False
    if row.launch != "graph" or row.prelaunch or row.time_us is None or row.collective not in tuple(KINDS):
        return False
    if row.implementation == "nccl":
        return not row.variant
    if row.implementation != "dma" or row.variant not in variants(Kind(row.collective)):
        return False
    if row.collective in REDUCING:
        return row.variant == "b2b"
    large = row.bytes >= LARGE and row.variant in ("b2b", "pcpy")
    return row.bytes <= SMALL or large


def _pair_role(machine: Machine, row: C3Row, found: object) -> ClaimRole:
    """Tell the role of a C3 row, whose isolated times the model is given.

    A serial one is their sum. That a copy of the own chunk waits for the GEMM is a rule that went in after the first
    rows of h200x4 had been compared; that NCCL takes turns with a GEMM or runs beside it, by chance, after those of
    h200x2; that embedding bags take the time of their rows, after the pairs by class.
    """
    strategy = strategy_of(row)
    if strategy is not None and not strategy.concurrent:
        return ClaimRole.INPUT
    if machine.name == "h200x2" and f"{row.gemm}_{format_bytes(row.bytes)}" in SET_APART:
        return ClaimRole.FITTED
    on_units = strategy is not None and strategy.mover.takes_units
    rules = on_units or row.gemm == ComputeKind.BAG or (OUT_OF_PLACE in row.note and machine.name == "h200x4")
    return ClaimRole.SEEN if rules and machine.name in FIRST_COMPARED else ClaimRole.HELD_OUT


def _by_chance(verdict: ClaimVerdict) -> ClaimVerdict:
    """Take a time between two predictions for no comparable one: it is the median of rounds that went either way."""
    found = (verdict.low, verdict.high)
    if verdict.low is None or not in_between(verdict.claimed, found):
        return verdict
    why = f"either may come first ({verdict.low:.0f} or {verdict.high:.0f} us), and rounds went either way"
    return dataclasses.replace(verdict, ok=False, incomparable=why)


def _collective_role(machine: Machine, row: CollectiveRow, found: Sequence[float]) -> ClaimRole:
    """Tell the role of a collective's row.

    Hops of NCCL's rings, and reductions of two inputs, were looked into after the rows of two GPUs had been compared.
    """
    if fitted_from(machine, f"results/{machine.name}/collectives.json") and fitted_to(row):
        return ClaimRole.FITTED
    mended = machine.name == "h200x2" and (row.implementation == "nccl" or row.collective in REDUCING)
    seen = row.implementation == ENGINES or row.variant in SEEN_VARIANTS or mended
    return ClaimRole.SEEN if len(found) > 1 or seen else ClaimRole.HELD_OUT


def _winners(machine: Machine, whole: str, judged: Judged[CollectiveRow]) -> list[ClaimVerdict]:
    """Count in how many cases the faster of copy engines and NCCL's kernels is predicted, by the times to plan with."""
    cases: dict[tuple[str, int, bool], dict[str, list[ClaimVerdict]]] = {}
    for row, verdict in judged:
        if verdict is not None:
            verdict = dataclasses.replace(verdict, predicted=predict_alone(machine, row))
            case = cases.setdefault((row.collective, row.bytes, row.in_place), {})
            case.setdefault(row.implementation, []).append(verdict)
    both = [case for case in cases.values() if {"dma", "nccl"} <= case.keys()]
    if not both:
        return []
    right = 0
    for case in both:
        engines, kernels = case["dma"], case["nccl"]
        measured = min(one.claimed for one in engines) < min(one.claimed for one in kernels)
        right += measured == (min(one.predicted for one in engines) < min(one.predicted for one in kernels))
    role = least_role([one for case in both for some in case.values() for one in some])
    share, text = right / len(both), f"{AT_LEAST} of {len(both)} winners right"
    figures = (100 * WINNERS, 100 * share, "percent", None)
    return [ClaimVerdict(f"{whole}/winners", text, *figures, role, share >= WINNERS)]


def _shares(machine: Machine, whole: str, judged: Judged[OccupancyRow]) -> list[ClaimVerdict]:
    """Judge the time of pipelined iterations over that of one operation after another, in percent."""
    found = []
    for row, verdict in judged:
        pipeline = pipeline_of(row)
        if verdict is None or pipeline is None:
            continue
        assert row.normalised is not None
        share = verdict.predicted / sequential_us(machine, pipeline)
        name, words = f"{whole}/{_occupancy_words(row)}/share", {"what": "share of sequential time", "unit": "percent"}
        found.append(judge_row(name, 100 * row.normalised, [100 * share], ClaimRole.SEEN, **words, points=True))
    return [one for one in found if one is not None]


def _power_role(machine: Machine, row: PowerRow, found: object) -> ClaimRole:
    """Tell the role of watts.

    That links draw power whatever their rate went in after those of h200x4 had been compared, and what links draw was
    fitted to those on copy engines.
    """
    if machine.name != "h200x4":
        return ClaimRole.HELD_OUT
    return ClaimRole.FITTED if row.implementation == "dma" else ClaimRole.SEEN


def _step_role(machine: Machine, row: FsdpRow, found: object) -> ClaimRole:
    """Take steps of h200x2 for seen: they had been compared when ways without copies were put in."""
    return ClaimRole.SEEN if machine.name == "h200x2" else ClaimRole.HELD_OUT


def _gains(machine: Machine, whole: str, judged: Judged[FsdpRow]) -> list[ClaimVerdict]:
    """Judge what each way saves of the library's step; the worst error counts for Sidelane's ways."""
    name, library = f"{machine.name}/gains", {case_of(row): row for row, _ in judged if row.implementation == "nccl"}
    own: list[ClaimVerdict | None] = []
    others: list[ClaimVerdict | None] = []
    for row, verdict in judged:
        base = library.get(case_of(row))
        if base is None or row.implementation not in STRATEGIES or row is base:
            continue
        gain = [] if verdict is None else [predict_step(machine, base)[0] - verdict.predicted]
        saved = 1e3 * ((base.step_ms or 0.0) - (row.step_ms or 0.0))
        role, words = _step_role(machine, row, None), f"{name}/{_step_words(row)}"
        saving = judge_row(words, saved, gain, role, what="measured gain over the library")
        (own if row.implementation in OWN_STEPS else others).append(saving)
    return [*(one for one in others if one is not None), *with_summary(name, own, None, 1 / 3)]


def _place(row: CollectiveRow | ChainRow) -> str:
    return f"{format_bytes(row.bytes)}/{'in place' if row.in_place else 'out of place'}"


def _step_words(row: FsdpRow) -> str:
    short = {model: name for name, model in SHORT.items()}.get(row.model, row.model)
    return f"{short} x {row.layers}, {row.batch}x{row.seq}/{row.implementation}"


def _occupancy_words(row: OccupancyRow) -> str:
    resident = f"{row.blocks} blocks {row.resident} resident"
    order = "priority" if row.priority else "equal"
    return f"{row.gemm}_{format_bytes(row.bytes)}/{row.collective}/{row.shape} {resident} {order}"


PAIRS = RowJudge(
    study="c3",
    name=lambda row: f"{row.gemm}_{format_bytes(row.bytes)}/{row.collective}/{row.strategy}",
    measured=lambda row: row.time_us,
    role=_pair_role,
    limits=(0.03, 0.10),
    change=_by_chance,
)
COLLECTIVES = RowJudge(
    study="collectives",
    name=lambda row: f"{row.collective}/{_place(row)}/{row.implementation} {row.variant}".strip(),
    measured=lambda row: row.time_us if row.bytes >= SMALLEST else None,
    role=_collective_role,
    limits=(0.07, 0.25),
    further=_winners,
)
OCCUPANCY: RowJudge[OccupancyRow] = RowJudge(
    study="occupancy",
    name=lambda row: f"{_occupancy_words(row)}/time",
    measured=lambda row: row.time_us,
    role=lambda machine, row, found: ClaimRole.SEEN,  # rows of h200x2 had been compared when streams were put in
    limits=(0.05, 0.15),
    further=_shares,
)
POWER = RowJudge(
    study="power",
    name=lambda row: f"{row.collective}/{format_bytes(row.bytes)}/{row.implementation} {row.variant}".rstrip(),
    measured=lambda row: row.watts,
    role=_power_role,
    limits=(0.10, 0.20),
    what="measured power of a GPU",
    unit="W",
)
CHAINS: RowJudge[ChainRow] = RowJudge(
    study="chain",
    name=lambda row: f"{_place(row)}/{row.implementation} {row.variant}".strip(),
    measured=lambda row: row.time_us,
    role=lambda machine, row, found: ClaimRole.HELD_OUT,
    what="measured chain",
)
STEPS = RowJudge(
    study="fsdp",
    name=_step_words,
    measured=lambda row: None if row.step_ms is None else 1e3 * row.step_ms,
    role=_step_role,
    limits=(None, 0.05),
    what="measured step",
    part="steps",
    further=_gains,
)
JUDGES: dict[str, RowJudge[Any]] = {
    **dict.fromkeys(("c3", CLASSES, AGAIN), PAIRS),
    **{judge.study: judge for judge in (COLLECTIVES, OCCUPANCY, POWER, CHAINS, STEPS)},
}
"""Judge of each result file."""


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTime:
    """GEMMs that ran one behind the other, with nothing beside them, and their time."""

    gemms: tuple[Gemm, ...]
    time_us: float


def gemm_times(rows: Sequence[object], ranks: int) -> list[GemmTime]:
    """Return every shape once, with the median of its times: of C3 rows, of chains in graphs, and of layers."""
    found: dict[tuple[Gemm, ...], list[float]] = {}
    for row in rows:
        if isinstance(row, C3Row) and row.gemm_us is not None:
            gemm = gemm_of(row)
            unnamed = Gemm(row.m, row.n, row.k, row.dtype)  # products have names in some files only
            shape = unnamed if gemm.operation is ComputeKind.PRODUCT else gemm
            found.setdefault((shape,), []).append(row.gemm_us)
        if isinstance(row, GemmRow) and row.time_us is not None:
            found.setdefault((Gemm(row.m, row.n, row.k, row.dtype),), []).append(row.time_us)
        if isinstance(row, ChainRow) and row.launch == "graph":
            found.setdefault(chain_gemms(row.bytes, ranks, row.dtype), []).append(row.gemms_us)
    return [GemmTime(gemms, statistics.median(times)) for gemms, times in found.items()]


def predict_gemms(machine: Machine, time: GemmTime) -> float:
    """Return the microseconds of the same GEMMs."""
    return sum(gemm_us(machine, gemm) for gemm in time.gemms)


def judge_gemms(
    machine: Machine, times: Sequence[GemmTime], role: ClaimRole, part: str = "gemms"
) -> list[ClaimVerdict]:
    """Return a verdict on each time, then on the median and the worst error. ``part``: what the ids call them."""
    whole, what = f"{machine.name}/{part}", "measured time of GEMMs"
    verdicts = []
    for time in times:
        # Embedding bags: rows after their first time had been compared.
        has_bags = any(gemm.operation is ComputeKind.BAG for gemm in time.gemms)
        name, role_here = " ".join(gemm.name for gemm in time.gemms), ClaimRole.SEEN if has_bags else role
        predicted = [predict_gemms(machine, time)]
        verdicts.append(judge_row(f"{whole}/{name}", time.time_us, predicted, role_here, what=what))
    return with_summary(whole, verdicts, *GEMM_LIMITS)


def judge_layers(machine: Machine, rows: Sequence[object], *, fitted: bool) -> list[ClaimVerdict]:
    """Return verdicts on ``gemms.json``, by what was known of a model's layers when rules and numbers went in.

    Args:
        machine: its description.
        rows: of the file.
        fitted: numbers of the description were fitted to it.
    """
    layers = [row for row in rows if isinstance(row, GemmRow)]
    verdicts: list[ClaimVerdict] = []
    for some, role, part in (
        ([row for row in layers if row.model in FITTED], ClaimRole.FITTED if fitted else ClaimRole.SEEN, ", first"),
        ([row for row in layers if row.model in SEEN], ClaimRole.SEEN, ", seen"),
        ([row for row in layers if row.model not in (*FITTED, *SEEN)], ClaimRole.HELD_OUT, ""),
    ):
        verdicts += judge_gemms(machine, gemm_times(some, machine.gpus), role, f"gemms of layers{part}")
    return verdicts
