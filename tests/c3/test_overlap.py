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


def test_what_takes_units_is_not_for_cpus(pool: RankPool) -> None:
    for told in pool.run(overlap_cases.units_on_a_cpu, 2):
        assert len(told) == 2 and "value='c3_rp', allowed=conccl," in told[0] and "no green contexts" in told[0]
        assert "overlap: units (value=8" in told[1]


def test_auto_takes_engines_and_refuses_half_a_description(pool: RankPool) -> None:
    for told in pool.run(overlap_cases.chosen, 2):
        assert told[0] == "conccl: copy engines leave all units to the computation"
        assert len(told) == 11 and all("moves (value=" in text for text in told[1:6])
        assert all("allowed=the first two with auto" in told[number] for number in (6, 7, 8))
        assert "allowed=with strategy='auto'" in told[9] and "beside (value='compute'" in told[10]


def test_failures(pool: RankPool) -> None:
    for told in pool.run(overlap_cases.failures, 2):
        assert "strategy (value='fastest', allowed=conccl, c3_sp," in told[0]
        assert "on (value=(), allowed=a Communicator" in told[1]
        assert "compute (value=[" in told[2] and "async_op (value=True" in told[3]
        assert told[4].startswith("RuntimeError") and "size" in told[4]
        assert "median" in told[5] and told[6].startswith("AttributeError")
        assert told[7] == "ValueError: overlap: on (value=3, allowed=a Communicator)"


def test_inside_of_compiled_code(pool: RankPool) -> None:
    pool.run(overlap_cases.compiled, 2, timeout_s=110)
