"""FSDP2 whose collectives Sidelane makes, on GPUs."""

from __future__ import annotations

import pytest
import torch
from device_pool import Ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="without Sidelane FSDP2 wants NCCL, a GPU a rank")


def test_loss_and_gradients_are_those_of_nccl(ranks: Ranks) -> None:
    for told in ranks.run("fsdp_device_cases.of", "as_without", 3, timeout_s=150):
        for name, (calls, reserved, elsewhere) in told.items():
            assert calls > 10 and reserved > 0 and elsewhere == {}, name


def test_prefetching(ranks: Ranks) -> None:
    ranks.run("fsdp_device_cases.of", "prefetched", 1)


def test_on_and_off(ranks: Ranks) -> None:
    ranks.run("fsdp_device_cases.of", "on_and_off")
