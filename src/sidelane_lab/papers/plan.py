"""Planning a training step on a machine one does not have: what communication stays exposed, and what to change.

Among several nodes a step is planned for each number of them, with layers sharded over all ranks (FSDP2), and with all
shards on each node (HSDP).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane.cli.table import Line, Table
from sidelane.cli.terminal import progress_console, say, say_written, tables_console
from sidelane_lab.harness.drawing import BLUE, GREEN, ORANGE, RC, STYLES, VERMILLION, plain_name, save_both
from sidelane_lab.machines.load import find
from sidelane_lab.machines.ranges import ends, variations
from sidelane_lab.machines.spec import Machine, NetworkTopology
from sidelane_lab.model.layer import MODELS, Step
from sidelane_lab.model.training import STRATEGIES, WAYS, StepTimes, compute_us, step_times
from sidelane_lab.papers.numbers import write_numbers, write_report

OF_COLLECTIVES = ("links", "dma", "library")
SECTIONS = ("gpu", "matmul", "interference", *OF_COLLECTIVES)
"""Sections of a description whose numbers a step depends on."""
WORTH = 0.01
"""Share of a step that a change must save to be named."""
MACHINE = "h100x8x2"
"""Machine of a plan for several nodes that names none: nodes of eight H100s on rails."""
FSDP, HSDP = "FSDP2", "HSDP"
"""Names of the ways to shard among several nodes: over all ranks, and in each node with replicas among nodes."""
AMONG_NODES = tuple(name for name, way in WAYS.items() if not way.apart)
"""Strategies among several nodes."""
MOST_NODES = 1024


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
        fsdp: the layers are sharded over all ranks; on one node nothing else is modelled, and on several the plan has
            HSDP, too, without it.
        json: file for the numbers, or ``written.STDOUT``.
        nodes: numbers of nodes, as :func:`parse_nodes` reads them; empty: the machine's.
        report: folder for the numbers and a picture of several nodes; None: none.
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


def with_nodes(machine: Machine, nodes: int) -> Machine:
    """Return a machine with another number of nodes; a torus of them is as even as it can be."""
    if nodes == machine.nodes:
        return machine
    kind = machine.title.split(" nodes of ", 1)[-1]
    changed = dataclasses.replace(machine, nodes=nodes, title=f"{nodes} nodes of {kind}")
    if machine.links.network is not NetworkTopology.TORUS:
        return changed
    row = min(side for side in range(1, nodes + 1) if nodes % side == 0 and side * side >= nodes)
    return changed.with_value("links.torus_row", row)


def main(options: PlanOptions) -> None:
    """Print a step under each strategy, and what to change.

    Raises:
        ValueError: no such machine, tokens that are no whole sequences, numbers of nodes that are none, or one node
            without ``fsdp``.
    """
    machine = find(options.machine)
    model = MODELS[options.model]
    if options.layers is not None:
        model = dataclasses.replace(model, layers=options.layers)
    step = Step(model, options.tokens, options.sequence)
    if options.nodes or machine.nodes > 1:
        _main_nodes(options, machine, step)
        return
    if not options.fsdp:
        raise ValueError("plan: sharding (value=none, allowed=--fsdp: no other is modelled on one node)")
    if options.report is not None:
        raise ValueError("plan: --report (allowed=with several nodes, or --model dlrm)")
    console = tables_console(options.json)
    with progress_console().status("simulating, over the plausible values of the machine's numbers"):
        found = plan(machine, step)
    console.print(plan_table(machine, step, found).to_rich())
    for line in advice(machine, step, found):
        say(console, line)
    say_written(write_numbers(options.json, "plan", machine, [{**_asked(step), **one.to_dict()} for one in found]))


def _asked(step: Step) -> dict[str, Any]:
    return {"model": step.model.name, "layers": step.model.layers, "tokens": step.tokens, "sequence": step.sequence}


def _main_nodes(options: PlanOptions, machine: Machine, step: Step) -> None:
    """Print a step on each number of nodes, in both ways to shard it, under each strategy."""
    counts = parse_nodes(options.nodes) if options.nodes else (machine.nodes,)
    if machine.gpus == 1:
        raise ValueError(f"plan: nodes of {machine.name} (value=1 GPU, allowed=2 and more, but for --model dlrm)")
    shardings = (FSDP,) if options.fsdp else (FSDP, HSDP)
    console = tables_console(options.json)
    with progress_console().status("simulating") as status:
        found = []
        for count in counts:
            status.update(f"{count} nodes")
            found += plan_nodes(with_nodes(machine, count), step, shardings)
    console.print(nodes_table(machine, step, found).to_rich())
    for line in nodes_advice(found):
        say(console, line)
    rows = [{**_asked(step), "gpus_per_node": machine.gpus, **one.to_dict()} for one in found]
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


def nodes_advice(found: Sequence[NodesStep]) -> list[str]:
    """Say for the fewest and the most nodes what is fastest, and what it saves over the library's kernels."""
    lines = []
    for count in dict.fromkeys((found[0].nodes, found[-1].nodes)):
        mine = [one for one in found if one.nodes == count]
        best, usual = min(mine, key=lambda one: one.times.time_us), mine[0]
        saved = usual.times.time_us - best.times.time_us
        share = 100 * saved / usual.times.time_us
        lines.append(
            f"{count} nodes: {best.sharding}, {best.strategy}: {_ms(saved)} ms a step less ({share:.0f}%) than "
            f"{usual.sharding}, {usual.strategy}."
        )
    return lines


def draw_nodes(machine: Machine, step: Step, found: Sequence[NodesStep], folder: Path) -> Path:
    """Draw the exposed share of a step over the number of nodes, a panel for each way to shard it."""
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
