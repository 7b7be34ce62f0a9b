"""A training step of a transformer whose layers are sharded (FSDP2), on the device model.

    forward    all-gather of layer i+1 beside layer i
    backward   all-gather of layer i-1 and reduce-scatter of layer i+1 beside layer i

A layer is GEMMs with element-wise kernels in front of each, and attention. Beside a GEMM a kernel of a collective runs
on units that it takes away, or waits for the GEMM's end; what is hidden then is what ran beside attention and
element-wise kernels. Where it is left to chance which (``interference.either_first``), a step has so many collectives
that it takes the mean of both.

An all-gather waits for the one before it and for the layer whose buffer it takes; a reduce-scatter for its layer's
gradients and for the one before it. Layers are alike: a few of them are simulated, and the rest take as long as the
last ones. Embedding, head and optimizer are left out.

FSDP2 copies a gathered layer out of a buffer before it is computed, on the stream of the computation; a gather straight
into the parameters needs no such copy.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence

from sidelane.c3.workload import Gemm
from sidelane.machine.spec import Gpu, Interference, Machine, Matmul
from sidelane.model.device import Gang, Tiled, run_device
from sidelane.model.gemm import gemm_kernel
from sidelane.model.kernels import dma_gangs, library_gang
from sidelane.model.strategies import partitions
from sidelane.program.collective import Kind

ELEMENT = 2
"""Bytes of parameters, activations and gradients (bfloat16)."""
ATTENTION_EFFICIENCY = 0.5
"""Share of the peak that a fused causal attention reaches. Assumed: between published figures of both directions."""
PARAMETER_BYTES = 30
"""Bytes through memory for each parameter and step: casts of shards, gradients that are packed. From kernels' times on
two H200s (docs/lab/hardware.md)."""
COPY_OUT_BYTES = 10
"""The same of copies out of gathered buffers: 4.9 ms of kernels for 10 layers of 218 million parameters, and 7.8 ms for
4 of 856 million, there."""
PASSES = 43
"""Times that a layer's forward pass goes through tokens x hidden elements outside of GEMMs and attention: fitted to one
step on H200s without communication (docs/lab/model.md); the operators of a layer have 40."""
SUSTAINED = 0.11
"""Share by which GEMMs of a step take longer than alone, since the GPU is at its power cap all the time: between the 9
and 12% of two H200s (kernels' times, docs/lab/hardware.md). Assumed for other machines."""
BESIDE_COPIES = 0.14
"""Share by which sustained GEMMs slow down while copy engines move, since the GPU is at its power cap: between the 10
and 18% of two H200s (docs/lab/hardware.md). Assumed for other machines."""
WAVES = 4
"""Of attention and of element-wise kernels: many short workgroups, so that those of a collective, which FSDP2 launches
on streams of high priority, get in between them."""
SIMULATED = (3, 5)
"""Layers that are simulated; the difference is what each further one takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Who communicates.

    Attributes:
        gathers, scatters: all-gathers and reduce-scatters run on copy engines.
        straight: parameters are gathered to where they are used, so that nothing is copied out.
        apart: the library's kernels have compute units of their own, which nothing else runs on in the whole step.
    """

    gathers: bool = False
    scatters: bool = False
    straight: bool = False
    apart: bool = False


WAYS = {
    "library": Way(),
    "library, own units": Way(apart=True),
    "dma all-gather": Way(gathers=True),
    "dma both": Way(gathers=True, scatters=True),
    "straight all-gather": Way(gathers=True, straight=True),
    "straight both": Way(gathers=True, scatters=True, straight=True),
}
STRATEGIES = tuple(WAYS)


@dataclasses.dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a decoder, with ``feed`` the width of its gated feed-forward part."""

    name: str
    layers: int
    hidden: int
    feed: int
    heads: int
    kv_heads: int

    @property
    def parameters(self) -> int:
        """Of a layer."""
        kv = self.hidden * self.kv_heads // self.heads
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.feed)


MODELS = {
    model.name: model
    for model in (
        Transformer("llama-8b-like", 32, 4096, 14336, 32, 8),
        Transformer("llama-70b-like", 80, 8192, 28672, 64, 8),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A training step of a rank.

    Attributes:
        model: its sizes.
        tokens: of a rank.
        sequence: tokens that attend to each other.
    """

    model: Transformer
    tokens: int
    sequence: int

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequence < 1 or self.tokens % self.sequence:
            value = f"{self.tokens}, {self.sequence}"
            raise ValueError(f"Step: tokens, sequence (value={value}, allowed=whole sequences of one token or more)")


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step takes, microseconds: with communication, without, and the collectives alone, one after another.

    The step without has copies out of buffers, so that a way that needs none can expose less than nothing. ``units``:
    of the library's kernels, where they have some of their own; else 0.
    """

    time_us: float
    compute_us: float
    communication_us: float
    units: int = 0

    @property
    def exposed_us(self) -> float:
        """What communication adds to the step."""
        return self.time_us - self.compute_us


def compute_us(machine: Machine, step: Step, *, straight: bool = False) -> float:
    """A step without communication; ``straight``: without copies out of buffers, too."""
    return _scaled(sustained(machine), step, None, straight)


def step_times(
    machine: Machine, step: Step, strategy: str, alone_us: float | None = None, units: int | None = None
) -> StepTimes:
    """Predict a step.

    Args:
        machine: one node of it.
        step: the model and its tokens.
        strategy: one of ``STRATEGIES``: the library's kernels, or these on units of their own; all-gathers on copy
            engines, or reduce-scatters, too; out of buffers, or straight into the parameters.
        alone_us: of the step without communication, if it is known.
        units: of their own; None: the best power of two.

    Raises:
        ValueError: another strategy, or several nodes.
    """
    if strategy not in WAYS:
        raise ValueError(f"step_times: strategy (value={strategy!r}, allowed={', '.join(STRATEGIES)})")
    way = WAYS[strategy]
    machine.refuse_nodes("step_times")
    machine = machine.with_value("interference.copies", max(BESIDE_COPIES, float(machine.interference.copies)))
    if alone_us is None:
        alone_us = compute_us(machine, step)
    options = [0] if not way.apart else partitions(machine) if units is None else [units]
    found = [_with_units(machine, step, way, alone_us, option) for option in options]
    return min(found, key=lambda times: times.time_us)


def _with_units(machine: Machine, step: Step, way: Way, alone_us: float, units: int) -> StepTimes:
    nbytes = step.model.parameters * ELEMENT
    on_engines = {Kind.ALL_GATHER: way.gathers, Kind.REDUCE_SCATTER: way.scatters}

    def library(kind: Kind) -> tuple[Gang, ...]:
        own = units or None
        return (library_gang(machine, kind, nbytes, units=own, reserved=way.apart, priority=1),)

    gangs = {kind: dma_gangs(machine, kind, nbytes) if on else library(kind) for kind, on in on_engines.items()}
    alone = {kind: run_device(machine, parts).time_us for kind, parts in gangs.items()}
    layers = step.model.layers
    communication = (2 * layers - 1) * alone[Kind.ALL_GATHER] + layers * alone[Kind.REDUCE_SCATTER]
    machines = [sustained(machine)]
    if machine.interference.either_first and not way.apart and not (way.gathers and way.scatters):
        machines.append(machines[0].with_value("matmul.persistent", 1))  # GEMMs that let nobody in
    limit = int(machine.gpu.units) - units if units else None
    times = [_scaled(one, step, gangs, way.straight, limit) for one in machines]
    return StepTimes(statistics.fmean(times), alone_us, communication, units)


def sustained(machine: Machine) -> Machine:
    """A machine whose GEMMs are at the power cap all the time."""
    return machine.with_value("matmul.efficiency", machine.matmul.efficiency / (1 + SUSTAINED))


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A machine, equal to others that differ in nothing that a step's kernels depend on once its gangs are known."""

    gpu: Gpu
    matmul: Matmul
    interference: Interference
    machine: Machine = dataclasses.field(compare=False)

    @classmethod
    def of(cls, machine: Machine) -> Node:
        """With those numbers of a machine."""
        return cls(machine.gpu, machine.matmul, machine.interference, machine)


def _scaled(
    machine: Machine,
    step: Step,
    gangs: dict[Kind, tuple[Gang, ...]] | None,
    straight: bool,
    limit: int | None = None,
) -> float:
    return _scaled_once(Node.of(machine), step, None if gangs is None else tuple(gangs.items()), straight, limit)


@functools.lru_cache(maxsize=1024)
def _scaled_once(
    node: Node,
    step: Step,
    gangs: tuple[tuple[Kind, tuple[Gang, ...]], ...] | None,
    straight: bool,
    limit: int | None,
) -> float:
    """Of most numbers of a description that are changed one at a time a step does not take notice."""
    machine, by_kind = node.machine, None if gangs is None else dict(gangs)
    few, more = (run_device(machine, step_kernels(node, step, n, by_kind, straight, limit)).time_us for n in SIMULATED)
    return more + (step.model.layers - SIMULATED[1]) * (more - few) / (SIMULATED[1] - SIMULATED[0])


def step_kernels(
    node: Node,
    step: Step,
    layers: int,
    gangs: dict[Kind, tuple[Gang, ...]] | None,
    straight: bool,
    limit: int | None = None,
) -> list[Tiled | Gang]:
    """Kernels of a step in launch order. A layer's last kernel, and a collective's, has the layer's or its name.

    ``limit``: compute units of all but the collectives.
    """
    found: list[Tiled | Gang] = []
    order = [("F", i) for i in range(layers)] + [("B", i) for i in reversed(range(layers))]
    last = layers - 1
    gathers = [f"AG {phase}{i}" for phase, i in order if (phase, i) != ("B", last)]  # the last layer stays gathered
    gathered: list[str] = []

    def gather(name: str, behind: tuple[str, ...]) -> None:
        if gangs is not None and name in gathers:
            found.extend(_named(gangs[Kind.ALL_GATHER], name, (*gathered[-1:], *behind)))
            gathered.append(name)

    gather("AG F0", ())
    for number, (phase, i) in enumerate(order):
        before = tuple(f"{p}{k}" for p, k in order[number - 1 : number] if number)
        if number + 1 < len(order):
            phase_next, following = order[number + 1]
            gather(f"AG {phase_next}{following}", before)  # the buffer of the layer before is free
        needs = (f"AG {phase}{i}",) if f"AG {phase}{i}" in gathered else ()
        kernels = _kernels(node, step, phase == "B", straight, limit)
        found += _layer(kernels, f"{phase}{i}", (*before, *needs))
        if phase == "B" and gangs is not None:
            behind = (f"B{i}", *((f"RS {i + 1}",) if i < last else ()))
            found += _named(gangs[Kind.REDUCE_SCATTER], f"RS {i}", behind)
    return found


def _named(parts: Sequence[Gang], name: str, behind: tuple[str, ...]) -> list[Gang]:
    """A collective's parts under names of their own; the last one has the collective's."""
    names = {part.name: f"{name} {part.name}" for part in parts[:-1]} | {parts[-1].name: name}
    renamed = []
    for part in parts:
        after = tuple(names[before] for before in part.after) or behind
        renamed.append(dataclasses.replace(part, name=names[part.name], after=after, part_of=part.part_of and name))
    return renamed


def _layer(kernels: Sequence[Tiled], name: str, behind: tuple[str, ...]) -> list[Tiled]:
    """A layer's kernels one after another, under names of their own; the last one has the layer's."""
    named: list[Tiled] = []
    for place, kernel in enumerate(kernels):
        label = name if place + 1 == len(kernels) else f"{name} {place}"
        named.append(dataclasses.replace(kernel, name=label, after=(named[-1].name,) if named else behind))
    return named


@functools.lru_cache(maxsize=64)
def _kernels(node: Node, step: Step, backward: bool, straight: bool, limit: int | None) -> tuple[Tiled, ...]:
    """A layer's kernels; the backward pass has each GEMM twice."""
    machine = node.machine
    model, rows, gpu = step.model, step.tokens, machine.gpu
    kv = model.hidden * model.kv_heads // model.heads
    shapes = [(model.hidden + 2 * kv, model.hidden), (model.hidden, model.hidden)]
    shapes += [(2 * model.feed, model.hidden), (model.hidden, model.feed)]
    kernels = [gemm_kernel(machine, Gemm(rows, n, k, "bfloat16"), limit=limit) for n, k in shapes]
    if backward:
        kernels = [
            kernel
            for n, k in reversed(shapes)
            for shape in ((rows, k, n), (n, k, rows))
            for kernel in [gemm_kernel(machine, Gemm(*shape, "bfloat16"), limit=limit)]
        ]
    units = int(gpu.units) if limit is None else limit
    attention_flops = 2.0 * rows * step.sequence * model.hidden * (2.5 if backward else 1.0)  # half of it is masked
    attention_us = attention_flops / (gpu.peak_tflops * ATTENTION_EFFICIENCY * 1e6) * float(gpu.units) / units
    launch = float(machine.matmul.launch_us)
    attention = Tiled("attention", WAVES * units, attention_us / WAVES, 0.0, limit=limit, fixed_us=launch / WAVES)
    passes = PASSES * (2 if backward else 1) * rows * model.hidden * ELEMENT
    passes += (PARAMETER_BYTES + (0 if straight else COPY_OUT_BYTES)) * model.parameters // 2
    each = passes / len(kernels)  # norms, rotations, activations and additions stand in front of GEMMs
    elements = Tiled("elements", WAVES * units, 0.0, each / units / WAVES, limit=limit, fixed_us=launch / WAVES)
    kernels = [one for gemm in kernels for one in (elements, gemm)]
    kernels.insert(len(kernels) - 4 if backward else 2, attention)  # beside the GEMMs of its inputs
    return tuple(kernels)
