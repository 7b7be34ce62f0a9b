"""The choice of a way for a fused operator: tables, and what is done where there is none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from choices import keep, profile

from sidelane.choice.fused import (
    FUSED,
    SPLIT,
    UNFUSED,
    FusedTime,
    choose_method,
    choose_order,
)
from sidelane.choice.fused_heuristic import ORDERS
from sidelane.choice.key import Key
from sidelane.choice.profile import Profile, parse
from sidelane.choice.store import builtin_fused, fused_times
from sidelane_lab.harness.study import read
from sidelane_lab.studies.fused.rows import OWN, OWN_METHOD, FusedRow, kept_of, times_of

RESULTS = Path(__file__).parents[2] / "results"
ALL = (FUSED, SPLIT, UNFUSED)
HERE = Key("cuda", "NVIDIA H200", 2, software=(("torch", "2.11.0"),))
OP = "gemm_all_to_all"


def some(op: str = OP, captured: bool = False, nbytes: int = 2, sizes: int = 1024, **times: float) -> FusedTime:
    return FusedTime(op, 2, captured, (sizes, sizes, sizes), nbytes, times)


def chosen(*times: FusedTime, op: str = OP, n: int = 2, **options: object) -> str:
    found = choose_method({"here": times}, op, n, (1024, 1024, 1024), ways=ALL, **options)  # type: ignore[arg-type]
    return f"{found.candidate.name} {found.reason.rpartition('; ')[2].partition(':')[0]}"


@pytest.mark.parametrize("table", builtin_fused().values(), ids=lambda table: table.machine)
def test_tables_of_this_package_are_what_was_measured(table: Profile) -> None:
    assert table == kept_of(read(RESULTS / table.machine / "fused.json"))
    assert len(table.operators) >= {"h100x2": 28, "h200x1": 50, "h200x2": 38}[table.machine]


@pytest.mark.parametrize("table", builtin_fused().values(), ids=lambda table: table.machine)
def test_measured_shapes_are_never_slower_than_unfused(table: Profile) -> None:
    """And by thumb, as if there were no table, GEMMs by no more than 2% where one rank measured them."""
    measured = {"": table.operators}
    for time in table.operators:
        by_method = {way.partition("/")[0]: us for way, us in sorted(time.times.items(), key=lambda item: -item[1])}
        options = {"ways": tuple(by_method), "captured": time.captured, "experts": time.experts}
        for tables in (measured, {}) if time.op.startswith(("gemm_r", "gemm_all_r", "all_gather")) else (measured,):
            found = choose_method(tables, time.op, time.world_size, time.sizes, **options)  # type: ignore[arg-type]
            chosen_us = by_method[found.candidate.name]
            assert chosen_us <= 1.02 * by_method.get(UNFUSED, float("inf")), (time, found)
            assert not tables or chosen_us == min(by_method.values())


def test_what_differs_is_not_looked_up() -> None:
    fast = some(fused=1.0, unfused=2.0)
    assert chosen(fast) == "fused measured at 1024, 1024, 1024, eager, here"
    assert chosen(fast, some(captured=True, fused=2, unfused=1), captured=True).startswith("unfused measured")
    assert chosen(fast, captured=True).startswith("fused measured")  # better than nothing
    assert chosen(some(sizes=300, fused=1), some(sizes=2000, unfused=1)).startswith("unfused measured")  # the nearer
    assert chosen(some(**{"split/1": 3.0, "split/4": 2.0, "fused": 2.5})).startswith("split measured")
    for other in (some(op="gemm_all_reduce", fused=1), some(nbytes=4, fused=1), some(sizes=200, fused=1)):
        assert chosen(other, element_bytes=2).endswith("rule of thumb")
    assert chosen(fast, n=4).endswith("rule of thumb")
    assert chosen(fast, device_type="cpu", n=4) == "fused rule of thumb"


def test_kernels_that_have_never_run_are_taken_by_measurement_only() -> None:
    fast = some(fused=1.0, unfused=2.0)
    assert chosen(fast, guesses=False) == "fused measured at 1024, 1024, 1024, eager, here"
    for op in (OP, "gemv_all_reduce", "gemm_reduce_scatter"):
        found = choose_method({}, op, 2, (1024, 1024, 1024), ways=ALL, guesses=False)
        assert found.candidate.name == UNFUSED and found.reason.startswith("kernels of fused operators have never run")


def test_times_of_several_experts_say_nothing_about_one() -> None:
    def timed(experts: int, *, captured: bool = False, **times: float) -> FusedTime:
        return FusedTime("all_to_all_gemm", 2, captured, (1024, 1024, 1024), 2, times, experts=experts)

    known = timed(1, fused=1, unfused=2), timed(4, fused=2, unfused=1), timed(16, fused=1, unfused=2)

    def choose(experts: int, times: tuple[FusedTime, ...] = known, **options: object) -> str:
        return chosen(*times, op="all_to_all_gemm", experts=experts, **options)

    where = "measured at 1024, 1024, 1024"
    assert choose(1) == f"fused {where}, eager, here"
    assert choose(2) == choose(4) == f"unfused {where}, 4 experts, eager, here"
    assert choose(12) == choose(64) == f"fused {where}, 16 experts, eager, here"
    assert choose(1, known[1:]).endswith("rule of thumb") and choose(2, known[:1]).endswith("rule of thumb")
    assert choose(32, known[:2]).endswith("rule of thumb")  # too far
    assert choose(2, (known[0], timed(2, captured=True, fused=2, unfused=1))).startswith("unfused measured")
    table = dataclasses.replace(profile(), operators=known)
    assert parse(table.to_text()) == table and table.to_text().count('"experts"') == 2
    with pytest.raises(ValueError, match="must be positive"):
        timed(0, fused=1)


def test_files_have_several_experts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keep(HERE, [some(fused=1.0, unfused=2.0)])
    keep(HERE, [dataclasses.replace(some(fused=4.0, unfused=3.0), experts=8)])
    found, *_ = fused_times(None, HERE).values()
    assert [(time.experts, time.times[FUSED]) for time in found] == [(1, 1.0), (8, 4.0)]


def test_rows_of_the_study_have_several_experts_apart() -> None:
    """Of a way that the operator has; what a benchmark alone does, with counts on the host, is none."""
    results = read(RESULTS / "h200x2" / "fused.json")
    rows = [row for row in results.rows if isinstance(row, FusedRow) and row.op == "all_to_all_gemm"]
    of_experts = [row for row in rows if row.shape == "4096x4096x2048 a rank, 8 experts by top-k"]
    plain = [row for row in rows if row.shape == "4096x4096x2048 a rank, half for one peer"]
    before = [row for row in of_experts if row.schedule != OWN_METHOD]
    assert not list(times_of(before, 2, 2))
    own = [
        dataclasses.replace(row, implementation=OWN, schedule=OWN_METHOD, time_us=100.0 + place)
        for place, row in enumerate(row for row in before if row.implementation == FUSED)
    ]
    found = list(times_of([*plain, *before, *own], 2, 2))
    assert [(time.sizes, time.experts, time.captured) for time in found] == [
        ((4096, 4096, 2048), experts, captured) for experts in (1, 8) for captured in (False, True)
    ]
    assert [time.times[UNFUSED] for time in found[2:]] == [100.0, 101.0]


def test_thumb() -> None:
    def thumb(op: str, *sizes: int, n: int = 2, **options: object) -> str:
        return choose_method({}, op, n, sizes, **{"ways": ALL, **options}).candidate.name  # type: ignore[arg-type]

    assert thumb("gemv_all_reduce", 8192, 8192, 1) == FUSED  # nothing is known of it
    assert thumb(OP, 64, 64, 64) == UNFUSED  # the host's time
    assert thumb(OP, 8192, 1024, 8192, n=8, captured=True, ways=(FUSED, UNFUSED)) == FUSED  # mostly communication
    assert thumb(OP, 8192, 8192, 8192, n=4) == SPLIT
    pair = {"ways": (FUSED, UNFUSED), "captured": True, "experts": 8}
    assert thumb("all_to_all_gemm", 4096, 7168, 2048, **pair) == UNFUSED  # whose tiles wait for rows
    assert thumb("all_to_all_gemm", 8192, 4096, 1536, **pair) == FUSED  # not in whole rounds of programs
    assert thumb("gemm_all_to_all", 4096, 2048, 4096, **pair) == FUSED
    assert thumb("gemm_all_reduce", 64, 4096, 8192, captured=True) == UNFUSED  # too few rows
    assert thumb("gemm_all_reduce", 64, 64, 64, device_type="cpu", ways=(SPLIT, UNFUSED)) == SPLIT


def test_files_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = {
        f"built-in {name}": table.operators
        for name, table in builtin_fused().items()
        if table.key.device == HERE.device
    }
    assert 0 < len(own) < len(builtin_fused()), "and there are others"
    assert fused_times(None, HERE) == own
    path = keep(HERE, [some(fused=1.0, unfused=2.0), some(op="all_gather_gemm", fused=1.0)])
    keep(HERE, [some(fused=3.0, unfused=2.0)])
    (first, found), *others = fused_times(None, HERE).items()
    assert dict(others) == own and first == path.name == "fused-h200x2.json"
    assert {time.op: time.times[FUSED] for time in found} == {OP: 3.0, "all_gather_gemm": 1.0}
    assert fused_times("builtin", HERE) == own
    assert fused_times(None, Key("cuda", "NVIDIA H200", 2, software=(("torch", "2.12.0"),))) == own
    assert fused_times(None, Key("cpu", "some", 2)) == {}
    text = path.read_text()
    older = json.dumps({"format": 2, "key": HERE.to_dict(), "times": [some(fused=1.0).to_dict()]})
    for wrong in ("", "[]", older, text.replace("3.0", "0")):
        path.write_text(wrong)
        assert fused_times(None, HERE) == own
        assert (
            "fused-h200x2.json: not a profile" in caplog.text and "sidelane fused --keep measures again" in caplog.text
        )
        caplog.clear()
    keep(HERE, [some(fused=3.0, unfused=2.0)])
    assert len(fused_times(None, HERE)[path.name]) == 1, "a file of another format is replaced"


BAGS = "embedding_all_to_all"


def test_measured_orders_are_the_fastest_and_the_thumb_is_right_about_them() -> None:
    """Where one is faster by 2% and more; in graphs, as eager calls are the host's."""
    measured = [
        (table, time) for table in builtin_fused().values() for time in table.operators if time.captured and time.orders
    ]
    assert len(measured) >= 7
    for table, time in measured:
        fastest = min(time.orders.values())
        assert time.times[FUSED] == fastest
        for tables in ({"": table.operators}, {}):
            found = choose_order(tables, time.op, time.world_size, time.sizes, element_bytes=time.element_bytes)
            assert time.orders[found.candidate] <= (fastest if tables else 1.02 * fastest), (time, found)


def test_orders_by_thumb() -> None:
    assert [choose_order({}, BAGS, 2, (64, 64, pooling)).candidate for pooling in (1, 11, 12)] == [
        *ORDERS[:1] * 2,
        ORDERS[1],
    ]
    assert choose_order({}, BAGS, 8, (64, 64, 79)).candidate == ORDERS[0]  # seven senders for one link
    assert choose_order({}, BAGS, 1, (64, 64, 1)).reason.startswith("rule of thumb: ")
    unordered = some(op=BAGS, captured=True, fused=1.0)
    nearby = FusedTime(BAGS, 2, False, (900, 900, 900), 2, {"fused": 1.0}, {"remote_first": 1.0, "oblivious": 2.0})
    assert choose_order({"here": (unordered, nearby)}, BAGS, 2, (1024, 1024, 1024)).candidate == ORDERS[0]
    table = dataclasses.replace(profile(), operators=(unordered, nearby))
    assert parse(table.to_text()) == table
    with pytest.raises(ValueError, match="allowed=remote_first, oblivious"):
        FusedTime(BAGS, 2, False, (1, 1, 1), 2, {"fused": 1.0}, {"last": 1.0})


def test_ways_that_there_are_not() -> None:
    for wrong in ({"split": 1.0}, {"fused/2": 1.0}, {"best": 1.0}, {"fused": 0.0}):
        with pytest.raises(ValueError, match="value="):
            some(**wrong)
