"""``sidelane pipeline``: rows of the occupancy study on a machine one does not have; and a measured row, predicted."""

from __future__ import annotations

import functools
import itertools

from sidelane.program.collective import Kind
from sidelane_lab.cli.c3 import OccupancyOptions
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.pipeline import (
    OPT1,
    OPT2,
    Pipeline,
    alone_us,
    blocks_per_unit,
    overlap_rate,
    run_pipeline,
    sequential_us,
)
from sidelane_lab.pairs.workload import Gemm, Workload, parse_workload
from sidelane_lab.studies.c3.occupancy_rows import OccupancyRow

TILES = {"opt1": OPT1, "opt2": OPT2}
"""Tiles that the model has, by shape."""
STREAMS = 2
"""Streams of GEMMs of the study that measures."""
RESERVED_BYTES = 1024
"""Shared memory that CUDA takes for each block besides."""


def predict_row(machine: Machine, row: OccupancyRow) -> tuple[float, ...]:
    """Return microseconds of the iterations; nothing if the model does not speak to the row or the machine."""
    pipeline = pipeline_of(row)
    if pipeline is None or machine.occupancy is None:
        return ()
    return (run_pipeline(machine, pipeline, priority=row.priority).time_us,)


def pipeline_of(row: OccupancyRow) -> Pipeline | None:
    """Return what a row ran; None for shapes of GEMMs that are not described, and where NCCL did not move the bytes."""
    if row.shape not in TILES or row.implementation != "nccl":
        return None
    return Pipeline(
        Gemm(row.m, row.n, row.k, row.dtype),
        Kind(row.collective),
        row.bytes,
        TILES[row.shape],
        row.blocks,
        iterations=row.iterations,
        streams=STREAMS,
        asked_kb=(row.shared_bytes + RESERVED_BYTES) / 1024,
    )


def predict(machine: Machine, options: OccupancyOptions) -> list[OccupancyRow]:
    """Return the rows of every pair, shape and number of blocks, without and with priority.

    Raises:
        ValueError: a machine of several nodes, or one whose compute units are not described.
    """
    machine.refuse_nodes("pipeline")
    pairs = [parse_workload(text, kind) for text, kind in itertools.product(options.workloads, options.collectives)]
    cases = itertools.product(pairs, options.shapes, options.blocks)
    return [row for case in cases for row in _rows_of(machine, *case, options.iterations)]


@functools.lru_cache(maxsize=2048)
def _rows_of(
    machine: Machine, pair: Workload, shape: str, blocks: int, iterations: int
) -> tuple[OccupancyRow, OccupancyRow]:
    """Return the rows without and with priority."""
    gemm, tile = pair.gemm, TILES[shape]
    pipeline = Pipeline(gemm, pair.collective, pair.nbytes, tile, blocks, iterations)
    gemm_us, comm_us = alone_us(machine, pipeline)
    whole_us = sequential_us(machine, pipeline)

    def row(priority: bool) -> OccupancyRow:
        run = run_pipeline(machine, pipeline, priority=priority)
        return OccupancyRow(
            **pair.columns,
            implementation="nccl",
            shape=shape,
            grid="persistent" if blocks < -(-gemm.m // tile.m) * -(-gemm.n // tile.n) else "data-parallel",
            blocks=blocks,
            resident=blocks_per_unit(machine, tile, gemm.dtype),
            shared_bytes=round(tile.shared_kb(gemm.dtype) * 1024),
            priority=priority,
            in_order=False,
            iterations=iterations,
            gemm_us=gemm_us,
            comm_us=comm_us,
            sequential_us=whole_us,
            time_us=run.time_us,
            normalised=run.time_us / whole_us,
            overlap_rate=100 * overlap_rate(run, iterations),
            correct=None,
        )

    return row(False), row(True)
