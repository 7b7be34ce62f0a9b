"""DDP and FSDP2 where host memory is between the ranks: losses are those of Gloo, and no tensor is symmetric."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import CONFIG, build, mesh_of, train
from on_ranks import on_ranks
from process_groups import sidelane_group
from torch import nn

import sidelane
from sidelane import fsdp
from sidelane.collectives.backend_cpu import CpuBackend
from sidelane.integrations import ledger
from sidelane.machine.peers import PeerMemory


def host_memory() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(CpuBackend, "peers", PeerMemory(True, "made up"))


def losses_of_ddp(group: dist.ProcessGroup) -> Iterator[float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 300), nn.GELU(), nn.Linear(300, 8))
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(6):
        torch.manual_seed(10 * step + group.rank())
        loss = ddp(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@on_ranks(2, 3)
def test_ddp_has_the_losses_of_gloo(group: dist.ProcessGroup) -> None:
    expected = list(losses_of_ddp(group))
    ledger.reset()
    with host_memory(), sidelane_group(group) as ours:
        assert list(losses_of_ddp(ours)) == pytest.approx(expected, rel=1e-5)
        report = sidelane.report()
        assert any(row.operation == "all_reduce" and row.where == "sidelane" for row in report.rows)
        assert "between ranks: host memory (made up)" in str(report)


@on_ranks(2)
def test_fsdp2_copies_out_and_has_the_losses_of_gloo(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group)
    expected = list(train(build(mesh), group, 3))
    ledger.reset()
    with host_memory():
        model = build(mesh)
        with fsdp.enable(model, config=CONFIG) as enabled:
            found = list(train(model, group, 3))
            assert enabled.calls > 10 and not enabled.elsewhere and not enabled.memory().reserved
        whys = {row.why for row in sidelane.report().rows if row.operation == "fsdp all_gather"}
        assert whys and all("copied out: between GPUs is host memory (made up)" in why for why in whys)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)  # two values have one sum
