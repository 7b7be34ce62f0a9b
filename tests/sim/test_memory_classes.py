"""Memory that tells traffic of collectives from that of computations, on what-if machines: bounds and who gains."""

from __future__ import annotations

import dataclasses

import pytest

from sidelane_lab.machines.load import named
from sidelane_lab.machines.spec import Machine, NumberSource, Quantity
from sidelane_lab.model.device import COLLECTIVES_FIRST, COMPUTATIONS_FIRST, Gang, Tiled, run_device
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.strategies import predict
from sidelane_lab.pairs.workload import parse_gemm, parse_workload

MI300X = named("mi300x8")
PEAK = float(MI300X.gpu.memory_gbps)


def what_if(machine: Machine = MI300X, **numbers: float) -> Machine:
    changes = {name: Quantity(value, NumberSource.ASSUMED, "what if") for name, value in numbers.items()}
    return dataclasses.replace(machine, interference=dataclasses.replace(machine.interference, **changes))


def pair(machine: Machine, gemm_share: float, comm_share: float) -> tuple[float, float]:
    """Times of a computation of one wave, and of a collective on engines, that use such shares of the memory alone."""
    units = int(machine.gpu.units)
    gemm = Tiled("gemm", units, 1000.0, gemm_share * PEAK * 1e3 * 1000.0 / units)
    run = run_device(machine, [Gang("collective", 1000.0, comm_share * PEAK), gemm])
    return run.ended_us["gemm"], run.ended_us["collective"]


def test_who_comes_first_is_as_fast_as_alone() -> None:
    first = what_if(memory_first=COLLECTIVES_FIRST, copies=0)
    gemm, comm = pair(first, 0.7, 0.6)
    assert comm == pytest.approx(1000.0)
    # 0.4 of the memory for 1000 us, then all: (0.7 - 0.4 x 1) of its bytes are left.
    assert gemm >= 1000.0 + (0.7 - 0.4) / 0.7 * 1000.0 - 1
    gemm, comm = pair(what_if(memory_first=COMPUTATIONS_FIRST, copies=0), 0.7, 0.6)
    assert gemm == pytest.approx(1000.0) and comm > 1300.0


@pytest.mark.parametrize("numbers", [{"memory_first": 1}, {"memory_first": 2}, {"collective_channels": 0.3}, {}])
@pytest.mark.parametrize("shares", [(0.9, 0.9), (0.5, 0.4), (0.2, 0.8), (0.95, 0.1)])
def test_nothing_is_faster_than_alone_or_than_the_memory(
    numbers: dict[str, float], shares: tuple[float, float]
) -> None:
    gemm, comm = pair(what_if(**numbers), *shares)
    assert min(gemm, comm) >= 999.9
    assert max(gemm, comm) >= sum(shares) * 1000.0 - 0.1, "all bytes go through one memory"


def test_channels_of_their_own_keep_classes_out_of_each_others_way_and_bound_each() -> None:
    machine = what_if(collective_channels=0.3, copies=0)
    gemm, comm = pair(machine, 0.9, 0.6)
    assert comm == pytest.approx(1000.0 * 0.6 / 0.3) and gemm == pytest.approx(1000.0 * 0.9 / 0.7)
    assert pair(machine, 0.9, 0.1)[0] == gemm, "whatever the collective does"
    assert pair(machine, 0.5, 0.2) == (pytest.approx(1000.0), pytest.approx(1000.0)), "enough for both"


def test_what_runs_alone_has_all_channels() -> None:
    gemm = parse_gemm("mb1")
    assert gemm_us(what_if(collective_channels=0.5), gemm) == gemm_us(MI300X, gemm)


def test_a_pair_gains_by_a_priority_where_memory_is_what_it_shares() -> None:
    workload = parse_workload("mb1_13G")
    times = {n: predict(what_if(memory_first=n), workload, "conccl").time_us for n in (0, 1, 2)}
    assert times[1] <= times[0], "the collective is the longer part"
    for number in (0, 1, 2):
        found = predict(what_if(memory_first=number), workload, "conccl")
        assert found.time_us >= max(found.gemm_us, found.best_comm_us) * 0.999
