"""A training step of a transformer whose layers are sharded (FSDP2), on the device model.

    forward    all-gather of layer i+1 beside layer i
    backward   all-gather of layer i-1 and reduce-scatter of layer i+1 beside layer i

Among several nodes layers are sharded over all ranks, or each node has all shards (HSDP): then both stay in the node,
and what was scattered is added up with the other nodes' behind it. With whole layers on each rank (DDP) gradients are
added up beside the backward pass, by the library.

A layer is GEMMs with element-wise kernels in front of each, and attention (``model/layer.py``). Beside a GEMM a kernel
of a collective runs on units that it takes away, or waits for the GEMM's end; what is hidden then is what ran beside
attention and element-wise kernels. Where nothing but chance decides which, as far as is known (``orders``), a step has
so many collectives that it takes the mean of both.

An all-gather waits for the one before it and for the layer whose buffer it takes; a reduce-scatter for its layer's
gradients and for the one before it. Layers are alike: a few of them are simulated, and the rest take as long as the
last ones. Embedding, head and optimizer are left out.

FSDP2 copies a gathered layer out of a buffer before it is computed, on the stream of the computation; a gather straight
into the parameters needs no such copy.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from sidelane.choice.choose import HOST_BESIDE_BYTES
from sidelane.program.collective import Kind
from sidelane.program.kernel import NARROW_BLOCKS
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import default_units
from sidelane_lab.model.device import Gang, Tiled, run_device
from sidelane_lab.model.gangs import engine_gangs, gangs_us, library_gangs, named_gangs, rails_gang
from sidelane_lab.model.kernels import own_gang
from sidelane_lab.model.layer import ELEMENT, WEIGHT_BYTES, Pass, Step, layer_kernels

SUSTAINED = 0.11
"""Share by which GEMMs of a step take longer than alone, since the GPU is at its power cap all the time: between the 9
and 12% of two H200s (kernels' times, results/notes/hardware.md); 5 to 8% on two others (fsdp-profile.json). Assumed for
other machines."""
COMMUNICATING = 0.04
"""The same of a step that communicates over one that does not, apart from what runs beside transfers: the power cap is
held over more than a GEMM. Mean of six steps on two H200s (1 to 6%: ``gemm_apart_ms`` of
results/h200x2/fsdp-profile.json). Assumed for other machines."""
BESIDE_COPIES = 0.11
"""The same of a GEMM's operations beside copy engines that move, besides: ``gemm_beside_ms`` of Sidelane's two steps
there, over the time of copies times the share of a step that GEMMs have (9 and 10% of whole GEMMs). Assumed for other
machines."""
FSDP, HSDP, DDP = "FSDP2", "HSDP", "DDP"
"""Ways to shard: over all ranks, in each node with replicas among nodes, and not at all."""
Gangs = tuple[tuple[Kind, tuple[Gang, ...]], ...]
"""A step's collectives, by kind."""
ON_A_GPU = ("gpu", "matmul", "interference")
"""Sections of a description that a step's kernels depend on once its collectives are known."""
SIMULATED = (3, 5)
"""Layers that are simulated; the difference is what each further one takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepWay:
    """Ways of a training step to communicate.

    Attributes:
        gathers, scatters: all-gathers and reduce-scatters run on copy engines.
        straight: parameters are gathered to where they are used, so that nothing is copied out.
    """

    gathers: bool = False
    scatters: bool = False
    straight: bool = False


WAYS = {
    "library": StepWay(),
    "dma all-gather": StepWay(gathers=True),
    "dma both": StepWay(gathers=True, scatters=True),
    "straight all-gather": StepWay(gathers=True, straight=True),
    "straight both": StepWay(gathers=True, scatters=True, straight=True),
}
STRATEGIES = tuple(WAYS)


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of a step: with communication, without, and the collectives alone, one after another.

    The step without has copies out of buffers, so that a way that needs none can expose less than nothing.
    """

    time_us: float
    compute_us: float
    communication_us: float

    @property
    def exposed_us(self) -> float:
        """Microseconds that communication adds to the step."""
        return self.time_us - self.compute_us


def compute_us(machine: Machine, step: Step, *, straight: bool = False) -> float:
    """Return the time of a step without communication; ``straight``: without copies out of buffers, too."""
    return _scaled(sustained(machine), step, None, straight)


def step_times(
    machine: Machine,
    step: Step,
    strategy: str,
    alone_us: float | None = None,
    *,
    sharding: str = FSDP,
) -> StepTimes:
    """Predict a step.

    Args:
        machine: one node, or several.
        step: the model and its tokens.
        strategy: one of ``STRATEGIES``: the library's kernels; all-gathers on copy engines, or reduce-scatters, too;
            out of buffers, or straight into the parameters.
        alone_us: of the step without communication, if it is known.
        sharding: shards are spread over all ranks; or each node has all of them, so that layers are gathered and
            scattered within it, and replicated among nodes (HSDP); or each rank has (DDP, by the library alone).

    Raises:
        ValueError: another strategy.
    """
    if strategy not in WAYS:
        raise ValueError(f"step_times: strategy (value={strategy!r}, allowed={', '.join(STRATEGIES)})")
    way, replicated = WAYS[strategy], sharding == DDP
    if machine.world_size == 1:
        alone_us = compute_us(machine, step, straight=True)
        return StepTimes(alone_us, alone_us, 0.0)
    machine = machine.with_value("interference.copies", max(BESIDE_COPIES, float(machine.interference.copies)))
    machine = ordinary(machine)
    among = machine if sharding == HSDP and machine.nodes > 1 else None
    if among is not None:
        machine = dataclasses.replace(machine, nodes=1)
    if alone_us is None:
        alone_us = compute_us(machine, step, straight=replicated)
    nbytes = step.gathered * ELEMENT
    on_engines = {Kind.ALL_GATHER: way.gathers, Kind.REDUCE_SCATTER: way.scatters}

    gangs = {
        kind: engine_gangs(machine, kind, nbytes) if on else library_gangs(machine, kind, nbytes, priority=1)
        for kind, on in on_engines.items()
    }
    if machine.through_host and way.scatters and nbytes < HOST_BESIDE_BYTES:  # sums in pieces would wait for units
        gangs[Kind.REDUCE_SCATTER] = (own_gang(machine, Kind.REDUCE_SCATTER, nbytes, units=NARROW_BLOCKS, priority=1),)
    if replicated:
        summed = step.gathered * WEIGHT_BYTES[step.dtype]
        gangs = {Kind.ALL_REDUCE: library_gangs(machine, Kind.ALL_REDUCE, summed, priority=1)}
    if among is not None:
        added = rails_gang(among, Kind.ALL_REDUCE, nbytes // among.gpus)
        gangs[Kind.ALL_REDUCE] = (dataclasses.replace(added, priority=1),)
    alone = {kind: gangs_us(machine, parts) for kind, parts in gangs.items()}
    layers = step.model.layers
    communication = sum(alone.values()) * layers + (layers - 1) * alone.get(Kind.ALL_GATHER, 0.0)
    machines = orders(sustained(machine, COMMUNICATING))
    if way.gathers and way.scatters:
        machines = machines[:1]
    times = [_scaled(one, step, tuple(gangs.items()), way.straight or replicated) for one in machines]
    return StepTimes(statistics.fmean(times), alone_us, communication)


def orders(going: Machine) -> list[Machine]:
    """Machines of whose steps the mean counts: one whose GEMMs go on beside the library's kernels, and one of others.

    Both where chance decides, and where nobody has looked at GEMMs beside these kernels. On two H200s pauses of the
    computation's stream are 0.3 to 3.5 ms longer than without communication, and would be 6.5 and 13.7 if they took
    turns (results/h200x2/fsdp-profile.json): they run beside.
    """
    if not going.interference.either_first or going.interference.kernels:
        return [going]
    return [going, going.with_value("matmul.persistent", 1)]


def ordinary(machine: Machine) -> Machine:
    """Return a machine whose library gathers in ordinary memory, as FSDP2 does.

    Its rings have as many units for gathers as for reductions; ``library.default_units`` may be those of a gather among
    windows, which takes fewer.
    """
    library = machine.library
    if not machine.interference.either_first:
        return machine
    need = max(float(library.all_gather_need), float(library.all_to_all_need))
    machine = machine.with_value("library.default_units", default_units(library, Kind.REDUCE_SCATTER))
    return machine.with_value("library.all_gather_need", need)


def sustained(machine: Machine, communicating: float = 0.0) -> Machine:
    """Return a machine whose GEMMs are at the power cap all the time, which other things share."""
    return machine.with_value("matmul.efficiency", machine.matmul.efficiency / (1 + SUSTAINED) / (1 + communicating))


@remembered(*ON_A_GPU, maxsize=1024)
def _scaled(machine: Machine, step: Step, gangs: Gangs | None, straight: bool) -> float:
    """Return the time of all layers, from a few that are simulated."""
    few, more = (run_device(machine, step_kernels(machine, step, n, gangs, straight)).time_us for n in SIMULATED)
    return more + (step.model.layers - SIMULATED[1]) * (more - few) / (SIMULATED[1] - SIMULATED[0])


def step_kernels(
    machine: Machine,
    step: Step,
    layers: int,
    gangs: Gangs | None,
    straight: bool,
) -> list[Tiled | Gang]:
    """Return kernels of a step in launch order. A layer's last kernel has the layer's name, a collective's its own."""
    found: list[Tiled | Gang] = []
    by_kind = dict(gangs or ())
    order = [("F", i) for i in range(layers)] + [("B", i) for i in reversed(range(layers))]
    last = layers - 1
    # The last layer stays gathered, and with DDP all do.
    ungathered = [("B", last)] if gangs is None or Kind.ALL_GATHER in by_kind else order
    gathers = [f"AG {phase}{i}" for phase, i in order if (phase, i) not in ungathered]
    gathered: list[str] = []

    def gather(name: str, behind: tuple[str, ...]) -> None:
        if gangs is not None and name in gathers:
            found.extend(named_gangs(by_kind[Kind.ALL_GATHER], name, (*gathered[-1:], *behind)))
            gathered.append(name)

    gather("AG F0", ())
    for number, (phase, i) in enumerate(order):
        before = tuple(f"{p}{k}" for p, k in order[number - 1 : number] if number)
        if number + 1 < len(order):
            phase_next, following = order[number + 1]
            gather(f"AG {phase_next}{following}", before)  # the buffer of the layer before is free
        needs = (f"AG {phase}{i}",) if f"AG {phase}{i}" in gathered else ()
        way = Pass(phase == "B", f"AG {phase}{i}" in gathers, straight)
        found += _layer(_kernels(machine, step, way), f"{phase}{i}", (*before, *needs))
        if phase == "B":
            made = f"B{i}"
            for kind, label in ((Kind.REDUCE_SCATTER, "RS"), (Kind.ALL_REDUCE, "AR")):
                if kind in by_kind:
                    behind = (made, *((f"{label} {i + 1}",) if i < last else ()))
                    made = f"{label} {i}"
                    found += named_gangs(by_kind[kind], made, behind)
    return found


def _layer(kernels: Sequence[Tiled], name: str, behind: tuple[str, ...]) -> list[Tiled]:
    """Return a layer's kernels one after another, under names of their own; the last one has the layer's."""
    named: list[Tiled] = []
    for place, kernel in enumerate(kernels):
        label = name if place + 1 == len(kernels) else f"{name} {place}"
        named.append(dataclasses.replace(kernel, name=label, after=(named[-1].name,) if named else behind))
    return named


_kernels = remembered(*ON_A_GPU, maxsize=64)(layer_kernels)
