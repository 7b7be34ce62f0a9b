"""Layers that a step trains, those of the models that ``sidelane plan`` predicts, how many tokens of a rank, and what
the model says of a measured step.

A case is written ``8b:2x4096``: layers like those of an 8B model, two sequences of 4096 tokens on each rank.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from sidelane_lab.model.layer import MODELS, Step
from sidelane_lab.model.transformer import Transformer

if TYPE_CHECKING:
    from sidelane_lab.machines.spec import Machine
    from sidelane_lab.studies.fsdp.rows import FsdpRow

SHORT = {name.removeprefix("llama-").removesuffix("-like"): name for name in MODELS}
"""Names of models in cases: ``8b``, ``70b``."""

LAYERS = {"llama-8b-like": 10, "llama-70b-like": 4}
"""Layers: as many as two GPUs of 80 GB take with gradients, next to the buffers of every implementation."""

FEW_LAYERS, DIVISOR, FEW_HEADS = 3, 64, (4, 2)
"""Sizes of CPU ranks: layers, what sizes are divided by, heads of queries and of keys."""

STRATEGIES = {
    "nccl": "library",
    "nccl_ce": "dma all-gather",
    "sidelane_ag": "straight all-gather",
    "sidelane": "straight both",
    "sidelane_copies": "dma both",
}
"""Names of the model for the implementations that communicate."""
FLOORS = {"compute_only": False, "compute_only_straight": True}
"""Implementations that do not, by whether parameters are gathered without copies."""


def predict_row(machine: Machine, row: FsdpRow) -> tuple[float, ...]:
    """Return microseconds of the same step; nothing if no model speaks to it: optimizers, gradients in float32."""
    from sidelane_lab.model.training import compute_us, step_times

    if row.optimizer or row.reduce_dtype != "bfloat16" or row.model not in MODELS:
        return ()
    step = step_of(row)
    if row.implementation in FLOORS:
        return (compute_us(machine, step, straight=FLOORS[row.implementation]),)
    strategy = STRATEGIES.get(row.implementation)
    return () if strategy is None else (step_times(machine, step, strategy, 0.0).time_us,)


def step_of(row: FsdpRow) -> Step:
    """Return the model's step of a row."""
    return Step(dataclasses.replace(MODELS[row.model], layers=row.layers), row.batch * row.seq, row.seq)


@dataclasses.dataclass(frozen=True, slots=True)
class StepCase:
    """A step.

    Attributes:
        model: sizes of a layer, and how many there are.
        batch: sequences of a rank.
        seq: tokens of a sequence.
    """

    model: Transformer
    batch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.model.name}, {self.model.layers} layers, {self.batch}x{self.seq} tokens a rank"

    def small(self) -> StepCase:
        """The same of a size that suits a CPU core."""
        heads, kv_heads = FEW_HEADS
        model = dataclasses.replace(
            self.model,
            layers=min(self.model.layers, FEW_LAYERS),
            hidden=self.model.hidden // DIVISOR,
            feed=self.model.feed // DIVISOR,
            heads=heads,
            kv_heads=kv_heads,
        )
        return StepCase(model, self.batch, max(8, self.seq // DIVISOR))


def parse_case(text: str, layers: int | None = None) -> StepCase:
    """Read ``8b:2x4096``.

    Args:
        text: model, sequences and tokens of each.
        layers: how many; None for :data:`LAYERS`.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\w+):([1-9]\d*)x([1-9]\d*)", text)
    if found is None or found[1] not in SHORT:
        models = " or ".join(SHORT)
        raise ValueError(f"fsdp: case (value={text!r}, allowed={models} and sequences x tokens, as in 8b:2x4096)")
    model = MODELS[SHORT[found[1]]]
    if layers is not None and layers < 1:
        raise ValueError(f"fsdp: layers (value={layers}, allowed=1 or more)")
    chosen = LAYERS[model.name] if layers is None else layers
    return StepCase(dataclasses.replace(model, layers=chosen), int(found[2]), int(found[3]))
