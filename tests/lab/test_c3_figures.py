"""From times to figures: ideal, speedup and percent of ideal, and the judgement of a run."""

from __future__ import annotations

import dataclasses

import pytest

from sidelane.c3.strategies import named, strategies
from sidelane_lab.harness.ways import Problem
from sidelane_lab.pairs.comparison import judge, pair_label
from sidelane_lab.pairs.pair import GEMM
from sidelane_lab.pairs.workload import C3Class, ideal_speedup, parse_workload, percent_of_ideal, speedup

PAIR = parse_workload("cb1_896M")
WANTED = tuple(map(named, ("serial", "c3_base", "c3_sp", "conccl", "nccl_ce")))


@dataclasses.dataclass(frozen=True)
class Way:
    implementation: str
    label: str
    in_place: bool = False


NCCL, NCCL_IN_PLACE = Way("nccl", "nccl out of place"), Way("nccl", "nccl in place", True)
DMA, CE = Way("dma", "dma in place", True), Way("nccl_ce", "nccl_ce in place", True)


def test_worked_example_of_hardware_md() -> None:
    # cb1 takes 1.41 ms, the best all-gather of 896 MiB 1.84 ms, both together 1.86 ms.
    assert ideal_speedup(1410, 1840) == pytest.approx(3250 / 1840)
    assert speedup(1410, 1840, 1860) == pytest.approx(3250 / 1860)
    assert percent_of_ideal(1410, 1840, 1860) == pytest.approx(97.5, abs=0.1)
    # NCCL alone takes 2.17 ms: the papers' figure is more generous to the same 1.86 ms.
    assert percent_of_ideal(1410, 2170, 1860) == pytest.approx(142.3, abs=0.1)


def test_ends_of_the_scale() -> None:
    assert percent_of_ideal(100, 50, 150) == pytest.approx(0)  # serial
    assert percent_of_ideal(100, 50, 100) == pytest.approx(100)  # the shorter one hidden entirely
    assert percent_of_ideal(100, 50, 125) == pytest.approx(40)
    assert percent_of_ideal(100, 50, 300) == pytest.approx(-100)  # slower than serial: not cut off


def test_average_of_the_conccl_paper() -> None:
    # c3_base: 1.13x where 1.6x is ideal is 21% of ideal (section I).
    gemm, comm = 1.0, 0.6
    assert ideal_speedup(gemm, comm) == pytest.approx(1.6)
    assert percent_of_ideal(gemm, comm, (gemm + comm) / 1.13) == pytest.approx(21, abs=1)


def judged(times: dict[str, list[float]], failures: dict[str, Problem] | None = None, **kwargs: dict[str, str]):
    ways = (NCCL, NCCL_IN_PLACE, DMA)
    return judge(PAIR, ways, WANTED, times, failures or {}, kwargs.get("unavailable", {}))


def all_times(**changed: list[float]) -> dict[str, list[float]]:
    times = {GEMM: [1400.0] * 3}
    for way, alone in ((NCCL, 2200.0), (NCCL_IN_PLACE, 2000.0), (DMA, 1800.0)):
        times[way.label] = [alone] * 3
    for name, way, together in (
        ("serial", NCCL, 3650.0),
        ("serial", NCCL_IN_PLACE, 3450.0),
        ("c3_base", NCCL, 3500.0),
        ("c3_base", NCCL_IN_PLACE, 3550.0),
        ("c3_sp", NCCL, 3500.0),
        ("c3_sp", NCCL_IN_PLACE, 3300.0),
        ("conccl", DMA, 1850.0),
    ):
        times[pair_label(named(name), way)] = [together] * 3
    return times | changed


def test_every_strategy_gets_its_best_configuration_and_the_strictest_ideal() -> None:
    outcome = judged(all_times())
    results = {result.strategy: result for result in outcome.results}
    assert list(results) == [strategy.name for strategy in WANTED]
    absent = results.pop("nccl_ce")
    assert absent.failure == Problem("not available: no nccl_ce among what runs here (nccl, dma)", wrong=False)
    assert outcome.best == DMA.label
    assert outcome.best_comm_us == 1800
    assert outcome.c3_class is C3Class.C_LONG
    # The best configuration next to the GEMM need not be the best one alone.
    assert (results["c3_base"].label, results["c3_base"].comm_us) == (NCCL.label, 2200)
    assert results["c3_sp"].label == NCCL_IN_PLACE.label
    for result in results.values():
        assert result.ideal == pytest.approx(3200 / 1800)
        assert result.speedup == pytest.approx(3200 / result.time_us)
    assert results["conccl"].percent_of_ideal == pytest.approx(percent_of_ideal(1400, 1800, 1850))
    # The papers' figure takes the library's best isolated time: in place.
    assert results["conccl"].percent_of_ideal_library == pytest.approx(percent_of_ideal(1400, 2000, 1850))
    assert outcome.choice is not None
    assert str(outcome.choice.candidate) == "conccl"


def test_another_call_is_a_row_and_no_ideal_and_nobody_s_choice() -> None:
    left = Way("dma_left", "left")
    wanted = [*WANTED, named("conccl_left")]
    times = all_times(left=[900.0] * 3)
    times[pair_label(named("conccl_left"), left)] = [1410.0] * 3
    outcome = judge(PAIR, (NCCL, NCCL_IN_PLACE, DMA, left), wanted, times, {}, {})
    assert (outcome.best, outcome.best_comm_us) == (DMA.label, 1800), (
        "the ideal is that of the call as it was asked for"
    )
    results = {result.strategy: result for result in outcome.results}
    assert results["conccl_left"].comm_us == 900 and results["conccl_left"].speedup == pytest.approx(3200 / 1410)
    assert outcome.choice is not None and str(outcome.choice.candidate) == "conccl"


def test_ratios_are_taken_in_each_round_before_the_median() -> None:
    # The machine slows down by half in one round and by a quarter in another: every ratio is the same in all rounds.
    pace = [1.0, 1.5, 1.25]
    times = {name: [series[0] * factor for factor in pace] for name, series in all_times().items()}
    steady = {result.strategy: result for result in judged(all_times()).results}
    for result in judged(times).results[:-1]:
        assert result.percent_of_ideal == pytest.approx(steady[result.strategy].percent_of_ideal)
        assert result.time_us == pytest.approx(1.25 * steady[result.strategy].time_us)
    # A round in which only the GEMM alone was slow moves no median.
    assert judged(all_times(gemm=[1400.0, 2800.0, 1400.0])).results[3].speedup == pytest.approx(3200 / 1850)


def test_what_failed_has_no_time_and_says_why() -> None:
    times = all_times()
    for label in (pair_label(named("conccl"), DMA), DMA.label):
        del times[label]
    outcome = judged(times, {DMA.label: Problem("rank 1: 3 bytes are wrong", wrong=True)})
    conccl = next(result for result in outcome.results if result.strategy == "conccl")
    assert conccl.time_us is None
    assert conccl.percent_of_ideal is None
    assert conccl.failure == Problem("rank 1: 3 bytes are wrong", wrong=True)
    assert outcome.best == NCCL_IN_PLACE.label
    assert outcome.choice is not None
    assert str(outcome.choice.candidate) != "conccl"
    assert [alone.time_us for alone in outcome.isolated] == [2200, 2000, None]


def test_what_belongs_here_but_is_missing_is_a_result_with_the_reason() -> None:
    outcome = judged(all_times(), unavailable={"nccl_ce": "no windows"})
    assert outcome.results[-1].strategy == "nccl_ce"
    assert outcome.results[-1].failure == Problem("not available: no windows", wrong=False)


def test_nothing_that_works() -> None:
    outcome = judge(PAIR, (DMA,), strategies(), {GEMM: [1.0]}, {DMA.label: Problem("broken", wrong=True)}, {})
    assert (outcome.best, outcome.c3_class, outcome.choice) == (None, None, None)
    failures = {result.strategy: result.failure for result in outcome.results}
    assert list(failures) == [strategy.name for strategy in strategies()]
    assert failures["conccl"] == failures["conccl_rp"] == Problem("broken", wrong=True)
    assert failures["c3_base"] == Problem("not available: no nccl or gloo among what runs here (dma)", wrong=False)


def test_what_a_runner_refuses_is_a_result_with_the_reason() -> None:
    refused = Problem("no green contexts", wrong=False)
    outcome = judge(PAIR, (NCCL,), [named("c3_rp")], {GEMM: [1.0], NCCL.label: [1.0]}, {"c3_rp": refused}, {})
    assert [(result.strategy, result.failure) for result in outcome.results] == [("c3_rp", refused)]
    assert outcome.choice is None
