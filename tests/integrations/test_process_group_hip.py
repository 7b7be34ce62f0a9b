"""The process group and FSDP2 on AMD GPUs, that is on the stand-in for the HIP runtime."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import group_world
import pytest
import torch
import torch.distributed as dist
from fsdp_models import build, mesh_of
from group_world import world
from hip_world import hip_gpus
from ranks import crew

import sidelane
from sidelane import fsdp
from sidelane.collectives import backend_cuda, backend_hip
from sidelane.collectives.backend_hip import HipBackend
from sidelane.execute.hip import HipExecutor
from sidelane.session import making


def collectives(group: dist.ProcessGroup, folder: str) -> list[tuple[str, str]]:
    """Make calls of torch.distributed, repeated; return the operations that Sidelane made, with their variants."""
    with hip_gpus(), world(folder) as (rank, n):
        made = dist.group.WORLD.communicator("cpu")
        assert type(made.backend) is HipBackend and type(made.backend.executor) is HipExecutor
        for repeat in range(4):
            own = torch.arange(64.0) + 100 * rank + repeat
            every = [torch.arange(64.0) + 100 * other + repeat for other in range(n)]
            gathered, part = torch.empty(64 * n), torch.empty(64 // n)
            dist.all_gather_into_tensor(gathered, own)
            assert torch.equal(gathered, torch.cat(every))
            dist.reduce_scatter_tensor(part, own, op=dist.ReduceOp.AVG)
            assert torch.equal(part, (sum(every) / n).chunk(n)[rank])
            total = own.clone()
            dist.all_reduce(total, async_op=True).wait()
            assert torch.equal(total, sum(every))
            splits = [1 + (rank + other) % n for other in range(n)]
            sent, came = own[: sum(splits)].clone(), torch.empty(sum(splits))
            dist.all_to_all_single(came, sent, splits, splits)
            first = [sum(1 + (source + other) % n for other in range(rank)) for source in range(n)]
            expected = [every[source][first[source] : first[source] + splits[source]] for source in range(n)]
            assert torch.equal(came, torch.cat(expected))
            dist.broadcast(total, src=1)
            assert torch.equal(total, sum(every))
            dist.barrier()
        return [(row.operation, row.where) for row in sidelane.report().rows]


def fsdp_steps(group: dist.ProcessGroup, folder: str) -> list[str]:
    """Train a model by FSDP2 on Gloo, on a Sidelane group and with ``fsdp.enable``; losses and gradients are alike."""
    found, where = [], []
    for number, (backend, enabled) in enumerate([("gloo", False), ("sidelane", False), ("gloo", True)]):
        with hip_gpus(), world(f"{folder}-{number}", backend):
            model = build(mesh_of(dist.group.WORLD))
            with fsdp.enable(model) if enabled else contextlib.nullcontext() as handle:
                found.append(train(model))
                assert handle is None or (handle.calls and not handle.elsewhere)
            where.append(" ".join(sorted({row.where for row in sidelane.report().rows})))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other)
    return where


def train(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the loss of each step, and this rank's shards of the last gradients."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        tokens = torch.randint(0, 37, (4, 9), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad.to_local().clone() for parameter in model.parameters())]


def test_calls_and_training_run_on_the_stand_in(tmp_path: Path) -> None:
    with crew(2) as ranks:
        ranks.run(group_world.leave)
        for made in ranks.run(collectives, None, str(tmp_path / "calls")):
            assert {where for _, where in made} == {"sidelane"}
        for where in ranks.run(fsdp_steps, None, str(tmp_path / "fsdp")):
            assert where == ["", "sidelane", "sidelane"]


@pytest.mark.parametrize(("hip", "expected"), [("6.4.43484", "HipBackend"), (None, "CudaBackend")])
def test_a_communicator_on_a_gpu_is_of_the_vendor_that_torch_names(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, expected: str
) -> None:
    """The group and FSDP2 make their communicators by this function, with the device of their tensors."""
    made: list[tuple[str, torch.device]] = []

    def noted(name: str) -> Any:
        return lambda exchange, device, *_, **options: made.append((name, device))

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backend_hip, "HipBackend", noted("HipBackend"))
    monkeypatch.setattr(backend_cuda, "CudaBackend", noted("CudaBackend"))
    unused: Any = None
    device = torch.device("cuda", 1)
    making.make_backend(unused, device, unused, 1.0)
    assert made == [(expected, device)]
