"""Predicted watts held against ``power.json``: NCCL's ordinary kernels, and the variants of paper 003."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.bench.claims_verdicts import judge, with_summary
from sidelane.bench.results import PowerRow
from sidelane.c3.workload import format_bytes
from sidelane.machine.spec import Machine
from sidelane.model.claims import Verdict
from sidelane.model.power import dma_power, library_power
from sidelane.model.published import PUBLISHED_VARIANTS
from sidelane.program.collective import Kind

MEDIAN, WORST = 0.10, 0.20
"""Errors that are still right."""


def judge_power(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    """A verdict on the watts of a GPU for each row that the model speaks to, then on the median and the worst error.

    Nothing where the machine's description has no power figures.
    """
    if machine.power is None:
        return []
    measured = [row for row in rows if isinstance(row, PowerRow) and row.watts is not None]
    name = f"{machine.name}/power"
    judged = [
        judge(f"{name}/{_words(row)}", row.watts, predict_watts(machine, row), WORST, what="power of a GPU", unit="W")
        for row in measured
    ]
    return with_summary(name, judged, MEDIAN, WORST)


def predict_watts(machine: Machine, row: PowerRow) -> float | None:
    """Watts of one GPU as paper 003 runs the collective (an all_gather in place, an all_to_all out of place)."""
    kind = Kind(row.collective)
    if kind not in PUBLISHED_VARIANTS or row.in_place != (kind is Kind.ALL_GATHER):
        return None
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return library_power(machine, kind, row.bytes).total_w
    if row.implementation != "dma" or row.variant not in PUBLISHED_VARIANTS[kind]:
        return None
    return dma_power(machine, kind, row.bytes, row.variant).total_w


def _words(row: PowerRow) -> str:
    return f"{row.collective}/{format_bytes(row.bytes)}/{row.implementation} {row.variant}".rstrip()
