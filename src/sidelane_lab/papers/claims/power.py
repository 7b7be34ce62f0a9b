"""Predicted watts held against ``power.json``: NCCL's kernels, the DMA collectives paper's variants, hybrids."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.program.collective import REDUCING, Kind
from sidelane.sizes import format_bytes
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import Role, Verdict
from sidelane_lab.model.power import dma_power, hybrid_power, library_power
from sidelane_lab.papers.claims.verdicts import judge, with_summary
from sidelane_lab.studies.power.predict import IN_PLACE, PREDICTED_VARIANTS
from sidelane_lab.studies.power.rows import PowerRow

MEDIAN, WORST = 0.10, 0.20
"""Targets of the whole."""


def judge_power(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    """A verdict on the watts of a GPU for each row that the model speaks to, then on the median and the worst error.

    Nothing where the machine's description has no power figures.
    """
    if machine.power is None:
        return []
    measured = [row for row in rows if isinstance(row, PowerRow) and row.watts is not None]
    name = f"{machine.name}/power"
    judged = [
        judge(
            f"{name}/{_words(row)}",
            row.watts,
            predict_watts(machine, row),
            role_of(machine, row),
            what="power of a GPU",
            unit="W",
        )
        for row in measured
    ]
    return with_summary(name, judged, MEDIAN, WORST)


def role_of(machine: Machine, row: PowerRow) -> Role:
    """What a row is to the model.

    That links draw power whatever their rate went in after those of h200x4 had been compared, and what links draw was
    fitted to those on copy engines.
    """
    if machine.name != "h200x4":
        return Role.HELD_OUT
    return Role.FITTED if row.implementation == "dma" else Role.SEEN


def predict_watts(machine: Machine, row: PowerRow) -> float | None:
    """Watts of one GPU, in the place that is predicted: all_gather and all_reduce in place, the others out of place."""
    kind = Kind(row.collective)
    if kind not in PREDICTED_VARIANTS or row.in_place != (kind in IN_PLACE):
        return None
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return library_power(machine, kind, row.bytes).total_w
    if row.implementation != "dma" or row.variant not in PREDICTED_VARIANTS[kind]:
        return None
    draw = hybrid_power if kind in REDUCING else dma_power
    return draw(machine, kind, row.bytes, row.variant).total_w


def _words(row: PowerRow) -> str:
    return f"{row.collective}/{format_bytes(row.bytes)}/{row.implementation} {row.variant}".rstrip()
