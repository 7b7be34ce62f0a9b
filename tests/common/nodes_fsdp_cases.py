"""Models whose shards are among all ranks of several nodes, with ``fsdp.enable`` and without."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import fsdp_cases
import straight_cases
import torch
import torch.distributed as dist
from fsdp_cases import CONFIG, OPTIONS, build, mesh_of, train
from straight_cases import STRAIGHT
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sidelane
from sidelane import Config, fsdp
from sidelane.integrations import ledger
from sidelane.integrations.nodes import topology


def on_nodes(group: dist.ProcessGroup, layout: Sequence[int], **changes: Any) -> Config:
    """Settings by which the ranks of ``group`` stand where ``layout`` says."""
    world = [9] * dist.get_world_size()
    for rank, node in zip(dist.get_process_group_ranks(group), layout, strict=True):
        world[rank] = node
    return dataclasses.replace(CONFIG, virtual_nodes=tuple(world), **changes)


def as_without(group: dist.ProcessGroup, layout: Sequence[int], names: Sequence[str]) -> dict[str, set[str]]:
    """Loss and gradients are those of Gloo; what went elsewhere, of each set of options."""
    told, mesh = {}, mesh_of(group)
    with mock.patch.multiple(topology, LEAST_BYTES=1, PIECE_BYTES=2 << 10):
        for name in names:
            ledger.reset()
            options = OPTIONS[name]
            twice = 2 if name == names[0] else 1
            wanted = list(train(build(mesh, **options), group, 2, accumulate=twice))
            model = build(mesh, **options)
            with fsdp.enable(model, config=on_nodes(group, layout)) as enabled:
                got = list(train(model, group, 2, accumulate=twice))
                told[name] = set(enabled.elsewhere)
                assert enabled.calls > 10 and enabled.memory().used > 0
            limits = {"rtol": 2e-2, "atol": 2e-3} if "mixed" in name or "16" in name else {"rtol": 1e-4, "atol": 1e-6}
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, **limits)
            whys = {row.why for row in sidelane.report().rows if row.where == "sidelane"}
            assert all(why.startswith("hierarchical: ") for why in whys), whys
            assert any(why.endswith(STRAIGHT) for why in whys), whys
    return told


def flat(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
    """Gradients are those of Gloo, which makes all calls; the handle has the reason."""
    mesh = mesh_of(group)
    wanted = list(train(build(mesh), group, 2))
    model = build(mesh)
    with fsdp.enable(model, config=on_nodes(group, layout)) as enabled:
        for one, other in zip(train(model, group, 2), wanted, strict=True):
            torch.testing.assert_close(one, other)
        why = "flat: 2 nodes of 2, 1 ranks; no steps for nodes of several sizes"
        assert set(enabled.elsewhere) == {f"{kind}: {why}" for kind in ("all_gather", "reduce_scatter")}
        assert enabled.calls == enabled.memory().used == 0


def memory(group: dist.ProcessGroup, layout: Sequence[int]) -> dict[bool, int]:
    """See ``straight_cases.buffers_go_round``."""
    return straight_cases.buffers_go_round(group, 4, on_nodes(group, layout))


def against_alone(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
    """Gradients are the mean of what each rank would have alone: for ranks that share GPUs, where NCCL refuses all."""
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), torch.get_default_device()
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(96, 255, bias=False), nn.GELU(), nn.Linear(255, 96))
    model = copy.deepcopy(alone)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(group))
    given = [torch.randn(5, 96, generator=torch.Generator(device).manual_seed(other)) for other in range(size)]
    with (
        mock.patch.multiple(topology, LEAST_BYTES=1, PIECE_BYTES=40 << 10),
        fsdp.enable(model, config=on_nodes(group, layout)) as enabled,
    ):
        for _ in range(3):
            model.zero_grad()
            model(given[rank]).square().sum().backward()
        assert not enabled.elsewhere and enabled.calls >= 12
        for each in given:
            alone(each).square().sum().div(size).backward()
        for sharded, whole in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(sharded.grad, DTensor) and whole.grad is not None
            wanted = whole.grad.split(-(-len(whole) // size))
            local = sharded.grad.to_local()
            torch.testing.assert_close(local, wanted[rank] if rank < len(wanted) else wanted[0][:0])


def asynchronous(
    group: dist.ProcessGroup, layout: Sequence[int], least_bytes: int, memory_bytes: int | None
) -> tuple[int, set[str]]:
    """Layers that are gathered ahead, and the same buffers from step to step; what is used, and what went flat."""
    mesh = mesh_of(group)
    plain, model = build(mesh), build(mesh)
    used = []
    with (
        mock.patch.object(topology, "LEAST_BYTES", least_bytes),
        fsdp.enable(model, config=on_nodes(group, layout, memory_bytes=memory_bytes)) as enabled,
    ):
        for step in range(4):
            model.zero_grad()  # of shards: those of gathered parameters are others
            works = [block.unshard(async_op=True) for block in model.blocks]  # type: ignore[operator]
            if step % 2:
                for work in works:
                    work.wait()
            tokens = torch.full((2, 5), step)
            plain.zero_grad()
            for each in (model, plain):
                each(tokens).square().mean().backward()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor())
            used.append(enabled.memory().used)
        assert used[1] == used[-1], used
        return used[-1], set(enabled.elsewhere)


def given_back(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
    """See ``fsdp_cases.given_back``."""
    with mock.patch.object(topology, "LEAST_BYTES", 1):
        fsdp_cases.given_back(group, on_nodes(group, layout))
