"""Decoder layers as published ones are, sharded by FSDP2: no embedding and no head, as in ``model/layer.py``.

B sequences, S tokens of each, H hidden, Q heads, K heads of keys and values, D = H / Q, F width of the gated layer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from sidelane_lab.model.layer import Transformer

EPSILON = 1e-5
ROTARY_BASE = 500_000.0


class Layer(nn.Module):
    """Attention with rotary positions, and a gated layer; both behind a norm. Seven matrices, as they are published."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        hidden, head = model.hidden, model.hidden // model.heads
        self.head = head
        self.norm, self.feed_norm = nn.RMSNorm(hidden, eps=EPSILON), nn.RMSNorm(hidden, eps=EPSILON)
        self.q = nn.Linear(hidden, model.heads * head, bias=False)
        self.k = nn.Linear(hidden, model.kv_heads * head, bias=False)
        self.v = nn.Linear(hidden, model.kv_heads * head, bias=False)
        self.out = nn.Linear(model.heads * head, hidden, bias=False)
        self.gate = nn.Linear(hidden, model.feed, bias=False)
        self.up = nn.Linear(hidden, model.feed, bias=False)
        self.down = nn.Linear(model.feed, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x``: [B, S, H]; ``cos``, ``sin``: [S, D]."""
        batch, seq, _ = x.shape
        normed = self.norm(x)
        q, k, v = (
            one(normed).view(batch, seq, -1, self.head).transpose(1, 2)  # [B, Q or K, S, D]
            for one in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
        normed = self.feed_norm(x)
        fed: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + fed


class Layers(nn.Module):
    """Layers one behind the other. The root of what FSDP2 shards, without a parameter of its own."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """As :meth:`Layer.forward`."""
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def sharded(model: Transformer, mesh: DeviceMesh, reduce_dtype: torch.dtype, device: torch.device, seed: int) -> Layers:
    """The layers on a rank: float32 shards of normal numbers, computed with in bfloat16.

    Args:
        model: sizes.
        mesh: of the ranks that share the parameters.
        reduce_dtype: in which gradients are added.
        device: of this rank.
        seed: of all ranks.
    """
    with torch.device("meta"):
        made = Layers(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for layer in made.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(made, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    made.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + dist.get_rank())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            assert isinstance(parameter, DTensor)
            mean, spread = (1.0, 0.1) if "norm" in name else (0.0, parameter.shape[-1] ** -0.5)
            parameter.to_local().normal_(mean, spread, generator=generator)
    return made


def rotary(seq: int, head: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the positions, [S, D] each, in bfloat16."""
    speeds = ROTARY_BASE ** (-torch.arange(0, head, 2, device=device) / head)
    angles = torch.arange(seq, device=device)[:, None] * speeds
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().bfloat16(), both.sin().bfloat16()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
