"""DDP whose gradients Sidelane averages, on GPUs."""

from __future__ import annotations

import pytest
import torch
from device_pool import Ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="without Sidelane DDP wants NCCL, a GPU a rank")


def test_loss_and_gradients_are_those_of_nccl(ranks: Ranks) -> None:
    for told in ranks.run("fsdp_device_cases.of_ddp", "as_without", 5, timeout_s=150):
        for name, calls in told.items():
            assert calls >= (3 if name in ("one bucket", "frozen") else 5), name


def test_a_hundred_steps_are_those_of_nccl(ranks: Ranks) -> None:
    for calls, first, last in ranks.run("fsdp_device_cases.of_ddp", "curves", 100, timeout_s=120):
        assert calls >= 199 and last < 0.7 * first, "it learns"


def test_inputs_that_end_earlier_on_some_ranks(ranks: Ranks) -> None:
    for told in ranks.run("fsdp_device_cases.of_ddp", "joined", timeout_s=120):
        assert len(told) == 2


def test_on_and_off(ranks: Ranks) -> None:
    ranks.run("fsdp_device_cases.of_ddp", "on_and_off")
