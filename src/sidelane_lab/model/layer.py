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
import math

from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.device import Tiled
from sidelane_lab.model.gemm import gemm_kernel, gemm_us
from sidelane_lab.model.transformer import Transformer, preset
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
MOMENT_BYTES = {"adamw": 8, "adamw-8bit": 2, "muon": 4, "sgd-momentum": 4, "sgd": 0}
"""Bytes of what an optimizer keeps of a parameter, of float32; half of it of bfloat16, but for 8 bits."""
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight that is trained, and of its gradient."""
LOGIT_BYTES = 10
"""Bytes of a logit while the loss is computed: bfloat16, float32, and its gradient in float32."""
GATHERED_LAYERS = 4
"""Layers in bfloat16 that a rank has gathered, or gradients of which it has not scattered, at once."""
WAVES = 4
"""Waves of attention and of element-wise kernels: many short workgroups, so that those of a collective, which FSDP2
launches on streams of high priority, get in between them."""


MODELS = {name: dataclasses.replace(preset(name), name=name) for name in ("llama-8b-like", "llama-70b-like")}
"""Models of the study of FSDP2's steps, by the names that its rows have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A training step of a rank.

    Attributes:
        model: sizes of what a rank computes: its part, with tensor parallelism.
        tokens: of a rank.
        sequence: tokens that attend to each other.
        recomputed: nothing but the inputs of layers is kept for the backward pass.
        context: ranks that share a sequence.
        tensor: ranks that share a layer; each has its part of what is between the layer's GEMMs.
        experts: ranks that share the experts.
        optimizer: one of ``MOMENT_BYTES``.
        dtype: of weights that are trained, one of ``WEIGHT_BYTES``.
    """

    model: Transformer
    tokens: int
    sequence: int
    recomputed: bool = False
    context: int = 1
    tensor: int = 1
    experts: int = 1
    optimizer: str = "adamw"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequence < 1 or self.tokens * self.context % self.sequence:
            value = f"{self.tokens}, {self.sequence}"
            allowed = f"whole sequences: add --sequence {self.tokens * self.context}, or change --tokens"
            raise ValueError(f"plan: --tokens, --sequence (value={value}, allowed={allowed})")

    @property
    def fewest_tokens(self) -> int:
        """Tokens of a rank in the smallest pass of whole sequences."""
        return self.sequence // math.gcd(self.sequence, self.context)

    @property
    def gathered(self) -> int:
        """Parameters of a layer that are gathered: without the experts of other ranks."""
        return self.model.divided(1, self.experts).parameters


@dataclasses.dataclass(frozen=True, slots=True)
class StepMemory:
    """Estimated bytes of a rank when it has most of them, at the end of the forward pass or of the backward pass.

    Attributes:
        weights: of its shard.
        optimizer: moments of its shard.
        gradients: of its shard.
        activations: of its layers, and logits.
        gathered: parameters and gradients of a few layers, and the embedding and the head; of DDP its buckets, and
            weights in bfloat16.
    """

    weights: float
    optimizer: float
    gradients: float
    activations: float
    gathered: float

    @property
    def total(self) -> float:
        """Bytes at once: activations go while gradients come."""
        return self.weights + self.optimizer + max(self.gradients, self.activations) + self.gathered


def step_memory(step: Step, shards: int) -> StepMemory:
    """Estimate the memory of a training step. ``shards``: ranks among which a rank's parameters are sharded; 1: DDP.

    On two H200s, without Adam, embedding and head, it is 1 to 14% above what NCCL's steps had, and 7% below to 2% above
    Sidelane's and NCCL's on copy engines (``peak_mb`` of results/h200x2/fsdp.json).
    """
    model, tokens, weight = step.model, step.tokens, WEIGHT_BYTES[step.dtype]
    mine = (model.layers * model.parameters + model.ends) / shards
    moments = MOMENT_BYTES[step.optimizer] * (weight / 4 if step.optimizer != "adamw-8bit" else 1)
    # Inputs of GEMMs, norms, attention and products; with tensor parallelism norms have their part of a sequence.
    kept = (12 * model.hidden / step.tensor + 2 * model.kv_size + 8 * width_of(model)) * tokens
    inputs = ELEMENT * model.hidden / step.tensor * tokens
    activations = model.layers * inputs + kept if step.recomputed else model.layers * kept
    logits = LOGIT_BYTES * tokens * model.vocabulary
    gathered = (
        mine * (weight + ELEMENT % weight) if shards == 1 else ELEMENT * (GATHERED_LAYERS * step.gathered + model.ends)
    )
    return StepMemory(weight * mine, moments * mine, weight * mine, activations + logits, gathered)


def width_of(model: Transformer) -> int:
    """Return the width of all feed-forward parts that a token goes through in a layer."""
    return model.active * model.expert_feed + model.shared if model.experts else model.feed


def head_us(machine: Machine, step: Step) -> float:
    """Estimate the head's GEMMs, and the loss. It was compared with nothing."""
    tokens, words, hidden = step.tokens, step.model.vocabulary, step.model.hidden
    shapes = ((tokens, words, hidden), (tokens, hidden, words), (words, hidden, tokens))
    loss_us = 2 * LOGIT_BYTES * tokens * words / ELEMENTWISE_SHARE / reachable(machine)  # written and read once
    return loss_us + sum(gemm_us(machine, Gemm(*shape, "bfloat16")) for shape in shapes)


def optimizer_us(machine: Machine, memory: StepMemory) -> float:
    """Estimate the time of the optimizer, which reads and writes what it has. It was compared with nothing."""
    return (2 * (memory.weights + memory.optimizer) + memory.gradients) / COPY_SHARE / reachable(machine)


def parallel_us(machine: Machine, step: Step) -> float:
    """Return the time of the collectives of tensor, context and expert parallelism, by the library in a node.

    A layer has two sums over ranks that share it, forward and backward; keys and values are gathered for each pass, and
    their gradients scattered; tokens go to experts and back. Nothing runs beside them. It was compared with nothing.
    """
    rows = ELEMENT * step.tokens
    times = 6 if step.recomputed else 4
    parts = (
        (times, Kind.ALL_REDUCE, step.tensor, rows * step.model.hidden),
        (3, Kind.ALL_GATHER, step.context, rows * step.context * step.model.kv_size),
        (times, Kind.ALL_TO_ALL, step.experts, rows * step.model.active * step.model.hidden),
    )
    node = dataclasses.replace(machine, nodes=1)
    each = (
        count * library_us(dataclasses.replace(node, gpus=ranks), kind, nbytes)
        for count, kind, ranks, nbytes in parts
        if ranks > 1
    )
    return step.model.layers * sum(each)


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
    whole_us = (elementwise / ELEMENTWISE_SHARE + copies / COPY_SHARE) / reachable(machine)
    between = short("elements", whole_us / len(gemms), (elementwise + copies) / len(gemms))
    kernels = [one for gemm in gemms for one in (between, gemm)]
    attention = short("attention", attention_us(machine, step, backward=way.backward))
    inputs = 2 * len(step.model.attention()) - 2  # kernels of the GEMMs of its inputs, which it stands beside
    kernels.insert(len(kernels) - 2 * inputs if way.backward else inputs, attention)
    return tuple(kernels)


def gemms_of(step: Step, *, backward: bool) -> list[Gemm]:
    """Return the GEMMs of a layer, with the matrices of one input as one; those of a rank's experts count as one."""
    model = step.model
    shapes = [(step.tokens, *matrix) for matrix in (*model.attention(), *model.gated(model.shared))]
    share, width = (model.active, model.expert_feed) if model.experts else (1, model.feed)
    shapes += [(step.tokens * share, *matrix) for matrix in model.gated(width)]
    if not backward:
        return [Gemm(rows, n, k, "bfloat16") for rows, n, k in shapes]
    both = (shape for rows, n, k in reversed(shapes) for shape in ((rows, k, n), (n, k, rows)))
    return [Gemm(*shape, "bfloat16") for shape in both]


def attention_us(machine: Machine, step: Step, *, backward: bool) -> float:
    """Return the attention's time in a layer, with all units; half of it is masked."""
    width = step.model.heads * (step.model.head_size + (step.model.latent or (step.model.head_size,))[-1]) / 2
    flops = 2.0 * step.tokens * (step.sequence + ATTENTION_RAMP) * width * (2.5 if backward else 1.0)
    return flops / (machine.gpu.peak_tflops * ATTENTION_EFFICIENCY * 1e6)


def elementwise_bytes(machine: Machine, step: Step, way: Pass) -> float:
    """Return the bytes that element-wise kernels move in a layer: of activations, and casts of shards."""
    model = step.model
    rotated, gated = 5 * model.kv_size / model.hidden, width_of(model) / model.hidden
    passes = (35 if way.backward else 20) / step.tensor + rotated + (9 if way.backward else 5) * gated
    shard = model.parameters / machine.world_size
    return passes * step.tokens * model.hidden * ELEMENT + 6 * shard * (way.gathered + way.backward)


def copied_bytes(machine: Machine, step: Step, way: Pass) -> float:
    """Return the bytes of copies into and out of gathered buffers, and of gradients that are packed, in a layer."""
    buffers = 1 + 1 / machine.world_size if way.gathered and not way.straight else 0.0
    return 4 * step.gathered * (buffers + way.backward)


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
        found["elementwise"] += count * elementwise_bytes(machine, step, way) / ELEMENTWISE_SHARE / reachable(machine)
        found["copies"] += count * copied_bytes(machine, step, way) / COPY_SHARE / reachable(machine)
    return found


def reachable(machine: Machine) -> float:
    """Return the bytes of memory in a microsecond."""
    return machine.gpu.memory_gbps * float(machine.matmul.memory_efficiency) * 1e3
