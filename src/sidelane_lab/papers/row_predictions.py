"""Predictions of rows of this project's own result files: what the model says of what a row measured.

From ``chain.json`` the model is given what both GEMMs take alone (and from ``c3.json`` isolated times, see
``studies/c3/prediction.py``). Of everything else the description says it all. ``papers/results.py`` holds these
predictions against the rows.
"""

from __future__ import annotations

import dataclasses

from sidelane.program.builders import variants
from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import IN_PLACE, KINDS, PREDICTED_VARIANTS, executed_run, library_us
from sidelane_lab.model.layer import MODELS, Step
from sidelane_lab.model.pipeline import OPT1, OPT2, Pipeline
from sidelane_lab.model.power import dma_power, hybrid_power, library_power
from sidelane_lab.model.training import compute_us, step_times
from sidelane_lab.pairs.workload import Gemm
from sidelane_lab.studies.c3.occupancy_rows import OccupancyRow
from sidelane_lab.studies.chain import ChainRow
from sidelane_lab.studies.collectives import CollectiveRow
from sidelane_lab.studies.fsdp.rows import FsdpRow
from sidelane_lab.studies.power.rows import PowerRow

DISTURBED = 0.05
"""Share of a time by which queues that share an engine must matter for both times to be predicted."""
LIBRARY_ENGINES = "nccl_ce"
"""NCCL on copy engines. Its rows had been looked at when they were first predicted."""
LIBRARY = "nccl"
STRATEGIES = {
    LIBRARY: "library",
    "nccl_ce": "dma all-gather",
    "sidelane_ag": "straight all-gather",
    "sidelane": "straight both",
    "sidelane_copies": "dma both",
}
"""Names of the model for the implementations of training steps that communicate."""
FLOORS = {"compute_only": False, "compute_only_straight": True}
"""Those that do not, by whether parameters are gathered without copies."""
TILES = {"opt1": OPT1, "opt2": OPT2}
"""Shapes of the occupancy study whose registers are known."""
STREAMS = 2
"""Streams of GEMMs in that study (``c3.pipelined``)."""
RESERVED_BYTES = 1024
"""Shared memory that CUDA takes for each block besides."""


def predict_alone(machine: Machine, row: CollectiveRow) -> float | None:
    """Predict a collective alone; None if the model does not speak to it."""
    if row.collective not in tuple(KINDS) or row.launch != "graph" or row.tensors > 1:
        return None
    kind = Kind(row.collective)
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return library_us(machine, kind, row.bytes)
    if row.implementation == LIBRARY_ENGINES and kind not in REDUCING:
        return _library_on_engines_us(machine, row)
    if row.implementation != "dma" or row.variant not in variants(kind) or row.prelaunch:
        return None
    return executed_run(machine, kind, row.bytes, row.variant, row.in_place).time_us


def _library_on_engines_us(machine: Machine, row: CollectiveRow) -> float:
    """NCCL's copies: those of one engine for all peers, and the own chunk behind them, not beside."""
    moved = executed_run(machine, Kind.ALL_GATHER, row.bytes, "b2b", True).time_us
    if row.in_place:
        return moved
    return moved + float(machine.dma.copy_us) + row.bytes / machine.gpus / (float(machine.dma.local_gbps) * 1e3)


def predict_ends(machine: Machine, row: CollectiveRow) -> tuple[float, ...]:
    """Predict times, what to plan with first; two where a GPU's queues share an engine, which ranks may do in step.

    Out of step two GPUs often send to one port while another idles, and 0.59 to 0.64 of a link is left; in step each
    has a port for itself. One program does either, from run to run (docs/lab/model.md).
    """
    alone = predict_alone(machine, row)
    if alone is None or row.implementation != "dma" or machine.gpus <= 2 or float(machine.dma.shared_queues) == 1:
        return () if alone is None else (alone,)
    in_step = predict_alone(machine.with_value("dma.shared_queues", 1), row)
    return (alone,) if in_step is None or in_step > (1 - DISTURBED) * alone else (alone, in_step)


def predict_chain(machine: Machine, row: ChainRow) -> float | None:
    """Return the microseconds of the same chain: nothing is hidden in it. None if the model does not speak to it."""
    if row.launch != "graph" or row.gemms_us is None:
        return None
    if row.implementation == "nccl" and not row.variant:  # on symmetric windows it has other kernels
        return row.gemms_us + library_us(machine, Kind.ALL_GATHER, row.bytes)
    if row.implementation != "dma" or row.variant not in variants(Kind.ALL_GATHER):
        return None
    return row.gemms_us + executed_run(machine, Kind.ALL_GATHER, row.bytes, row.variant, row.in_place).time_us


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
        streams=1 if row.in_order else STREAMS,
        asked_kb=(row.shared_bytes + RESERVED_BYTES) / 1024,
    )


def predict_step(machine: Machine, row: FsdpRow) -> float | None:
    """Microseconds of the same step; None if the model does not speak to it: optimizers, and gradients in float32."""
    if row.optimizer or row.reduce_dtype != "bfloat16" or row.model not in MODELS:
        return None
    model = dataclasses.replace(MODELS[row.model], layers=row.layers)
    step = Step(model, row.batch * row.seq, row.seq)
    if row.implementation in FLOORS:
        return compute_us(machine, step, straight=FLOORS[row.implementation])
    strategy = STRATEGIES.get(row.implementation)
    return None if strategy is None else step_times(machine, step, strategy, 0.0).time_us
