"""How much the kernels of a sharded training step slow down beside the library's collectives (arXiv 2507.03114).

That paper times the kernels of GPT and LLaMA steps on four A100, H100, MI250 and MI210, with communication and without.
What we have of it is the abstract, which gives means and maxima, but no sizes, batches or precisions. So a step of the
smallest and of the greatest model of its kind is predicted with few tokens a rank and with many: the more tokens, the
less of the computation has a collective beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import Gang, Tiled, run_device
from sidelane_lab.model.kernels import library_gang
from sidelane_lab.model.layer import ELEMENT, Step, Transformer
from sidelane_lab.model.training import Node, orders, step_kernels, sustained

MODELS = (
    Transformer("GPT-3 XL", 24, 2048, 5461, 16, 16),
    Transformer("LLaMA-2 13B", 40, 5120, 13824, 40, 40),
)
"""Sizes that their papers publish. GPT's two matrices of four times the width count as three of 8/3 of it."""
SEQUENCE = 512
TOKENS = (512, 1024, 2048, 4096, 8192)
"""Of a rank. Assumed: batches of 1 to 16 such sequences."""
SIMULATED = (2, 3)
"""Layers of a step; the difference is one in the middle."""
SECTIONS = ("gpu", "links", "library", "matmul", "interference")
"""Of a description, whose numbers a step with the library's collectives depends on."""


def platforms() -> dict[str, Machine]:
    """The paper's: four GPUs each, an MI250 being two dies of 104 units and 181 TFLOPS (data sheet)."""
    dies = named("mi250x8").with_value("gpu.units", 104).with_value("gpu.peak_tflops", 181)
    return {"A100": named("a100x4"), "H100": named("h100x4"), "MI250": dies, "MI210": named("mi210x4")}


@dataclasses.dataclass(frozen=True, slots=True)
class Overlapped:
    """A step of a rank next to the same without communication.

    Attributes:
        slower: percent that its kernels take longer.
        sequence: percent that computation and communication take longer one after the other.
        communication: time of the collectives alone over that of the computation alone.
    """

    slower: float
    sequence: float
    communication: float


@functools.lru_cache(maxsize=1024)
def overlapped(machine: Machine, step: Step) -> Overlapped:
    """Predict a layer in the middle of a step, forward and backward.

    The mean of both orders where chance decides whether the library's kernels run beside a GEMM. What a power cap adds
    all through a step (``training.COMMUNICATING``) is left out: it was seen on H200s alone.
    """
    nbytes = step.model.parameters * ELEMENT
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    gangs = tuple((kind, (library_gang(machine, kind, nbytes, priority=1),)) for kind in kinds)
    gathering, scattering = (run_device(machine, parts).time_us for _, parts in gangs)
    machines = orders(sustained(machine))
    alone, alone_us = _layer(Node.of(machines[0]), step, None)
    both = [_layer(Node.of(one), step, gangs) for one in machines]
    busy, whole_us = (sum(one[place] for one in both) / len(both) for place in (0, 1))
    communication_us = 2 * gathering + scattering
    return Overlapped(
        100 * (busy / alone - 1), 100 * ((alone_us + communication_us) / whole_us - 1), communication_us / alone_us
    )


def sequence_span(machine: Machine) -> tuple[float, float]:
    """Least and most percent that steps take longer one after the other, over models and tokens."""
    found = [overlapped(machine, step).sequence for step in _steps()]
    return min(found), max(found)


def slower_span(machine: Machine) -> tuple[float, float]:
    """The same of the slowdown, and over what the description leaves open where it is least and where it is most."""
    least, most = (pick(_steps(), key=lambda step: overlapped(machine, step).slower) for pick in (min, max))
    return plausible(machine, least)[0], plausible(machine, most)[1]


@functools.lru_cache(maxsize=256)
def plausible(machine: Machine, step: Step) -> tuple[float, float]:
    """The slowdown of a step with one number of the description at a time at either end of its range; squares add."""
    centre = overlapped(machine, step).slower
    squares = [0.0, 0.0]
    for path, quantity in machine.quantities().items():
        if path.partition(".")[0] in SECTIONS:
            for value in (quantity.low, quantity.high):
                by = 0.0 if value is None else overlapped(machine.with_value(path, value), step).slower - centre
                squares[by > 0] += by * by
    return centre - math.sqrt(squares[0]), centre + math.sqrt(squares[1])


def _steps() -> list[Step]:
    return [Step(model, tokens, SEQUENCE) for model in MODELS for tokens in TOKENS]


@functools.lru_cache(maxsize=1024)
def _layer(node: Node, step: Step, gangs: tuple[tuple[Kind, tuple[Gang, ...]], ...] | None) -> tuple[float, float]:
    """Sum of the times of a layer's kernels, and time of the layer."""
    sums = []
    for layers in SIMULATED:
        kernels = step_kernels(node, step, layers, None if gangs is None else dict(gangs), False)
        run = run_device(node.machine, kernels)
        tiled = [kernel.name for kernel in kernels if isinstance(kernel, Tiled)]
        sums.append((sum(run.ended_us[name] - run.began_us[name] for name in tiled), run.time_us))
    (few, few_us), (more, more_us) = sums
    return more - few, more_us - few_us
