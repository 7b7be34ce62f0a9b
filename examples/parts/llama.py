"""What the training examples share: a small decoder in the style of Llama, sizes, a clock."""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention with rotary positions, and a gated layer; both behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        hidden = 8 * dim // 3 // 16 * 16
        self.heads = heads
        self.norm, self.gated_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        gate, up = self.gate_up(self.gated_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, vocabulary: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.out = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Positions as rotations of pairs; ``x``: [..., positions, size of a head]."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def options(what: str | None, gpu: bool) -> argparse.Namespace:
    """Sizes from the command line; small ones between CPU processes."""
    parser = argparse.ArgumentParser(description=what)
    for name, on_gpu, on_cpu in (
        *(("dim", 4096, 64), ("layers", 8, 2), ("heads", 32, 4)),
        *(("length", 4096, 64), ("batch", 1, 4), ("steps", 20, 8), ("vocabulary", 8192, 512)),
    ):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu)
    parser.add_argument("--tokenizer", choices=("auto", "bpe", "bytes"), default="auto")
    return parser.parse_args()


def begin(backend: str = "") -> torch.device:
    """This process's device, and the process group."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # processes that share cores
    dist.init_process_group(backend or ("nccl" if gpu else "gloo"))
    return device


def rate_of(sizes: argparse.Namespace) -> float:
    return min(5e-3, 0.4 / float(sizes.dim))  # wide models want small steps


def train(
    model: nn.Module,
    text: torch.Tensor,
    sizes: argparse.Namespace,
    device: torch.device,
    synchronize: Callable[[], object],
    optimizer: Any = None,
) -> tuple[float, list[float]]:
    """Tokens a second of all ranks, without the first two steps; and the loss of every step, averaged over ranks."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=rate_of(sizes))
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses, began = [], 0.0
    for step in range(sizes.steps):
        if step == 2:
            synchronize()
            began = time.perf_counter()
        places = torch.randint(len(text) - sizes.length - 1, (sizes.batch,), generator=draw)
        rows = torch.stack([text[place : place + sizes.length + 1] for place in places]).to(device)
        loss = functional.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize()
    tokens = (sizes.steps - 2) * sizes.batch * sizes.length * dist.get_world_size()
    rate = tokens / (time.perf_counter() - began)
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return rate, (mean / dist.get_world_size()).tolist()
