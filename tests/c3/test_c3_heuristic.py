"""The runtime heuristics of the ConCCL paper, on the paper's own cases."""

from __future__ import annotations

import pytest

from sidelane.c3.heuristic import (
    EFFICIENCY,
    KernelDemand,
    allocate,
    expected_comm_us,
    expected_gemm_us,
    launch_order,
    spare,
)

# Figure 5 as its text has it: compute-bound GEMMs lose 17 to 27% with 32 to 64 units fewer, memory-bound ones nothing
# and are faster with 8 fewer; an all-gather needs 32 units, an all-to-all 64.
COMPUTE_BOUND = {8: 1.04, 16: 1.08, 32: 1.17, 64: 1.27, 128: 1.75}
MEMORY_BOUND = {8: 0.95, 16: 0.96, 32: 0.98, 64: 1.0, 128: 1.3}
ALL_GATHER = {8: 4.0, 16: 2.0, 32: 1.0, 64: 1.0, 128: 1.0}
ALL_TO_ALL = {8: 8.0, 16: 4.0, 32: 2.0, 64: 1.0, 128: 1.0}


@pytest.mark.parametrize(("collective", "workgroups"), [("all_gather", 64), ("all_to_all", 56)])
def test_a_collective_is_launched_before_a_gemm(collective: str, workgroups: int) -> None:
    kernels = [KernelDemand("gemm", 1024), KernelDemand(collective, workgroups)]
    for given in (kernels, kernels[::-1]):
        found = launch_order(given)
        assert [kernel.name for kernel in found.kernels] == [collective, "gemm"]
        assert found.reason == f"fewest workgroups first: {collective} ({workgroups}), gemm (1024)"


def test_more_kernels_and_what_supersedes() -> None:
    kernels = [
        KernelDemand("gemm", 4096),
        KernelDemand("all_to_all", 56),
        KernelDemand("norm", 512),
        KernelDemand("copies", 0),
    ]
    assert [one.name for one in launch_order(kernels).kernels] == ["copies", "all_to_all", "norm", "gemm"]
    urgent = launch_order([*kernels, KernelDemand("optimizer", 9999, priority=1)])
    assert [one.name for one in urgent.kernels] == ["optimizer", "copies", "all_to_all", "norm", "gemm"]
    assert urgent.reason.startswith("highest priority, then fewest workgroups first: optimizer (9999, priority 1), ")
    alike = [KernelDemand("first", 7), KernelDemand("second", 7)]
    assert launch_order(alike).kernels == tuple(alike)
    for wrong in ([], [KernelDemand("less than none", -1)]):
        with pytest.raises(ValueError, match="launch_order: kernels"):
            launch_order(wrong)


def test_a_long_gemm_keeps_what_the_collective_can_do_without() -> None:
    # G-long, compute-bound: a quarter of its time for the collective, so that even 16 units are enough.
    found = allocate(1000.0, 250.0, COMPUTE_BOUND, ALL_GATHER)
    assert (found.units, found.equal) == (8, (8,))
    assert allocate(1000.0, 400.0, COMPUTE_BOUND, ALL_GATHER).units == 16


def test_a_long_collective_gets_what_it_needs_and_no_more() -> None:
    for table, needed in ((ALL_GATHER, 32), (ALL_TO_ALL, 64)):
        found = allocate(500.0, 1000.0, COMPUTE_BOUND, table)
        assert found.units == needed == min(found.equal)
        assert dict(found.expected_us)[needed] == 1000.0
    # Memory-bound: nothing is lost by giving 64.
    assert allocate(1000.0, 990.0, MEMORY_BOUND, ALL_TO_ALL).units == 64


def test_the_reason_names_the_next_best() -> None:
    found = allocate(1000.0, 1000.0, COMPUTE_BOUND, ALL_GATHER)
    assert found.reason == (
        "32 units: GEMM 1000 x 1.17, collective 1000 x 1.00 = 1170 us expected, next 64 units 1270 us"
    )
    assert "next" not in allocate(1.0, 1.0, {8: 1.0}, {8: 1.0}).reason
    for tables in (({}, {}), ({8: 1.0}, {16: 1.0})):
        with pytest.raises(ValueError, match="tables must be of the same units"):
            allocate(1.0, 1.0, *tables)


def test_eight_units_are_taken_from_a_memory_bound_gemm_beside_copy_engines() -> None:
    found = spare(True, MEMORY_BOUND)
    assert (found.units, found.reason) == (8, "8 units fewer: a memory-bound GEMM takes 0.95 of its time")
    assert spare(False, MEMORY_BOUND).units == 0
    assert spare(True, {8: 1.0, 16: 1.01}).reason.endswith("gains nothing here by having fewer")


def test_rooflines_at_the_papers_efficiency() -> None:
    assert EFFICIENCY == 0.7
    assert expected_gemm_us(7e8, 1.0, 1.0, 1.0) == pytest.approx(1000.0)
    assert expected_gemm_us(1.0, 7e5, 1.0, 1.0) == pytest.approx(1000.0)
    assert expected_comm_us(7e5, 1.0) == pytest.approx(1000.0)
