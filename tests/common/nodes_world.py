"""What the ranks of a world on virtual nodes do whose default group is a Sidelane group."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cpu_calls import in_a_forked_copy
from group_world import copies, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import sidelane
from sidelane import config, fsdp
from sidelane.errors import CommunicatorClosedError, PeerError
from sidelane.integrations.fallback import make_other
from sidelane.integrations.nodes import communicator

WIDE = 256


def meshes(group: dist.ProcessGroup, folder: str) -> None:
    """HSDP on two nodes: shards within, copies between them; then shards among all, and new groups."""
    with _on((0, 0, 1, 1)), world(f"{folder}/meshes") as (rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
        _train(mesh, rank, size)
        rows = {(row.operation, row.ranks, row.where) for row in sidelane.report().rows}
        near, far = ((0, 1) if rank < 2 else (2, 3)), ((0, 2) if rank % 2 == 0 else (1, 3))
        assert ("reduce_scatter_tensor", near, "sidelane") in rows, rows
        assert ("all_reduce", far, "gloo") in rows, rows
        sidelane.integrations.ledger.reset()
        _train(mesh, rank, size, ours=True)
        rows = {(row.operation, row.ranks, row.where) for row in sidelane.report().rows}
        assert ("fsdp all_gather", near, "sidelane") in rows and ("all_reduce", far, "gloo") in rows, rows
        sidelane.integrations.ledger.reset()
        _train(init_device_mesh("cpu", (4,)), rank, size)
        found = {row.operation: row for row in sidelane.report().rows}
        assert found["reduce_scatter_tensor"].why.startswith("hierarchical: 2 nodes of 2, 2 ranks"), found
        sidelane.integrations.ledger.reset()
        _train(init_device_mesh("cpu", (4,)), rank, size, ours=True)
        found = {row.operation: row for row in sidelane.report().rows}
        assert found["fsdp reduce_scatter"].why.startswith("hierarchical: 2 nodes of 2, 2 ranks"), found
        assert found["fsdp all_gather"].why.endswith("; straight into the parameters"), found
        for ranks in ([3, 1, 0], [2, 3]):
            part = dist.new_group(ranks)
            if rank in ranks:
                tensor = torch.full((40_000,), float(rank))
                dist.all_reduce(tensor, group=part)
                assert tensor.eq(sum(ranks)).all()
                last = sidelane.report().last
                assert last is not None and last.where == ("gloo" if len(ranks) == 3 else "sidelane")
                assert last.why.startswith("flat: 2 nodes of 2, 1 ranks; no steps for nodes") == (len(ranks) == 3)
        split = dist.group.WORLD.split_group([0, 1, 2])
        if split is not None:
            tensor = torch.full((40_000,), float(rank))
            split.allreduce([tensor]).wait()
            assert tensor.eq(3).all()


def _on(layout: Sequence[int]) -> object:
    return config.override(dataclasses.replace(config.current(), virtual_nodes=tuple(layout), beside=config.COMPUTE))


def _train(mesh: object, rank: int, size: int, *, ours: bool = False) -> None:
    """The gradient is that of all ranks."""
    torch.manual_seed(0)
    net = fully_shard(torch.nn.Linear(WIDE, WIDE, bias=False), mesh=mesh)  # type: ignore[arg-type]
    assert isinstance(net, FSDPModule)
    enabled = fsdp.enable(net) if ours else None
    x = torch.arange(2.0 * WIDE).view(2, WIDE)
    net(x + rank).sum().backward()
    grad = net.weight.grad
    assert isinstance(grad, DTensor)
    everywhere = x.sum(0) + 2 * sum(range(size)) / size
    torch.testing.assert_close(grad.full_tensor(), everywhere.expand(WIDE, WIDE))
    if enabled is not None:
        enabled.disable()


def copied(group: dist.ProcessGroup, folder: str) -> None:
    """Forked copies change nothing for the ranks, which are on several nodes; FSDP2's lanes neither."""
    with _on((0, 0, 1, 1)), world(f"{folder}/copied", timeout_s=150) as (rank, size):
        tensor = torch.ones(40_000)
        copies(rank, size, tensor, f"{folder}/of copies")
        dist.all_reduce(tensor)
        last = sidelane.report().last
        assert last is not None and last.why.startswith("hierarchical"), last
        torch.manual_seed(0)
        net = fully_shard(torch.nn.Linear(WIDE, WIDE, bias=False))
        assert isinstance(net, FSDPModule)
        enabled = fsdp.enable(net)
        for _ in range(2):
            net(torch.ones(2, WIDE)).sum().backward()
            text = in_a_forked_copy(lambda: net(torch.ones(2, WIDE)))
            assert text.startswith("CommunicatorClosedError: communicator of several nodes: it was made in"), text
            assert in_a_forked_copy(enabled.disable) == "None"
        enabled.disable()


def late(group: dist.ProcessGroup, folder: str) -> None:
    """A rank does not come to a call: all others name it when the time-out has passed, those of the other node too."""
    with _on((0, 0, 1, 1)), world(f"{folder}/late", timeout_s=4) as (rank, size):
        tensor, store = torch.ones(100_000), dist.distributed_c10d._get_default_store()
        dist.all_reduce(tensor)
        others = [other for other in range(size) if other != 2]
        if rank == 2:
            store.wait([f"named by {other}" for other in others])
            return
        began = time.monotonic()
        with pytest.raises(PeerError, match=r"rank 2 \(rank 2 of the world, node 1\) did not answer") as caught:
            dist.all_reduce(tensor)
        assert caught.value.ranks == (2,)
        assert time.monotonic() - began < 20
        store.set(f"named by {rank}", "")


def dies(group: dist.ProcessGroup, folder: str) -> None:
    """A rank dies in the middle of calls, then a whole node; all others name them, long before the time-out."""
    with _on((0, 0, 1, 1, 2, 2)), world(f"{folder}/dies", timeout_s=40) as (rank, _):
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        without = dist.new_group([0, 1, 2, 3])
        if rank < 4:
            dist.all_reduce(tensor, group=without)
        if rank == 5:
            os._exit(7)
        _fails(None, (5,), "rank 5 .*died")
        store = dist.distributed_c10d._get_default_store()
        if rank < 4:
            dist.all_reduce(tensor, group=without)
            if rank > 1:
                os._exit(7)
            _fails(without, (2, 3), "rank 2 .*rank 3 .*did not answer")
        store.set(f"ended {rank}", "")
        store.wait([f"ended {other}" for other in (0, 1, 4)])


class Silent:
    """A group whose calls fail no more than streams of GPUs do: they end, or are let go when it is aborted."""

    def __init__(self, *arguments: object) -> None:
        self._group, self._aborted = make_other(*arguments), threading.Event()  # type: ignore[arg-type]

    def abort(self) -> None:
        self._aborted.set()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            work = getattr(self._group, name)(*arguments)

            def wait(timeout: object) -> bool:
                while not work.is_completed() and not self._aborted.wait(0.01):
                    pass
                return True

            return mock.Mock(wait=wait)

        return call


def stays_away(group: dist.ProcessGroup, folder: str) -> None:
    """A node does not come, and the network says nothing, as NCCL on streams: a thread of each other rank names it.

    Calls along rails would wait for ten minutes here. Calls that all make must not take the time-out.
    """
    streams = mock.patch.multiple(communicator, ON_STREAMS=("cpu", "cuda"), SLACK_S=600, make_other=Silent)
    with streams, _on((0, 0, 1, 1, 2, 2)), world(f"{folder}/away", timeout_s=4) as (rank, _):
        store = dist.distributed_c10d._get_default_store()
        for _ in range(3):
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            assert tensor.eq(6).all()
        others = [f"named by {other}" for other in range(4)]
        if rank > 3:
            store.wait(others)
            return
        with pytest.raises(PeerError, match=r"rank 4 \(.*node 2\) rank 5 \(.*node 2\) did not answer") as caught:
            dist.all_reduce(tensor)
        assert caught.value.ranks == (4, 5)
        with pytest.raises(CommunicatorClosedError, match="did not answer"):
            dist.all_reduce(tensor)
        store.set(others[rank], "")


def _fails(group: dist.ProcessGroup | None, ranks: tuple[int, ...], match: str) -> None:
    began = time.monotonic()
    with pytest.raises(PeerError, match=match) as caught:
        while True:
            dist.all_reduce(torch.ones(100_000), group=group)
    assert caught.value.ranks == ranks, str(caught.value)
    assert time.monotonic() - began < 15, time.monotonic() - began
