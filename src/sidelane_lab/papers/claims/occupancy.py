"""Pipelined iterations held against ``occupancy.json``: their time, and over that of one operation after another.

The description says it all: no time of a row is given to the model. GEMMs take turns on the two streams of the study,
and blocks that ask for more shared memory than they need take that much of a unit, and a kilobyte for the system.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane.c3.workload import Gemm
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import POINTS, Role, Verdict, error_of
from sidelane_lab.model.pipeline import OPT1, OPT2, Pipeline, run_pipeline, sequential_us
from sidelane_lab.papers.claims.verdicts import judge, with_summary
from sidelane_lab.studies.c3.occupancy_rows import OccupancyRow

MEDIAN, WORST = 0.05, 0.15
"""Targets of the whole (issue 22)."""
TILES = {"opt1": OPT1, "opt2": OPT2}
"""Shapes whose registers are known."""
STREAMS = 2
"""Of GEMMs in the study (``c3.pipelined``)."""
RESERVED_BYTES = 1024
"""Shared memory that CUDA takes for each block besides."""


def judge_occupancy(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    """Two verdicts for each row that the model speaks to, then those on the median and the worst error of the times.

    All rows are "seen": that the study has two streams went into the model after rows of ``h200x2`` had been compared.
    """
    if machine.occupancy is None:
        return []
    times, shares = [], []
    for row in rows:
        if not isinstance(row, OccupancyRow) or row.time_us is None:
            continue
        pipeline = pipeline_of(row)
        if pipeline is None:
            continue
        name = f"{machine.name}/occupancy/{_words(row)}"
        predicted_us = run_pipeline(machine, pipeline, priority=row.priority).time_us
        times.append(judge(f"{name}/time", row.time_us, predicted_us, Role.SEEN))
        assert row.normalised is not None
        shares.append(_share(f"{name}/share", row.normalised, predicted_us / sequential_us(machine, pipeline)))
    return [*with_summary(f"{machine.name}/occupancy", times, MEDIAN, WORST), *shares]


def pipeline_of(row: OccupancyRow) -> Pipeline | None:
    """What a row ran; None for shapes of GEMMs that are not described, and where NCCL did not move the bytes."""
    if row.shape not in TILES or row.implementation != "nccl":
        return None
    return Pipeline(
        Gemm(row.m, row.n, row.k, row.dtype),
        Kind(row.collective),
        row.bytes,
        TILES[row.shape],
        row.blocks,
        iterations=row.iterations,
        streams=1 if row.in_order else STREAMS,
        asked_kb=(row.shared_bytes + RESERVED_BYTES) / 1024,
    )


def _share(claim_id: str, measured: float, predicted: float) -> Verdict:
    """Of normalised time, in percent of the sequential time."""
    measured, predicted = 100 * measured, 100 * predicted
    error = error_of(measured, predicted, points=True)
    assert error is not None
    verdict = Verdict(claim_id, "share of sequential time", measured, predicted, "percent", error, Role.SEEN, True)
    return dataclasses.replace(verdict, points=True, ok=error <= POINTS)


def _words(row: OccupancyRow) -> str:
    resident = f"{row.blocks} blocks {row.resident} resident"
    order = "priority" if row.priority else "equal"
    return f"{row.gemm}_{format_bytes(row.bytes)}/{row.collective}/{row.shape} {resident} {order}"
