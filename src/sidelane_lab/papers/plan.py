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

from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import progress, say, say_written, tables_console
from sidelane_lab.machines.load import MOST_NODES, find, with_nodes
from sidelane_lab.machines.numbers import write_numbers, write_report
from sidelane_lab.machines.ranges import Variation, ends, predict_each, variations
from sidelane_lab.machines.spec import Machine, RunStatus
from sidelane_lab.model.layer import ADAM_BYTES, MODELS, WEIGHT_BYTES, Step, ends_us, step_memory
from sidelane_lab.model.training import STRATEGIES, WAYS, StepTimes, compute_us, step_times, sustained

OF_COLLECTIVES = ("links", "dma", "library")
SECTIONS = ("gpu", "matmul", "interference", *OF_COLLECTIVES)
"""Sections of a description whose numbers a step depends on."""
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
AMONG_NODES = tuple(name for name, way in WAYS.items() if not way.apart)
"""Strategies among several nodes."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class NodesStep:
    """A step on a number of nodes, sharded in one of the ways, under one strategy."""

    nodes: int
    sharding: str
    strategy: str
    times: StepTimes

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` writes."""
        where = {"nodes": self.nodes, "sharding": self.sharding, "strategy": self.strategy}
        return {**where, **dataclasses.asdict(self.times), "exposed_us": self.times.exposed_us}


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
    """Print a step under each strategy, and what to change.

    Raises:
        ValueError: no such machine, tokens that are no whole sequences, or numbers of nodes that are none.
    """
    machine = find(options.machine)
    model = MODELS[options.model]
    if options.layers is not None:
        model = dataclasses.replace(model, layers=options.layers)
    step = Step(model, options.tokens, options.sequence)
    if options.nodes or machine.nodes > 1:
        _main_nodes(options, machine, step)
        return
    step = _kept(machine, step, options.recompute)
    if options.report is not None:
        raise ValueError("plan: --report (allowed=with several nodes, or --model dlrm)")
    console = tables_console(options.json)
    with progress("simulating, over the plausible values of the machine's numbers") as update:
        found = plan(machine, step, update)
    best = min(found, key=lambda one: one.times.time_us)
    for line in answer(machine, step, best.strategy, best.times, found[0].times):
        say(console, line, style="bold")
    console.print()
    console.print(plan_table(machine, step, found).to_rich())
    for line in advice(machine, step, found) if fits(machine, step) else ():
        say(console, line)
    rows = [{**_asked(machine, step, FSDP, one.times), **one.to_dict()} for one in found]
    say_written(write_numbers(options.json, "plan", machine, rows))


def _asked(machine: Machine, step: Step, sharding: str, times: StepTimes) -> dict[str, Any]:
    return {
        "model": step.model.name,
        "layers": step.model.layers,
        "tokens": step.tokens,
        "sequence": step.sequence,
        "recomputed": step.recomputed,
        "memory_gb": memory_gb(machine, step, sharding),
        "fits": fits(machine, step, sharding),
        "tokens_per_s": tokens_per_s(machine, step, sharding, times),
    }


def memory_gb(machine: Machine, step: Step, sharding: str = FSDP) -> float:
    """Estimate the memory of a GPU in a step, in 10^9 bytes."""
    return step_memory(step, _shards(machine, sharding)).total / 1e9


def fits(machine: Machine, step: Step, sharding: str = FSDP) -> bool:
    """Return whether a step has enough memory.

    Data sheets' gigabytes are 2^30 bytes, of which driver, contexts and gaps take some: 10^9 are taken to be left.
    """
    return memory_gb(machine, step, sharding) <= machine.gpu.memory_gb


def tokens_per_s(machine: Machine, step: Step, sharding: str, times: StepTimes) -> float:
    """Return the tokens of all ranks in a second, with embedding, head and optimizer estimated."""
    others_us = ends_us(sustained(machine), step, _shards(machine, sharding))
    return machine.world_size * step.tokens / (times.time_us + others_us) * 1e6


def _shards(machine: Machine, sharding: str) -> int:
    return machine.gpus if sharding == HSDP else machine.world_size


def _kept(machine: Machine, step: Step, recompute: bool | None) -> Step:
    """Return the step with what is asked for recomputed; None: if nothing else fits."""
    return dataclasses.replace(step, recomputed=not fits(machine, step) if recompute is None else recompute)


def answer(
    machine: Machine, step: Step, strategy: str, best: StepTimes, usual: StepTimes, sharding: str = FSDP
) -> list[str]:
    """Say whether a step fits, what it reaches, what stays exposed, and what to write where it fits."""
    is_enough = fits(machine, step, sharding)
    lines = [f"{step.model.name} {'fits' if is_enough else 'does not fit'} on {machine.title} ({machine.runs})."]
    lines += _memory_words(machine, step, sharding)
    if not is_enough:
        lines += _what_fits(machine, step)
    ours, theirs = (tokens_per_s(machine, step, sharding, times) for times in (best, usual))
    condition = "" if is_enough else "If it did: "
    lines += [
        f"{condition}{ours:,.0f} tokens a second of all GPUs with Sidelane, {theirs:,.0f} with the vendor's library.",
        f"Exposed communication: {_exposed(best)} of a step with Sidelane, {_exposed(usual)} with the library.",
    ]
    if not is_enough:
        return lines
    if machine.runs is RunStatus.UNSUPPORTED:
        lines.append("Sidelane has never run on AMD GPUs: the plan says what copy engines could give.")
    elif strategy not in CODE:
        lines.append("Leave the vendor's library: copy engines would not be faster.")
    else:
        mesh = ""
        if sharding == HSDP:
            mesh = f", mesh=init_device_mesh('cuda', ({machine.nodes}, {machine.gpus}))"
        lines.append(f"Write after fully_shard(model{mesh}): from sidelane import fsdp; enabled = {CODE[strategy]}")
    return lines


def _exposed(times: StepTimes) -> str:
    return f"{_ms(times.exposed_us)} ms ({100 * times.exposed_us / times.time_us:.0f}%)"


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


def _main_nodes(options: PlanOptions, machine: Machine, step: Step) -> None:
    """Print a step on each number of nodes, in both ways to shard it, under each strategy."""
    counts = parse_nodes(options.nodes) if options.nodes else (machine.nodes,)
    if machine.gpus == 1:
        raise ValueError(f"plan: nodes of {machine.name} (value=1 GPU, allowed=2 and more, but for --model dlrm)")
    shardings = (FSDP,) if options.fsdp else (FSDP, HSDP)
    console = tables_console(options.json)
    steps, answers, advised, found = {}, list[str](), list[str](), list[NodesStep]()
    with progress("simulating") as update:
        for count in counts:
            update(f"{count} nodes")
            there = with_nodes(machine, count)
            steps[count] = _kept(there, step, options.recompute)
            mine = plan_nodes(there, steps[count], shardings)
            found += mine
            if count in (counts[0], counts[-1]):
                fitting = [one for one in mine if fits(there, steps[count], one.sharding)]
                best = min(fitting or mine, key=lambda one: one.times.time_us)
                given = (best.strategy, best.times, mine[0].times, best.sharding)
                answers += answer(there, steps[count], *given)
                advised += nodes_advice(best, mine[0]) if fitting else []
    for line in answers:
        say(console, line, style="bold")
    console.print()
    console.print(nodes_table(machine, step, found).to_rich())
    for line in advised:
        say(console, line)
    if recomputed := [str(count) for count, one in steps.items() if one.recomputed]:
        say(console, f"Layers are recomputed in the backward pass on {', '.join(recomputed)} nodes.")
    rows = [
        {
            **_asked(with_nodes(machine, one.nodes), steps[one.nodes], one.sharding, one.times),
            "gpus_per_node": machine.gpus,
            **one.to_dict(),
        }
        for one in found
    ]
    files = write_report(options.json, options.report, "plan_nodes", machine, rows, f"plan-{step.model.name}-nodes")
    if options.report is not None:
        draw_nodes(machine, step, found, options.report)
    say_written(files)


def plan_nodes(machine: Machine, step: Step, shardings: Sequence[str] = (FSDP, HSDP)) -> list[NodesStep]:
    """Predict a step on several nodes, in each way to shard it, under every strategy."""
    return [
        NodesStep(machine.nodes, sharding, strategy, step_times(machine, step, strategy, hybrid=sharding == HSDP))
        for sharding in shardings
        for strategy in AMONG_NODES
    ]


def nodes_table(machine: Machine, step: Step, found: Sequence[NodesStep]) -> Table:
    """Make a table of milliseconds by number of nodes, sharding and strategy."""
    lines = []
    for one in found:
        times = one.times
        cells = (_ms(times.time_us), _ms(times.communication_us), _ms(times.exposed_us))
        share = f"{100 * times.exposed_us / times.time_us:.0f}"
        lines.append(Line((str(one.nodes), one.sharding, one.strategy, *cells, share)))
    model = step.model
    where = f"nodes of {machine.title.split(' nodes of ', 1)[-1]}, {machine.links.network}"
    title = f"{model.name}, {model.layers} layers, {step.tokens} tokens a rank, on {where}: predicted, ms"
    notes = (
        "FSDP2: shards among all ranks; HSDP: among the ranks of a node, gradients added up among nodes behind it",
        "library: flat rings of its kernels; dma, straight: copy engines in the node, the library's kernels between",
        "exposed: more than a step has that communicates nothing; %: of the step",
        "nothing of this was compared with hardware; no ranges; trees of libraries are not modelled",
    )
    columns = ("nodes", "<sharding", "<strategy", "step", "collectives\nalone", "exposed", "%")
    return Table(title, columns, tuple(lines), notes, keys=3)


def nodes_advice(best: NodesStep, usual: NodesStep) -> list[str]:
    """Say what the fastest step that fits saves over the library's kernels."""
    saved = usual.times.time_us - best.times.time_us
    share = 100 * saved / usual.times.time_us
    return [
        f"{best.nodes} nodes: {best.sharding}, {best.strategy}: {_ms(saved)} ms a step less ({share:.0f}%) than "
        f"{usual.sharding}, {usual.strategy}."
    ]


def draw_nodes(machine: Machine, step: Step, found: Sequence[NodesStep], folder: Path) -> Path:
    """Draw the exposed share of a step over the number of nodes, a panel for each way to shard it."""
    import matplotlib as mpl  # which, and torch behind our drawing, take longer to load than a plan takes
    from matplotlib.figure import Figure

    from sidelane_lab.harness.drawing import BLUE, GREEN, ORANGE, RC, STYLES, VERMILLION, plain_name, save_both

    shardings = list(dict.fromkeys(one.sharding for one in found))
    counts = sorted({one.nodes for one in found})
    with mpl.rc_context(RC):
        figure = Figure(figsize=(5.5 * len(shardings), 3.8), layout="constrained")
        panels = figure.subplots(1, len(shardings), sharey=True, squeeze=False)[0]
        for axes, sharding in zip(panels, shardings, strict=True):
            for strategy, colour, (dash, mark) in zip(
                AMONG_NODES, (VERMILLION, ORANGE, BLUE, GREEN, "#000000"), STYLES, strict=False
            ):
                mine = [one for one in found if (one.sharding, one.strategy) == (sharding, strategy)]
                shares = [100 * one.times.exposed_us / one.times.time_us for one in mine]
                looks: Any = {"color": colour, "linestyle": dash, "marker": mark, "markersize": 4}
                axes.plot([one.nodes for one in mine], shares, label=plain_name(strategy), **looks)
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, list(map(str, counts)))
            axes.set_xlabel(f"nodes of {machine.gpus} GPUs")
            axes.set_title(sharding)
        panels[0].set_ylabel("exposed communication, % of the step")
        panels[0].set_ylim(bottom=0)
        labels = panels[0].get_legend_handles_labels()
        figure.legend(*labels, fontsize=8, frameon=False, ncols=3, loc="outside lower center")
        title = f"{step.model.name}, {step.tokens} tokens a rank: predicted"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        return save_both(figure, f"plan-{step.model.name}-nodes", folder)


def plan(machine: Machine, step: Step, progress: Callable[[str], None] = lambda text: None) -> list[PlannedStep]:
    """Predict a step under every strategy, with ranges: one number at a time at both ends of its own; squares add."""
    compute = compute_us(machine, step)
    least = compute_us(machine, step, straight=True) - compute
    times = {strategy: step_times(machine, step, strategy, compute) for strategy in STRATEGIES}

    def exposed(variation: Variation) -> dict[str, float]:
        section = variation.path.partition(".")[0]
        alone = compute if section in OF_COLLECTIVES else compute_us(variation.machine, step)
        # The library does without engines.
        concerned = {name: one for name, one in times.items() if section != "dma" or WAYS[name].gathers}
        return {
            name: step_times(variation.machine, step, name, alone, one.units or None).exposed_us
            for name, one in concerned.items()
        }

    varied: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _, changed in predict_each(variations(machine, SECTIONS), exposed, progress):
        for strategy, exposed_us in changed.items():
            varied[strategy].append(exposed_us)
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
    recomputed = ", recomputed" if step.recomputed else ""
    what = f"{model.name}, {model.layers} layers{recomputed}, {step.tokens} tokens a rank"
    title = f"{what}, FSDP on {machine.title}: predicted, ms"
    notes = (
        "embedding, head and optimizer are left out; ranges are those of the description's numbers",
        "dma: on copy engines; both: all-gathers and reduce-scatters; straight: without copies out of buffers",
        "exposed: more than a step has that communicates nothing and copies out of buffers",
        "library: any priority, since a collective is ready before the kernel that it runs beside",
        "own units: the best of powers of two, which nothing else runs on in the whole step; never measured",
        "how far predicted steps were off on two H200s: docs/lab/model.md",
    )
    columns = ("<strategy", "step", "compute", "collectives\nalone", "exposed", "plausible")
    return Table(title, columns, tuple(lines), notes)


def advice(machine: Machine, step: Step, found: list[PlannedStep]) -> list[str]:
    """Say what to change in a step that fits, most first: a strategy, or more tokens where these would fit, too."""
    library, best = found[0].times, min(found, key=lambda one: one.times.time_us)
    saved = library.time_us - best.times.time_us
    longer, lines = dataclasses.replace(step, tokens=step.tokens + step.sequence), []
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
        enough = dataclasses.replace(step, tokens=more)
        need = "" if fits(machine, enough) else f", which need {memory_gb(machine, enough):.0f} GB and do not fit"
        lines.append(f"The collectives outlast the computation: they could hide from about {more} tokens a rank{need}.")
    elif best.times.exposed_us > 0.05 * best.times.time_us and fits(machine, longer):
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
