"""Pairs: GEMMs and classes of the ConCCL paper, ideal and speedup, which calls are timed, and what a run says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import pytest

from sidelane.c3.strategies import named, strategies
from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane_lab.harness.ways import Problem
from sidelane_lab.pairs import workload
from sidelane_lab.pairs.pair import GEMM, PairLaunch
from sidelane_lab.studies.c3.comparison import WORTH, aliases_of, judge, lasting, narrowed, pair_label

PAIR = workload.parse_workload("cb1_896M")
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
    assert workload.ideal_speedup(1410, 1840) == pytest.approx(3250 / 1840)
    assert workload.speedup(1410, 1840, 1860) == pytest.approx(3250 / 1860)
    assert workload.percent_of_ideal(1410, 1840, 1860) == pytest.approx(97.5, abs=0.1)
    # NCCL alone takes 2.17 ms: the papers' figure is more generous to the same 1.86 ms.
    assert workload.percent_of_ideal(1410, 2170, 1860) == pytest.approx(142.3, abs=0.1)


def test_ends_of_the_scale() -> None:
    assert workload.percent_of_ideal(100, 50, 150) == pytest.approx(0)  # serial
    assert workload.percent_of_ideal(100, 50, 100) == pytest.approx(100)  # the shorter one hidden entirely
    assert workload.percent_of_ideal(100, 50, 125) == pytest.approx(40)
    assert workload.percent_of_ideal(100, 50, 300) == pytest.approx(-100)  # slower than serial: not cut off


def test_average_of_the_conccl_paper() -> None:
    # c3_base: 1.13x where 1.6x is ideal is 21% of ideal (section I).
    gemm, comm = 1.0, 0.6
    assert workload.ideal_speedup(gemm, comm) == pytest.approx(1.6)
    assert workload.percent_of_ideal(gemm, comm, (gemm + comm) / 1.13) == pytest.approx(21, abs=1)


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
    rows = {row.strategy: row for row in judged(all_times()).rows}
    assert list(rows) == [*(strategy.code for strategy in WANTED), "auto"]
    absent, auto = rows.pop("nccl_ce"), rows.pop("auto")
    assert (absent.note, absent.correct) == ("not available: no nccl_ce among what runs here (nccl, dma)", None)
    # The best configuration next to the GEMM need not be the best one alone.
    assert (rows["c3_base"].note, rows["c3_base"].comm_us) == (NCCL.label, 2200)
    assert rows["c3_sp"].note == NCCL_IN_PLACE.label
    for row in rows.values():
        assert (row.best_comm_us, row.c3_class) == (1800, workload.C3Class.C_LONG)
        assert row.ideal == pytest.approx(3200 / 1800)
        assert row.speedup == pytest.approx(3200 / row.time_us)
    assert rows["conccl"].percent_of_ideal == pytest.approx(workload.percent_of_ideal(1400, 1800, 1850))
    # The papers' figure takes the library's best isolated time: in place.
    assert rows["conccl"].percent_of_ideal_nccl == pytest.approx(workload.percent_of_ideal(1400, 2000, 1850))
    assert auto.chosen == "conccl"


def test_another_call_is_a_row_and_no_ideal_and_nobody_s_choice() -> None:
    left = Way("dma_left", "left")
    wanted = [*WANTED, named("conccl_left")]
    times = all_times(left=[900.0] * 3)
    times[pair_label(named("conccl_left"), left)] = [1410.0] * 3
    outcome = judge(PAIR, (NCCL, NCCL_IN_PLACE, DMA, left), wanted, times, {}, {})
    rows = {row.strategy: row for row in outcome.rows}
    assert rows["conccl_left"].best_comm_us == 1800, "the ideal is that of the call as it was asked for"
    assert rows["conccl_left"].comm_us == 900 and rows["conccl_left"].speedup == pytest.approx(3200 / 1410)
    assert rows["auto"].chosen == "conccl"


def test_ratios_are_taken_in_each_round_before_the_median() -> None:
    # The machine slows down by half in one round and by a quarter in another: every ratio is the same in all rounds.
    pace = [1.0, 1.5, 1.25]
    times = {name: [series[0] * factor for factor in pace] for name, series in all_times().items()}
    for row, steady in zip(judged(times).rows, judged(all_times()).rows, strict=True):
        if steady.time_us is not None:
            assert row.percent_of_ideal == pytest.approx(steady.percent_of_ideal)
            assert row.time_us == pytest.approx(1.25 * steady.time_us)
    # A round in which only the GEMM alone was slow moves no median.
    assert judged(all_times(gemm=[1400.0, 2800.0, 1400.0])).rows[3].speedup == pytest.approx(3200 / 1850)


def test_what_failed_has_no_time_and_says_why() -> None:
    times = all_times()
    for label in (pair_label(named("conccl"), DMA), DMA.label):
        del times[label]
    outcome = judged(times, {DMA.label: Problem("rank 1: 3 bytes are wrong", wrong=True)})
    rows = {row.strategy: row for row in outcome.rows}
    conccl = rows["conccl"]
    assert (conccl.time_us, conccl.percent_of_ideal, conccl.correct) == (None, None, False)
    assert conccl.note == "rank 1: 3 bytes are wrong"
    assert conccl.best_comm_us == 2000 and rows["auto"].chosen != "conccl"
    assert list(outcome.alone_us.values()) == [2200, 2000, None]


def test_what_belongs_here_but_is_missing_is_a_row_with_the_reason() -> None:
    (row,) = (
        row for row in judged(all_times(), unavailable={"nccl_ce": "no windows"}).rows if row.strategy == "nccl_ce"
    )
    assert (row.note, row.correct) == ("not available: no windows", None)


def test_nothing_that_works() -> None:
    with pytest.raises(UnavailableError, match=f"no implementation works: {DMA.label}: broken"):
        judge(PAIR, (DMA,), strategies(), {GEMM: [1.0]}, {DMA.label: Problem("broken", wrong=True)}, {})
    outcome = judge(PAIR, (DMA,), strategies(), {GEMM: [1.0], DMA.label: [1.0]}, {}, {})
    notes = {row.strategy: row.note for row in outcome.rows}
    assert list(notes) == [strategy.code for strategy in strategies()], "nothing ran that auto could take"
    assert notes["conccl"] == notes["conccl_rp"] == "no configuration could run"
    assert notes["c3_base"] == "not available: no nccl or gloo among what runs here (dma)"


def test_what_a_runner_refuses_is_a_row_with_the_reason() -> None:
    refused = Problem("no green contexts", wrong=False)
    outcome = judge(PAIR, (NCCL,), [named("c3_rp")], {GEMM: [1.0], NCCL.label: [1.0]}, {"c3_rp": refused}, {})
    assert [(row.strategy, row.note, row.correct) for row in outcome.rows] == [("c3_rp", "no green contexts", None)]


H200_FLOPS_PER_BYTE = 206.0


def test_the_paper_s_gemms_have_8192_tokens_in_one_dimension() -> None:
    # Forward projections have them as n, weight gradients as k: what tells us the order of the dimensions.
    forward = {tag: workload.parse_gemm(tag) for tag in ("cb2", "cb4", "cb5")}
    gradients = {tag: workload.parse_gemm(tag) for tag in ("cb3", "mb1", "mb2")}
    assert all(gemm.n == 8192 and gemm.k == 16384 for gemm in forward.values())
    assert all(gemm.k == 8192 and gemm.n != 8192 for gemm in gradients.values())
    assert set(forward) | set(gradients) | {"cb1"} == set(workload.TABLE_I)


def test_operations_and_bytes_of_cb1() -> None:
    gemm = workload.parse_gemm("cb1")
    assert gemm.flops == 2 * 8192**3
    assert gemm.nbytes == 3 * 8192**2 * 2
    # 1.41 ms at 770 TFLOP/s on an H200 (results/notes/hardware.md)
    assert gemm.flops / 1.41e-3 / 1e12 == pytest.approx(780, rel=0.02)


def test_bound_follows_the_traffic_that_is_given() -> None:
    gemm = workload.parse_gemm("mb1")
    assert gemm.bound(H200_FLOPS_PER_BYTE) is workload.Bound.COMPUTE
    # The paper calls it memory-bound by measured traffic, which is more than the least possible.
    assert gemm.bound(H200_FLOPS_PER_BYTE, measured_bytes=20 * gemm.nbytes) is workload.Bound.MEMORY
    assert workload.Gemm(1, 8192, 8192).bound(H200_FLOPS_PER_BYTE) is workload.Bound.MEMORY  # a GEMV


@pytest.mark.parametrize(
    ("gemm_us", "comm_us", "expected"),
    [
        (1410.0, 1840.0, workload.C3Class.C_LONG),  # cb1 and 896 MiB on four H200s; C-long in the paper's Table II too
        (11500.0, 1840.0, workload.C3Class.G_LONG),  # mb1 and 896 MiB; G-long in the paper
        (114.9, 100.0, workload.C3Class.GC_EQUAL),  # "more than 115%"
        (115.1, 100.0, workload.C3Class.G_LONG),
        (100.0, 114.9, workload.C3Class.GC_EQUAL),
        (100.0, 115.1, workload.C3Class.C_LONG),
    ],
)
def test_classes(gemm_us: float, comm_us: float, expected: workload.C3Class) -> None:
    assert workload.classify(gemm_us, comm_us) is expected


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_classes_need_times(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        workload.classify(*times)


def test_sizes_are_binary_and_read_back() -> None:
    # 896M is LLaMA-70B's fused gate and up projection in bf16, 3.25G that of LLaMA-405B.
    assert workload.parse_bytes("896M") == 8192 * 57344 * 2
    assert workload.parse_bytes("1.2G") == 1288490192, "whole elements of any dtype"
    assert workload.parse_bytes("0.001K") == 16
    assert workload.parse_bytes("3.25G") == workload.parse_bytes("3.25 GiB") == 16384 * 106496 * 2
    for nbytes in (1, 1000, 1024, 1536, 896 << 20, 13 << 28, (1 << 30) + 1):
        assert workload.parse_bytes(workload.format_bytes(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1K", "1T", "1.3", "1e3", "9" * 400])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="^not a size"):
        workload.parse_bytes(text)


def test_pairs_as_table_ii_writes_them() -> None:
    pair = workload.parse_workload("mb2_3.25G", Kind.ALL_TO_ALL)
    assert pair == workload.Workload(workload.Gemm(16384, 106496, 8192, tag="mb2"), Kind.ALL_TO_ALL, 13 << 28)
    assert pair.name == "mb2_3.25G all_to_all"
    assert workload.parse_workload("512x256x128_64K", dtype="float32").gemm == workload.Gemm(512, 256, 128, "float32")


@pytest.mark.parametrize("text", ["cb1", "cb9_1M", "cb1_", "8x8_1M", "0x8x8_1M", "cb1_0"])
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(ValueError, match=r"^not a (pair|GEMM|size) |Gemm|Workload"):
        workload.parse_workload(text)


def test_dtypes_are_those_of_gemms() -> None:
    with pytest.raises(ValueError, match="allowed=bfloat16"):
        workload.parse_gemm("cb1", "int32")


@pytest.mark.parametrize("tag", sorted(workload.TABLE_I))
def test_cpu_sizes_are_the_largest_that_fit(tag: str) -> None:
    whole = workload.parse_workload(f"{tag}_896M")
    small = whole.scaled_for_cpu()
    divisor = small.gemm.divisor
    assert small.gemm.flops <= workload.CPU_GEMM_FLOPS < whole.gemm.scaled(divisor // 2).flops
    assert small.nbytes == whole.nbytes // divisor
    assert small.gemm.name == f"{tag}/{divisor}"
    assert (small.gemm.m, small.gemm.n, small.gemm.k) == tuple(size // divisor for size in workload.TABLE_I[tag])


def test_what_is_small_stays_as_it_is() -> None:
    small = workload.parse_workload("64x64x64_4K", dtype="float32")
    assert small.scaled_for_cpu() == small


@dataclasses.dataclass(frozen=True)
class Call:
    label: str


FAST, NEAR, SLOW = Call("fast"), Call("near"), Call("slow")
LOOKED = {"fast": [100.0, 190.0], "near": [300.0, 100.0 * WORTH], "slow": [101.0 * WORTH, 500.0]}


class Looks:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def look(self, runs: Mapping[str, Callable[[], None]]) -> Mapping[str, Sequence[float]]:
        self.asked += runs
        return {label: LOOKED[label.partition(" ")[2]] for label in runs}


def test_the_best_round_of_a_look_decides() -> None:
    assert lasting([("fast", "near", "slow"), ("slow",), ("unknown",)], LOOKED) == {"fast", "near", "slow"}
    assert lasting([("fast", "near", "slow")], LOOKED) == {"fast", "near"}


def test_only_what_has_rivals_is_looked_at() -> None:
    calls = [("c3_base", FAST, 0), ("c3_base", NEAR, 0), ("c3_base", SLOW, 0), ("c3_rp", SLOW, 8), ("c3_rp", FAST, 16)]
    planned = {f"{name}{units} {call.label}": (named(name), call, units) for name, call, units in calls}
    launches = {label: PairLaunch(label, lambda: None) for label in planned}
    looks = Looks()
    left = narrowed(planned, launches, looks)
    assert looks.asked == ["c3_base0 fast", "c3_base0 near", "c3_base0 slow"]
    assert list(left) == ["c3_base0 fast", "c3_base0 near", "c3_rp8 slow", "c3_rp16 fast"], (
        "numbers of units are no rivals"
    )
    del launches["c3_base0 fast"], launches["c3_base0 near"]
    assert narrowed(planned, launches, looks) == launches


def test_a_partition_of_nothing_is_the_same_launch() -> None:
    calls = [
        ("conccl", FAST, 0),
        ("conccl_rp", FAST, 0),
        ("conccl_rp", SLOW, 0),
        ("conccl_left", FAST, 0),
        ("nccl_ce", FAST, 0),
    ]
    planned = {f"{name} {call.label}": (named(name), call, units) for name, call, units in calls}
    assert aliases_of(planned) == {"conccl_rp fast": "conccl fast"}, "another call, order or mover is another launch"
    assert not aliases_of({"conccl": (named("conccl"), FAST, 0), "conccl_rp": (named("conccl_rp"), FAST, 8)})
