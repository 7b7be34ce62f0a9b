"""A computation and collectives at once, on GPUs."""

from __future__ import annotations

import overlap_cases
from device_pool import Ranks

from sidelane.choice.key import key_here
from sidelane.choice.store import builtin_for


def test_every_strategy(ranks: Ranks) -> None:
    ranks.run("overlap_device_cases.of", "every_strategy", 1, 60)


def test_the_fastest_is_learned_from_the_slowest_rank(ranks: Ranks) -> None:
    times = {name: [10.0 + number] * ranks.world_size for number, name in enumerate(overlap_cases.WAYS)}
    times["conccl"][-1] = 50.0
    ways = list(overlap_cases.WAYS)
    for before, real, ran, text, _ in ranks.run("overlap_device_cases.of", "learned", times):
        assert before == "conccl: not decided yet" and real == [2] * len(ways)
        assert ran == ways * 3 + ["conccl"] + ["c3_sp"] * 3
        assert text.startswith("c3_sp: c3_sp 11 us")


def test_failures(ranks: Ranks) -> None:
    for told in ranks.run("overlap_device_cases.of", "failures"):
        assert len(told) == 11, told


def test_kernels_move_the_bytes(ranks: Ranks) -> None:
    for told in ranks.run("overlap_device_cases.by_kernels"):
        assert told == ["one_shot"], told


def test_in_graphs(ranks: Ranks) -> None:
    ranks.run("overlap_device_cases.in_graphs", 5)


def test_partitions(ranks: Ranks) -> None:
    for told in ranks.run("overlap_device_cases.partitions"):
        assert "c3_rp with 16 units" in told[0] and "c3_sp_rp with 8 units" in told[0]
        assert len(told) == 3, "a GPU has no such parts, and says so"


def test_choosing(ranks: Ranks) -> None:
    for told in ranks.run("overlap_device_cases.of", "chosen"):
        assert told[0].startswith("conccl: copy engines") and len(told) == 11, told


def test_a_large_reduction_gets_units_of_its_own(ranks: Ranks) -> None:
    known = builtin_for(key_here("cuda", ranks.world_size)) is not None
    for told in ranks.run("overlap_device_cases.large_reduction"):
        assert told[0] == told[1] and told[0].startswith("sm_rp with " if known else "conccl"), told
