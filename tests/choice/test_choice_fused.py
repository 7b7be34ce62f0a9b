"""The choice of a way for a fused operator: tables, and what is done where there is none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from choices import keep

from sidelane.choice.fused import FUSED, SPLIT, UNFUSED, FusedTime, choose_method
from sidelane.choice.key import MachineKey
from sidelane.choice.profile import Profile
from sidelane.choice.store import builtin_fused, fused_times
from sidelane.machine.peers import PeerMemory
from sidelane_lab.harness.study import read
from sidelane_lab.studies.fused.rows import FusedRow, kept_of, times_of

RESULTS = Path(__file__).parents[2] / "results"
ALL = (FUSED, SPLIT, UNFUSED)
HERE = MachineKey("cuda", "NVIDIA H200", 2, software=(("torch", "2.11.0"),))
OP = "gemm_all_to_all"


def some(op: str = OP, captured: bool = False, nbytes: int = 2, sizes: int = 1024, **times: float) -> FusedTime:
    return FusedTime(op, 2, captured, (sizes, sizes, sizes), nbytes, times)


def chosen(*times: FusedTime, op: str = OP, n: int = 2, **options: object) -> str:
    found = choose_method({"here": times}, op, n, (1024, 1024, 1024), ways=ALL, **options)  # type: ignore[arg-type]
    return f"{found.candidate.name} {found.reason.rpartition('; ')[2].partition(':')[0]}"


GRID = "results/h200x2/gemv-grid.txt"


def grid() -> Iterator[tuple[FusedTime, bool]]:
    """Times of GEMVs between two H200s, by the tiles that the operator takes, and whether the table has them."""
    for line in (RESULTS.parent / GRID).read_text().splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            fused = one["16x256w2" if one["t"] > 1 and one["m"] <= 4096 else "default"]
            times = {"fused": fused, "unfused": min(one["unfused"], one["mm+ar"])}
            sizes = one["m"], 2 * one["k"], one["t"]
            yield FusedTime("gemv_all_reduce", 2, True, sizes, 2, times), one["t"] in (1, 4, 16)


@pytest.mark.parametrize("table", builtin_fused().values(), ids=lambda table: table.machine)
def test_tables_of_this_package_are_what_was_measured(table: Profile) -> None:
    right = kept_of(read(RESULTS / table.machine / "fused.json"))
    if table.machine == "h200x2":
        of_grid = sorted((time for time, is_known in grid() if is_known), key=lambda time: (time.sizes[2], time.sizes))
        command = f"{right.command}; grid of gemv_all_reduce in graphs at 7fa5592c (30 November): {GRID}"
        right = dataclasses.replace(right, operators=(*right.operators, *of_grid), command=command)
    assert table == right and len(table.operators) >= {"h100x2": 22, "h200x1": 50, "h200x2": 38}[table.machine]


@pytest.mark.parametrize("table", builtin_fused().values(), ids=lambda table: table.machine)
def test_measured_shapes_are_never_slower_than_unfused(table: Profile) -> None:
    """And by thumb, as if there were no table, GEMMs by no more than 2% where one rank measured them."""
    measured = {"": table.operators}
    for time in table.operators:
        by_method = {way.partition("/")[0]: us for way, us in sorted(time.times.items(), key=lambda item: -item[1])}
        options = {"ways": tuple(by_method), "captured": time.captured}
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


def test_rows_of_gemvs_count_for_the_methods_that_they_have() -> None:
    """A method fails at one size, or is one that arithmetic says nothing about."""
    one_token = dataclasses.replace(some("gemv_all_reduce", fused=20.0, unfused=25.0), sizes=(1024, 1024, 1))
    for times, columns, expected in (
        ({"unfused": 40.0}, 1100, "fused: 20 us"),
        ({"unfused": 40.0}, 1900, "unfused: 37.9"),
        ({"fused": 30.0, "split/1": 3.0}, 1100, "fused: 2"),
        ({"unfused": 40.0, "split/1": 3.0}, 2048, "split: 3 us"),
    ):
        rows = one_token, dataclasses.replace(one_token, sizes=(1024, 2048, 1), times=times)
        assert str(choose_method({"": rows}, "gemv_all_reduce", 2, (1024, columns, 1), ways=ALL)).startswith(expected)


def test_kernels_that_have_never_run_are_taken_by_measurement_only() -> None:
    fast = some(fused=1.0, unfused=2.0)
    assert chosen(fast, guesses=False) == "fused measured at 1024, 1024, 1024, eager, here"
    for op in (OP, "gemv_all_reduce", "gemm_reduce_scatter"):
        found = choose_method({}, op, 2, (1024, 1024, 1024), ways=ALL, guesses=False)
        assert found.candidate.name == UNFUSED and found.reason.startswith("kernels of fused operators have never run")


def test_rows_of_several_experts_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files of earlier versions, which have orders of embeddings, too; and in rows of the study."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = keep(HERE, [some(fused=1.0, unfused=2.0), some(fused=4.0, unfused=3.0)])
    assert path.read_text().count('"times"') == 1
    content = json.loads(path.read_text())
    (row,) = content["operators"]
    orders = {"remote_first": 1.0, "oblivious": 2.0}
    content["operators"] = [{**row, "orders": orders}, {**row, "times": {"fused": 9.0}, "experts": 8}]
    path.write_text(json.dumps(content))
    found, *_ = fused_times(None, HERE).values()
    assert found == (some(fused=4.0, unfused=3.0),)
    rows = [row for row in read(RESULTS / "h100x2" / "fused.json").rows if isinstance(row, FusedRow)]
    of_experts = [row for row in rows if row.shape == "4096x4096x2048 a rank, 8 experts by top-k"]
    assert of_experts and not list(times_of(of_experts, 2, 2))


def test_thumb() -> None:
    def thumb(op: str, *sizes: int, n: int = 2, **options: object) -> str:
        return choose_method({}, op, n, sizes, **{"ways": ALL, **options}).candidate.name  # type: ignore[arg-type]

    assert thumb("gemv_all_reduce", 8192, 8192, 1) == FUSED
    for captured in (False, True):
        assert thumb("gemv_all_reduce", 2560, 19456, 4, captured=captured) == UNFUSED  # two tiles for 28 of 132 units
        assert thumb("gemv_all_reduce", 2560, 19456, 1, captured=captured) == FUSED
    assert thumb(OP, 64, 64, 64) == UNFUSED  # the host's time
    assert thumb(OP, 8192, 1024, 8192, n=8, captured=True, ways=(FUSED, UNFUSED)) == FUSED  # mostly communication
    assert thumb(OP, 8192, 8192, 8192, n=4) == SPLIT
    pair = {"ways": (FUSED, UNFUSED), "captured": True}
    assert thumb("all_to_all_gemm", 4096, 7168, 2048, **pair) == UNFUSED  # whose tiles wait for rows
    assert thumb("gemm_all_reduce", 64, 4096, 8192, captured=True) == UNFUSED  # too few rows
    assert thumb("gemm_all_reduce", 64, 64, 64, device_type="cpu", ways=(SPLIT, UNFUSED)) == SPLIT


def test_a_gemv_is_never_slower_than_unfused_between_measured_shapes() -> None:
    """Each shape of the grid with its own time, and with its time, those of its rows, or of its columns, out of the
    table. With its own time the choice is the faster way. Two and eight tokens are in no table.
    """
    ((name, own),) = ((name, times) for name, times in fused_times("builtin", HERE).items() if "h200x2" in name)
    behind: dict[str, list[float]] = {"known": [], "one": [], "several": [], "unfused": []}
    for time, is_known in grid():
        for kind, left in (
            ("known" if is_known else "", own),
            ("", tuple(t for t in own if t.op != time.op or t.sizes != time.sizes)),
            ("", tuple(t for t in own if t.op != time.op or t.sizes[1] != time.sizes[1])),
            ("", tuple(t for t in own if t.op != time.op or t.sizes[0] != time.sizes[0])),
        ):
            found = choose_method({name: left}, time.op, 2, time.sizes, element_bytes=2, captured=True)
            behind[kind or ("one" if time.sizes[2] == 1 else "several")].append(
                time.times[found.candidate.name] / min(time.times.values())
            )
            behind["unfused"].append(time.times[found.candidate.name] / time.times[UNFUSED])
    assert max(behind["known"]) <= 1.001 and max(behind["unfused"]) <= 1.02
    for between, *most in ("one", 1.0, 1.01, 1.16), ("several", 1.001, 1.06, 1.2):
        ratios = sorted(behind[str(between)])
        assert sum(ratios) <= 1.0144 * len(ratios), "the mean without margins"
        places = len(ratios) * 3 // 4, len(ratios) * 9 // 10, -1
        assert all(ratios[at] <= limit for at, limit in zip(places, most, strict=True)), between


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
    assert fused_times(None, MachineKey("cuda", "NVIDIA H200", 2, software=(("torch", "2.12.0"),))) == own
    assert fused_times(None, MachineKey("cpu", "some", 2)) == {}
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
    between = HERE.between(PeerMemory(True))
    assert fused_times(None, between) == {}, "none of these was measured through host memory"
    path = keep(between, [some(fused=4.0, unfused=2.0)])
    assert fused_times(None, between) == {path.name: (some(fused=4.0, unfused=2.0),)}


def test_ways_that_there_are_not() -> None:
    for wrong in ({"split": 1.0}, {"fused/2": 1.0}, {"best": 1.0}, {"fused": 0.0}):
        with pytest.raises(ValueError, match="value="):
            some(**wrong)
