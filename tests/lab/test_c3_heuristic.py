"""The order of launches of the ConCCL paper's runtime, and what limits a GEMM, by its isolated times."""

from __future__ import annotations

import pytest

from sidelane_lab.pairs.isolated_times import GemmTimes, Isolated
from sidelane_lab.pairs.launch_order import KernelDemand, launch_order
from sidelane_lab.pairs.workload import Bound, Gemm, parse_gemm

CB1, MB1 = parse_gemm("cb1"), parse_gemm("mb1")
COMPUTE = GemmTimes(CB1, "split", 132, {0: 1400.0, 8: 1520.0, 64: 2700.0})  # 64 of 132 in proportion: x 1.94
MEMORY = GemmTimes(MB1, "split", 132, {0: 12000.0, 8: 11400.0, 64: 13000.0})
MACHINE = Isolated(800.0, 4000.0, (COMPUTE, MEMORY), ())


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
