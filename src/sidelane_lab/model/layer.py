"""A layer of a transformer in a training step: GEMMs, attention, and the framework's own kernels around them.

T tokens, H hidden, F width of the gated layer, Q heads, K heads of keys and values, P parameters, R ranks. A *pass* is
T x H elements that are read or written once. What kernels other than GEMMs and attention move is counted:

    on activations   norms, rotation of queries and keys, silu and product, sums     forward  20 + 10 K/Q + 5 F/H passes
                                                                                     backward 35 + 10 K/Q + 9 F/H
    for a gather     each rank casts its shard to bfloat16                           6 P / R bytes
                     and copies it to where it is gathered, unless straight          4 P / R
                     what was gathered is copied out, unless straight                4 P
    for a scatter    gradients are packed                                            4 P
                     this rank's sum is cast to float32                              6 P / R

A layer that is recomputed runs its forward kernels once more before its backward ones.

Casts have streams of their own, and are counted as if they had none: they are no more than the waits of the
computation's stream, and what its other kernels take longer, in the kernels' times that these numbers are from.
"""

from __future__ import annotations

import dataclasses

from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import Tiled
from sidelane_lab.model.gemm import gemm_kernel, gemm_us
from sidelane_lab.pairs.workload import Gemm

ELEMENT = 2
"""Bytes of parameters, activations and gradients (bfloat16)."""
ATTENTION_EFFICIENCY = 0.52
"""Share of the peak that a fused causal attention reaches, forward and backward, with long sequences."""
ATTENTION_RAMP = 710
"""Tokens by which a sequence seems longer to it: blocks on the diagonal are computed whole, and begin and end. Both
numbers from kernels' times of sequences of 2048 and 4096 (results/h200x2/fsdp-profile.json, without communication)."""
ELEMENTWISE_SHARE = 0.55
"""Share of the memory's bandwidth that element-wise kernels and casts of the framework reach: their time in the four
steps without communication of results/h200x2/fsdp-profile.json, over the bytes above (0.53 to 0.58)."""
COPY_SHARE = 0.9
"""The same of copies out of gathered buffers, and of gradients that are packed (0.87 to 1.05 there)."""
VOCABULARY = 128_256
"""Rows of the embedding, and of the head, of Llama 3."""
WEIGHT_BYTES, GRADIENT_BYTES, ADAM_BYTES = 4, 4, 8
"""Bytes that a rank keeps of each parameter of its shard: weights and gradients in float32, Adam's two moments."""
LOGIT_BYTES = 10
"""Bytes of a logit while the loss is computed: bfloat16, float32, and its gradient in float32."""
GATHERED_LAYERS = 4
"""Layers in bfloat16 that a rank has gathered, or gradients of which it has not scattered, at once."""
WAVES = 4
"""Waves of attention and of element-wise kernels: many short workgroups, so that those of a collective, which FSDP2
launches on streams of high priority, get in between them."""


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
        """Parameters of a layer."""
        kv = self.hidden * self.kv_heads // self.heads
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.feed)

    @property
    def ends(self) -> int:
        """Parameters of the embedding and of the head."""
        return 2 * VOCABULARY * self.hidden


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
        recomputed: nothing but the inputs of layers is kept for the backward pass.
    """

    model: Transformer
    tokens: int
    sequence: int
    recomputed: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequence < 1 or self.tokens % self.sequence:
            value = f"{self.tokens}, {self.sequence}"
            raise ValueError(f"Step: tokens, sequence (value={value}, allowed=whole sequences of one token or more)")


@dataclasses.dataclass(frozen=True, slots=True)
class StepMemory:
    """Estimated bytes of a rank when it has most of them, at the end of the forward pass or of the backward pass.

    Attributes:
        states: weights and moments of its shard.
        gradients: of its shard.
        activations: of its layers, and logits.
        gathered: parameters and gradients of a few layers, and the embedding and the head.
    """

    states: float
    gradients: float
    activations: float
    gathered: float

    @property
    def total(self) -> float:
        """Bytes at once: activations go while gradients come."""
        return self.states + max(self.gradients, self.activations) + self.gathered


def step_memory(step: Step, shards: int) -> StepMemory:
    """Estimate the memory of a training step with Adam. ``shards``: ranks among which parameters are sharded.

    On two H200s, without Adam, embedding and head, it is 1 to 14% above what NCCL's steps had, and 7% below to 2% above
    Sidelane's and NCCL's on copy engines (``peak_mb`` of results/h200x2/fsdp.json).
    """
    model, tokens = step.model, step.tokens
    kv = model.hidden * model.kv_heads // model.heads
    layers = model.layers * model.parameters
    mine = (layers + model.ends) / shards
    kept = (12 * model.hidden + 4 * kv + 8 * model.feed) * tokens  # inputs of GEMMs, norms, attention and products
    inputs = ELEMENT * model.hidden * tokens
    activations = model.layers * inputs + kept if step.recomputed else model.layers * kept
    logits = LOGIT_BYTES * tokens * VOCABULARY
    gathered = ELEMENT * (GATHERED_LAYERS * model.parameters + model.ends)
    return StepMemory((WEIGHT_BYTES + ADAM_BYTES) * mine, GRADIENT_BYTES * mine, activations + logits, gathered)


def ends_us(machine: Machine, step: Step, shards: int) -> float:
    """Estimate what a step has beside its layers: the head's GEMMs and its loss, and Adam. Compared with nothing."""
    model, tokens = step.model, step.tokens
    forward, of_inputs = (tokens, VOCABULARY, model.hidden), (tokens, model.hidden, VOCABULARY)
    shapes = (forward, of_inputs, (VOCABULARY, model.hidden, tokens))
    head_us = sum(gemm_us(machine, Gemm(*shape, "bfloat16")) for shape in shapes)
    loss = 2 * LOGIT_BYTES * tokens * VOCABULARY  # written and read once
    states = WEIGHT_BYTES + ADAM_BYTES
    adam = (2 * states + GRADIENT_BYTES) * (model.layers * model.parameters + model.ends) / shards
    return head_us + (loss / ELEMENTWISE_SHARE + adam / COPY_SHARE) / _reachable(machine)


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One way through a layer.

    Attributes:
        backward: gradients of its inputs and of its parameters, which are scattered then.
        gathered: its parameters have to be gathered for it.
        straight: gathers write where parameters are used.
    """

    backward: bool
    gathered: bool = True
    straight: bool = False


def layer_kernels(machine: Machine, step: Step, way: Pass) -> tuple[Tiled, ...]:
    """A layer's kernels one after another; the backward pass has each GEMM twice."""
    if way.backward and step.recomputed:
        once = dataclasses.replace(step, recomputed=False)
        again = layer_kernels(machine, once, Pass(False, gathered=False, straight=way.straight))
        return again + layer_kernels(machine, once, way)
    units, launch = int(machine.gpu.units), float(machine.matmul.launch_us)

    def short(name: str, whole_us: float, nbytes: float = 0.0) -> Tiled:
        return Tiled(name, WAVES * units, whole_us / WAVES, nbytes / units / WAVES, fixed_us=launch / WAVES)

    gemms = [gemm_kernel(machine, gemm) for gemm in gemms_of(step, backward=way.backward)]
    elementwise, copies = elementwise_bytes(machine, step, way), copied_bytes(machine, step, way)
    whole_us = (elementwise / ELEMENTWISE_SHARE + copies / COPY_SHARE) / _reachable(machine)
    between = short("elements", whole_us / len(gemms), (elementwise + copies) / len(gemms))
    kernels = [one for gemm in gemms for one in (between, gemm)]
    attention = short("attention", attention_us(machine, step, backward=way.backward))
    kernels.insert(len(kernels) - 4 if way.backward else 2, attention)  # beside the GEMMs of its inputs
    return tuple(kernels)


def gemms_of(step: Step, *, backward: bool) -> list[Gemm]:
    """Return the GEMMs of a layer, with the matrices of one input as one."""
    model, rows = step.model, step.tokens
    kv = model.hidden * model.kv_heads // model.heads
    shapes = [(model.hidden + 2 * kv, model.hidden), (model.hidden, model.hidden)]
    shapes += [(2 * model.feed, model.hidden), (model.hidden, model.feed)]
    if not backward:
        return [Gemm(rows, n, k, "bfloat16") for n, k in shapes]
    return [Gemm(*shape, "bfloat16") for n, k in reversed(shapes) for shape in ((rows, k, n), (n, k, rows))]


def attention_us(machine: Machine, step: Step, *, backward: bool) -> float:
    """Return the attention's time in a layer, with all units; half of it is masked."""
    flops = 2.0 * step.tokens * (step.sequence + ATTENTION_RAMP) * step.model.hidden * (2.5 if backward else 1.0)
    return flops / (machine.gpu.peak_tflops * ATTENTION_EFFICIENCY * 1e6)


def elementwise_bytes(machine: Machine, step: Step, way: Pass) -> float:
    """Return the bytes that element-wise kernels move in a layer: of activations, and casts of shards."""
    model = step.model
    rotated, gated = 10 * model.kv_heads / model.heads, model.feed / model.hidden
    passes = 35 + rotated + 9 * gated if way.backward else 20 + rotated + 5 * gated
    shard = model.parameters / machine.world_size
    return passes * step.tokens * model.hidden * ELEMENT + 6 * shard * (way.gathered + way.backward)


def copied_bytes(machine: Machine, step: Step, way: Pass) -> float:
    """Return the bytes of copies into and out of gathered buffers, and of gradients that are packed, in a layer."""
    buffers = 1 + 1 / machine.world_size if way.gathered and not way.straight else 0.0
    return 4 * step.model.parameters * (buffers + way.backward)


def parts_us(machine: Machine, step: Step, *, straight: bool = False) -> dict[str, float]:
    """Return what a step without communication takes, by kernels: of GEMMs, attention, element-wise kernels, copies."""
    layers, found = step.model.layers, dict.fromkeys(("gemm", "attention", "elementwise", "copies"), 0.0)
    for way, count in (
        (Pass(False, True, straight), layers),
        (Pass(True, True, straight), layers - 1),
        (Pass(True, False, straight), 1),  # the last layer stays gathered
    ):
        found["gemm"] += count * sum(gemm_us(machine, gemm) for gemm in gemms_of(step, backward=way.backward))
        found["attention"] += count * attention_us(machine, step, backward=way.backward)
        found["elementwise"] += count * elementwise_bytes(machine, step, way) / ELEMENTWISE_SHARE / _reachable(machine)
        found["copies"] += count * copied_bytes(machine, step, way) / COPY_SHARE / _reachable(machine)
    return found


def _reachable(machine: Machine) -> float:
    """Return the bytes of memory in a microsecond."""
    return machine.gpu.memory_gbps * float(machine.matmul.memory_efficiency) * 1e3
