"""The workload of sequence parallelism: training steps of transformer blocks whose positions lie on all ranks.

S: positions, N: ranks, H: heads of q, K: heads of k and v, D: size of a head. Every rank has all weights. Parameters of
q, k and v are in one matrix, rank by rank, so that what goes to a rank lies together and every way of Ulysses exchanges
one tensor, which is the fastest form of plain PyTorch: [B, S / N, N * heads of a rank, D]. Positions are rotated behind
the exchange.

    nccl, gloo   permute, ``all_to_all_single`` and permute, forward and backward
    group        the same on a process group of Sidelane's
    operators    ``sidelane.ops.reshard``: the exchange with a layout
    none         no communication: views of the right shapes

A step is forward and backward with gradients of all weights; their reduction over ranks is FSDP's, and left to its
study. What is compared is the gradient of the first norm's weight, summed over the ranks: all of both passes takes part
in it, and it does not depend on which rank has which positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from sidelane import ops
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.split import ours_us
from sidelane_lab.studies.e2e.workload import EndToEndWorkload, Prepared, moved_us, sidelane_group
from sidelane_lab.studies.layout_exchanges import BACK, THERE, merged, permuted

TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
EPS = 1e-5
ROTATION_BASE = 500_000.0
DEVIATION = 0.02
"""Standard deviation of weights."""

Attend = Callable[[Tensor], Tensor]
"""Type of the attention between the projections: [B, S / N, N * (H + 2 K) / N, D] to [B, S / N, H, D]."""

Exchanged = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSize:
    """Blocks of a transformer, and one sequence.

    Attributes:
        layers: number of blocks.
        tokens: S.
        hidden: elements of a token.
        heads, kv_heads, size: H, K and D.
        feed: width of the feed-forward part.
        is_causal: a position attends to itself and the ones before it; the feed-forward part is gated then.
    """

    layers: int
    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    size: int
    feed: int
    is_causal: bool

    @property
    def parameters(self) -> int:
        """Parameters of all blocks."""
        attention = self.hidden * self.size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + (2 + self.is_causal) * self.hidden * self.feed + 2 * self.hidden)

    def collectives(self, world_size: int, itemsize: int) -> list[tuple[Kind, int, int]]:
        """Return kind, bytes and number of a step's exchanges by Ulysses: two forward, and as many backward."""
        position = self.tokens // world_size * self.size * itemsize
        counts = self.heads + 2 * self.kv_heads, self.heads
        return [(Kind.ALL_TO_ALL, position * heads, 2 * self.layers) for heads in counts]


class Blocks:
    """Weights of the blocks, and this rank's positions.

    Args:
        size: sizes.
        world_size: number of ranks.
        device: device of the tensors.
        dtype: dtype of the tensors.
    """

    def __init__(self, size: AttentionSize, world_size: int, device: torch.device, dtype: torch.dtype) -> None:
        if size.tokens % world_size or size.kv_heads % world_size:
            raise ValueError(
                f"attention: ranks (value={world_size}, allowed=divisors of {size.tokens} and {size.kv_heads})"
            )
        self.size, self.world_size = size, world_size
        generator = torch.Generator(device).manual_seed(1)

        def normal(*shape: int, deviation: float = DEVIATION) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, deviation, generator=generator)

        width, kv_width = size.heads * size.size, size.kv_heads * size.size
        self.layers = [
            {
                "norm": torch.ones(size.hidden, device=device, dtype=dtype),
                "qkv": normal(width + 2 * kv_width, size.hidden),
                "out": normal(size.hidden, width),
                "feed_norm": torch.ones(size.hidden, device=device, dtype=dtype),
                "up": normal((1 + size.is_causal) * size.feed, size.hidden),
                "down": normal(size.hidden, size.feed),
            }
            for _ in range(size.layers)
        ]
        self.weights = [weight.requires_grad_() for layer in self.layers for weight in layer.values()]
        self.tokens, self.grad = (normal(1, size.tokens, size.hidden, deviation=1.0) for _ in range(2))

    def step(self, attend: Attend, tokens: Tensor, grad: Tensor, summed: Callable[[Tensor], object]) -> Tensor:
        """Run forward and backward. Returns the gradient of the first norm's weight, summed over the ranks.

        Args:
            attend: attention between the projections.
            tokens: tokens of this rank, [1, S / N, hidden].
            grad: gradient of the result.
            summed: function that sums a tensor over the ranks, in place.
        """
        size, x = self.size, tokens
        for layer in self.layers:
            normal = functional.rms_norm(x, (size.hidden,), layer["norm"], EPS)
            projected = functional.linear(normal, layer["qkv"]).unflatten(-1, (-1, size.size))
            x = x + functional.linear(attend(projected).flatten(2), layer["out"])
            normal = functional.rms_norm(x, (size.hidden,), layer["feed_norm"], EPS)
            wide = functional.linear(normal, layer["up"])
            if size.is_causal:
                gate, up = wide.chunk(2, -1)
                wide = functional.silu(gate) * up
            else:
                wide = functional.gelu(wide, approximate="tanh")
            x = x + functional.linear(wide, layer["down"])
        found = torch.autograd.grad(x, self.weights, grad)[0].float()
        summed(found)
        return found

    def ulysses(self, there: Exchanged, back: Exchanged) -> Attend:
        """Return the attention to all positions by some heads of each rank, between two exchanges."""
        size, n = self.size, self.world_size
        rotate = Rotation(torch.arange(size.tokens, device=self.tokens.device), size.size)
        counts = [size.heads // n, size.kv_heads // n, size.kv_heads // n]

        def attend(projected: Tensor) -> Tensor:
            q, k, v = there(projected).split(counts, 2)
            query, key, value = (tensor.transpose(1, 2) for tensor in (rotate(q), rotate(k), v))
            found = functional.scaled_dot_product_attention(
                query, key, value, is_causal=size.is_causal, enable_gqa=size.heads > size.kv_heads
            )
            return back(found.transpose(1, 2).contiguous())

        return attend


class Rotation:
    """Rotary embedding of positions, for tensors [B, positions, heads, size] (Su et al., "RoFormer", 2021).

    Args:
        positions: their numbers in the whole sequence.
        size: size of a head.
    """

    def __init__(self, positions: Tensor, size: int) -> None:
        steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
        angles = positions[:, None, None] * ROTATION_BASE**-steps
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the rotated tensor."""
        cos, sin = self._cos.to(tensor.dtype), self._sin.to(tensor.dtype)
        low, high = tensor.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def exchange(tensor: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    """Exchange by permuting into contiguous parts, ``all_to_all_single``, and permuting what comes."""
    n = group.size()
    sent = permuted(tensor.contiguous(), layout, n).contiguous()
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    batch, positions, heads, size = tensor.shape
    there = (batch, positions * n, heads // n, size)
    return merged(came, layout, there if layout == THERE else (batch, positions // n, heads * n, size))


class LibraryExchange(torch.autograd.Function):
    """An exchange whose backward is the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
        """Exchange a tensor in a layout by a group."""
        ctx.layout, ctx.group = layout, group
        return exchange(tensor, layout, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange the gradient the other way."""
        other = BACK if ctx.layout == THERE else THERE
        return exchange(grads[0], other, ctx.group), None, None


def prepare(size: AttentionSize, group: dist.ProcessGroup, comm: Communicator, device: torch.device) -> Prepared:
    """Make the steps of one size. Collective."""
    n, dtype = comm.world_size, torch.float32 if device.type == "cpu" else torch.bfloat16
    blocks = Blocks(size, n, device, dtype)
    own = sidelane_group(device)

    def by(group: dist.ProcessGroup) -> tuple[Attend, Callable[[Tensor], object]]:
        def exchanged(layout: str) -> Exchanged:
            apply: Callable[..., Tensor] = LibraryExchange.apply
            return lambda tensor: apply(tensor, layout, group)

        summed = functools.partial(dist.all_reduce, group=group)
        return blocks.ulysses(exchanged(THERE), exchanged(BACK)), summed

    def reshard(scatter_dim: int, gather_dim: int) -> Exchanged:
        return lambda tensor: ops.reshard(comm, tensor, scatter_dim=scatter_dim, gather_dim=gather_dim)

    def view(count: int) -> Exchanged:
        """Return a view of the shape behind an exchange: so many times the positions, or its inverse."""
        return lambda tensor: tensor.reshape(1, size.tokens // count, -1, size.size)

    ways: dict[str, tuple[Attend, Callable[[Tensor], object]]] = {
        "nccl": by(group),
        "group": by(own),
        "operators": (blocks.ulysses(reshard(2, 1), reshard(1, 2)), comm.all_reduce),
        "none": (blocks.ulysses(view(1), view(n)), lambda _: None),
    }
    tokens, grad = (tensor.chunk(n, 1)[comm.rank].contiguous() for tensor in (blocks.tokens, blocks.grad))
    steps = {
        way: functools.partial(blocks.step, attend, tokens, grad, summed) for way, (attend, summed) in ways.items()
    }
    exchanged = size.collectives(n, dtype.itemsize)
    return Prepared(
        steps=steps,
        tolerance=TOLERANCES[dtype],
        units=size.tokens,
        facts={
            "parameters": size.parameters,
            "layers": size.layers,
            "sent_bytes": sum(nbytes * calls for _, nbytes, calls in exchanged) * (n - 1) // n,
        },
    )


def predicted_us(size: AttentionSize, machine: Machine) -> Mapping[str, float]:
    """See :class:`EndToEndWorkload`.

    Before an exchange or behind it the library's and the group's tensors are permuted. ``reshard`` permutes nothing
    and copies its input to symmetric memory.
    """
    found = dict.fromkeys(("nccl", "group", "operators"), 0.0)
    for kind, nbytes, calls in size.collectives(machine.gpus, torch.bfloat16.itemsize):
        copy = moved_us(machine, 2 * nbytes)
        for way in found:
            exchange = (library_us if way == "nccl" else ours_us)(machine, kind, nbytes)
            found[way] += calls * (exchange + copy)
    return found


# Hidden size, heads and feed-forward width as in the published configurations: Llama 3.1 8B, and Wan 2.1 14B's
# self-attention and feed-forward part, with as many tokens as a video of 81 frames at 480 x 832 has.
WORKLOAD = EndToEndWorkload(
    "attention",
    "tokens",
    {
        "tiny": AttentionSize(2, 24, 32, 24, 12, 8, 48, is_causal=True),
        "llama-3.1-8b-16k": AttentionSize(4, 16384, 4096, 32, 8, 128, 14336, is_causal=True),
        "wan-2.1-14b": AttentionSize(2, 32760, 5120, 40, 40, 128, 13824, is_causal=False),
    },
    prepare,
    predicted_us,
)
