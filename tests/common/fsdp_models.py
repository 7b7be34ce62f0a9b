"""Models that FSDP2 trains with Sidelane and without, and where: CPU processes, on one node or on several, and GPUs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from sidelane import Config
from sidelane.integrations import fsdp_calls

if TYPE_CHECKING:
    from device_context import Context

CONFIG = Config(timeout_s=60)
STRAIGHT = "straight into the parameters"


class Block(nn.Module):
    """Two layers and a norm, of sizes that nothing divides."""

    def __init__(self, width: int, *, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width, bias=False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, width)
        self.blocks = nn.ModuleList(Block(width, recompute=recompute) for _ in range(layers))
        self.out = nn.Linear(width, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def build(mesh: DeviceMesh, *, recompute: bool = False, **options: Any) -> Model:
    """The same model on every rank, with a shard of it on each."""
    torch.manual_seed(7)
    model = Model(11, 3, recompute=recompute)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: Model, group: dist.ProcessGroup, steps: int, *, accumulate: int = 1) -> Iterator[torch.Tensor]:
    """The loss of every step, then the gradients of the last one, whole."""
    rank, generator = dist.get_rank(group), torch.Generator(device=torch.get_default_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for part in range(accumulate):
            generator.manual_seed(1000 * step + 10 * part + rank)
            tokens = torch.randint(0, 37, (4, 9), generator=generator)
            model.set_requires_gradient_sync(part == accumulate - 1)  # type: ignore[attr-defined]
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1).flatten())
            loss.backward()
            yield loss.detach()
        if step + 1 < steps:
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad.full_tensor()


OPTIONS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bfloat16 sums": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "recomputed": {"recompute": True},
}


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, torch.get_default_device().type)


def collectives_of(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the objects that gather and scatter, for each group of parameters."""
    return [(params._all_gather_comm, params._reduce_scatter_comm) for params in fsdp_calls.param_groups(model)]


def let_go_late(model: Model) -> None:
    """Have other backends keep the tensors of their calls, as Gloo's threads do for a moment behind ``wait``."""
    kept: list[Any] = []

    def keeping(call: Any) -> Any:
        def keeps(*arguments: Any) -> Any:
            kept.append(arguments)
            return call(*arguments)

        return keeps

    for pair in collectives_of(model):
        for comm in pair:
            comm.own = keeping(comm.own)


def on_nodes(group: dist.ProcessGroup, layout: Sequence[int] | None, **changes: Any) -> Config:
    """Settings by which the ranks of ``group`` stand where ``layout`` says, or on one node."""
    if layout is None:
        return CONFIG
    world = [9] * dist.get_world_size()
    for rank, node in zip(dist.get_process_group_ranks(group), layout, strict=True):
        world[rank] = node
    return dataclasses.replace(CONFIG, virtual_nodes=tuple(world), **changes)


@functools.cache
def library() -> dist.ProcessGroup:
    """A group of NCCL, by which models are trained without Sidelane: that of the pool is Gloo's, of host memory."""
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    return group


def by_nccl(context: Context, function: Callable[..., Any]) -> Any:
    """Execute a test on this rank's GPU, with a group of NCCL."""
    torch.set_default_device(context.device)
    try:
        return function(library())
    finally:
        torch.set_default_device(None)


ON_NCCL = pytest.param(
    by_nccl,
    marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="without Sidelane FSDP2 wants NCCL, a GPU a rank"),
)
