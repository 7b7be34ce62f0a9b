"""A computation and collectives at once, on GPUs."""

from __future__ import annotations

from device_pool import Ranks

from sidelane.choice.key import key_here
from sidelane.choice.store import builtin_for


def test_every_strategy(ranks: Ranks) -> None:
    ranks.run("overlap_device_cases.of", "every_strategy", 1, 60)


def test_failures(ranks: Ranks) -> None:
    for told in ranks.run("overlap_device_cases.of", "failures"):
        assert len(told) == 8, told


def test_kernels_move_the_bytes(ranks: Ranks) -> None:
    for told in ranks.run("overlap_device_cases.by_kernels"):
        assert told == ["one_shot"], told


def test_in_graphs(ranks: Ranks) -> None:
    ranks.run("overlap_device_cases.in_graphs", 5)


def test_partitions(ranks: Ranks) -> None:
    for told in ranks.run("overlap_device_cases.partitions"):
        assert len(told) == 2, "a GPU has no such parts, and says so"


def test_choosing(ranks: Ranks) -> None:
    for told in ranks.run("overlap_device_cases.of", "chosen"):
        assert told[0].startswith("conccl: copy engines") and len(told) == 11, told


def test_a_large_reduction_gets_units_of_its_own(ranks: Ranks) -> None:
    known = builtin_for(key_here("cuda", ranks.world_size)) is not None
    for told in ranks.run("overlap_device_cases.large_reduction"):
        assert told[0] == told[1] and told[0].startswith("sm_rp with " if known else "conccl"), told
