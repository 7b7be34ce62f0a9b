"""GPUs that reach each other through host memory: the same calls, on tensors that are never symmetric."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from made_up_gpus import OwnedMemory, made_up_gpus
from on_ranks import on_ranks

import sidelane
from sidelane import Communicator, Config, log, ops
from sidelane.choice.key import MachineKey
from sidelane.cli.info import look
from sidelane.collectives import backend_cuda
from sidelane.config import from_environment, override
from sidelane.errors import MismatchError, UnavailableError
from sidelane.machine import local, nvidia
from sidelane.machine.inventory import Accelerators, InstalledGpu, Inventory
from sidelane.machine.peers import forced
from sidelane.program.builders import build
from sidelane.program.collective import Kind, all_gather
from sidelane_lab.cli.explain import ExplainOptions
from sidelane_lab.explain.call import explain

HOST = Config(peers="host")
SIZES = (1, 100, 4099, (1 << 20) + 3)  # int32 of a rank's part


def inputs(comm: Communicator, numel: int) -> list[torch.Tensor]:
    """The input of every rank."""
    made = (torch.Generator().manual_seed(7 * rank + numel) for rank in range(comm.world_size))
    return [
        torch.randint(-9999, 9999, (comm.world_size * numel,), dtype=torch.int32, generator=each, device="cpu").to(
            comm.device
        )
        for each in made
    ]


def calls(
    comm: Communicator, numel: int, variant: str, given: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Calls of each kind: its name, its result and the right one."""
    n, rank = comm.world_size, comm.rank
    mine = given[rank]
    part = mine[:numel]
    comm.all_gather(output := mine.new_empty(n * numel), part, variant=variant)
    yield "all_gather", output, torch.cat([each[:numel] for each in given])
    comm.all_to_all(output := torch.empty_like(mine), mine, variant=variant)
    yield "all_to_all", output, torch.cat([each.chunk(n)[rank] for each in given])
    comm.reduce_scatter(output := torch.empty_like(part), mine, variant=variant)
    yield "reduce_scatter", output, torch.stack(given).sum(0, dtype=torch.int32).chunk(n)[rank]
    comm.all_reduce(output := mine.clone(), variant=variant)
    yield "all_reduce", output, torch.stack(given).sum(0, dtype=torch.int32)
    comm.broadcast(output := mine.clone(), root=n - 1, variant=variant)
    yield "broadcast", output, given[-1]


def check_calls(comm: Communicator, variants: tuple[str, ...]) -> None:
    for variant in variants:
        for numel in SIZES:
            for _ in range(3):  # planned, cached, repeated
                for name, found, right in calls(comm, numel, variant, inputs(comm, numel)):
                    comm.synchronize()
                    assert torch.equal(found, right), (name, variant, numel)


@on_ranks(2, 3, tried=("auto",))
@on_ranks(2, 3, tried=("b2b",))
@on_ranks(2, 3, tried=("chunked",))
@on_ranks(gpu=True, tried=("auto", "b2b", "chunked", "one_shot"))
def test_collectives_through_host_memory(group: dist.ProcessGroup, tried: tuple[str, ...]) -> None:
    """Between CPU ranks the setting changes nothing."""
    gpus = torch.cuda.is_available()
    with Communicator(group, config=HOST) as comm:
        check_calls(comm, tried)
        assert comm.reach(comm.empty(8)).how == ("staged" if gpus else "symmetric")
        if gpus:
            graph, given = torch.cuda.CUDAGraph(), inputs(comm, 4099)
            with torch.cuda.graph(graph):
                found = list(calls(comm, 4099, "auto", given))
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(one, right) for _, one, right in found) and len(given) == comm.world_size
            x, weight = torch.full((4, 64), 1.0 + comm.rank), torch.full((64,), 2.0)
            y, total = ops.all_reduce_rms_norm(comm, x, torch.ones(4, 64), weight)
            assert total.eq(1 + comm.world_size * (comm.world_size + 1) / 2).all()
            assert torch.allclose(y, torch.full_like(y, 2.0), atol=1e-4)


def on_made_up_gpus(group: dist.ProcessGroup) -> str:
    with (
        made_up_gpus() as driver,
        mock.patch.object(backend_cuda, "PinnedMemory", lambda exchange, *_: OwnedMemory(exchange, driver)),
        Communicator(group, config=HOST) as comm,
    ):
        assert comm.backend.peers.through_host and "host memory" in comm.profile.where
        check_calls(comm, ("b2b", "pcpy", "chunked"))
        tensor = comm.empty(1000)
        assert comm.location(tensor) is None and comm.reach(tensor).how == "staged"
        with sidelane.pool(comm, 1 << 20):
            comm.all_reduce(inside := torch.ones(1000, dtype=torch.int32), variant="b2b")
        comm.synchronize()
        assert inside.eq(comm.world_size).all()
        with pytest.raises(UnavailableError, match="through host memory"):
            comm.peers(tensor)
        program = build(all_gather([4000] * comm.world_size), "b2b")
        with pytest.raises(ValueError, match="symmetric"):
            comm.load(program, {"input": tensor, "output": comm.empty(1000 * comm.world_size)})
        return comm.profile.where


def test_the_path_of_gpus(pool: Any) -> None:
    assert len(set(pool.run(on_made_up_gpus, 2))) == 1


ACCESS = {
    "no pair": (3, set(), True, "no GPU reaches another one's memory"),
    "some pairs": (3, {(0, 1)}, True, "2 of 3 pairs of GPUs do not .*ranks 0 and 2, 1 and 2"),
    "all pairs": (3, {(0, 1), (0, 2), (1, 2)}, False, "all GPUs reach each other's memory"),
    "unseen": (2, None, False, "no rank sees the GPUs of 1 of 1 pairs"),
    "one GPU": (2, "shared", False, "all GPUs reach each other's memory"),
}
"""Ranks, pairs of them with peer access, whether host memory is taken, and the reason."""


def on_gpus_with(
    group: dist.ProcessGroup, pairs: object, peers: str, seen_by: int | None = None
) -> tuple[bool, str, str, str]:
    rank = group.rank()

    def peer_access(_: torch.device, ranks: int) -> tuple[str, dict[str, bool]]:
        if not isinstance(pairs, set) or seen_by not in (None, rank):
            return ("one" if pairs == "shared" else f"GPU {rank}"), {}
        reached = {f"GPU {peer}": (min(rank, peer), max(rank, peer)) in pairs for peer in range(ranks)}
        return f"GPU {rank}", reached

    with (
        made_up_gpus() as driver,
        mock.patch.object(backend_cuda, "PinnedMemory", lambda exchange, *_: OwnedMemory(exchange, driver)),
        mock.patch.object(backend_cuda, "peer_access", peer_access),
        mock.patch.object(log.calls, "warning") as warn,
        Communicator(group, config=Config(peers=peers)) as comm,
    ):
        check_calls(comm, ("b2b",))
        how = comm.reach(comm.empty(8)).how
        return comm.backend.peers.through_host, str(comm.backend.peers), how, str(warn.call_args_list)


@pytest.mark.parametrize("case", ACCESS)
def test_memory_is_chosen_by_what_gpus_reach(pool: Any, case: str) -> None:
    ranks, pairs, through_host, reason = ACCESS[case]
    found = pool.run(on_gpus_with, ranks, pairs, "auto")
    for taken, words, how, warned in found:
        assert taken is through_host and re.search(reason, words) and how == ("staged" if taken else "symmetric")
        assert ("host memory" in warned) == (case == "some pairs" and found.index((taken, words, how, warned)) == 0)


def test_what_one_rank_knows_counts_for_all(pool: Any) -> None:
    assert [taken for taken, *_ in pool.run(on_gpus_with, 2, set(), "auto", 1)] == [True, True]


@pytest.mark.parametrize(("peers", "through_host"), [("gpu", False), ("host", True)])
def test_a_setting_is_followed_whatever_gpus_reach(pool: Any, peers: str, through_host: bool) -> None:
    for taken, words, *_ in pool.run(on_gpus_with, 2, set(), peers):
        assert taken is through_host and f"Config.peers is '{peers}'" in words


def test_a_vendor_is_asked_about_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        NVML_P2P_CAPS_INDEX_READ = NVML_P2P_STATUS_OK = 0
        nvmlInit = nvmlShutdown = staticmethod(lambda: None)
        nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: int(uuid.removeprefix("GPU-")) + 1)
        nvmlDeviceGetCount = staticmethod(lambda: 4)
        nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index + 1)
        nvmlDeviceGetUUID = staticmethod(lambda handle: f"GPU-{handle - 1}".encode())

        @staticmethod
        def nvmlDeviceGetP2PStatus(own: int, peer: int, _: int) -> int:
            if peer == 4:
                raise OSError("not supported")
            return 0 if (own, peer) in ((1, 1), (1, 2)) else 5

    monkeypatch.setitem(sys.modules, "pynvml", Library)
    assert nvidia.peers_by_driver("0") == {"1": True, "2": False}  # the last one is not known
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia.peers_by_driver("0") == {}


def test_info_and_explain_name_the_memory_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(InstalledGpu(index, "NVIDIA GeForce RTX 4090", 24 << 30, 128, links=0) for index in range(2))
    without = ((True, False), (False, True))
    found = Accelerators("cuda", gpus, without, "580", "NCCL 2.28.9", True, symmetric_memory=False)
    machine = Inventory("a processor", 16, 64 << 30, 8 << 30, found)
    monkeypatch.setattr(local, "inspect", lambda: machine)
    monkeypatch.setattr(local, "device_type_and_count", lambda: ("cuda", 2))
    for reader in ("sidelane.cli.info", "sidelane_lab.explain.call"):
        monkeypatch.setattr(f"{reader}.key_here", lambda *_: MachineKey("cuda", gpus[0].name, 2, "none"))
    uses = dict(look(probe=False).uses)
    assert uses["between GPUs"] == "host memory (no GPU reaches another one's memory)"
    assert "host memory" in uses["memory"] and "host memory" in uses["choice"]
    explained = explain(ExplainOptions(kind=Kind.ALL_GATHER, nbytes=64 << 20))
    assert "through host memory (no GPU" in explained.where and "host memory" in explained.by.where
    assert not explained.agreement.call.symmetric
    with override(Config(peers="host")):
        assert "host memory" in explain(ExplainOptions(kind=Kind.ALL_REDUCE, nbytes=64, machine="h200x2")).by.where


def test_a_setting_has_the_name_under_which_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forced("host").reason == "Config.peers is 'host'"
    monkeypatch.setenv("SIDELANE_PEERS", "host")
    assert forced("host").reason == "SIDELANE_PEERS is 'host'" and forced("gpu").reason == "Config.peers is 'gpu'"
    assert from_environment({"SIDELANE_PEERS": ""}) == Config()
    with pytest.raises(ValueError, match="^SIDELANE_PEERS .value='hots', allowed=auto, gpu, host"):
        from_environment({"SIDELANE_PEERS": "hots"})


@on_ranks(2)
def test_settings_of_all_ranks_are_one(group: dist.ProcessGroup) -> None:
    with made_up_gpus(), pytest.raises(MismatchError, match="Config.peers"):
        Communicator(group, config=Config(peers=("gpu", "host")[dist.get_rank(group)]))
