"""arXiv 2507.03114: how much the kernels of training steps slow down beside the library's collectives, predicted.

The paper times the kernels of GPT and LLaMA steps on four A100, H100, MI250 and MI210, with communication and without.
Only its abstract is at hand, which gives means and maxima, but no sizes, batches or precisions. So a step of the
smallest and of the greatest model of its kind is predicted with few tokens a rank and with many: the more tokens, the
less of the computation has a collective beside it. Means are bracketed by these steps; the slowdown by what the numbers
of the descriptions leave open, too. No number was taken from it; but which steps these are was settled with predictions
in view, so that the claims are "seen".
"""

from __future__ import annotations

import dataclasses
import functools

from sidelane.program.collective import Kind
from sidelane_lab.machines.load import named
from sidelane_lab.machines.ranges import ends, remembered, variations
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import Tiled, run_device
from sidelane_lab.model.kernels import library_gang
from sidelane_lab.model.layer import ELEMENT, Step
from sidelane_lab.model.training import ON_A_GPU, Gangs, orders, step_kernels, sustained
from sidelane_lab.model.transformer import Transformer
from sidelane_lab.papers.claims import Claim, ClaimRole, Paper

MODELS = (
    Transformer("GPT-3 XL", 24, 2048, 5461, 16, 16),
    Transformer("LLaMA-2 13B", 40, 5120, 13824, 40, 40),
)
"""Sizes that their papers publish. GPT's two matrices of four times the width count as three of 8/3 of it."""
SEQUENCE = 512
TOKENS = (512, 1024, 2048, 4096, 8192)
"""Tokens of a rank. Assumed: batches of 1 to 16 such sequences."""
SIMULATED = (2, 3)
"""Layers of a step; the difference is one in the middle."""
SECTIONS = ("gpu", "links", "library", "matmul", "interference")
"""Sections of a description whose numbers a step with the library's collectives depends on."""

Brackets = dict[str, list[float]]
"""Least and most percent, by GPU."""


def platforms() -> dict[str, Machine]:
    """Return the paper's machines: four GPUs each, an MI250 being two dies of 104 units and 181 TFLOPS (data sheet)."""
    dies = named("mi250x8").with_value("gpu.units", 104).with_value("gpu.peak_tflops", 181)
    return {"A100": named("a100-40x4"), "H100": named("h100x4"), "MI250": dies, "MI210": named("mi210x4")}


@dataclasses.dataclass(frozen=True, slots=True)
class OverlappedStep:
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
def overlapped(machine: Machine, step: Step) -> OverlappedStep:
    """Predict a layer in the middle of a step, forward and backward.

    The mean of both orders where chance decides whether the library's kernels run beside a GEMM. What a power cap adds
    all through a step (``training.COMMUNICATING``) is left out: it was seen on H200s alone.
    """
    nbytes = step.model.parameters * ELEMENT
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    gangs = tuple((kind, (library_gang(machine, kind, nbytes, priority=1),)) for kind in kinds)
    gathering, scattering = (run_device(machine, parts).time_us for _, parts in gangs)
    machines = orders(sustained(machine))
    alone, alone_us = _layer(machines[0], step, None)
    both = [_layer(one, step, gangs) for one in machines]
    busy, whole_us = (sum(one[place] for one in both) / len(both) for place in (0, 1))
    communication_us = 2 * gathering + scattering
    return OverlappedStep(
        100 * (busy / alone - 1), 100 * ((alone_us + communication_us) / whole_us - 1), communication_us / alone_us
    )


@remembered(*ON_A_GPU, maxsize=1024)
def _layer(machine: Machine, step: Step, gangs: Gangs | None) -> tuple[float, float]:
    """Return the sum of the times of a layer's kernels, and the time of the layer."""
    sums = []
    for layers in SIMULATED:
        kernels = step_kernels(machine, step, layers, gangs, False)
        run = run_device(machine, kernels)
        tiled = [kernel.name for kernel in kernels if isinstance(kernel, Tiled)]
        sums.append((sum(run.ended_us[name] - run.began_us[name] for name in tiled), run.time_us))
    (few, few_us), (more, more_us) = sums
    return more - few, more_us - few_us


@functools.lru_cache(maxsize=256)
def plausible(machine: Machine, step: Step) -> tuple[float, float]:
    """Return the least and the most plausible slowdown of a step."""
    varied = [overlapped(one.machine, step).slower for one in variations(machine, SECTIONS)]
    return ends(overlapped(machine, step).slower, varied)


class SlowdownContext:
    """Brackets of the four machines, over models and tokens, made when first asked for."""

    steps = tuple(Step(model, tokens, SEQUENCE) for model in MODELS for tokens in TOKENS)

    @functools.cached_property
    def slower(self) -> Brackets:
        """Percent that kernels take longer, and what descriptions leave open where it is least and most."""
        found = {}
        for name, machine in platforms().items():
            by_slowdown = sorted(self.steps, key=lambda step: overlapped(machine, step).slower)
            found[name] = [plausible(machine, by_slowdown[0])[0], plausible(machine, by_slowdown[-1])[1]]
        return found

    @functools.cached_property
    def sequence(self) -> Brackets:
        """Percent that a step takes longer one after the other."""
        found = {name: [overlapped(one, step).sequence for step in self.steps] for name, one in platforms().items()}
        return {name: [min(values), max(values)] for name, values in found.items()}


def all_bracketed(claimed: float, predicted: Brackets) -> bool:
    """True if a mean lies between the least and the most of every GPU."""
    return all(low <= claimed <= high for low, high in predicted.values())


def _most(predicted: Brackets) -> float:
    return max(high for _, high in predicted.values())


UNKNOWN = "the abstract does not say which model, batch and precision that is"
UNSAID = "the text at hand does not say which model, batch and precision it is; our steps are in fsdp.json"
CLAIMS: tuple[Claim[SlowdownContext], ...] = (
    Claim("CO-01", ClaimRole.SEEN, lambda c: c.slower, UNSAID, within=all_bracketed),
    Claim("CO-02", ClaimRole.SEEN, lambda c: _most(c.slower), UNSAID, incomparable=UNKNOWN),
    Claim(
        "CO-03",
        ClaimRole.SEEN,
        lambda c: c.sequence,
        UNSAID,
        within=all_bracketed,
        miss="overlap loses on an MI250: its dies have memory's interference from an MI300X, and a link to every other",
    ),
    Claim("CO-04", ClaimRole.SEEN, lambda c: _most(c.sequence), UNSAID, incomparable=UNKNOWN),
)
PAPER = Paper(
    numbers=("2507.03114",),
    machine="",
    context=lambda machine, version: SlowdownContext(),
    claims=CLAIMS,
)
