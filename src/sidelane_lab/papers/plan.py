"""Planning a training step on a machine one does not have: what communication stays exposed, and what to change."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from sidelane.cli.table import Line, Table
from sidelane.cli.terminal import progress_console, say, say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.ranges import ends, variations
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.layer import MODELS, Step
from sidelane_lab.model.training import STRATEGIES, WAYS, StepTimes, compute_us, step_times
from sidelane_lab.papers.numbers import write_numbers

OF_COLLECTIVES = ("links", "dma", "library")
SECTIONS = ("gpu", "matmul", "interference", *OF_COLLECTIVES)
"""Sections of a description whose numbers a step depends on."""
WORTH = 0.01
"""Share of a step that a change must save to be named."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step under one strategy, and what stays exposed over the plausible values of the description's numbers."""

    strategy: str
    times: StepTimes
    low_us: float
    high_us: float

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` writes."""
        return {
            "strategy": self.strategy,
            **dataclasses.asdict(self.times),
            "exposed_us": self.times.exposed_us,
            "exposed_low_us": self.low_us,
            "exposed_high_us": self.high_us,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of ``sidelane plan``.

    Attributes:
        machine: in the catalogue, or a file.
        model: one of ``MODELS``.
        tokens: of a rank.
        sequence: tokens that attend to each other.
        layers: None: the model's.
        fsdp: the layers are sharded over all ranks; nothing else is modelled.
        json: file for the numbers, or ``written.STDOUT``.
    """

    machine: str
    model: str
    tokens: int = 8192
    sequence: int = 4096
    layers: int | None = None
    fsdp: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        if not self.fsdp:
            raise ValueError("plan: sharding (value=none, allowed=--fsdp: no other is modelled)")
        if self.model not in MODELS:
            raise ValueError(f"plan: --model (value={self.model!r}, allowed={', '.join(MODELS)})")
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"plan: --layers (value={self.layers}, allowed=1 or more)")


def main(options: PlanOptions) -> None:
    """Print a step under each strategy, and what to change.

    Raises:
        ValueError: no such machine, several nodes, or tokens that are no whole sequences.
    """
    machine = find(options.machine)
    model = MODELS[options.model]
    if options.layers is not None:
        model = dataclasses.replace(model, layers=options.layers)
    step = Step(model, options.tokens, options.sequence)
    console = tables_console(options.json)
    with progress_console().status("simulating, over the plausible values of the machine's numbers"):
        found = plan(machine, step)
    console.print(plan_table(machine, step, found).to_rich())
    for line in advice(machine, step, found):
        say(console, line)
    asked = {"model": model.name, "layers": model.layers, "tokens": step.tokens, "sequence": step.sequence}
    say_written(write_numbers(options.json, "plan", machine, [{**asked, **one.to_dict()} for one in found]))


def plan(machine: Machine, step: Step) -> list[PlannedStep]:
    """Predict a step under every strategy, with ranges: one number at a time at both ends of its own; squares add."""
    compute = compute_us(machine, step)
    least = compute_us(machine, step, straight=True) - compute
    times = {strategy: step_times(machine, step, strategy, compute) for strategy in STRATEGIES}
    varied: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for variation in variations(machine, SECTIONS):
        section = variation.path.partition(".")[0]
        alone = compute if section in OF_COLLECTIVES else compute_us(variation.machine, step)
        for strategy, known in times.items():
            if section == "dma" and not WAYS[strategy].gathers:
                continue  # the library does without engines
            changed = step_times(variation.machine, step, strategy, alone, known.units or None)
            varied[strategy].append(changed.exposed_us)
    found = []
    for strategy, known in times.items():
        low, high = ends(known.exposed_us, varied[strategy])
        found.append(PlannedStep(strategy, known, max(least if WAYS[strategy].straight else 0.0, low), high))
    return found


def plan_table(machine: Machine, step: Step, found: list[PlannedStep]) -> Table:
    """Milliseconds of a step, of its computation and of its communication, alone and exposed."""
    lines = [
        Line(
            (
                _named(one),
                _ms(one.times.time_us),
                _ms(one.times.compute_us),
                _ms(one.times.communication_us),
                _ms(one.times.exposed_us),
                f"{_ms(one.low_us)} .. {_ms(one.high_us)}",
            )
        )
        for one in found
    ]
    model = step.model
    title = f"{model.name}, {model.layers} layers, {step.tokens} tokens a rank, FSDP on {machine.title}: predicted, ms"
    notes = (
        "embedding, head and optimizer are left out; ranges are those of the description's numbers",
        "exposed: more than a step has that communicates nothing and copies out of buffers; straight: without copies",
        "library: any priority, since a collective is ready before the kernel that it runs beside",
        "own units: the best of powers of two, which nothing else runs on in the whole step; never measured",
        "H200s: 37 of 59 steps were within 5%, all within 13%; single gains are rough (docs/lab/model.md)",
    )
    columns = ("<strategy", "step", "compute", "collectives\nalone", "exposed", "plausible")
    return Table(title, columns, tuple(lines), notes)


def advice(machine: Machine, step: Step, found: list[PlannedStep]) -> list[str]:
    """Say what to change, most first: a strategy that exposes less, or more tokens where nothing can hide it all."""
    library, best = found[0].times, min(found, key=lambda one: one.times.time_us)
    saved = library.time_us - best.times.time_us
    lines = []
    if best.strategy != "library" and saved > WORTH * library.time_us:
        share = 100 * saved / library.time_us
        lines.append(f"{_recipe(best)}: {_ms(saved)} ms a step less ({share:.0f}%).")
        if found[0].low_us < best.high_us:
            lines.append("The plausible ranges overlap: measure before you count on it.")
    else:
        lines.append("Leave the library's kernels: copy engines save less than 1% of this step.")
    if best.times.communication_us > best.times.compute_us:
        factor = best.times.communication_us / best.times.compute_us
        more = math.ceil(step.tokens * factor / step.sequence) * step.sequence
        lines.append(f"The collectives outlast the computation: from about {more} tokens a rank they could hide.")
    elif best.times.exposed_us > 0.05 * best.times.time_us:
        lines.append("The collectives could hide: more tokens a rank make what stays exposed a smaller share.")
    return lines


def _recipe(one: PlannedStep) -> str:
    way = WAYS[one.strategy]
    if not way.gathers:
        return f"Give the library's kernels {one.times.units} units of their own"
    moved = "all-gathers and reduce-scatters" if way.scatters else "all-gathers"
    where = "copy engines, straight into the parameters" if way.straight else "copy engines"
    return f"Run {moved} on {where}"


def _named(one: PlannedStep) -> str:
    return one.strategy.replace("own units", f"{one.times.units} own units") if one.times.units else one.strategy


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f}"
