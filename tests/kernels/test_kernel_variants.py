"""Variants that are kernels, on CPUs: refused on every rank, before anything moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane import Communicator, Config


def ask_for_kernels(group: dist.ProcessGroup) -> list[str]:
    texts = []
    with Communicator(group, device="cpu", config=Config(timeout_s=20)) as comm:
        n = comm.world_size
        whole, part = torch.full((4 * n,), -1.0), torch.ones(4)
        for call in (
            lambda: comm.all_gather(whole, part, variant="one_shot"),
            lambda: comm.all_to_all(whole, whole, variant="one_shot"),
            lambda: comm.reduce_scatter(part, whole, variant="one_shot"),
            lambda: comm.all_reduce(whole, variant="two_shot"),
        ):
            with pytest.raises(ValueError) as caught:
                call()
            texts.append(str(caught.value))
        assert whole.eq(-1).all() and part.eq(1).all()
        comm.all_reduce(part)  # the ranks are still in step
        assert part.eq(n).all()
    return texts


def test_kernels_are_refused(pool: RankPool) -> None:
    for texts in pool.run(ask_for_kernels, 2):
        assert all("variant (value=" in text and "allowed=auto, b2b" in text for text in texts), texts
