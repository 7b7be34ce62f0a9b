"""Planning a training step on a machine one does not have: does it fit, how fast is it, and what to write.

Among several nodes a step is planned for each number of them, with layers sharded over all ranks (FSDP2), with all
shards on each node (HSDP), and with whole layers on each rank (DDP).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sidelane_lab.cli.model import PlanOptions
from sidelane_lab.harness.table import Line, Table, without_empty_columns
from sidelane_lab.harness.terminal import progress, say, say_written, tables_console
from sidelane_lab.machines.load import MOST_NODES, find, with_nodes
from sidelane_lab.machines.numbers import write_report
from sidelane_lab.machines.ranges import Band
from sidelane_lab.machines.spec import Machine, RunStatus
from sidelane_lab.model import serving
from sidelane_lab.model.collectives import PCIE_GBPS
from sidelane_lab.model.layer import WEIGHT_BYTES, Step, StepMemory, head_us, optimizer_us, parallel_us, step_memory
from sidelane_lab.model.training import DDP, FSDP, HSDP, STRATEGIES, WAYS, StepTimes, step_times, sustained
from sidelane_lab.model.transformer import Transformer, read_model

MACHINE = "h100x8x2"
"""Machine of a plan for several nodes that names none: nodes of eight H100s on rails."""
CODE = {
    "straight all-gather": "fsdp.enable(model)",
    "straight both": "fsdp.enable(model)",
    "dma all-gather": "fsdp.enable(model, zero_copy=False)",
    "dma both": "fsdp.enable(model, zero_copy=False)",
}
"""Calls that a program writes, by strategy."""
LIBRARY, *_ = STRATEGIES
STEPS = "FSDP2 steps of Llamas on H200s were within 6%, and 16% before they were seen"
TITAN = "8B (--tokens 16K --sequence 8K) is predicted 28% faster than torchtitan was on 8 H100s, 11% than compiled"
EXPECTED = "405B on 32 MI300X and 70B on 8 are predicted 17% and 2% faster than AMD expects"
"""Comparisons of a plan with figures of others, as docs/guide/start-planning.md has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step, sharded in one of the ways, under one strategy.

    Attributes:
        sharding: ``FSDP2``, ``HSDP`` or ``DDP``.
        strategy: one of ``STRATEGIES``.
        times: of the layers of one pass, without tensor, context and expert parallelism.
    """

    sharding: str
    strategy: str
    times: StepTimes

    @property
    def exposed_percent(self) -> float:
        """Exposed communication in percent of the layers' time."""
        return 100 * self.times.exposed_us / self.times.time_us


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A step on a machine in every way: the first is the library's kernels, with shards among all ranks.

    Attributes:
        machine: all of its GPUs.
        step: a rank's step.
        ways: ways to shard and to communicate.
        accumulate: passes of a step.
    """

    machine: Machine
    step: Step
    ways: tuple[PlannedStep, ...]
    accumulate: int = 1

    @property
    def usual(self) -> PlannedStep:
        """The fastest of the library's ways that fit, or of all where none fits."""
        return min(self.fitting or self.ways, key=lambda one: (one.strategy != LIBRARY, self.step_us(one)))

    @property
    def best(self) -> PlannedStep:
        """The fastest of those that fit, or of all where none fits."""
        return min(self.fitting or self.ways, key=self.step_us)

    @property
    def fitting(self) -> list[PlannedStep]:
        """The ways that have enough memory."""
        return [one for one in self.ways if fits(self.machine, self.step, one.sharding)]

    def step_us(self, one: PlannedStep) -> float:
        """Return the time of a step with all of its passes, the head, the loss and the optimizer."""
        going, step = sustained(self.machine), self.step
        each = one.times.time_us + parallel_us(self.machine, step) + head_us(going, step)
        return self.accumulate * each + optimizer_us(going, memory_of(self.machine, step, one.sharding))

    def exposed_us(self, one: PlannedStep) -> float:
        """Return what communication adds to a step."""
        return self.accumulate * (one.times.exposed_us + parallel_us(self.machine, self.step))

    def token_j(self, one: PlannedStep) -> float | None:
        """Return the joules of a token: a GPU is at its power cap but while it waits for links; None: not described."""
        power, exposed_us = self.machine.power, self.exposed_us(one)
        if power is None:
            return None
        waiting_w = float(power.idle_w + power.links_on_w + power.links_w)
        us = self.step_us(one) - exposed_us, exposed_us
        return self.machine.world_size * (float(power.cap_w) * us[0] + waiting_w * us[1]) / 1e6 / self.tokens

    @property
    def tokens(self) -> int:
        """Tokens of all ranks in a step."""
        return self.accumulate * self.step.tokens * self.machine.world_size // self.step.tensor

    def tokens_per_s(self, one: PlannedStep) -> float:
        """Return the tokens of all ranks in a second."""
        return self.tokens / self.step_us(one) * 1e6

    def utilization(self, one: PlannedStep) -> float:
        """Return the share of the GPUs' peak that a step's operations need, attention masked, nothing counted twice."""
        model, peak = self.step.model, self.machine.gpu.peak_tflops * 1e12 * self.machine.world_size
        attention = 6 * model.layers * model.heads * model.head_size * self.step.sequence
        return self.tokens_per_s(one) * self.step.tensor * (6 * model.computed + attention) / peak

    def rows(self) -> list[dict[str, Any]]:
        """Return the objects that ``--json`` writes."""
        step = dataclasses.asdict(self.step)
        del step["model"]
        asked = {
            "model": self.step.model.name,
            "layers": self.step.model.layers,
            **step,
            "accumulate": self.accumulate,
            "nodes": self.machine.nodes,
            "gpus_per_node": self.machine.gpus,
        }
        return [
            {
                **asked,
                "memory_gb": memory_of(self.machine, self.step, one.sharding).total / 1e9,
                "fits": one in self.fitting,
                "tokens_per_s": self.tokens_per_s(one),
                "step_us": self.step_us(one),
                "mfu": self.utilization(one),
                "token_j": self.token_j(one),
                "sharding": one.sharding,
                "strategy": one.strategy,
                **dataclasses.asdict(one.times),
                "exposed_us": one.times.exposed_us,
            }
            for one in self.ways
        ]


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
        ValueError: no such machine or model, tokens that are no whole sequences, numbers of nodes that are none, or
            ranks that do not share a layer, a sequence or experts evenly.
    """
    if not options.machine and not options.nodes:
        raise ValueError("plan: on which machine? Say --machine 8xh100, for example, or --nodes 2")
    machine, model = with_present_gemms(find(options.machine or MACHINE, least=1)), read_model(options.model)
    model = dataclasses.replace(model, layers=options.layers or model.layers)
    if options.serve:
        serving.main(machine, model, options)
        return
    if options.dtype not in WEIGHT_BYTES:
        raise ValueError(f"plan: --dtype {options.dtype} is for --serve; for training say {' or '.join(WEIGHT_BYTES)}")
    counts = parse_nodes(options.nodes) if options.nodes else (machine.nodes,)
    if counts == (1,) and options.report is not None:
        raise ValueError("plan: --report (allowed=with several nodes)")
    tensor = options.tensor or 1
    _refuse_uneven_ranks(machine, model, {"--tp": tensor, "--cp": options.context, "--ep": options.experts})
    step = Step(
        *(model.divided(tensor), options.pass_tokens, options.sequence, False, options.context, tensor),
        *(options.experts, options.optimizer, options.dtype),
    )
    console = tables_console(options.json)
    asked = (FSDP, HSDP, DDP) if options.shard == "all" else (options.shard,)
    plans = []
    with progress("simulating") as update:
        for nodes in counts:
            there = with_present_gemms(find(options.machine or MACHINE, least=1, nodes=nodes))
            kept = _kept(there, step, options.recompute, asked[0])
            shardings = [one for one in asked if fits(there, kept, one)] or asked[:1]
            plans.append(plan(there, kept, shardings, update, options.accumulate))
    first_and_last = [*plans[:1], *plans[1:][-1:]]
    for line in (line for one in first_and_last for line in answer(one)):
        say(console, line, style="bold")
    console.print()
    console.print(plan_table(plans).to_rich())
    for line in (line for one in first_and_last for line in advice(one)):
        say(console, line)
    rows = [row for one in plans for row in one.rows()]
    if options.report is not None:
        draw_plans(plans, options.report)
    say_written(write_report(options.json, options.report, "plan", machine, rows, f"plan-{model.name}-nodes"))


def _refuse_uneven_ranks(machine: Machine, model: Transformer, given: dict[str, int]) -> None:
    """Refuse ranks that do not divide a node, alone or with --tp, whose ranks have parts of the same experts."""
    shared = {"--tp": model.heads, "--cp": 0, "--ep": model.experts}  # a model without experts is refused as such
    for first, flag in (("", "--tp"), ("", "--cp"), ("", "--ep"), ("--tp", "--cp"), ("--tp", "--ep")):
        tensor, ranks = given.get(first, 1), given[flag]
        if machine.gpus % (tensor * ranks) and (flag != "--ep" or model.experts):
            possible = (n for n in range(1, machine.gpus + 1) if not (machine.gpus % (tensor * n) or shared[flag] % n))
            product = f"{first} {tensor} times {flag} {ranks} is {tensor * ranks} ranks, which do"
            raise ValueError(
                f"plan: {product if first else f'{flag} {ranks} does'} not divide the {machine.gpus} GPUs of a node "
                f"evenly; {f'with {first} {tensor} ' * bool(first)}say {flag} {' or '.join(map(str, possible))}"
            )


def with_present_gemms(machine: Machine) -> Machine:
    """Return a machine whose largest GEMMs are limited by operations, as those of smaller ones are.

    The ConCCL paper's largest are limited by memory on MI300X, at 22% of its peak. A step of 405B would reach 97
    tokens/s of a GPU by that, and 164 without it; AMD expects 140 or more (``docs/guide/start-planning.md``).
    """
    matmul = machine.matmul
    return machine.with_value("matmul.bound_intensity", max(float(matmul.intensity), float(matmul.bound_intensity)))


def memory_of(machine: Machine, step: Step, sharding: str = FSDP) -> StepMemory:
    """Estimate the memory of a GPU in a step."""
    return step_memory(step, {FSDP: machine.world_size, HSDP: machine.gpus}.get(sharding, step.tensor) // step.tensor)


def fits(machine: Machine, step: Step, sharding: str = FSDP) -> bool:
    """Return whether a step has enough memory.

    Data sheets' gigabytes are 2^30 bytes, of which driver, contexts and gaps take some: 10^9 are taken to be left.
    """
    return memory_of(machine, step, sharding).total / 1e9 <= machine.gpu.memory_gb


def _kept(machine: Machine, step: Step, recompute: bool | None, sharding: str = FSDP) -> Step:
    """Return the step with what is asked for recomputed; None: if nothing else fits."""
    return dataclasses.replace(step, recomputed=not fits(machine, step, sharding) if recompute is None else recompute)


def answer(planned: TrainingPlan) -> list[str]:
    """Say whether a step fits, what it reaches, what stays exposed, what to write where it fits, and how sure it is."""
    machine, step, best, usual = planned.machine, planned.step, planned.best, planned.usual
    is_enough = bool(planned.fitting)
    left = machine.gpu.memory_gb - memory_of(machine, step, best.sharding).total / 1e9
    lines = [serving.verdict(step.model, machine, left), *_memory_words(machine, step, best.sharding)]
    if not is_enough:
        lines += _what_fits(machine, step, best.sharding)
    ours, theirs = (f"{planned.tokens_per_s(one) / machine.world_size:,.0f}" for one in (best, usual))
    joules = [f"{one:.2f}" for one in map(planned.token_j, (best, usual)) if one is not None]
    lines += [
        f"{'A' if is_enough else 'If it did: a'} step of {planned.tokens:,} tokens in sequences of {step.sequence:,}: "
        f"{planned.step_us(best) / 1e6:.2f} s, {planned.tokens_per_s(best):,.0f} tokens/s,",
        f"{ours} per GPU ({theirs} with the vendor's library"
        f"{f' under {usual.sharding}' * (usual.sharding != best.sharding)}), "
        f"MFU {100 * planned.utilization(best):.0f}%.",
        f"Exposed communication: {_exposed(planned, best)} of a step with Sidelane, {_exposed(planned, usual)} with "
        f"the library{'. Energy: {} J a token, {} with the library'.format(*joules) if joules else ''}.",
    ]
    if is_enough:
        lines.append(_to_write(planned))
    return [
        *lines,
        *how_sure(machine, step, best.sharding),
        *serving.left_out(step.model, *["energy of this GPU"] * (not joules)),
    ]


def how_sure(machine: Machine, step: Step, sharding: str = FSDP) -> list[str]:
    """Say which comparison is nearest to a plan, and how far off it was; the largest error, where none is near."""
    is_amd = machine.runs is RunStatus.UNSUPPORTED
    near = [STEPS, TITAN] if machine.name.startswith("h100") else [STEPS]
    near = [EXPECTED] if is_amd else near
    apart = {
        "one GPU": machine.world_size == 1,
        "GPUs without NVLink": machine.world_size > 1 and machine.links.peak_gbps <= PCIE_GBPS and not is_amd,
        "several nodes": machine.nodes > 1 and not is_amd,
        sharding: sharding != FSDP,
        "experts": step.model.experts > 0,
        "--tp and --cp": step.tensor * step.context > 1,
        f"--dtype {step.dtype}": step.dtype != "float32" and not is_amd,
        f"--optimizer {step.optimizer}": step.optimizer != "adamw",
    }
    names = ", ".join(name for name, is_there in apart.items() if is_there)
    first, *more = [*near, *serving.assumed(machine), *([f"Nothing was compared with {names}"] if names else [])]
    return [f"How sure: {serving.RUNS.get(machine.runs, machine.runs)}; {first}.", *(f"{one}." for one in more)]


def _to_write(planned: TrainingPlan) -> str:
    """Return the line of code for the recommended way."""
    machine, step, best = planned.machine, planned.step, planned.best
    if machine.runs is RunStatus.UNSUPPORTED:
        return "Sidelane has never run on AMD GPUs: the plan says what copy engines could give."
    if best.sharding == DDP:
        return "Write DistributedDataParallel(model), and leave its sums to the vendor's library."
    if best.strategy not in CODE:
        return "Write fully_shard(model), and leave the vendor's library: copy engines would not be faster."
    ranks = machine.gpus // step.tensor
    dims = (machine.nodes, ranks) if best.sharding == HSDP else (machine.nodes * ranks,)
    mesh = f", mesh=init_device_mesh('cuda', {dims})" if best.sharding == HSDP else ""
    mesh = f", mesh=the mesh of {' x '.join(map(str, dims))} beside tp" if step.tensor > 1 else mesh
    return f"Write after fully_shard(model{mesh}): from sidelane import fsdp; enabled = {CODE[best.strategy]}"


def _exposed(planned: TrainingPlan, one: PlannedStep) -> str:
    exposed = planned.exposed_us(one)
    return f"{_ms(exposed)} ms ({100 * exposed / planned.step_us(one):.0f}%)"


def _memory_words(machine: Machine, step: Step, sharding: str) -> list[str]:
    memory = memory_of(machine, step, sharding)
    how = f"under {sharding}" + (", with layers recomputed" if step.recomputed else "")
    parts = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "buckets and casts" if sharding == DDP else "gathered layers": memory.gathered,
    }
    words = ", ".join(f"{name} {nbytes / 1e9:.0f}" for name, nbytes in parts.items())
    return [
        f"Each GPU has {machine.gpu.memory_gb:.0f} GB and needs about {memory.total / 1e9:.0f} GB {how}.",
        f"GB: {words} (gradients replace activations).",
    ]


def _what_fits(machine: Machine, step: Step, sharding: str) -> list[str]:
    """Say what makes a step fit: more GPUs, layers recomputed, FSDP2; then smaller moments or weights, fewer tokens,
    as few of them together as are enough.
    """
    again = dataclasses.replace(step, recomputed=True)
    larger = _larger(machine, again, sharding)
    words = "" if step.recomputed else " with recomputed layers"
    whole = _kept(machine, dataclasses.replace(step, recomputed=False), None, FSDP)
    tried = [
        (f"on {larger.world_size} such GPUs{words}" if larger else "", (larger or machine, again, sharding)),
        ("here with --recompute" if not step.recomputed else "", (machine, again, sharding)),
        (f"here with --shard FSDP2{words * whole.recomputed}" * (sharding != FSDP), (machine, whole, FSDP)),
    ]
    changes: dict[str, dict[str, Any]] = {
        "--optimizer adamw-8bit": {"optimizer": "adamw-8bit"},
        "--dtype bfloat16": {"dtype": "bfloat16"},
        f"--tokens {step.fewest_tokens}": {"tokens": step.fewest_tokens},
    }
    fitting = [(words, where) for words, where in tried if words and fits(*where)]
    found = len(fitting)
    for count in range(1, len(changes) + 1):
        for some in itertools.combinations(changes, count):
            changed = dataclasses.replace(again, **{key: value for one in some for key, value in changes[one].items()})
            if fits(machine, changed, sharding):
                fitting.append((f"here with {' '.join(some)}", (machine, changed, sharding)))
        if len(fitting) > found:
            break
    if not fitting and (larger := _larger(machine, changed, sharding)):
        fitting.append((f"with {' '.join(changes)} on {larger.world_size} GPUs", (larger, changed, sharding)))
    ways = [f"{words} ({memory_of(*where).total / 1e9:.0f} GB a GPU)" for words, where in fitting]
    if ways:
        return [f"It fits {', or '.join(ways)}."]
    parts = "neither recomputed layers, more such GPUs, smaller moments or weights, nor fewer tokens, nor all together"
    return [f"Nothing fits: {parts}{', nor FSDP2 here' * (sharding != FSDP)}."]


def _larger(machine: Machine, step: Step, sharding: str) -> Machine | None:
    """Return the fewest nodes of a machine, above its own, on which a step fits."""
    more = (with_nodes(machine, 1 << power) for power in range(MOST_NODES.bit_length()))
    return next((one for one in more if one.world_size > machine.world_size and fits(one, step, sharding)), None)


def plan(
    machine: Machine,
    step: Step,
    shardings: Sequence[str] = (FSDP, HSDP),
    progress: Callable[[str], None] = lambda text: None,
    accumulate: int = 1,
) -> TrainingPlan:
    """Predict a step in every way.

    Args:
        machine: one node; or several, in each of the shardings.
        step: the model and its tokens.
        shardings: ways to shard, of which one node has no HSDP, and experts of several ranks no DDP.
        progress: is called with each way.
        accumulate: passes of a step.

    Raises:
        ValueError: none of the shardings is possible.
    """
    ranks = dataclasses.replace(machine, gpus=machine.gpus // step.tensor)
    apart = {HSDP: machine.nodes > 1 and ranks.gpus > 1, DDP: step.experts == 1}
    ways = []
    for sharding in (one for one in shardings if apart.get(one, True)):
        for strategy, way in WAYS.items():
            # Through host memory FSDP2 cannot gather into the parameters (docs/guide/without-nvlink.md).
            if (not (way.straight and machine.through_host) and ranks.gpus > 1 and sharding != DDP) or not way.gathers:
                progress(f"{machine.title}, {sharding}, {strategy}")
                ways.append(PlannedStep(sharding, strategy, step_times(ranks, step, strategy, sharding=sharding)))
    if not ways:
        why = {HSDP: ": it needs two nodes or more, with several groups of --tp in each", DDP: " with --ep"}
        raise ValueError(f"plan: --shard {shardings[0]} is not for {machine.title}{why[shardings[0]]}; say FSDP2")
    return TrainingPlan(machine, step, tuple(ways), accumulate)


def plan_table(plans: Sequence[TrainingPlan]) -> Table:
    """Make a table of milliseconds by number of nodes, sharding and strategy, alone and exposed."""
    machine, step = plans[0].machine, plans[0].step
    is_among = machine.nodes > 1
    lines = []
    for planned in plans:
        for one in planned.ways:
            times = (one.times.time_us, one.times.compute_us, one.times.communication_us, one.times.exposed_us)
            gb = memory_of(planned.machine, planned.step, one.sharding).total / 1e9
            names = (str(planned.machine.nodes) if is_among else "", one.sharding, one.strategy)
            cells = (*names, f"{gb:.0f}{'' if one in planned.fitting else ' (no)'}", *map(_ms, times))
            lines.append(Line((*cells, f"{one.exposed_percent:.0f}")))
    there = f"nodes of {machine.title.split(' nodes of ', 1)[-1]}, {machine.links.network}"
    notes = [
        "a pass: without embedding, head, optimizer and collectives of --tp, --cp and --ep (the first lines have them)",
        "GB: of a GPU; (no): it has less",
        "ways to shard that do not fit are left out, unless they are asked for",
        "exposed: step time minus that of a step without communication and copies out of buffers; %: of the step",
        "dma: on copy engines; both: all-gathers and reduce-scatters; straight: without copies out of buffers",
    ]
    if is_among:
        notes += [
            "FSDP2: shards among all ranks; HSDP: among those of a node; DDP: no shards",
            "library: flat rings of its kernels; dma, straight: copy engines in the node, its kernels among nodes",
            "nothing of this was compared with hardware; trees of libraries are not modelled",
        ]
    else:
        notes += [
            "library: any priority, since a collective is ready before the kernel that it runs beside",
            "how far predicted steps were off on two H200s: docs/lab/model.md",
        ]
    if recomputed := [str(one.machine.nodes) for one in plans if one.step.recomputed]:
        notes.append(f"layers are recomputed in the backward pass (nodes: {', '.join(recomputed)})")
    asked = (
        f"{step.model.name}, a pass through {step.model.layers} layers, {step.tokens} tokens a "
        f"{'rank' if step.tensor == 1 else f'group of {step.tensor} ranks'}"
    )
    title = f"{asked}, on {there if is_among else machine.title}: predicted, ms"
    times_of = ("GB", "step", "compute", "collectives\nalone", "exposed", "%")
    columns = ("nodes", "<sharding", "<strategy", *times_of)
    return without_empty_columns(Table(title, columns, tuple(lines), tuple(notes), keys=3))


def advice(planned: TrainingPlan) -> list[str]:
    """Say which other change helps a step that fits: more tokens, where these would fit, too."""
    machine, step, best, times = planned.machine, planned.step, planned.best, planned.best.times
    if planned.fitting and times.communication_us > times.compute_us:
        tokens = step.tokens * times.communication_us / times.compute_us
        more = math.ceil(tokens / step.fewest_tokens) * step.fewest_tokens
        memory = memory_of(machine, enough := dataclasses.replace(step, tokens=more), best.sharding).total / 1e9
        need = "" if fits(machine, enough, best.sharding) else f", which need {memory:.0f} GB and do not fit"
        return [f"The collectives outlast the computation: they could hide from about {more} tokens a rank{need}."]
    return []


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f}"


def draw_plans(plans: Sequence[TrainingPlan], folder: Path) -> None:
    """Draw the exposed share of a step over the number of nodes, a panel for each way to shard it."""
    # Both load matplotlib, and torch, which takes longer than a plan does.
    from sidelane_lab.harness.drawing import COLOURS, plain_name
    from sidelane_lab.model.panels import Panel, draw_panels

    machine, step = plans[0].machine, plans[0].step
    ways = dict.fromkeys(one.strategy for planned in plans for one in planned.ways)

    def panel(sharding: str) -> Panel:
        shares: dict[str, list[float]] = {}
        so = [planned for planned in plans if sharding in {one.sharding for one in planned.ways}]
        counts = [planned.machine.nodes for planned in so]
        for one in (one for planned in so for one in planned.ways if one.sharding == sharding):
            shares.setdefault(plain_name(one.strategy), []).append(one.exposed_percent)
        return Panel(
            curves={name: Band(*3 * (tuple(values),)) for name, values in shares.items()},
            x=counts,
            styles={plain_name(way): (COLOURS[way], number) for number, way in enumerate(ways)},
            ticks={float(count): str(count) for count in counts},
            xlabel=f"nodes of {machine.gpus} GPUs",
            ylabel="exposed communication, % of the step",
            title=sharding,
            low=0,
            legend={"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2, "frameon": False},
        )

    shardings = dict.fromkeys(one.sharding for planned in plans for one in planned.ways)
    title = f"{step.model.name}, {step.tokens} tokens per GPU: predicted"
    draw_panels(list(map(panel, shardings)), title, folder, f"plan-{step.model.name}-nodes", shared=True)
