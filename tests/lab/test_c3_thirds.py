"""Three kernels in every order of their launches: what is timed, what is wrong, and how the heuristic is judged."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from test_c3_judged import KNOWN

from sidelane.program.collective import Kind
from sidelane_lab.pairs.pair import orders_of, small_of
from sidelane_lab.pairs.sweep import LAUNCH_ORDERS, judge
from sidelane_lab.pairs.workload import Gemm, parse_workload
from sidelane_lab.studies.c3.bench import rows_not_run
from sidelane_lab.studies.c3.heuristics import sweeps_of

PAIR = parse_workload("8x6x4_1K", Kind.ALL_REDUCE, "float32")
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
    orders = orders_of(PAIR, call, instruments, torch.device("cpu"), itertools.count(1))
    assert set(orders) == set(itertools.permutations(NAMES))
    assert orders["all_reduce", "small gemm", "gemm"] == 98.0 and orders["gemm", "small gemm", "all_reduce"] == 100.0
    assert call.log.count("begins") == call.log.count("ends") == 12 and call.log.count("filled") == 6
    assert small_of(Gemm(8, 1, 4, "float32", "cb1")) == Gemm(4, 1, 4, "float32")


def test_an_order_that_is_wrong_has_no_time() -> None:
    call, instruments = Call(), Alone()
    call.wrong_at = 2
    orders = orders_of(PAIR, call, instruments, torch.device("cpu"), itertools.count(1))
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
