"""Heuristics for pairs: on the ConCCL paper's own cases, on measured times, and on files that are made up."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sidelane.choice.selection import Selection
from sidelane.program.collective import Kind
from sidelane_lab.pairs.heuristics import (
    KernelDemand,
    SlowedKernel,
    allocate,
    class_of,
    expected_comm_us,
    expected_gemm_us,
    expected_time_us,
    is_latency_bound,
    launch_order,
    slowed_beside,
    spare,
    units_for,
    units_to_spare,
)
from sidelane_lab.pairs.isolated import (
    EFFICIENCY,
    CollectiveTimes,
    GemmTimes,
    Isolated,
    PairTimes,
    isolated_times,
)
from sidelane_lab.pairs.workload import Bound, C3Class, Gemm, parse_gemm, parse_workload

# Figure 5 as its text has it: compute-bound GEMMs lose 17 to 27% with 32 to 64 units fewer, memory-bound ones nothing
# and are faster with 8 fewer; an all-gather needs 32 units, an all-to-all 64.
COMPUTE_BOUND = {8: 1.04, 16: 1.08, 32: 1.17, 64: 1.27, 128: 1.75}
MEMORY_BOUND = {8: 0.95, 16: 0.96, 32: 0.98, 64: 1.0, 128: 1.3}
ALL_GATHER = {8: 4.0, 16: 2.0, 32: 1.0, 64: 1.0, 128: 1.0}
ALL_TO_ALL = {8: 8.0, 16: 4.0, 32: 2.0, 64: 1.0, 128: 1.0}

CB1, MB1 = parse_gemm("cb1"), parse_gemm("mb1")
COMPUTE = GemmTimes(CB1, "split", 132, {0: 1400.0, 8: 1520.0, 64: 2700.0})  # 64 of 132 in proportion: x 1.94
MEMORY = GemmTimes(MB1, "split", 132, {0: 12000.0, 8: 11400.0, 64: 13000.0})
GATHER = CollectiveTimes(Kind.ALL_GATHER, 896 << 20, "nccl", {0: 2200.0, 8: 4400.0, 64: 2200.0})
SMALL = CollectiveTimes(Kind.ALL_GATHER, 1 << 10, "nccl", {0: 12.0})
MEDIUM = CollectiveTimes(Kind.ALL_GATHER, 1 << 20, "nccl", {0: 20.0})
BY_ENGINES = CollectiveTimes(Kind.ALL_GATHER, 896 << 20, "dma", {0: 1850.0})
MACHINE = Isolated(800.0, 4000.0, (COMPUTE, MEMORY), (GATHER, SMALL, MEDIUM, BY_ENGINES))


def beside(gemm_us: float, comm_us: float, *tables: Mapping[int, float]) -> Selection[tuple[int, ...]]:
    gemm, comm = tables
    return allocate(SlowedKernel("GEMM", gemm_us, gemm), [SlowedKernel("collective", comm_us, comm)])


def test_a_long_gemm_keeps_what_the_collective_can_do_without() -> None:
    # G-long, compute-bound: a quarter of its time for the collective, so that even 16 units are enough.
    found = beside(1000.0, 250.0, COMPUTE_BOUND, ALL_GATHER)
    assert found.candidate == (8,)
    assert beside(1000.0, 400.0, COMPUTE_BOUND, ALL_GATHER).candidate == (16,)


def test_a_long_collective_gets_what_it_needs_and_no_more() -> None:
    for table, needed in ((ALL_GATHER, 32), (ALL_TO_ALL, 64)):
        found = beside(500.0, 1000.0, COMPUTE_BOUND, table)
        assert found.candidate == (needed,) and dict(found.table)[needed,] == dict(found.table)[128,] == 1000.0
    # Memory-bound: nothing is lost by giving 64.
    assert beside(1000.0, 990.0, MEMORY_BOUND, ALL_TO_ALL).candidate == (64,)


def test_the_reason_names_the_next_best() -> None:
    found = beside(1000.0, 1000.0, COMPUTE_BOUND, ALL_GATHER)
    assert found.reason == (
        "32 units: GEMM 1000 x 1.17, collective 1000 x 1.00 = 1170 us expected, next 64 units 1270 us"
    )
    assert "next" not in beside(1.0, 1.0, {8: 1.0}, {8: 1.0}).reason
    for tables in (({}, {}), ({}, {8: 1.0}), ({8: 1.0}, {16: 1.0})):
        with pytest.raises(ValueError, match="allowed=units of collectives that the GEMM has lost"):
            beside(1.0, 1.0, *tables)
    with pytest.raises(ValueError, match="allocate: tables"):
        allocate(SlowedKernel("GEMM", 1.0, {8: 1.0}), [])


@pytest.mark.parametrize("seed", range(20))
def test_units_of_several_collectives_are_those_of_a_search_by_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    gemm = SlowedKernel("GEMM", draw.uniform(500, 2000), dict(zip(range(8, 130, 8), _rising(draw, 16), strict=True)))
    collectives = [
        SlowedKernel(
            f"collective {number}",
            draw.uniform(100, 2000),
            dict(zip((8, 16, 32, 64), reversed(list(_rising(draw, 4))), strict=True)),
        )
        for number in range(draw.randint(1, 4))
    ]
    found = allocate(gemm, collectives)
    best = (float("inf"), 0, ())
    for shares in itertools.product((8, 16, 32, 64), repeat=len(collectives)):
        if sum(shares) <= 128:
            times = [one.us * one.slowdown[units] for one, units in zip(collectives, shares, strict=True)]
            best = min(best, (max(gemm.us * gemm.slowdown[sum(shares)], *times), sum(shares), shares))
    assert dict(found.table)[found.candidate] <= best[0] * 1.001 and sum(found.candidate) <= best[1]
    assert len(found.candidate) == len(collectives)


def _rising(draw: random.Random, count: int) -> Iterator[float]:
    factor = 1.0
    for _ in range(count):
        factor += draw.uniform(0.0, 0.2)
        yield factor


def test_what_was_not_profiled_lies_between_its_neighbours() -> None:
    gemm = SlowedKernel("GEMM", 1000.0, {8: 1.04, 16: 1.08, 32: 1.2})
    assert gemm.after_loss(0) == 1.0 and gemm.after_loss(33) is None
    assert gemm.after_loss(24) == pytest.approx(1.14) and gemm.after_loss(4) == pytest.approx(1.02)
    both = allocate(gemm, [SlowedKernel(name, 500.0, {8: 2.1, 16: 1.1}) for name in ("all_gather", "all_to_all")])
    assert both.candidate == (8, 8), "1080 against more for the GEMM"
    assert both.reason.startswith(
        "8 and 8 units: GEMM 1000 x 1.08, all_gather 500 x 2.10, all_to_all 500 x 2.10 = 1080"
    )


def test_eight_units_are_taken_from_a_memory_bound_gemm_beside_copy_engines() -> None:
    found = spare(True, MEMORY_BOUND)
    assert (found.candidate, found.reason) == (8, "8 units fewer: a memory-bound GEMM takes 0.95 of its time")
    assert spare(False, MEMORY_BOUND).candidate == 0
    assert spare(True, {8: 1.0, 16: 1.01}).reason.endswith("gains nothing here by having fewer")


def test_rooflines_at_the_papers_efficiency() -> None:
    assert EFFICIENCY == 0.7
    assert expected_gemm_us(7e8, 1.0, 1.0, 1.0) == pytest.approx(1000.0)
    assert expected_gemm_us(1.0, 7e5, 1.0, 1.0) == pytest.approx(1000.0)
    assert expected_comm_us(7e5, 1.0) == pytest.approx(1000.0)


def test_classes() -> None:
    assert class_of(MACHINE, parse_workload("cb1_896M")) is C3Class.C_LONG  # 1850 by engines over 1400
    assert class_of(MACHINE, parse_workload("cb1_690M")) is C3Class.GC_EQUAL
    assert class_of(MACHINE, parse_workload("mb1_896M")) is C3Class.G_LONG
    assert is_latency_bound(MACHINE, Kind.ALL_GATHER, 2 << 20) and not is_latency_bound(
        MACHINE, Kind.ALL_GATHER, 1 << 30
    )
    for wrong in (
        lambda: is_latency_bound(MACHINE, Kind.ALL_TO_ALL, 1),
        lambda: class_of(MACHINE, parse_workload("cb1_1M", Kind.ALL_TO_ALL)),
    ):
        with pytest.raises(ValueError, match="allowed=all_gather"):
            wrong()


def test_units_for_a_collective_come_from_the_tables_that_were_measured() -> None:
    found = units_for(MACHINE, parse_workload("cb1_896M"))
    # 8 units: 2200 x 2, of those who run on units; 64: 1400 x 1.93 = 2700.
    assert (found.candidate, dict(found.table)) == ((64,), {(8,): pytest.approx(4400), (64,): pytest.approx(2700)})
    assert found.reason == (
        "64 units: GEMM 1400 x 1.93, collective 2200 x 1.00 = 2700 us expected, next 8 units 4400 us; compute-bound "
        "(fewer units cost it 0.99 of their share), as cb1 by split and nccl all_gather 896M"
    )
    assert units_for(MACHINE, parse_workload("mb1_896M")).candidate == (8,), "11400 against 13000"


def test_a_gemm_that_was_not_measured_takes_the_table_of_its_bound() -> None:
    found = units_for(MACHINE, parse_workload("4096x4096x16384_896M"))
    assert "as cb1 by split" in found.reason
    assert expected_time_us(MACHINE, Gemm(4096, 4096, 16384)) == pytest.approx(1400.0 / 2), (
        "half of the operations, at its rate"
    )
    flops = 2 * 4096 * 4096 * 16384
    without = Isolated(800.0, 4000.0, (GemmTimes(CB1, "split", 132, {0: 1400.0}),), (GATHER,))
    assert expected_time_us(without, Gemm(4096, 4096, 16384)) == pytest.approx(flops / (800 * 0.7 * 1e6)), (
        "by the roofline"
    )


def test_a_collective_is_slower_beside_a_gemm() -> None:
    # Alone on 8 units 4400; the GEMM without them takes 1520. A pair that the GEMM decides says nothing.
    times = {("c3_rp", 8): 5280.0, ("c3_sp_rp", 8): 4840.0, ("c3_rp", 64): 9000.0, ("c3_target", 8): 9000.0}
    together = PairTimes(CB1, Kind.ALL_GATHER, 896 << 20, "nccl", 2200.0, 3600.0, times)
    known = Isolated(800.0, 4000.0, (COMPUTE, MEMORY), (GATHER, BY_ENGINES), (together,))
    assert slowed_beside(known, Kind.ALL_GATHER, "nccl") == pytest.approx(1.15)
    assert slowed_beside(known, Kind.ALL_TO_ALL, "nccl") == pytest.approx(1.15), (
        "of another collective, for want of its own"
    )
    assert slowed_beside(known, Kind.ALL_GATHER, "dma") == slowed_beside(MACHINE, Kind.ALL_GATHER, "nccl") == 1.0
    found = units_for(known, parse_workload("cb1_896M"))
    assert dict(found.table)[8,] == pytest.approx(1.15 * 4400)
    assert "collective 2530 x" in found.reason and "1.15 of its time beside a GEMM" in found.reason
    faster = dataclasses.replace(together, times_us={("c3_rp", 8): 4000.0})
    assert slowed_beside(dataclasses.replace(known, pairs=(faster,)), Kind.ALL_GATHER, "nccl") == 1.0


def test_nothing_to_look_up() -> None:
    alone = Isolated(800.0, 4000.0, (COMPUTE,), (BY_ENGINES,))
    with pytest.raises(ValueError, match="no all_gather was measured with fewer units"):
        units_for(alone, parse_workload("cb1_896M"))
    with pytest.raises(ValueError, match="no GEMM was measured"):
        units_for(Isolated(800.0, 4000.0, (), (GATHER,)), parse_workload("cb1_896M"))


def test_units_to_spare_next_to_copy_engines() -> None:
    assert units_to_spare(MACHINE, MB1).candidate == 8
    assert "takes 0.95 of its time" in units_to_spare(MACHINE, MB1).reason
    assert units_to_spare(MACHINE, CB1).candidate == 0
    assert "compute-bound (fewer units cost it" in units_to_spare(MACHINE, CB1).reason
    assert units_to_spare(Isolated(800.0, 4000.0, (COMPUTE,), ()), Gemm(64, 64, 8192)).candidate == 0


@pytest.mark.parametrize(("collective", "workgroups"), [("all_gather", 64), ("all_to_all", 56)])
def test_a_collective_is_launched_before_a_gemm(collective: str, workgroups: int) -> None:
    kernels = [KernelDemand("gemm", 1024), KernelDemand(collective, workgroups)]
    for given in (kernels, kernels[::-1]):
        found = launch_order(given)
        assert [kernel.name for kernel in found.candidate] == [collective, "gemm"]
        assert found.reason == f"fewest workgroups first: {collective} ({workgroups}), gemm (1024)"


def test_more_kernels_and_what_supersedes() -> None:
    kernels = [
        KernelDemand("gemm", 4096),
        KernelDemand("all_to_all", 56),
        KernelDemand("norm", 512),
        KernelDemand("copies", 0),
    ]
    assert [one.name for one in launch_order(kernels).candidate] == ["copies", "all_to_all", "norm", "gemm"]
    urgent = launch_order([*kernels, KernelDemand("optimizer", 9999, priority=1)])
    assert [one.name for one in urgent.candidate] == ["optimizer", "copies", "all_to_all", "norm", "gemm"]
    assert urgent.reason.startswith("highest priority, then fewest workgroups first: optimizer (9999, priority 1), ")
    alike = [KernelDemand("first", 7), KernelDemand("second", 7)]
    assert launch_order(alike).candidate == tuple(alike)
    for wrong in ([], [KernelDemand("less than none", -1)]):
        with pytest.raises(ValueError, match="launch_order: kernels"):
            launch_order(wrong)


def test_what_limits_a_gemm() -> None:
    assert MACHINE.flops_per_byte == 200
    assert COMPUTE.sensitivity() == pytest.approx((2700 / 1400 - 1) / (132 / 68 - 1))
    assert MACHINE.bound(CB1) == (Bound.COMPUTE, "fewer units cost it 0.99 of their share")
    # Its least bytes would call it compute-bound.
    assert MB1.bound(MACHINE.flops_per_byte) is Bound.COMPUTE
    assert MACHINE.bound(MB1)[0] is Bound.MEMORY
    unknown = MACHINE.bound(Gemm(64, 64, 8192))
    assert unknown == (Bound.MEMORY, "32 operations a byte of the least possible; the machine 200")
    assert GemmTimes(CB1, "split", 132, {0: 1.0}).sensitivity() is None


@pytest.mark.parametrize("text", ["", "[]", '{"study": "c3", "rows": []}', '{"study": "isolated", "rows": [{}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c3.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"value='.*c3.json'"):
        isolated_times(path, "cpu", 2)
