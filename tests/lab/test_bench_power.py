"""The study of power on CPU ranks with made-up counters: everything but the counters is real."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from sidelane import Communicator, Config
from sidelane.c3.strategies import named
from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane_lab.baselines.baselines_cpu import Gloo
from sidelane_lab.baselines.candidate import ReadyCall, Tensors, candidates_of
from sidelane_lab.baselines.reference import Case
from sidelane_lab.baselines.roster import OwnDma, Roster
from sidelane_lab.harness import running
from sidelane_lab.harness.measure import Meter
from sidelane_lab.pairs.workload import parse_workload
from sidelane_lab.studies.c3.comparison import Instruments, run_workload
from sidelane_lab.studies.power.meter import PairPower, Recorder
from sidelane_lab.studies.power.rows import PowerRow
from sidelane_lab.studies.power.study import LARGEST, PowerBench, PowerOptions, ReducedInput, calls_between

CPU = torch.device("cpu")
IDLE_W = 100.0
SOME_EXPONENT = LARGEST + 21  # calls of a sample may go on beyond the count


class MadeUp:
    """Draws ``IDLE_W`` plus 10 W a rank, and 200 W more while something runs. Its counter moves every 5 ms."""

    averaged = False

    def __init__(self, rank: int) -> None:
        self.busy, self._base = False, IDLE_W + 10 * rank
        self._last, self._mj = time.perf_counter(), 0.0

    def watts(self) -> float:
        return self._base + 200.0 * self.busy

    def energy_mj(self) -> float:
        now = time.perf_counter()
        if now - self._last >= 0.005:
            self._mj += self.watts() * (now - self._last) * 1e3
            self._last = now
        return self._mj

    def close(self) -> None:
        pass


class Drawing(Gloo):
    """Draws power from its first call on."""

    def __init__(self, group: dist.ProcessGroup, sensor: MadeUp) -> None:
        super().__init__(group)
        self.sensor = sensor

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        self.sensor.busy = True
        return super().start(case, tensors, variant)


class Wrong(Gloo):
    name = "symm_mem"

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        return lambda: None


class Refusing(Gloo):
    name = "nccl_ce"

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        raise RuntimeError("not today")


class OnlyHere(Gloo):
    """Has a place that no library has, where nothing could be compared."""

    name = "sm"

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ("one_shot",) if in_place else ()


class Chooser(Gloo):
    """Is one of the others, and so is not measured unless it is asked for."""

    name = "auto"


def measured(group: dist.ProcessGroup) -> tuple[float, list[PowerRow]]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sensor = MadeUp(rank)
    libraries = (Drawing(group, sensor), Wrong(group), Refusing(group))
    implementations = (*libraries, OnlyHere(group), Chooser(group))
    roster = Roster(Meter(CPU, group=group), {each.name: each for each in implementations})
    roster.reserve(1 << 14, 1 << 14)
    recorder = Recorder(sensor, interval_s=0.001)
    try:
        options = PowerOptions(seconds=0.4, idle_s=0.2)
        bench = PowerBench(roster, recorder, options)
        case = Case(Kind.ALL_TO_ALL, 1 << 12, torch.uint8, rank, ranks, CPU)
        return bench.idle_w, list(bench.rows(case))
    finally:
        recorder.close()


def test_what_is_drawn_is_what_is_reported(pool: RankPool) -> None:
    results = pool.run(measured, 2)
    assert results[0] == results[1], "every rank makes the same rows"
    idle_w, rows = results[0]
    assert idle_w == pytest.approx(IDLE_W + 5, rel=0.03)
    good, wrong, refused = rows
    assert (good.implementation, good.launch, good.in_place, good.correct) == ("gloo", "eager", False, True)
    assert good.watts == pytest.approx(IDLE_W + 205, rel=0.05)
    assert good.watts_sampled == pytest.approx(IDLE_W + 205, rel=0.05)
    assert good.counters_agree_percent == pytest.approx(100, abs=5)
    assert good.energy_mj == pytest.approx(2 * good.watts * good.time_us / 1e3, rel=0.2)
    assert good.energy_above_idle_mj == pytest.approx(400 * good.time_us / 1e3, rel=0.2)
    assert (wrong.implementation, wrong.correct, wrong.energy_mj) == ("symm_mem", False, None)
    assert "output bytes are wrong" in wrong.note
    assert (refused.implementation, refused.correct, refused.watts) == ("nccl_ce", None, None)
    assert "not today" in refused.note


def power_of_a_pair(group: dist.ProcessGroup) -> tuple[dict[str, tuple[float, float]], dict[str, float | None]]:
    """A pair under two strategies and one that is refused: watts and energy, and the times."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sensor = MadeUp(rank)
    library = Drawing(group, sensor)
    workload = parse_workload("32x32x32_1K", Kind.ALL_GATHER, "float32")
    roster = Roster(Meter(CPU, group=group), {"gloo": library})
    case = Case(workload.collective, workload.nbytes, torch.float32, rank, ranks, CPU)
    roster.reserve_for([case], lambda text: None)
    run = ReadyCall(candidates_of(library, case.kind)[0], case, library)
    power = PairPower(roster.meter, Recorder(sensor, interval_s=0.001), 0.4)
    try:
        outcome = run_workload(
            workload,
            [run],
            Instruments(roster.meter, warmup=0, repeats=1),
            device=CPU,
            strategies=tuple(map(named, ("serial", "c3_sp", "c3_rp"))),
            on_launch=power.measure,
        )
    finally:
        power.close()
    return power.found, {row.strategy: row.time_us for row in outcome.rows}


def test_a_pair_draws_power_under_each_strategy_that_ran(pool: RankPool) -> None:
    results = pool.run(power_of_a_pair, 2)
    assert results[0][0] == results[1][0], "every rank finds the same"
    found, times = results[0]
    assert set(found) == {"serial", "c3_sp"} and times["c3_rp"] is None
    for watts, energy_mj in found.values():
        assert watts == pytest.approx(IDLE_W + 205, rel=0.05)
        assert energy_mj > 0


class Adding(Gloo):
    """Notes the largest value of its input, and how many there are, before every call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.largest: list[float] = []
        self.fewest = 1 << 30

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        self.largest.append(float(tensors.input.abs().max()))
        self.fewest = min(self.fewest, len(tensors.input.unique()))
        return super().start(case, tensors, variant)


def reduced(group: dist.ProcessGroup, kind: Kind) -> tuple[list[PowerRow], list[float], int]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    with Communicator(group, config=Config(timeout_s=60)) as comm:
        added = Adding(group)
        roster = Roster(Meter(CPU, group=group), {"gloo": added, "dma": OwnDma(comm)})
        roster.reserve(1 << 12, 1 << 12)
        recorder = Recorder(MadeUp(rank), interval_s=0.001)
        try:
            bench = PowerBench(roster, recorder, PowerOptions(seconds=0.8, idle_s=0.2, variants=("b2b", "pcpy")))
            rows = list(bench.rows(Case(kind, 1 << 12, torch.bfloat16, rank, ranks, CPU)))
            return rows, added.largest, added.fewest
        finally:
            recorder.close()


@pytest.mark.long
def test_an_all_reduce_in_place_adds_up_numbers_however_long_it_runs(pool: RankPool) -> None:
    rows, largest, fewest = pool.run(reduced, 2, Kind.ALL_REDUCE, timeout_s=120)[0]
    ways = [(row.implementation, row.variant, row.in_place) for row in rows]
    assert ways == [("gloo", "", True), ("dma", "b2b", True), ("dma", "pcpy", True)], "in the place of the library"
    assert all(row.correct and row.energy_mj > 0 for row in rows)
    assert len(largest) > calls_between(2), "else nothing is shown"
    assert max(largest) < 2.0**SOME_EXPONENT, "they double in every call"
    assert min(largest) < 2.0**-90, "and are given anew"
    assert fewest >= 15, "they stay as different as they were"


@pytest.mark.long
def test_a_reduce_scatter_out_of_place_keeps_what_it_was_given(pool: RankPool) -> None:
    rows, largest, _ = pool.run(reduced, 2, Kind.REDUCE_SCATTER, timeout_s=120)[0]
    assert {(row.implementation, row.variant) for row in rows} == {("gloo", ""), ("dma", "b2b"), ("dma", "pcpy")}
    assert {row.in_place for row in rows if row.implementation == "dma"} == {False}, "nothing to compare in place with"
    assert all(row.correct for row in rows)
    assert {value for value in largest if value < 1} == {max(value for value in largest if value < 1)}


def test_inputs_of_reductions_are_refused_where_they_could_not_last() -> None:
    for kind, dtype, word in (
        (Kind.ALL_GATHER, torch.bfloat16, "kind"),
        (Kind.ALL_REDUCE, torch.float16, "dtype"),
        (Kind.ALL_REDUCE, torch.int32, "dtype"),
    ):
        with pytest.raises(ValueError, match=rf"ReducedInput: {word} \(value="):
            ReducedInput(Case(kind, 1 << 10, dtype, 0, 2, CPU), 1)


def test_cpus_have_no_power_to_read() -> None:
    with pytest.raises(UnavailableError, match="needs GPUs.*--machine h200x4 predicts"):
        running.run(PowerOptions(device="cpu", ranks=2, quiet=True))
