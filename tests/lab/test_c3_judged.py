"""Heuristics against the best of a sweep: made-up pairs, a described machine from end to end, and three kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from isolated_files import SIZE, collective, file_of, gemm, pair
from marks import long

from sidelane.cli import main
from sidelane.program.collective import Kind
from sidelane_lab.harness import running
from sidelane_lab.harness.study import read
from sidelane_lab.pairs.heuristics import KernelDemand
from sidelane_lab.pairs.isolated import parse_isolated
from sidelane_lab.pairs.pair import orders_of, small_of
from sidelane_lab.pairs.sweep import (
    CHOICE,
    LAUNCH_ORDER,
    LAUNCH_ORDERS,
    PARTITION,
    PARTITIONS,
    RULES,
    SPARED,
    HeuristicRow,
    Sweep,
    judge,
)
from sidelane_lab.pairs.workload import Gemm, Workload, parse_workload
from sidelane_lab.studies.c3.bench import rows_not_run
from sidelane_lab.studies.c3.heuristics import HeuristicsOptions, sweeps_of
from sidelane_lab.studies.c3.rows import C3Row

SHAPE = Gemm(8192, 8192, 8192)
KNOWN = parse_isolated(
    file_of(
        *(gemm(1000.0), gemm(1100.0, units=8), gemm(1900.0, units=64)),
        *(collective(800.0, "nccl"), collective(1600.0, "nccl", 8), collective(800.0, "nccl", 64)),
        *(collective(700.0, "dma"), pair("serial", 1700.0, "dma", alone=700.0), pair("conccl", 1050.0, "dma")),
    ),
    "made up",
)
TIMES = {
    ("serial", 0): 1800.0, ("c3_base", 0): 1500.0, ("c3_sp", 0): 1400.0, ("c3_rp", 8): 1700.0, ("c3_rp", 64): 2000.0,
    ("conccl", 0): 1060.0, ("conccl_rp", 8): 1150.0,
}  # fmt: skip
PAIR = Workload(SHAPE, Kind.ALL_GATHER, SIZE)
SWEEP = Sweep(PAIR, 1000.0, TIMES, (KernelDemand("gemm", 4096), KernelDemand("all_gather", 32)), why_not="pairs only")


def verdicts(sweep: Sweep) -> dict[str, Any]:
    return {verdict.heuristic: verdict for verdict in judge(sweep, KNOWN)}


def test_every_heuristic_is_right_or_loses() -> None:
    found = verdicts(SWEEP)
    assert tuple(found) == tuple(RULES)
    order = found[LAUNCH_ORDER]
    assert (order.chosen, order.best, order.right, order.lost_percent) == (
        "collective_first",
        "collective_first",
        True,
        0.0,
    )
    assert order.note == "fewest workgroups first: all_gather (32), gemm (4096)"
    assert found[LAUNCH_ORDERS].lost_percent is None and found[LAUNCH_ORDERS].note == "pairs only"
    # 8 units: max(1000 x 1.1, 700 x 2); 64: 1000 x 1.9.
    assert (found[PARTITION].chosen, found[PARTITION].right) == ("partition 8", True)
    assert (found[SPARED].chosen, found[SPARED].best) == ("copy_engines", "copy_engines")
    assert "compute-bound" in found[SPARED].note
    assert (found[CHOICE].chosen, found[CHOICE].time_us) == ("copy_engines", 1060.0)
    assert all(verdict.seen for verdict in found.values())


def test_another_call_is_not_what_a_choice_is_held_against() -> None:
    fast = {**TIMES, ("conccl_left", 0): 1001.0}
    assert verdicts(dataclasses.replace(SWEEP, times_us=fast)) == verdicts(SWEEP)


def test_what_is_lost() -> None:
    slow = {**TIMES, ("c3_base", 0): 1330.0, ("c3_rp", 64): 1360.0, ("conccl_rp", 8): 1000.0}
    found = verdicts(dataclasses.replace(SWEEP, times_us=slow))
    assert found[LAUNCH_ORDER].lost_percent == pytest.approx(100 * (1400 / 1330 - 1)) and not found[LAUNCH_ORDER].right
    assert (found[PARTITION].best, found[PARTITION].lost_percent) == ("partition 64", pytest.approx(25))
    assert [found[name].lost_percent for name in (SPARED, CHOICE)] == pytest.approx([6, 6])
    nearly = {**TIMES, ("conccl_rp", 8): 1056.0}
    assert verdicts(dataclasses.replace(SWEEP, times_us=nearly))[CHOICE].right, "0.4% is nothing"


def test_a_small_gemm_goes_first() -> None:
    found = verdicts(dataclasses.replace(SWEEP, kernels=(KernelDemand("gemm", 4), KernelDemand("all_gather", 32))))
    assert found[LAUNCH_ORDER].chosen == "compute_first" and not found[LAUNCH_ORDER].right


def test_three_kernels() -> None:
    kernels = (KernelDemand("gemm", 4096), KernelDemand("all_gather", 32), KernelDemand("all_to_all", 16))
    orders = {("all_to_all", "all_gather", "gemm"): 1030.0, ("gemm", "all_gather", "all_to_all"): 1000.0}
    found = verdicts(dataclasses.replace(SWEEP, others=kernels, orders_us=orders))[LAUNCH_ORDERS]
    assert (found.chosen, found.best) == ("all_to_all > all_gather > gemm", "gemm > all_gather > all_to_all")
    assert found.lost_percent == pytest.approx(3)


def test_what_did_not_run_is_not_judged() -> None:
    found = verdicts(dataclasses.replace(SWEEP, times_us={("serial", 0): 1800.0, ("conccl", 0): 1060.0}))
    assert all(found[name].lost_percent is None and found[name].note for name in (LAUNCH_ORDER, PARTITION, SPARED))
    assert found[CHOICE].right
    unseen = dataclasses.replace(PAIR, gemm=Gemm(4096, 4096, 4096))
    assert not any(verdict.seen for verdict in judge(dataclasses.replace(SWEEP, workload=unseen), KNOWN))


def row(strategy: str, time_us: float | None, **others: Any) -> C3Row:
    values: dict[str, Any] = {
        "gemm": "8192x8192x8192", "m": 8192, "n": 8192, "k": 8192, "dtype": "bfloat16", "collective": "all_gather",
        "bytes": SIZE, "c3_class": "G-long", "strategy": strategy, "chosen": "", "gemm_us": 1000.0, "comm_us": 800.0,
        "best_comm_us": 700.0, "time_us": time_us, "speedup": time_us and 1.0, "ideal": 1.7, "percent_of_ideal": 50.0,
        "percent_of_ideal_nccl": None, "correct": True if time_us else None, "note": "" if time_us else "no units here",
    }  # fmt: skip
    return C3Row(**{**values, **others})


ROWS = (
    *(row("serial", 1800.0), row("c3_base", 1500.0), row("c3_sp", 1400.0), row("conccl", 1060.0)),
    row("c3_rp", 1700.0, units=8, sweep="8 1700, 64 2000"),
    *(row("conccl_rp", 1150.0, units=8), row("c3_target", None), row("auto", 1060.0, chosen="conccl")),
)


def test_sweeps_of_a_result_file() -> None:
    (found,) = sweeps_of(ROWS, 32)
    assert found.times_us == TIMES and found.workload == PAIR
    assert [kernel.workgroups for kernel in found.kernels] == [4096, 32]
    assert sweeps_of([row("serial", None)], 32) == []
    assert sweeps_of([*ROWS, row("c3_target", 1002.0)], 32) == [found], "a strategy that has gone since"


def test_a_result_file_from_end_to_end(tmp_path: Path) -> None:
    from sidelane_lab.harness.study import collect, write

    files = {name: tmp_path / f"{name}.json" for name in ("c3", "isolated", "heuristics")}
    write(
        files["c3"], dataclasses.replace(collect("c3", ROWS, device_type="cpu", ranks=2), gpus=2, device="NVIDIA H200")
    )
    files["isolated"].write_text(
        file_of(*(gemm(1000.0), gemm(1100.0, units=8), gemm(1900.0, units=64), collective(700.0, "dma")))
    )
    given = ["c3", "--study", "heuristics", "--results", str(files["c3"]), "--isolated", str(files["isolated"])]
    told = CliRunner().invoke(main, [*given, "--json", str(files["heuristics"]), "--report", str(tmp_path / "report")])
    assert told.exit_code == 0, told.output
    found = read(files["heuristics"])
    rows = [one for one in found.rows if isinstance(one, HeuristicRow)]
    assert [one.heuristic for one in rows] == list(RULES) and found.device == "NVIDIA H200"
    chosen = {one.heuristic: (one.chosen, one.right) for one in rows}
    assert chosen[CHOICE] == ("copy_engines", True) and chosen[PARTITION] == ("", None), "no table of nccl by units"
    assert "no third kernel" in next(one.note for one in rows if one.heuristic == LAUNCH_ORDERS)
    write(files["c3"], dataclasses.replace(read(files["c3"]), rows=(*ROWS, row("sm_rp", None, correct=False))))
    judged = CliRunner().invoke(main, [*given, "--json", str(tmp_path / "judged.json")])
    assert judged.exit_code == 1 and "c3: 1 of 9 rows are WRONG: strategy sm_rp" in judged.stderr, judged.output
    assert read(tmp_path / "judged.json").rows == found.rows
    wrong = CliRunner().invoke(main, [*given[:3], "--results", str(files["heuristics"]), *given[5:]])
    assert wrong.exit_code and "allowed=a file of sidelane c3" in wrong.output


@pytest.mark.parametrize("machine", ["mi300x8", long("h200x4")])
def test_a_described_machine(machine: str) -> None:
    results = running.run(HeuristicsOptions(machine=machine, quiet=True, command="test"))
    assert results is not None and "simulated" in results.device
    rows = [one for one in results.rows if isinstance(one, HeuristicRow)]
    assert len(rows) == 30 * len(RULES) and all(one.note for one in rows)
    by = {name: [one for one in rows if one.heuristic == name] for name in RULES}
    assert {one.chosen for one in by[CHOICE]} == {"copy_engines"} and sum(
        bool(one.right) for one in by[PARTITION]
    ) >= 24
    assert sum(bool(one.right) for one in by[PARTITIONS]) >= 20
    assert max(one.lost_percent or 0.0 for one in by[PARTITIONS]) < 7
    assert all(one.right for one in by[SPARED]), "strategies and heuristic go by one definition of memory-bound"
    assert sum(not one.seen for one in by[CHOICE]) == 16
    assert {one.chosen for one in by[LAUNCH_ORDERS]} <= {one.best for one in by[LAUNCH_ORDERS]} | {
        "all_to_all > all_gather > gemm", "all_gather > all_to_all > gemm"
    }  # fmt: skip


SMALL_PAIR = parse_workload("8x6x4_1K", Kind.ALL_REDUCE, "float32")
NAMES = ("gemm", "small gemm", "all_reduce")


class Call:
    implementation, in_place, label = "gloo", False, "call"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.wrong_at = -1

    def start(self) -> Callable[[], None]:
        self.log.append("begins")
        return lambda: self.log.append("ends")

    def fill(self, seed: int) -> None:
        self.log.append("filled")

    def error(self, seed: int) -> str | None:
        self.wrong_at -= 1
        return "wrong" if self.wrong_at == 0 else None


class Alone:
    """Instruments of one rank: an order takes as long as the place of the large GEMM in it says."""

    def __init__(self) -> None:
        self.timed: list[str] = []

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def attempt(self, step: Callable[[], Any]) -> str | None:
        return step()  # type: ignore[no-any-return]

    def finish(self, what: str) -> None:
        pass

    def time(self, runs: Mapping[str, Callable[[], None]]) -> Mapping[str, Sequence[float]]:
        self.timed += runs
        for run in runs.values():
            run()
        return {name: [100.0 - name.split(" > ").index("gemm"), 500.0, 50.0] for name in runs}

    look = time


def test_every_order_is_checked_and_timed() -> None:
    call, instruments = Call(), Alone()
    orders = orders_of(SMALL_PAIR, call, instruments, torch.device("cpu"), itertools.count(1))
    assert set(orders) == set(itertools.permutations(NAMES))
    assert orders["all_reduce", "small gemm", "gemm"] == 98.0 and orders["gemm", "small gemm", "all_reduce"] == 100.0
    assert call.log.count("begins") == call.log.count("ends") == 12 and call.log.count("filled") == 6
    assert small_of(Gemm(8, 1, 4, "float32", "cb1")) == Gemm(4, 1, 4, "float32")


def test_an_order_that_is_wrong_has_no_time() -> None:
    call, instruments = Call(), Alone()
    call.wrong_at = 2
    orders = orders_of(SMALL_PAIR, call, instruments, torch.device("cpu"), itertools.count(1))
    assert len(orders) == 5 and list(itertools.permutations(NAMES))[1] not in orders


def test_the_launch_order_of_three_is_judged_by_a_file() -> None:
    serial, base = rows_not_run(parse_workload("cb1_896M"), "to be filled in", ("serial", "c3_base"))
    words = (
        "gemm > small gemm > all_gather 130",
        "all_gather > small gemm > gemm 100",
        "small gemm > all_gather > gemm 97",
    )
    filled: dict[str, Any] = {"gemm_us": 80.0, "time_us": 120.0, "speedup": 1.0, "note": ""}
    rows = [dataclasses.replace(serial, **filled, orders=", ".join(words)), dataclasses.replace(base, **filled)]
    (sweep,) = sweeps_of(rows, workgroups=32)
    assert [(kernel.name, kernel.workgroups) for kernel in sweep.others] == [
        ("gemm", 4096), ("small gemm", 1024), ("all_gather", 32),
    ]  # fmt: skip
    found = {one.heuristic: one for one in judge(sweep, KNOWN)}[LAUNCH_ORDERS]
    assert (found.chosen, found.best) == ("all_gather > small gemm > gemm", "small gemm > all_gather > gemm")
    assert (
        found.lost_percent is not None
        and round(found.lost_percent, 2) == round(100 * (100 / 97 - 1), 2)
        and not found.right
    )
