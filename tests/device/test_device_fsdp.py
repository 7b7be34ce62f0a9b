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


def test_parameters_are_gathered_into_their_own_memory(ranks: Ranks) -> None:
    for told in ranks.run("fsdp_device_cases.of_straight", "straight_into_parameters", timeout_s=150):
        assert told["mixture"] == told["offloaded"] == told["torch 2.11"] == (0, {"straight into the parameters"})
        copies, why = told["dimension 1"]
        assert copies > 0 and why == {"copied out: a parameter is sharded along dimension 1"}


def test_few_buffers_do_for_all_layers(ranks: Ranks) -> None:
    for told in ranks.run("fsdp_device_cases.of_straight", "buffers_go_round", 8):
        layer = 512 * 512 * 4  # the guide's: two of a gathered size or all that stay gathered, and two of gradients
        assert told[True] <= (2 + 2) * layer and told[False] <= (8 + 2) * layer, told


def test_memory_that_is_in_use_is_given_back(ranks: Ranks) -> None:
    ranks.run("fsdp_device_cases.of_straight", "given_back_in_use")


def test_prefetching(ranks: Ranks) -> None:
    ranks.run("fsdp_device_cases.of", "prefetched", 1)


def test_on_and_off(ranks: Ranks) -> None:
    ranks.run("fsdp_device_cases.of", "on_and_off")
