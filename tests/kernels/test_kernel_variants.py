"""Variants that are kernels, on CPUs: refused on every rank, before anything moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from sidelane import Communicator, Config


@on_ranks(2)
def test_kernels_are_refused(group: dist.ProcessGroup) -> None:
    with Communicator(group, device="cpu", config=Config(timeout_s=20)) as comm:
        n = comm.world_size
        whole, part = torch.full((4 * n,), -1.0), torch.ones(4)
        for call in (
            lambda: comm.all_gather(whole, part, variant="one_shot"),
            lambda: comm.all_to_all(whole, whole, variant="one_shot"),
            lambda: comm.reduce_scatter(part, whole, variant="one_shot"),
            lambda: comm.all_reduce(whole, variant="two_shot"),
        ):
            with pytest.raises(ValueError, match=r"variant \(value=.*allowed=auto, b2b"):
                call()
        assert whole.eq(-1).all() and part.eq(1).all()
        comm.all_reduce(part)  # the ranks are still in step
        assert part.eq(n).all()
