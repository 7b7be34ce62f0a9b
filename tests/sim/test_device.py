"""Kernels on compute units: waves, launch order, partitions, priority and interference, each worked out by hand."""

from __future__ import annotations

import random

import pytest

from sidelane_lab.machines.load import named
from sidelane_lab.model.device import Gang, Tiled, run_device

QUIET = named("mi300x8").with_value("interference.memory", 0.0).with_value("interference.late_share", 0.0)
UNITS = int(QUIET.gpu.units)


def tiled(workgroups, name="gemm", us=100.0, traffic=0.0, **more):
    return Tiled(name, workgroups, us, traffic, **more)


def gang(us=300.0, units=64, need=32.0, **more):
    return Gang("comm", us, 0.0, units, need, **more)


@pytest.mark.parametrize(("workgroups", "waves"), [(1, 1), (UNITS, 1), (UNITS + 1, 2), (4 * UNITS, 4)])
def test_workgroups_run_in_waves(workgroups, waves):
    assert run_device(QUIET, [tiled(workgroups)]).time_us == pytest.approx(100.0 * waves)


def test_runs_are_remembered_by_what_they_depend_on():
    kernels = [gang(us=301.0), tiled(4 * UNITS, traffic=1.5e6)]
    run, other = (run_device(one, kernels) for one in (QUIET, QUIET.with_value("dma.copy_us", 77.0)))
    changed = [QUIET.with_value(name, 0.5) for name in ("matmul.memory_efficiency", "interference.kernels")]
    changed.append(QUIET.with_value("gpu.units", UNITS - 8))
    assert other is run and all(run_device(one, kernels).time_us != run.time_us for one in changed)


def test_losing_64_units_costs_27_percent_of_many_waves():
    whole = run_device(QUIET, [tiled(240 * 304)]).time_us
    part = run_device(QUIET, [tiled(240 * 304, limit=240)]).time_us
    assert part / whole == pytest.approx(304 / 240)


def test_launched_first_a_gemm_starves_the_collective():
    run = run_device(QUIET, [tiled(4 * UNITS), gang()])
    assert run.began_us["comm"] == pytest.approx(400.0) and run.time_us == pytest.approx(700.0)


def test_launched_first_the_collective_runs_at_full_speed_and_its_units_come_back():
    run = run_device(QUIET, [gang(), tiled(4 * UNITS)])
    assert run.ended_us["comm"] == pytest.approx(300.0)
    # 240 a wave for three waves leave 496 workgroups: 304 more, then 192.
    assert run.time_us == pytest.approx(500.0)


def test_priority_is_launch_order_for_what_waits():
    behind = run_device(QUIET, [tiled(4 * UNITS), gang(priority=1)])
    assert behind.began_us["comm"] == 0.0


def test_a_late_kernel_gets_its_share_at_the_first_wave():
    machine = QUIET.with_value("interference.late_share", 0.25)
    run = run_device(machine, [tiled(4 * UNITS), gang()])
    assert run.began_us["comm"] == pytest.approx(100.0)
    # 16 of the 32 units that it needs: half speed until the GEMM has placed its last workgroup.
    assert run.ended_us["comm"] < 700.0


def test_a_partition_holds_for_the_whole_run():
    run = run_device(QUIET, [tiled(4 * UNITS, limit=UNITS - 32), gang(units=32, reserved=True)])
    assert run.began_us["comm"] == 0.0 and run.ended_us["comm"] == pytest.approx(300.0)
    assert run.time_us == pytest.approx(500.0)  # 1216 in waves of 272


@pytest.mark.parametrize("order", [1, -1])
def test_a_kernel_whose_workgroups_count_on_each_other_runs_beside_no_other(order):
    kernels = [tiled(UNITS, together=True), gang()][::order]
    assert run_device(QUIET, kernels).time_us == pytest.approx(400.0)
    # Without that, most of it runs beside the collective, and the rest behind its own first part.
    kernels = [tiled(UNITS), gang()][::order]
    assert run_device(QUIET, kernels).time_us == pytest.approx(400.0 if order > 0 else 300.0)


def test_a_kernel_whose_workgroups_count_on_each_other_runs_in_its_partition():
    run = run_device(QUIET, [tiled(UNITS - 32, together=True, limit=UNITS - 32), gang(units=32, reserved=True)])
    assert run.time_us == pytest.approx(300.0)


def test_a_collective_with_half_its_units_takes_twice_as_long():
    full = run_device(QUIET, [gang(units=64)]).time_us
    assert run_device(QUIET, [gang(units=16, us=2 * full)]).time_us == pytest.approx(2 * full)


def test_memory_that_is_full_is_shared():
    bound = tiled(UNITS, traffic=1e9)  # memory is its limit, far beyond 100 us
    alone = run_device(QUIET, [bound]).time_us
    reach = QUIET.gpu.memory_gbps * QUIET.matmul.memory_efficiency * 1e3
    assert alone == pytest.approx(UNITS * 1e9 / reach)
    beside = run_device(QUIET, [bound, Gang("comm", 2 * alone, 0.3 * QUIET.gpu.memory_gbps)])
    assert beside.began_us["comm"] == 0.0, "DMA engines need no unit"
    left = 1 - 0.3 / QUIET.matmul.memory_efficiency  # an engine that asks for less than an equal share gets it
    assert beside.ended_us == pytest.approx({"gemm": alone / left, "comm": 2 * alone})
    greedy = Gang("comm", 2 * alone, 2.0 * QUIET.gpu.memory_gbps)
    assert run_device(QUIET, [bound, greedy]).ended_us["gemm"] == pytest.approx(2 * alone), "half for each"


def test_operations_wait_for_bytes_as_far_as_the_kernel_says():
    reach = QUIET.gpu.memory_gbps * QUIET.matmul.memory_efficiency * 1e3
    blended = tiled(UNITS, traffic=75.0 * reach / UNITS, blend=1.0)
    assert run_device(QUIET, [blended]).time_us == pytest.approx(125.0)
    comm = Gang("comm", 1000.0, 0.25 * reach / 1e3)  # leaves three quarters of the memory
    assert run_device(QUIET, [blended, comm]).ended_us["gemm"] == pytest.approx(100.0 * 2**0.5)


def test_clocks_slow_operations_and_not_bytes():
    slow, gang = QUIET.with_value("interference.copies", 0.25), Gang("comm", 1e4, 1.0)
    assert run_device(slow, [tiled(UNITS), gang]).ended_us["gemm"] == pytest.approx(125.0)
    kernels = [tiled(UNITS, us=0.0, traffic=1e9), gang]
    assert run_device(slow, kernels).ended_us == pytest.approx(run_device(QUIET, kernels).ended_us)


def test_memory_that_is_not_full_interferes_softly_and_with_both():
    machine = QUIET.with_value("interference.memory", 2.0)
    peak = float(machine.gpu.memory_gbps)
    traffic = 0.2 * peak * 1e3 * 100.0 / UNITS  # 20% of the peak
    run = run_device(machine, [tiled(UNITS, traffic=traffic), Gang("comm", 1000.0, 0.1 * peak)])
    slow = 1 + 2.0 * 0.2 * 0.1
    assert run.ended_us["gemm"] == pytest.approx(100.0 * slow)
    assert run.time_us == pytest.approx(1000.0 + 100.0 * (slow - 1))


def test_fewer_units_save_traffic_only_where_there_is_a_gain():
    bound = {"traffic": 1e9, "limit": UNITS - 8}
    plain = run_device(QUIET, [tiled(10 * UNITS, **bound)]).time_us
    better = run_device(QUIET, [tiled(10 * UNITS, cache_gain=0.03, **bound)]).time_us
    assert better == pytest.approx(0.97 * plain, rel=0.01)


def test_kernels_wait_for_what_they_follow():
    run = run_device(QUIET, [tiled(UNITS, "a"), tiled(UNITS, "b", after=("a",)), gang(after=("b",))])
    assert (run.began_us["b"], run.began_us["comm"]) == pytest.approx((100.0, 200.0))


def test_the_timeline_covers_the_run():
    run = run_device(QUIET, [tiled(4 * UNITS), gang()], record=True)
    assert max(interval.end_us for interval in run.timeline) == pytest.approx(run.time_us)
    assert {interval.lane for interval in run.timeline} == {"gemm", "comm"}
    on_engines = run_device(QUIET, [Gang("comm", 10.0, 0.0)], record=True).timeline
    assert [(each.lane, each.label, each.end_us) for each in on_engines] == [("comm", "on DMA engines", 10.0)]


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ([tiled(1), tiled(1)], "unique"),
        ([tiled(1, after=("nobody",))], "nobody"),
        ([tiled(1, "a", after=("b",)), tiled(1, "b", after=("a",))], "nothing can start"),
        ([tiled(1, limit=0)], "no unit"),
    ],
)
def test_runs_that_can_not_be_are_refused(kernels, message):
    with pytest.raises(ValueError, match=message):
        run_device(QUIET, kernels)


@pytest.mark.parametrize("seed", range(40))
def test_waves_that_are_alike_are_passed_over_to_the_last_bit(seed: int) -> None:
    """A run that keeps its timeline takes each wave by itself."""
    draws = random.Random(seed)
    kernels: list[Tiled | Gang] = []
    for number in range(draws.randint(1, 6)):
        after = tuple(kernel.name for kernel in kernels if draws.random() < 0.3)
        name, priority = f"k{number}", draws.choice((0, 0, 1))
        if draws.random() < 0.6:
            workgroups = draws.choice((1, 100, 304, 305, 3000, 9120))
            limit = draws.choice((None, None, 100, 304))
            kernels.append(
                Tiled(name, workgroups, draws.uniform(1, 9), draws.choice((0, 1e4, 1e6)), limit=limit,
                      together=draws.random() < 0.1, priority=priority, after=after)
            )  # fmt: skip
        else:
            units = draws.choice((0, 0, 8, 64))
            kernels.append(
                Gang(name, draws.uniform(1, 900), draws.uniform(0, 900), units=units, need=8.0,
                     reserved=bool(units) and draws.random() < 0.3, priority=priority, after=after)
            )  # fmt: skip
    machine = named("mi300x8")
    try:
        slow = run_device(machine, kernels, record=True)
    except ValueError:
        with pytest.raises(ValueError):
            run_device(machine, kernels)
        return
    fast = run_device(machine, kernels)
    assert (fast.time_us, fast.began_us, fast.ended_us) == (slow.time_us, slow.began_us, slow.ended_us)
