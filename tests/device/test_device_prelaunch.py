"""Prelaunched calls on GPUs: the three triggers, what gets through while one is armed, captures, failures."""

from __future__ import annotations

import pytest
from device_pool import Pool, Ranks

CASES = "prelaunch_cases."


@pytest.mark.parametrize("case", ["sweep", "sweep_on_stream"])
@pytest.mark.parametrize(
    ("name", "args"), [("prelaunched", ()), ("prelaunched_rounds", (300,)), ("prelaunched_staging", ())]
)
def test_what_cpu_ranks_do(ranks: Ranks, case: str, name: str, args: tuple[int, ...]) -> None:
    ranks.run(f"communicator_cases.{case}", name, *args, timeout_s=120)


@pytest.mark.parametrize("variant", ["b2b", "pcpy"])
@pytest.mark.parametrize("numel", [1, 4097, 300_001])
@pytest.mark.parametrize("how", ["stream", "host", "kernel"])
def test_triggers(ranks: Ranks, how: str, numel: int, variant: str) -> None:
    times = ranks.run(CASES + "triggers", how, variant, numel, 40, timeout_s=120)
    print(f"{how} trigger, {variant}, {numel} elements: {max(times):.2f} us of the host (median, slowest rank)")


def test_the_kernel_that_produces_fires(ranks: Ranks) -> None:
    ranks.run(CASES + "kernel_that_produces", 30, timeout_s=120)


@pytest.mark.parametrize("case", ["fired_by_kernels", "on_the_default_stream"])
@pytest.mark.parametrize(("name", "args"), [("handles", (40,)), ("slices", (1, 60))])
def test_kernels_fire_as_on_cpus(ranks: Ranks, name: str, args: tuple[int, ...], case: str) -> None:
    ranks.run(CASES + case, name, *args, timeout_s=120)


def test_work_gets_through_while_armed(ranks: Ranks) -> None:
    ranks.run(CASES + "work_while_armed", timeout_s=120)


@pytest.mark.parametrize("case", ["on_default_stream", "closed_while_armed"])
def test_others(ranks: Ranks, case: str) -> None:
    ranks.run(CASES + case)


def test_captures_are_refused(ranks: Ranks) -> None:
    for texts in ranks.run(CASES + "in_a_capture"):
        assert len(texts) == 3
        assert all("graph" in text for text in texts)


@pytest.mark.parametrize("arms", [False, True])
def test_a_rank_that_never_fires(fresh_pool: type[Pool], arms: bool) -> None:
    results = fresh_pool().run(CASES + "absent", arms, timeout_s=60)
    for rank, (text, at_fault) in enumerate(results):
        if rank != 1:
            assert at_fault == (1,), text
            assert "rank 1" in text
            assert "all_gather" in text


def test_a_dead_peer(fresh_pool: type[Pool]) -> None:
    pool = fresh_pool()
    victim = len(pool.processes) - 1
    pool.begin(CASES + "wait_for_a_dead_peer", victim)
    answers = pool.finish(30.0, but=(victim,))
    assert len(answers) == victim
    assert all(f"({victim},)" in text and f"rank {victim} died" in text for text in answers), answers
