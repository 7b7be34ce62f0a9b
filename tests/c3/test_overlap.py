"""A computation and collectives at once, between CPU processes."""

from __future__ import annotations

import overlap_cases
import pytest
from marks import long
from ranks import RankPool


@pytest.mark.parametrize("n", [1, long(2), 3])
def test_every_strategy(pool: RankPool, n: int) -> None:
    pool.run(overlap_cases.every_strategy, n, n, 40)


def test_nano_batches_have_gradients(pool: RankPool) -> None:
    pool.run(overlap_cases.nano_batches_have_gradients, 2, 2)


def test_computing_waits_for_nobody(pool: RankPool) -> None:
    pool.run(overlap_cases.computing_waits_for_nobody, 3)


def test_the_fastest_is_learned_from_the_slowest_rank(pool: RankPool) -> None:
    times = {name: [10.0 + number, 20.0] for number, name in enumerate(overlap_cases.WAYS)}
    times["c3_sp"], times["priority"] = [12.0, 11.0], [1.0, 13.0]
    ways = list(overlap_cases.WAYS)
    for before, real, ran, text, times_us in pool.run(overlap_cases.learned, 2, times):
        assert before == "conccl: not decided yet"
        assert real == [2] * len(ways)
        assert ran == ways * 3 + ["conccl"] + ["c3_sp"] * 3
        assert text.startswith("c3_sp: c3_sp 12 us, priority 13 us, conccl 20 us")
        assert times_us["serial"] == 20.0


def test_what_takes_units_is_not_for_cpus(pool: RankPool) -> None:
    for told in pool.run(overlap_cases.units_on_a_cpu, 2):
        assert len(told) == 3
        assert all("value='c3_rp', allowed=conccl," in text and "no green contexts" in text for text in told[:2])
        assert "overlap: units (value=8" in told[2]


def test_auto_takes_engines_and_refuses_half_a_description(pool: RankPool) -> None:
    for told in pool.run(overlap_cases.chosen, 2):
        assert told[0] == "conccl: copy engines leave all units to the computation"
        assert len(told) == 11 and all("moves (value=" in text for text in told[1:6])
        assert all("strategy auto takes beside and moves" in told[number] for number in (6, 7, 8))
        assert "need strategy='auto'" in told[9] and "beside (value='compute'" in told[10]


def test_failures(pool: RankPool) -> None:
    for told in pool.run(overlap_cases.failures, 2):
        assert "strategy (value='fastest', allowed=conccl, c3_sp," in told[0]
        assert "on (value=(), allowed=a Communicator" in told[1]
        assert "compute (value=[" in told[2] and "async_op (value=True" in told[3]
        assert told[4].startswith("RuntimeError") and "size" in told[4]
        assert "median" in told[5] and told[6].startswith("AttributeError")
        assert told[10] == "ValueError: overlap: on (value=3, allowed=a Communicator)"
        assert "rounds (value=()" in told[7] and "rounds (value=" in told[8] and "'fastest'" in told[9]


def test_inside_of_compiled_code(pool: RankPool) -> None:
    pool.run(overlap_cases.compiled, 2, timeout_s=110)
