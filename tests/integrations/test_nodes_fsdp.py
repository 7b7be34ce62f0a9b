"""FSDP2 and meshes on several nodes: CPU ranks on virtual ones, Gloo between them; and two times two GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import nodes_world as scenarios
import pytest
import torch
import torch.distributed as dist
from device_context import Context
from fsdp_models import CONFIG, OPTIONS, STRAIGHT, build, by_nccl, let_go_late, mesh_of, on_nodes, train
from group_world import leave
from marks import long
from on_ranks import everyones, on_ranks
from ranks import crew
from torch.distributed.device_mesh import init_device_mesh

import sidelane
from sidelane import fsdp
from sidelane.integrations import ledger
from sidelane.integrations.nodes import topology


@on_ranks(4, layout=(0, 0, 1, 1), names=("mixed precision",))
@on_ranks(long(4), layout=(0, 1, 1, 0), names=("resharded",))
def test_shards_among_nodes(group: dist.ProcessGroup, layout: Sequence[int], names: Sequence[str]) -> None:
    """Loss and gradients are those of Gloo, of each set of options."""
    mesh = mesh_of(group)
    with mock.patch.multiple(topology, LEAST_BYTES=1, PIECE_BYTES=2 << 10):
        for name in names:
            ledger.reset()
            options = OPTIONS[name]
            twice = 2 if name == names[0] else 1
            wanted = list(train(build(mesh, **options), group, 2, accumulate=twice))
            model = build(mesh, **options)
            with fsdp.enable(model, config=on_nodes(group, layout)) as enabled:
                got = list(train(model, group, 2, accumulate=twice))
                assert not enabled.elsewhere and enabled.calls > 10 and enabled.memory().used > 0
            limits = {"rtol": 2e-2, "atol": 2e-3} if "mixed" in name or "16" in name else {"rtol": 1e-4, "atol": 1e-6}
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, **limits)
            whys = {row.why for row in sidelane.report().rows if row.where == "sidelane"}
            assert all(why.startswith("hierarchical: ") for why in whys), whys
            assert any(why.endswith(STRAIGHT) for why in whys), whys


@on_ranks(3, layout=(0, 1, 0))
def test_nodes_of_several_sizes_use_the_groups_own_backend(group: dist.ProcessGroup, layout: Sequence[int]) -> None:
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


@on_ranks(long(4), least_bytes=3500, memory_bytes=None)
@on_ranks(long(4), least_bytes=1, memory_bytes=1)
def test_shards_are_gathered_ahead(group: dist.ProcessGroup, least_bytes: int, memory_bytes: int | None) -> None:
    """Layers of 3456 bytes, and one of 3680, in the same buffers from step to step; without room for them, too."""
    layout, mesh = (0, 1, 0, 1), mesh_of(group)
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
        assert everyones(group, used[-1]) == used[-1:] * 4 and (used[-1] > 0) == (memory_bytes is None)
        why = "flat: 2 nodes of 2, 2 ranks; less than 3500: one call is sooner there than three"
        kinds = ("all_gather", "reduce_scatter") if least_bytes == 3500 else ()
        assert set(enabled.elsewhere) == {f"{kind}: {why}" for kind in kinds}


def in_two_dimensions(group: dist.ProcessGroup) -> dict[str, int]:
    """HSDP on two times two ranks, and a number for ``reshard_after_forward``."""
    device = torch.get_default_device()
    assert dist.get_world_size() == dist.get_world_size(group) == 4
    both = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    wanted = list(train(build(both), group, 3))
    model = build(both)
    with fsdp.enable(model, config=CONFIG) as enabled:
        got = list(train(model, group, 3))
        assert enabled.calls > 0 and not enabled.elsewhere
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    mesh = mesh_of(group)
    wanted = list(train(build(mesh, reshard_after_forward=2), group, 3))
    model = build(mesh, reshard_after_forward=2)
    with fsdp.enable(model, config=CONFIG) as enabled:
        if dist.get_rank(group) % 2:
            let_go_late(model)
        got = list(train(model, group, 3))
        elsewhere = dict(enabled.elsewhere)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    return elsewhere


def in_groups_of_nccl(context: Context, function: Callable[..., Any]) -> Any:
    """Execute a test where groups that FSDP2 makes, which take the default group's backend, have NCCL."""
    world = dist.distributed_c10d._get_default_group()
    known = dist.distributed_c10d._world.pg_map
    backend, store = known[world]
    known[world] = "cpu:gloo,cuda:nccl", store
    try:
        return by_nccl(context, function)
    finally:
        known[world] = backend, store


ON_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="two times two ranks, a GPU each")


@on_ranks(gpu=pytest.param(in_groups_of_nccl, marks=ON_FOUR), timeout_s=120)
def test_copies_of_shards_and_smaller_groups_after_forward(group: dist.ProcessGroup) -> None:
    assert in_two_dimensions(group).keys() == {"all_gather: another group than that of the shards"}


def test_copies_of_shards_and_smaller_groups() -> None:
    with crew(4) as ranks:
        for elsewhere in ranks.run(in_two_dimensions):
            assert elsewhere.keys() == {"all_gather: another group than that of the shards"}


def test_meshes_on_several_nodes(tmp_path: Path) -> None:
    with crew(4) as ranks:
        ranks.run(leave)
        ranks.run(scenarios.meshes, None, str(tmp_path))
        ranks.run(scenarios.late, None, str(tmp_path))
