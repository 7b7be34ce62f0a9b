"""Predicted training steps held against ``fsdp.json``, and what each way saves of the library's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims import Role, Verdict
from sidelane_lab.model.layer import MODELS, Step
from sidelane_lab.model.training import compute_us, step_times
from sidelane_lab.papers.claims.verdicts import judge, with_summary
from sidelane_lab.studies.fsdp.cases import SHORT
from sidelane_lab.studies.fsdp.rows import FsdpRow, case_of

WORST, WORST_GAIN = 0.05, 1 / 3
"""Targets of issue 25: of a step, and of the gain by Sidelane."""
LIBRARY = "nccl"
STRATEGIES = {
    LIBRARY: "library",
    "nccl_ce": "dma all-gather",
    "sidelane_ag": "straight all-gather",
    "sidelane": "straight both",
    "sidelane_copies": "dma both",
}
"""What the model calls the implementations that communicate."""
FLOORS = {"compute_only": False, "compute_only_straight": True}
"""Those that do not, by whether parameters are gathered without copies."""
FIRST_COMPARED = "h200x2"
"""Its steps had been compared when ways without copies were put in."""
OWN = ("sidelane_ag", "sidelane", "sidelane_copies")


def judge_steps(machine: Machine, rows: Sequence[object]) -> list[Verdict]:
    """A verdict on each step with its worst error, then on each gain over the library with that of Sidelane's."""
    measured = [row for row in rows if isinstance(row, FsdpRow) and row.step_ms is not None]
    predicted = {row: predict_step(machine, row) for row in measured}
    library = {case_of(row): row for row in measured if row.implementation == LIBRARY}
    name, role = machine.name, Role.SEEN if machine.name == FIRST_COMPARED else Role.HELD_OUT
    steps = [judge(f"{name}/steps/{_words(r)}", _us(r), p, role, what="step") for r, p in predicted.items()]
    own: list[Verdict | None] = []
    others: list[Verdict | None] = []
    for row, time_us in predicted.items():
        base = library.get(case_of(row))
        if base is None or row.implementation not in STRATEGIES or row is base:
            continue
        by_library = predicted[base]
        gain = None if by_library is None or time_us is None else by_library - time_us
        saved = judge(f"{name}/gains/{_words(row)}", _us(base) - _us(row), gain, role, what="gain over the library")
        (own if row.implementation in OWN else others).append(saved)
    return [
        *with_summary(f"{name}/steps", steps, None, WORST),
        *(one for one in others if one is not None),
        *with_summary(f"{name}/gains", own, None, WORST_GAIN),
    ]


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


def _us(row: FsdpRow) -> float:
    assert row.step_ms is not None
    return 1e3 * row.step_ms


def _words(row: FsdpRow) -> str:
    short = {model: name for name, model in SHORT.items()}.get(row.model, row.model)
    return f"{short} x {row.layers}, {row.batch}x{row.seq}/{row.implementation}"
