"""Planning a training step on a machine one does not have: what communication stays exposed, and what to change.

Among several nodes a step is planned for each number of them, with layers sharded over all ranks (FSDP2), and with all
shards on each node (HSDP).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sidelane_lab.harness.table import Line, Table, without_empty_columns
from sidelane_lab.harness.terminal import progress, say, say_written, tables_console
from sidelane_lab.machines.load import MOST_NODES, find, with_nodes
from sidelane_lab.machines.numbers import write_report
from sidelane_lab.machines.ranges import Band
from sidelane_lab.machines.spec import Machine, RunStatus
from sidelane_lab.model.layer import ADAM_BYTES, MODELS, WEIGHT_BYTES, Step, ends_us, step_memory
from sidelane_lab.model.training import WAYS, StepTimes, step_times, sustained

WORTH = 0.01
"""Share of a step that a change must save to be named."""
MACHINE = "h100x8x2"
"""Machine of a plan for several nodes that names none: nodes of eight H100s on rails."""
FSDP, HSDP = "FSDP2", "HSDP"
"""Names of the ways to shard among several nodes: over all ranks, and in each node with replicas among nodes."""
CODE = {
    "straight all-gather": "fsdp.enable(model)",
    "straight both": "fsdp.enable(model)",
    "dma all-gather": "fsdp.enable(model, zero_copy=False)",
    "dma both": "fsdp.enable(model, zero_copy=False)",
}
"""Calls that a program writes, by strategy."""
SMALL_ADAM_BYTES = 2
"""Bytes of both moments of a parameter where an optimizer keeps them in 8 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step, sharded in one of the ways, under one strategy.

    Attributes:
        sharding: ``FSDP2`` or ``HSDP``.
        strategy: one of ``STRATEGIES``.
        times: of the step.
    """

    sharding: str
    strategy: str
    times: StepTimes

    @property
    def exposed_percent(self) -> float:
        """Exposed communication in percent of the step."""
        return 100 * self.times.exposed_us / self.times.time_us


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A step on a machine in every way: the first is the library's kernels, with shards among all ranks."""

    machine: Machine
    step: Step
    ways: tuple[PlannedStep, ...]

    @property
    def usual(self) -> PlannedStep:
        """The library's kernels."""
        return self.ways[0]

    @property
    def best(self) -> PlannedStep:
        """The fastest of those that fit, or of all where none fits."""
        return min(self.fitting or self.ways, key=lambda one: one.times.time_us)

    @property
    def fitting(self) -> list[PlannedStep]:
        """The ways that have enough memory."""
        return [one for one in self.ways if fits(self.machine, self.step, one.sharding)]

    def tokens_per_s(self, one: PlannedStep) -> float:
        """Return the tokens of all ranks in a second, with embedding, head and optimizer estimated."""
        others_us = ends_us(sustained(self.machine), self.step, _shards(self.machine, one.sharding))
        return self.machine.world_size * self.step.tokens / (one.times.time_us + others_us) * 1e6

    def rows(self) -> list[dict[str, Any]]:
        """Return the objects that ``--json`` writes."""
        asked = {
            "model": self.step.model.name,
            "layers": self.step.model.layers,
            "tokens": self.step.tokens,
            "sequence": self.step.sequence,
            "recomputed": self.step.recomputed,
            "nodes": self.machine.nodes,
            "gpus_per_node": self.machine.gpus,
        }
        return [
            {
                **asked,
                "memory_gb": memory_gb(self.machine, self.step, one.sharding),
                "fits": one in self.fitting,
                "tokens_per_s": self.tokens_per_s(one),
                "sharding": one.sharding,
                "strategy": one.strategy,
                **dataclasses.asdict(one.times),
                "exposed_us": one.times.exposed_us,
            }
            for one in self.ways
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of ``sidelane plan``.

    Attributes:
        machine: in the catalogue, or a file.
        model: one of ``MODELS``.
        tokens: of a rank.
        sequence: tokens that attend to each other.
        layers: None: the model's.
        fsdp: on several nodes, layers are sharded over all ranks alone; without it the plan has HSDP, too.
        json: file for the numbers, or ``written.STDOUT``.
        nodes: numbers of nodes, as :func:`parse_nodes` reads them; empty: the machine's.
        report: folder for the numbers and a picture of several nodes; None: none.
        recompute: nothing but the inputs of layers is kept for the backward pass; None: where it would not fit.
    """

    machine: str
    model: str
    tokens: int = 8192
    sequence: int = 4096
    layers: int | None = None
    fsdp: bool = False
    json: Path | None = None
    nodes: str = ""
    report: Path | None = None
    recompute: bool | None = None

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"plan: --model (value={self.model!r}, allowed={', '.join(MODELS)})")
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"plan: --layers (value={self.layers}, allowed=1 or more)")


def parse_nodes(text: str) -> tuple[int, ...]:
    """Return numbers of nodes: one, several, or the powers of two of a range.

    >>> parse_nodes("2..16"), parse_nodes("3,12")
    ((2, 4, 8, 16), (3, 12))

    Raises:
        ValueError: none, or numbers that are too large.
    """
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if span:
        first, last = map(int, span.groups())
        found = tuple(1 << power for power in range(1, MOST_NODES.bit_length()) if first <= 1 << power <= last)
    elif re.fullmatch(r"\d+(,\d+)*", text):
        found = tuple(dict.fromkeys(map(int, text.split(","))))
    else:
        found = ()
    if not found or not all(2 <= count <= MOST_NODES for count in found):
        allowed = f"2 to {MOST_NODES}: 16, or 2,8,32, or 2..128 for powers of two"
        raise ValueError(f"plan: --nodes (value={text!r}, allowed={allowed})")
    return found


def main(options: PlanOptions) -> None:
    """Print a step in every way, on each number of nodes that is asked for, and what to change.

    Raises:
        ValueError: no such machine, tokens that are no whole sequences, or numbers of nodes that are none.
    """
    machine = find(options.machine)
    model = MODELS[options.model]
    if options.layers is not None:
        model = dataclasses.replace(model, layers=options.layers)
    step = Step(model, options.tokens, options.sequence)
    counts = parse_nodes(options.nodes) if options.nodes else (machine.nodes,)
    if counts == (1,) and options.report is not None:
        raise ValueError("plan: --report (allowed=with several nodes, or --model dlrm)")
    if counts != (1,) and machine.gpus == 1:
        raise ValueError(f"plan: nodes of {machine.name} (value=1 GPU, allowed=2 and more, but for --model dlrm)")
    console = tables_console(options.json)
    plans = []
    with progress("simulating") as update:
        for count in counts:
            there = with_nodes(machine, count)
            update(there.title)
            kept = _kept(there, step, options.recompute)
            plans.append(plan(there, kept, (FSDP,) if options.fsdp else (FSDP, HSDP), update))
    first_and_last = [*plans[:1], *plans[1:][-1:]]
    for line in (line for one in first_and_last for line in answer(one)):
        say(console, line, style="bold")
    console.print()
    console.print(plan_table(plans).to_rich())
    for line in (line for one in first_and_last for line in advice(one)):
        say(console, line)
    rows = [row for one in plans for row in one.rows()]
    files = write_report(options.json, options.report, "plan", machine, rows, f"plan-{model.name}-nodes")
    if options.report is not None:
        draw_plans(plans, options.report)
    say_written(files)


def memory_gb(machine: Machine, step: Step, sharding: str = FSDP) -> float:
    """Estimate the memory of a GPU in a step, in 10^9 bytes."""
    return step_memory(step, _shards(machine, sharding)).total / 1e9


def fits(machine: Machine, step: Step, sharding: str = FSDP) -> bool:
    """Return whether a step has enough memory.

    Data sheets' gigabytes are 2^30 bytes, of which driver, contexts and gaps take some: 10^9 are taken to be left.
    """
    return memory_gb(machine, step, sharding) <= machine.gpu.memory_gb


def _shards(machine: Machine, sharding: str) -> int:
    return machine.gpus if sharding == HSDP else machine.world_size


def _kept(machine: Machine, step: Step, recompute: bool | None) -> Step:
    """Return the step with what is asked for recomputed; None: if nothing else fits."""
    return dataclasses.replace(step, recomputed=not fits(machine, step) if recompute is None else recompute)


def answer(planned: TrainingPlan) -> list[str]:
    """Say whether a step fits, what it reaches, what stays exposed, and what to write where it fits."""
    machine, step, best, usual = planned.machine, planned.step, planned.best, planned.usual
    is_enough = bool(planned.fitting)
    lines = [f"{step.model.name} {'fits' if is_enough else 'does not fit'} on {machine.title} ({machine.runs})."]
    lines += _memory_words(machine, step, best.sharding)
    if not is_enough:
        lines += _what_fits(machine, step)
    ours, theirs = map(planned.tokens_per_s, (best, dataclasses.replace(usual, sharding=best.sharding)))
    condition = "" if is_enough else "If it did: "
    lines += [
        f"{condition}{ours:,.0f} tokens a second of all GPUs with Sidelane, {theirs:,.0f} with the vendor's library.",
        f"Exposed communication: {_exposed(best)} of a step with Sidelane, {_exposed(usual)} with the library.",
    ]
    if not is_enough:
        return lines
    if machine.runs is RunStatus.UNSUPPORTED:
        lines.append("Sidelane has never run on AMD GPUs: the plan says what copy engines could give.")
    elif best.strategy not in CODE:
        lines.append("Leave the vendor's library: copy engines would not be faster.")
    else:
        mesh = ""
        if best.sharding == HSDP:
            mesh = f", mesh=init_device_mesh('cuda', ({machine.nodes}, {machine.gpus}))"
        code = CODE[best.strategy]
        lines.append(f"Write after fully_shard(model{mesh}): from sidelane import fsdp; enabled = {code}")
    return lines


def _exposed(one: PlannedStep) -> str:
    return f"{_ms(one.times.exposed_us)} ms ({one.exposed_percent:.0f}%)"


def _memory_words(machine: Machine, step: Step, sharding: str) -> list[str]:
    memory = step_memory(step, _shards(machine, sharding))
    parts = (memory.total, memory.states + memory.gradients, memory.activations, memory.gathered)
    total, states, activations, gathered = (f"{part / 1e9:.0f}" for part in parts)
    how = f"under {sharding}" + (", with layers recomputed" if step.recomputed else "")
    return [
        f"Each GPU has {machine.gpu.memory_gb:.0f} GB and needs about {total} GB {how}.",
        f"Weights, gradients and Adam in float32 take {states} GB, activations {activations}, "
        f"gathered layers {gathered}.",
    ]


def _what_fits(machine: Machine, step: Step) -> list[str]:
    """Say what makes a step fit, if anything does: more GPUs, smaller moments, fewer tokens."""
    memory, ways = step_memory(step, machine.world_size), []
    again = dataclasses.replace(step, recomputed=True)
    more = (with_nodes(machine, 1 << power) for power in range(MOST_NODES.bit_length()))
    larger = next((one for one in more if one.world_size > machine.world_size and fits(one, again)), None)
    if not step.recomputed and fits(machine, again):
        ways.append(f"with recomputed layers ({memory_gb(machine, again):.0f} GB; --recompute)")
    if larger is not None:
        words = "" if step.recomputed else " with recomputed layers"
        ways.append(f"on {larger.world_size} such GPUs{words} ({memory_gb(larger, again):.0f} GB a GPU)")
    saved = memory.states * (ADAM_BYTES - SMALL_ADAM_BYTES) / (ADAM_BYTES + WEIGHT_BYTES)
    if memory.total - saved <= machine.gpu.memory_gb * 1e9:
        ways.append(f"here with 8-bit moments of Adam ({(memory.total - saved) / 1e9:.0f} GB)")
    least = dataclasses.replace(step, tokens=step.sequence)
    if fits(machine, least):
        ways.append(f"with --tokens {least.tokens} ({memory_gb(machine, least):.0f} GB)")
    if ways:
        return [f"It fits {', or '.join(ways)}."]
    return ["Nothing fits: neither recomputed layers, more such GPUs, 8-bit moments of Adam, nor fewer tokens."]


def plan(
    machine: Machine,
    step: Step,
    shardings: Sequence[str] = (FSDP, HSDP),
    progress: Callable[[str], None] = lambda text: None,
) -> TrainingPlan:
    """Predict a step in every way.

    Args:
        machine: one node; or several, in each of the shardings.
        step: the model and its tokens.
        shardings: among several nodes.
        progress: is called with each way.
    """
    ways = []
    for sharding in shardings if machine.nodes > 1 else (FSDP,):
        for strategy, way in WAYS.items():
            # Through host memory FSDP2 cannot gather into the parameters (docs/guide/without-nvlink.md).
            if not (way.straight and machine.through_host):
                progress(f"{machine.title}, {sharding}, {strategy}")
                ways.append(
                    PlannedStep(sharding, strategy, step_times(machine, step, strategy, hybrid=sharding == HSDP))
                )
    return TrainingPlan(machine, step, tuple(ways))


def plan_table(plans: Sequence[TrainingPlan]) -> Table:
    """Make a table of milliseconds by number of nodes, sharding and strategy, alone and exposed."""
    machine, step = plans[0].machine, plans[0].step
    is_among = machine.nodes > 1
    lines = []
    for planned in plans:
        for one in planned.ways:
            times = (one.times.time_us, one.times.compute_us, one.times.communication_us, one.times.exposed_us)
            where = (str(planned.machine.nodes), one.sharding) if is_among else ("", "")
            cells = (*where, one.strategy, *map(_ms, times), f"{one.exposed_percent:.0f}")
            lines.append(Line(cells))
    there = f"nodes of {machine.title.split(' nodes of ', 1)[-1]}, {machine.links.network}"
    notes = [
        "embedding, head and optimizer are left out",
        "exposed: more than a step has that communicates nothing and copies out of buffers; %: of the step",
        "dma: on copy engines; both: all-gathers and reduce-scatters; straight: without copies out of buffers",
    ]
    if is_among:
        notes += [
            "FSDP2: shards among all ranks; HSDP: among those of a node, whose gradients are then added up among nodes",
            "library: flat rings of its kernels; dma, straight: copy engines in the node, its kernels among nodes",
            "nothing of this was compared with hardware; no ranges; trees of libraries are not modelled",
        ]
    else:
        notes += [
            "library: any priority, since a collective is ready before the kernel that it runs beside",
            "how far predicted steps were off on two H200s: docs/lab/model.md",
        ]
    if recomputed := [str(one.machine.nodes) for one in plans if one.step.recomputed]:
        where_so = f" on {', '.join(recomputed)} nodes" if is_among else ""
        notes.append(f"layers are recomputed in the backward pass{where_so}")
    asked = f"{step.model.name}, {step.model.layers} layers, {step.tokens} tokens a rank"
    title = f"{asked}, {'on ' + there if is_among else 'FSDP on ' + machine.title}: predicted, ms"
    times_of = ("step", "compute", "collectives\nalone", "exposed", "%")
    columns = ("nodes", "<sharding", "<strategy", *times_of)
    return without_empty_columns(Table(title, columns, tuple(lines), tuple(notes), keys=3))


def advice(planned: TrainingPlan) -> list[str]:
    """Say what to change in a step that fits, most first: a strategy, or more tokens where these would fit, too."""
    if not planned.fitting:
        return []
    machine, step, best = planned.machine, planned.step, planned.best
    library, saved = planned.usual.times, planned.usual.times.time_us - best.times.time_us
    longer, lines = dataclasses.replace(step, tokens=step.tokens + step.sequence), []
    where = f"{machine.nodes} nodes, {best.sharding}: " if machine.nodes > 1 else ""
    if best.strategy != "library" and saved > WORTH * library.time_us:
        share = 100 * saved / library.time_us
        lines.append(f"{where}{_recipe(best)}: {_ms(saved)} ms a step less ({share:.0f}%).")
    else:
        lines.append(f"{where}Leave the library's kernels: copy engines save less than 1% of this step.")
    if best.times.communication_us > best.times.compute_us:
        factor = best.times.communication_us / best.times.compute_us
        more = math.ceil(step.tokens * factor / step.sequence) * step.sequence
        enough = dataclasses.replace(step, tokens=more)
        memory = f"{memory_gb(machine, enough, best.sharding):.0f} GB"
        need = "" if fits(machine, enough, best.sharding) else f", which need {memory} and do not fit"
        lines.append(f"The collectives outlast the computation: they could hide from about {more} tokens a rank{need}.")
    elif best.times.exposed_us > 0.05 * best.times.time_us and fits(machine, longer, best.sharding):
        lines.append("The collectives could hide: more tokens a rank make what stays exposed a smaller share.")
    return lines


def _recipe(one: PlannedStep) -> str:
    way = WAYS[one.strategy]
    moved = "all-gathers and reduce-scatters" if way.scatters else "all-gathers"
    where = "copy engines, straight into the parameters" if way.straight else "copy engines"
    return f"Run {moved} on {where}"


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f}"


def draw_plans(plans: Sequence[TrainingPlan], folder: Path) -> None:
    """Draw the exposed share of a step over the number of nodes, a panel for each way to shard it."""
    # Both load matplotlib, and torch, which takes longer than a plan does.
    from sidelane_lab.harness.drawing import plain_name
    from sidelane_lab.model.panels import Panel, draw_panels

    machine, step = plans[0].machine, plans[0].step
    counts = [planned.machine.nodes for planned in plans]

    def panel(sharding: str) -> Panel:
        shares: dict[str, list[float]] = {}
        for one in (one for planned in plans for one in planned.ways if one.sharding == sharding):
            shares.setdefault(plain_name(one.strategy), []).append(one.exposed_percent)
        return Panel(
            curves={name: Band(*3 * (tuple(values),)) for name, values in shares.items()},
            x=counts,
            ticks={float(count): str(count) for count in counts},
            xlabel=f"nodes of {machine.gpus} GPUs",
            ylabel="exposed communication, % of the step",
            title=sharding,
            low=0,
        )

    shardings = dict.fromkeys(one.sharding for one in plans[0].ways)
    title = f"{step.model.name}, {step.tokens} tokens a rank: predicted"
    draw_panels(list(map(panel, shardings)), title, folder, f"plan-{step.model.name}-nodes", shared=True)
