"""What follows from isolated times: classes, the partition heuristic's choices and their reasons."""

from __future__ import annotations

import dataclasses

import pytest

from sidelane.c3.isolated_times import CollectiveTimes, GemmTimes, Isolated, Limit, PairTimes
from sidelane.c3.workload import Bound, C3Class, Gemm, parse_gemm, parse_workload
from sidelane.program.collective import Kind

CB1, MB1 = parse_gemm("cb1"), parse_gemm("mb1")
COMPUTE = GemmTimes(CB1, "split", 132, {0: 1400.0, 8: 1520.0, 64: 2700.0})  # 64 of 132 in proportion: x 1.94
MEMORY = GemmTimes(MB1, "split", 132, {0: 12000.0, 8: 11400.0, 64: 13000.0})
GATHER = CollectiveTimes(Kind.ALL_GATHER, 896 << 20, "nccl", {0: 2200.0, 8: 4400.0, 64: 2200.0})
SMALL = CollectiveTimes(Kind.ALL_GATHER, 1 << 10, "nccl", {0: 12.0})
MEDIUM = CollectiveTimes(Kind.ALL_GATHER, 1 << 20, "nccl", {0: 20.0})
BY_ENGINES = CollectiveTimes(Kind.ALL_GATHER, 896 << 20, "dma", {0: 1850.0})
MACHINE = Isolated(800.0, 4000.0, (COMPUTE, MEMORY), (GATHER, SMALL, MEDIUM, BY_ENGINES))


def test_what_limits_a_gemm() -> None:
    assert MACHINE.flops_per_byte == 200
    assert COMPUTE.sensitivity() == pytest.approx((2700 / 1400 - 1) / (132 / 68 - 1))
    assert MACHINE.bound(CB1) == (Bound.COMPUTE, "fewer units cost it 0.99 of their share")
    # Its least bytes would call it compute-bound.
    assert MB1.bound(MACHINE.flops_per_byte) is Bound.COMPUTE
    assert MACHINE.bound(MB1)[0] is Bound.MEMORY
    unknown = MACHINE.bound(Gemm(64, 64, 8192))
    assert unknown == (Bound.MEMORY, "32 operations a byte, the machine 200")
    assert GemmTimes(CB1, "split", 132, {0: 1.0}).sensitivity() is None


def test_classes() -> None:
    assert MACHINE.kind(parse_workload("cb1_896M")) is C3Class.C_LONG  # 1850 by engines over 1400
    assert MACHINE.kind(parse_workload("cb1_690M")) is C3Class.GC_EQUAL
    assert MACHINE.kind(parse_workload("mb1_896M")) is C3Class.G_LONG
    assert MACHINE.limit(Kind.ALL_GATHER, 2 << 20) is Limit.LATENCY
    assert MACHINE.limit(Kind.ALL_GATHER, 1 << 30) is Limit.BANDWIDTH
    for wrong in (
        lambda: MACHINE.limit(Kind.ALL_TO_ALL, 1),
        lambda: MACHINE.kind(parse_workload("cb1_1M", Kind.ALL_TO_ALL)),
    ):
        with pytest.raises(ValueError, match="allowed=all_gather"):
            wrong()


def test_units_for_a_collective_come_from_the_tables_that_were_measured() -> None:
    found = MACHINE.allocate(parse_workload("cb1_896M"))
    # 8 units: 2200 x 2, of those who run on units; 64: 1400 x 1.93 = 2700.
    assert (found.units, dict(found.expected_us)) == (64, {8: pytest.approx(4400), 64: pytest.approx(2700)})
    assert found.reason == (
        "64 units: GEMM 1400 x 1.93, collective 2200 x 1.00 = 2700 us expected, next 8 units 4400 us; compute-bound "
        "(fewer units cost it 0.99 of their share), as cb1 by split and nccl all_gather 896M"
    )
    assert MACHINE.allocate(parse_workload("mb1_896M")).units == 8, "11400 against 13000"


def test_a_gemm_that_was_not_measured_takes_the_table_of_its_bound() -> None:
    found = MACHINE.allocate(parse_workload("4096x4096x16384_896M"))
    assert "as cb1 by split" in found.reason
    assert MACHINE.gemm_us(Gemm(4096, 4096, 16384)) == pytest.approx(1400.0 / 2), "half of the operations, at its rate"
    flops = 2 * 4096 * 4096 * 16384
    without = Isolated(800.0, 4000.0, (GemmTimes(CB1, "split", 132, {0: 1400.0}),), (GATHER,))
    assert without.gemm_us(Gemm(4096, 4096, 16384)) == pytest.approx(flops / (800 * 0.7 * 1e6)), "by the roofline"


def test_a_collective_is_slower_beside_a_gemm() -> None:
    # Alone on 8 units 4400; the GEMM without them takes 1520. A pair that the GEMM decides says nothing.
    times = {("c3_rp", 8): 5280.0, ("c3_sp_rp", 8): 4840.0, ("c3_rp", 64): 9000.0, ("c3_target", 8): 9000.0}
    pair = PairTimes(CB1, Kind.ALL_GATHER, 896 << 20, "nccl", 2200.0, 3600.0, times)
    known = Isolated(800.0, 4000.0, (COMPUTE, MEMORY), (GATHER, BY_ENGINES), (pair,))
    assert known.slowed_beside(Kind.ALL_GATHER, "nccl") == pytest.approx(1.15)
    assert known.slowed_beside(Kind.ALL_TO_ALL, "nccl") == pytest.approx(1.15), (
        "of another collective, for want of its own"
    )
    assert known.slowed_beside(Kind.ALL_GATHER, "dma") == MACHINE.slowed_beside(Kind.ALL_GATHER, "nccl") == 1.0
    found = known.allocate(parse_workload("cb1_896M"))
    assert dict(found.expected_us)[8] == pytest.approx(1.15 * 4400)
    assert "collective 2530 x" in found.reason and "1.15 of its time beside a GEMM" in found.reason
    faster = dataclasses.replace(pair, times_us={("c3_rp", 8): 4000.0})
    assert dataclasses.replace(known, pairs=(faster,)).slowed_beside(Kind.ALL_GATHER, "nccl") == 1.0


def test_nothing_to_look_up() -> None:
    alone = Isolated(800.0, 4000.0, (COMPUTE,), (BY_ENGINES,))
    with pytest.raises(ValueError, match="no all_gather was measured with fewer units"):
        alone.allocate(parse_workload("cb1_896M"))
    with pytest.raises(ValueError, match="no GEMM was measured"):
        Isolated(800.0, 4000.0, (), (GATHER,)).allocate(parse_workload("cb1_896M"))


def test_units_to_spare_next_to_copy_engines() -> None:
    assert MACHINE.spare(MB1).units == 8
    assert "takes 0.95 of its time" in MACHINE.spare(MB1).reason
    assert MACHINE.spare(CB1).units == 0
    assert "compute-bound (fewer units cost it" in MACHINE.spare(CB1).reason
    assert Isolated(800.0, 4000.0, (COMPUTE,), ()).spare(Gemm(64, 64, 8192)).units == 0
