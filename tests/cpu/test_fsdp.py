"""FSDP2 whose collectives Sidelane makes, between CPU processes, against Gloo."""

from __future__ import annotations

import fsdp_cases
import pytest
from ranks import RankPool, crew


@pytest.mark.parametrize("n", [2, 3])
def test_loss_and_gradients_are_those_of_the_group(pool: RankPool, n: int) -> None:
    for told in pool.run(fsdp_cases.as_without, n, 2):
        for name, (calls, reserved, elsewhere) in told.items():
            assert calls > 10 and reserved > 0, name
            assert elsewhere == {}, name


@pytest.mark.parametrize("n", [2, 3])
def test_parameters_are_gathered_into_their_own_memory(pool: RankPool, n: int) -> None:
    for told in pool.run(fsdp_cases.straight_into_parameters, n):
        assert told["mixture"] == told["offloaded"] == told["torch 2.11"] == (0, {fsdp_cases.STRAIGHT})
        copies, why = told["dimension 1"]
        assert copies > 0 and why == {"copied out: a parameter is sharded along dimension 1"}
        copies, why = told["not asked for"]
        assert copies > 0 and why == {"copied out: not asked for"}


def test_two_buffers_do_for_all_layers(pool: RankPool) -> None:
    for told in pool.run(fsdp_cases.buffers_go_round, 2, 6):
        layer = 512 * 512 * 4
        assert told == {True: (2 + 2) * layer, False: (6 + 2) * layer}  # and two for gradients


def test_without_room_in_symmetric_memory_parameters_are_copied_out(pool: RankPool) -> None:
    for why in pool.run(fsdp_cases.without_room, 2):
        assert why == {fsdp_cases.STRAIGHT, "copied out: no symmetric memory is left for the parameters"}


def test_memory_that_is_in_use_is_given_back(pool: RankPool) -> None:
    pool.run(fsdp_cases.given_back_in_use, 2)


def test_another_torch_is_left_alone(pool: RankPool) -> None:
    for why in pool.run(fsdp_cases.guarded, 2):
        assert why == {"copied out: something else has replaced foreach_all_gather"}


def test_prefetching(pool: RankPool) -> None:
    assert len(set(pool.run(fsdp_cases.prefetched, 2, 1))) == 1


def test_in_two_dimensions() -> None:
    with crew(4) as ranks:
        for elsewhere in ranks.run(fsdp_cases.in_two_dimensions):
            assert elsewhere.keys() == {"all_gather: another group than that of the shards"}


def test_on_and_off(pool: RankPool) -> None:
    for told in pool.run(fsdp_cases.on_and_off, 2):
        assert "it is on for this model" in told[0]
        assert "no module that fully_shard was applied to" in told[1]


def test_a_rank_that_dies_is_named() -> None:
    with crew(3) as ranks:
        first, second, code = ranks.run(fsdp_cases.dies, None, dying=(2,))
    assert code == 3
    for text in (first, second):
        assert text.startswith("PeerError (2,)") and "died" in text, text
