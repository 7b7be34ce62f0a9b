"""The study of host time: from end to end on CPU ranks, and with calls that can be timed as on GPUs."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane.program.collective import Kind
from sidelane_lab.baselines.baselines_cpu import Gloo
from sidelane_lab.baselines.candidate import Tensors
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies import host as host_study
from sidelane_lab.studies.host import HostCall, HostOptions, HostRow, HostWay, calls_of, row_of

CPU = torch.device("cpu")
QUICK = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 1, "repeats": 2, "timeout_s": 100.0}
WAIT_S = 2e-3


class Slow(Gloo):
    """Takes rank 1's host a while before every call."""

    name = "symm_mem"

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        time.sleep(WAIT_S * case.rank)
        return super().start(case, tensors, variant)


class Spoilt(Gloo):
    """Right when it is checked first, wrong under way."""

    name = "nccl"
    calls = 0

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        self.calls += 1
        return super().start(case, tensors, variant) if self.calls < 3 else lambda: None


def rows_of_made_up_calls(group: dist.ProcessGroup) -> tuple[list[HostRow], list[float]]:
    """Every call waits for its own end: there is no device behind which it could be queued."""
    spins: list[float] = []
    implementations = (Gloo(group), Slow(group), Spoilt(group))
    case = Case(Kind.ALL_GATHER, 1024, torch.bfloat16, dist.get_rank(group), dist.get_world_size(group), CPU)
    for implementation in implementations:
        implementation.reserve(1024, 1024)
    by_name = {implementation.name: implementation for implementation in implementations}

    def made(call: HostCall, make: Callable[[], HostWay]) -> HostWay:
        way = make()
        way.blocks = False
        way._call = lambda: by_name[call.implementation].start(case, way.tensors, "")()
        return way

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_study, "_spin", lambda device, us: spins.append(us))
        meter, options, seeds = Meter(CPU, group=group), HostOptions(**QUICK, calls=3), itertools.count(1)
        rows = [
            row_of(meter, options, case, call, functools.partial(made, call, make), seeds)
            for call, make in calls_of(implementations, ("b2b",), case)
        ]
    return rows, spins


def test_the_slowest_rank_counts_and_a_wrong_output_has_no_time(pool: RankPool):
    by_rank = pool.run(rows_of_made_up_calls, 2)
    assert by_rank[0][0] == by_rank[1][0]
    gloo, slow, spoilt = by_rank[0][0]
    assert gloo.correct is slow.correct is True
    assert slow.host_us >= 1e6 * WAIT_S
    assert slow.best_us <= slow.p10_us <= slow.host_us <= slow.p90_us
    assert (gloo.driver_calls, gloo.symmetric, slow.symmetric) == (None, False, True)
    assert (spoilt.correct, spoilt.host_us, spoilt.best_us) == (False, None, None)
    assert "output bytes are wrong" in spoilt.note
    spins = by_rank[0][1]
    assert len(spins) == 3 * (QUICK["warmup"] + QUICK["repeats"]), "one in front of every batch"
    assert min(spins[4:6]) >= 2 * 3 * 1e6 * WAIT_S, "long enough for what the batches before took"
