"""GPUs that reach each other through host memory: the same calls, on tensors that are never symmetric."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from made_up_gpus import OwnedMemory, made_up_gpus
from on_ranks import on_ranks

import sidelane
from sidelane import Communicator, Config, ops
from sidelane.collectives import backend_cuda
from sidelane.errors import MismatchError, UnavailableError
from sidelane.program.builders import build
from sidelane.program.collective import all_gather

HOST = Config(peers="host")
SIZES = (1, 100, 4099, (1 << 20) + 3)  # elements of a rank's part


def inputs(comm: Communicator, numel: int) -> list[torch.Tensor]:
    """The input of every rank."""
    made = (torch.Generator().manual_seed(7 * rank + numel) for rank in range(comm.world_size))
    return [
        torch.randint(-9999, 9999, (comm.world_size * numel,), dtype=torch.int32, generator=each, device="cpu").to(
            comm.device
        )
        for each in made
    ]


def calls(comm: Communicator, numel: int, variant: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Calls of each kind: its name, its result and the right one."""
    n, rank, given = comm.world_size, comm.rank, inputs(comm, numel)
    mine = given[rank]
    part = mine[:numel]
    comm.all_gather(output := comm.empty(n * numel, dtype=torch.int32), part, variant=variant)
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
                for name, found, right in calls(comm, numel, variant):
                    comm.synchronize()
                    assert torch.equal(found, right), (name, variant, numel)


@on_ranks(2, 3, gpu=True)
def test_collectives_through_host_memory(group: dist.ProcessGroup) -> None:
    """Between CPU ranks the setting changes nothing."""
    gpus = torch.cuda.is_available()
    with Communicator(group, config=HOST) as comm:
        check_calls(comm, ("auto", "b2b", *(("one_shot",) if gpus else ())))
        assert comm.reach(comm.empty(8)).how == ("staged" if gpus else "symmetric")
        if gpus:
            graph, given = torch.cuda.CUDAGraph(), inputs(comm, 4099)
            with torch.cuda.graph(graph):
                found = list(calls(comm, 4099, "auto"))
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(one, right) for _, one, right in found) and len(given) == comm.world_size
            x, weight = torch.randn(4, 64, device=comm.device), torch.ones(64, device=comm.device)
            y, total = ops.all_reduce_rms_norm(comm, x.bfloat16(), weight.bfloat16(), x.bfloat16())
            assert torch.isfinite(y.float()).all() and torch.isfinite(total.float()).all()


def on_made_up_gpus(group: dist.ProcessGroup) -> str:
    with (
        made_up_gpus() as driver,
        mock.patch.object(backend_cuda, "PinnedMemory", lambda exchange, _: OwnedMemory(exchange, driver)),
        Communicator(group, config=HOST) as comm,
    ):
        assert comm.backend.through_host and "host memory" in comm.profile.where
        check_calls(comm, ("b2b", "pcpy"))
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


def test_the_path_of_gpus(pool: object) -> None:
    assert len(set(pool.run(on_made_up_gpus, 2))) == 1  # type: ignore[attr-defined]


@on_ranks(2)
def test_settings_of_all_ranks_are_one(group: dist.ProcessGroup) -> None:
    with made_up_gpus(), pytest.raises(MismatchError, match="Config.peers"):
        Communicator(group, config=Config(peers=("gpu", "host")[dist.get_rank(group)]))
