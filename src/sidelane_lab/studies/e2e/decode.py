"""Decoding and prefill of a Llama, tensor parallel, with a static cache of keys and values.

Each half of a layer ends with a sum over the ranks, a residual and a norm. ``nccl`` and ``group`` sum in place and
leave the rest to one compiled kernel; ``operators`` take ``all_reduce_rms_norm``, and for many tokens
``gemm_all_reduce``. For few tokens there are ``symm_mem``, PyTorch's one-shot sum in symmetric memory, and ``gemv``,
Sidelane's ``gemv_all_reduce``, each with that compiled kernel. A step of decoding makes one token of each sequence, the
likeliest of all ranks' vocabularies.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from sidelane.program.collective import Kind
from sidelane.program.kernel import HOST_LL_BYTES
from sidelane.session import Communicator
from sidelane_lab.baselines import candidate
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.operators import AllReduceNorm, GemmReduce, predict_fused
from sidelane_lab.model.split import chain_us, ours_us, split_us
from sidelane_lab.studies.clients.cases import MODELS, TINY, ClientModel
from sidelane_lab.studies.e2e.workload import EndToEndWorkload, Prepared, sidelane_group
from sidelane_lab.studies.fused.case import OneShot
from sidelane_lab.studies.steps import GROUP, NONE

EPS, ROTARY_BASE = 1e-5, 500_000.0
MOST_NORMED, MOST_TOKENS = 512, 16
"""Largest numbers of tokens that ``all_reduce_rms_norm`` and ``gemv_all_reduce`` take."""

PIECES = 1, 2, 4
"""Numbers of parts of a product for each peer, of which the model takes the best."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-1}

Half = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The end of half a layer: input, weight, residual and weight of the norm to the next input and residual."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A product of an input and a weight, summed over the ranks."""

Gather = Callable[[torch.Tensor, torch.Tensor], object]
"""An all-gather: output and input."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeSize:
    """A step of a model.

    Attributes:
        batch: number of sequences.
        length: number of tokens that are attended to; in prefill, that the step makes keys and values of.
        prefill: the step takes the whole prompt.
    """

    model: ClientModel
    batch: int
    length: int = 1024
    prefill: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens that go through the layers."""
        return self.batch * (self.length if self.prefill else 1)

    def summed_bytes(self, itemsize: int) -> int:
        """Return the bytes of a tensor that is summed, which is one for each half of a layer."""
        return self.tokens * self.model.hidden * itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedLayer:
    """A rank's part of a layer: rows of q, k and v together, of gate and up together, columns of the others."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class ShardedLlama:
    """A rank's part of a Llama with random weights. The embedding and the norms are whole, the head is not."""

    def __init__(self, size: DecodeSize, device: torch.device, dtype: torch.dtype) -> None:
        model, ranks = size.model, dist.get_world_size()
        if model.kv_heads % ranks:
            raise ValueError(f"decode: ranks (value={ranks}, allowed=divisors of {model.kv_heads} key-value heads)")
        whole, own = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + dist.get_rank()))

        def weights(*shape: int, draw: torch.Generator = own, scale: float | None = None) -> torch.Tensor:
            made = torch.empty(shape, dtype=dtype, device=device)
            return made.normal_(std=shape[-1] ** -0.5 if scale is None else scale, generator=draw)

        self.size, self.ranks, self.dtype = size, ranks, dtype
        self.head_size = model.hidden // model.heads
        self.heads, self.kv_heads = model.heads // ranks, model.kv_heads // ranks
        hidden, features = model.hidden, model.feed // ranks
        self.embedding = weights(model.vocabulary, hidden, draw=whole)
        self.head = (
            self.embedding.chunk(ranks)[dist.get_rank()] if model.tied else weights(model.vocabulary // ranks, hidden)
        )
        self.norm = torch.ones(hidden, dtype=dtype, device=device)
        cache = size.batch, self.kv_heads, size.length, self.head_size
        self.layers = [
            ShardedLayer(
                qkv=weights((self.heads + 2 * self.kv_heads) * self.head_size, hidden),
                out=weights(hidden, self.heads * self.head_size, scale=hidden**-0.5),
                gate_up=weights(2 * features, hidden),
                down=weights(hidden, features, scale=model.feed**-0.5),
                keys=weights(*cache, scale=1.0),
                values=weights(*cache, scale=1.0),
            )
            for _ in range(model.layers)
        ]
        taken = (size.batch, size.length if size.prefill else 1)
        self.tokens = torch.randint(model.vocabulary, taken, device=device, generator=whole)
        half = self.head_size // 2
        speeds = ROTARY_BASE ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(size.length, device=device)[-taken[1] :, None] * speeds
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        kernels: list[Any] = [add_norm, gated, rotated]
        if device.type != "cpu":
            torch.compiler.reset()  # else a function is compiled for so many shapes only
            kernels = [torch.compile(kernel) for kernel in kernels]
        self.add_norm, self.gated, self.rotated = kernels

    def step(self, half: Half, gather: Gather) -> torch.Tensor:
        """Return this rank's logits of each sequence's last token, [batch, vocabulary / ranks]."""
        batch, count = self.tokens.shape
        residual = self.embedding[self.tokens].flatten(0, 1)
        x = functional.rms_norm(residual, self.norm.shape, self.norm, EPS)
        for layer in self.layers:
            attended = self.attention(layer, functional.linear(x, layer.qkv).view(batch, count, -1, self.head_size))
            x, residual = half(attended, layer.out, residual, self.norm)
            x, residual = half(self.gated(functional.linear(x, layer.gate_up)), layer.down, residual, self.norm)
        logits = functional.linear(x.view(batch, count, -1)[:, -1], self.head)
        self.likeliest(logits, gather)
        return logits

    def attention(self, layer: ShardedLayer, qkv: torch.Tensor) -> torch.Tensor:
        """Attend to the cache, which gets these keys and values. Takes [batch, count, heads, size of a head]."""
        batch, count = qkv.shape[:2]
        q, k, v = qkv.transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = self.rotated(q, k, self.cos, self.sin)
        layer.keys[:, :, -count:] = k
        layer.values[:, :, -count:] = v
        if count == 1:
            # The query heads of a group are queries of its one key-value head.
            q = q.reshape(batch, self.kv_heads, -1, self.head_size)
            attended = functional.scaled_dot_product_attention(q, layer.keys, layer.values)
            return attended.reshape(batch, -1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).reshape(batch * count, -1)

    def likeliest(self, logits: torch.Tensor, gather: Gather) -> torch.Tensor:
        """Return each sequence's likeliest token: every rank tells its own one."""
        best, token = logits.max(dim=-1)
        mine = torch.stack((best.float(), (token + dist.get_rank() * logits.shape[1]).float()))
        every = mine.new_empty(self.ranks, *mine.shape)
        gather(every.flatten(0, 1), mine)
        return every[:, 1].gather(0, every[:, 0].argmax(dim=0, keepdim=True))[0].long()


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x + residual``, and that sum."""
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, EPS), total


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Return the product of the halves of rows, the first of them through SiLU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries and keys that are rotated by their positions, [batch, heads, positions, size of a head]."""
    pairs = [each.chunk(2, dim=-1) for each in (q, k)]
    return tuple(torch.cat((one * cos - two * sin, one * sin + two * cos), dim=-1) for one, two in pairs)


def prepare(size: DecodeSize, group: dist.ProcessGroup, comm: Communicator, device: torch.device) -> Prepared:
    """Make the steps of one size. Collective."""
    from sidelane import ops  # needs Triton, which reads a setting when it is imported

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    llama = ShardedLlama(size, device, dtype)

    def half_of(product: Product) -> Half:
        """Make the end of half a layer from a product that is summed over the ranks."""
        return lambda x, weight, residual, norm: llama.add_norm(product(x, weight), residual, norm)

    def summed_by(group: dist.ProcessGroup) -> Half:
        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = functional.linear(x, weight)
            dist.all_reduce(y, group=group)
            return y

        return half_of(product)

    def fused(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> Any:
        return ops.all_reduce_rms_norm(comm, functional.linear(x, weight), residual, norm, eps=EPS)

    def gathered(group: dist.ProcessGroup) -> Gather:
        return functools.partial(candidate.all_gather, group=group)

    own, few = sidelane_group(device), size.tokens <= MOST_NORMED
    many = half_of(functools.partial(ops.gemm_all_reduce, comm))
    ways: dict[str, tuple[Half, Gather]] = {
        "nccl": (summed_by(group), gathered(group)),
        GROUP: (summed_by(own), gathered(own)),
        "operators": (fused if few else many, comm.all_gather),
    }
    if size.tokens <= MOST_TOKENS:
        gemv = half_of(lambda x, weight: ops.gemv_all_reduce(comm, weight, x))
        ways["gemv"] = gemv, comm.all_gather
    if few and device.type != "cpu" and not comm.backend.peers.through_host:
        one_shot = OneShot(comm, torch.empty(size.tokens, size.model.hidden, dtype=dtype, device=device))

        def in_symmetric_memory(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            torch.mm(x, weight.t(), out=one_shot.input)
            return one_shot()

        ways["symm_mem"] = half_of(in_symmetric_memory), gathered(group)

    def alone(output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(input.repeat(llama.ranks, 1))

    ways[NONE] = half_of(functional.linear), alone

    def step(half: Half, gather: Gather) -> torch.Tensor:
        with torch.no_grad():
            return llama.step(half, gather)

    return Prepared(
        steps={way: functools.partial(step, *parts) for way, parts in ways.items()},
        tolerance=TOLERANCES[dtype],
        units=size.tokens,
        facts={
            "parameters": size.model.total,
            "batch": size.batch,
            "length": size.length,
            "summed_bytes": 2 * size.model.layers * size.summed_bytes(dtype.itemsize),
        },
    )


def predicted_us(size: DecodeSize, machine: Machine) -> Mapping[str, float]:
    """See :class:`EndToEndWorkload`. Of GEMVs in cells, and of PyTorch's operators, the model knows nothing."""
    ranks, model = machine.gpus, size.model
    summed = size.summed_bytes(torch.bfloat16.itemsize)
    gathered = 2 * torch.float32.itemsize * ranks * size.batch

    def step_us(half_us: float, collective_us: Callable[[Machine, Kind, int], float]) -> float:
        return 2 * model.layers * half_us + collective_us(machine, Kind.ALL_GATHER, gathered)

    if machine.through_host:  # where sums are small one kernel adds up and norms, so that a launch is saved
        saved = float(machine.kernels.launch_us) if machine.kernels and summed <= HOST_LL_BYTES else 0.0
        half = ours_us(machine, Kind.ALL_REDUCE, summed) - saved
    elif size.tokens <= MOST_NORMED:
        fused = (AllReduceNorm(size.tokens, model.hidden, pushed) for pushed in (False, True))
        alone = AllReduceNorm(size.tokens, model.hidden).alone_us(machine)  # what "none" takes
        half = min(predict_fused(machine, one).fused.time_us for one in fused) - alone
    else:
        depths = model.hidden // ranks, model.feed // ranks
        half = statistics.mean(
            _summed_us(machine, GemmReduce(size.tokens, depth, model.hidden, gathers=True)) for depth in depths
        )
    return {
        "nccl": step_us(library_us(machine, Kind.ALL_REDUCE, summed), library_us),
        GROUP: step_us(ours_us(machine, Kind.ALL_REDUCE, summed), ours_us),
        "operators": step_us(half, ours_us),
    }


def _summed_us(machine: Machine, product: GemmReduce) -> float:
    """Return by how much a product that is summed is longer than a product, in parts or with the sum behind it."""
    times = chain_us(machine, product), *(split_us(machine, product, pieces) for pieces in PIECES)
    return min(time for time in times if time is not None) - product.compute_us(machine)


PUBLIC = ("llama-3.2-1b", "llama-3.1-8b")
WORKLOAD = EndToEndWorkload(
    "decode",
    "tokens",
    {
        TINY: DecodeSize(MODELS[TINY], batch=2, length=8),
        **{f"{name}-x{batch}": DecodeSize(MODELS[name], batch) for name in PUBLIC for batch in (1, 8, 64)},
        **{f"{name}-prefill-2048": DecodeSize(MODELS[name], 1, 2048, prefill=True) for name in PUBLIC},
    },
    prepare,
    predicted_us,
)
