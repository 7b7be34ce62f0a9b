"""Predicted chains held against ``chain.json``: a GEMM, an all-gather of what it made, and a GEMM that reads all.

The model is given what both GEMMs take alone; the collective comes from the description. Chains in graphs only: of
eager launches, which cost the host more, and of prelaunched copies no description of GPUs here has the times.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.program.builders import variants
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import Verdict
from sidelane_lab.model.executed import executed_run
from sidelane_lab.model.published import library_us
from sidelane_lab.papers.claims.verdicts import judge
from sidelane_lab.studies.chain.study import ChainRow


def judge_chains(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    """A verdict on each chain that the model speaks to."""
    judged = [
        judge(f"{machine.name}/chain/{_words(row)}", row.time_us, predict_chain(machine, row), what="chain")
        for row in rows
        if isinstance(row, ChainRow)
    ]
    return [verdict for verdict in judged if verdict is not None]


def predict_chain(machine: Machine, row: ChainRow) -> float | None:
    """Microseconds of the same chain: nothing is hidden in it. None if the model does not speak to it."""
    if row.launch != "graph" or row.gemms_us is None:
        return None
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return row.gemms_us + library_us(machine, Kind.ALL_GATHER, row.bytes)
    if row.implementation != "dma" or row.variant not in variants(Kind.ALL_GATHER):
        return None
    return row.gemms_us + executed_run(machine, Kind.ALL_GATHER, row.bytes, row.variant, row.in_place).time_us


def _words(row: ChainRow) -> str:
    place = "in place" if row.in_place else "out of place"
    return f"{format_bytes(row.bytes)}/{place}/{row.implementation} {row.variant}".strip()
