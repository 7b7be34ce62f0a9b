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
