"""Predicted times of GEMMs alone held against those in ``c3.json``, ``chain.json`` and ``gemms.json``."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from sidelane.c3.workload import Gemm
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import Role, Verdict
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.papers.claims.verdicts import judge, with_summary
from sidelane_lab.studies.c3.rows import C3Row
from sidelane_lab.studies.chain.study import ChainRow
from sidelane_lab.studies.chain.ways import chain_gemms
from sidelane_lab.studies.gemms import FITTED, SEEN, GemmRow

MEDIAN, WORST = 0.05, 0.15
"""Targets of issue 25."""


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTime:
    """GEMMs that ran one behind the other, with nothing beside them, and their time."""

    gemms: tuple[Gemm, ...]
    time_us: float

    @property
    def name(self) -> str:
        return " ".join(gemm.name for gemm in self.gemms)


def gemm_times(rows: Sequence[object], ranks: int) -> list[GemmTime]:
    """Every shape once, with the median of its times: of C3 rows, of chains in graphs, and of layers."""
    found: dict[tuple[Gemm, ...], list[float]] = {}
    for row in rows:
        if isinstance(row, C3Row) and row.gemm_us is not None:
            found.setdefault((Gemm(row.m, row.n, row.k, row.dtype),), []).append(row.gemm_us)
        if isinstance(row, GemmRow) and row.time_us is not None:
            found.setdefault((Gemm(row.m, row.n, row.k, row.dtype),), []).append(row.time_us)
        if isinstance(row, ChainRow) and row.launch == "graph":
            found.setdefault(chain_gemms(row.bytes, ranks, row.dtype), []).append(row.gemms_us)
    return [GemmTime(gemms, statistics.median(times)) for gemms, times in found.items()]


def predict_gemms(machine: Machine, time: GemmTime) -> float:
    """Microseconds of the same GEMMs."""
    return sum(gemm_us(machine, gemm) for gemm in time.gemms)


def judge_gemms(machine: Machine, times: Sequence[GemmTime], role: Role, among: str = "") -> list[Verdict]:
    """A verdict on each, then on the median and the worst error.

    Args:
        machine: its description.
        times: measured.
        role: of these times.
        among: what to call them by, where there are several of a machine.
    """
    name = f"{machine.name}/gemms" + (f" {among}" if among else "")
    judged = [
        judge(f"{name}/{time.name}", time.time_us, predict_gemms(machine, time), role, what="time of GEMMs")
        for time in times
    ]
    return with_summary(name, judged, MEDIAN, WORST)


def judge_layers(machine: Machine, rows: Sequence[object], *, fitted: bool) -> list[Verdict]:
    """Verdicts on ``gemms.json``, by what was known of a model's layers when the rules and the numbers went in.

    Args:
        machine: its description.
        rows: of the file.
        fitted: numbers of the description were fitted to it.
    """
    layers = [row for row in rows if isinstance(row, GemmRow)]
    first = [row for row in layers if row.model in FITTED]
    seen = [row for row in layers if row.model in SEEN]
    others = [row for row in layers if row.model not in (*FITTED, *SEEN)]
    verdicts: list[Verdict] = []
    for some, role, among in (
        (first, Role.FITTED if fitted else Role.SEEN, "of layers, first"),
        (seen, Role.SEEN, "of layers, seen"),
        (others, Role.HELD_OUT, "of layers"),
    ):
        verdicts += judge_gemms(machine, gemm_times(some, machine.gpus), role, among)
    return verdicts
