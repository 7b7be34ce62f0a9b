"""FSDP2 whose collectives Sidelane makes, on GPUs."""

from __future__ import annotations

import fsdp_cases
import fsdp_device_cases
import pytest
import torch
from device_pool import Ranks
from torch.distributed.fsdp import FSDPModule

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="without Sidelane FSDP2 wants NCCL, a GPU a rank")


def test_loss_and_gradients_are_those_of_nccl(ranks: Ranks) -> None:
    for told in ranks.run(fsdp_device_cases.of, "as_without", 3, timeout_s=150):
        for name, (calls, reserved, elsewhere) in told.items():
            assert calls > 10 and reserved > 0 and elsewhere == {}, name


def test_a_hundred_steps_are_those_of_nccl(ranks: Ranks) -> None:
    for calls, first, last in ranks.run(fsdp_device_cases.of, "curves", 100, timeout_s=120):
        assert calls >= 5 * 100 and last < 0.7 * first, "it learns"


def test_parameters_are_gathered_into_their_own_memory(ranks: Ranks) -> None:
    for told in ranks.run(fsdp_device_cases.of_straight, "straight_into_parameters", timeout_s=150):
        assert told["mixture"] == told["offloaded"] == told["torch 2.11"] == (0, {"straight into the parameters"})
        copies, why = told["dimension 1"]
        assert copies > 0 and why == {"copied out: a parameter is sharded along dimension 1"}


def test_few_buffers_do_for_all_layers(ranks: Ranks) -> None:
    for told in ranks.run(fsdp_device_cases.of_straight, "buffers_go_round", 8):
        layer = 512 * 512 * 4  # the guide's: two of a gathered size or all that stay gathered, and two of gradients
        assert told[True] <= (2 + 2) * layer and told[False] <= (8 + 2) * layer, told


def test_memory_that_is_in_use_is_given_back(ranks: Ranks) -> None:
    ranks.run(fsdp_device_cases.of_straight, "given_back_in_use")


def test_what_keeps_a_model_ends_as_without(ranks: Ranks) -> None:
    assert ranks.run(fsdp_device_cases.of, "kept", timeout_s=150) == [[]] * ranks.world_size


def test_prefetching(ranks: Ranks) -> None:
    ranks.run(fsdp_device_cases.of, "prefetched", 1)


def test_what_else_fsdp2_can_be_told(ranks: Ranks) -> None:
    if ranks.world_size != 2:
        pytest.skip("the operations of its reductions are those of two ranks")
    for told in ranks.run(fsdp_device_cases.of, "switched", timeout_s=120):
        wanted = set(fsdp_cases.SWITCHES)
        if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
            wanted -= {"a group for gradients"}
        assert set(told) == wanted
        assert told["kept after backward"] < told["sums"], "the second part of a step gathers nothing"


def test_a_factor_of_ones_own_is_multiplied_behind_a_sum(ranks: Ranks) -> None:
    assert all(not elsewhere for elsewhere in ranks.run(fsdp_device_cases.of, "by_a_factor"))


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="two times two ranks, a GPU each")
def test_copies_of_shards_and_smaller_groups_after_forward(ranks: Ranks) -> None:
    for elsewhere in ranks.run(fsdp_device_cases.in_two_dimensions, timeout_s=120):
        assert set(elsewhere) == {"all_gather: another group than that of the shards"}


def test_gathers_ahead_scatters_and_exchanges_of_the_users_together(ranks: Ranks) -> None:
    told = ranks.run(fsdp_device_cases.of, "beside_exchanges", 1, 20)
    assert len({order for order, _, _ in told}) == ranks.world_size, "they make them in the same order"
    for _, beside_exchange, _ in told:
        assert beside_exchange > 6


def test_on_and_off(ranks: Ranks) -> None:
    ranks.run(fsdp_device_cases.of, "on_and_off")
