"""The study of fused operators, from end to end on CPU ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sidelane import cli
from sidelane.choice.profile import parse
from sidelane.execute.timeline import Interval
from sidelane_lab.cli.collectives import FUSED_OPS
from sidelane_lab.harness import running
from sidelane_lab.harness.report import draw, tables_of
from sidelane_lab.harness.study import Results, read
from sidelane_lab.studies.fused.rows import ALONE, FusedRow
from sidelane_lab.studies.fused.study import FusedOptions

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def makers_of(op: str) -> tuple[object, ...]:
    from sidelane_lab.studies.fused import cases

    return cases.makers_of(op)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("ops", [FUSED_OPS[:4], FUSED_OPS[4:]], ids=["first", "others"])
def test_everything_is_checked_and_timed(tmp_path: Path, ops: tuple[str, ...]) -> None:
    path = tmp_path / "fused.json"
    plain: dict[str, Any] = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 1}
    options = FusedOptions(**plain, ops=ops, json=path, timeline=tmp_path)
    results = running.run(options)
    assert isinstance(results, Results)
    names = {made.name for made in tmp_path.glob("*-remote_first.*")}
    ordered = {"embedding_all_to_all", "gemm_all_to_all"} & set(ops)
    for op in ordered:
        assert {f"{op}-remote_first.{ending}" for ending in ("trace.json", "png", "svg")} <= names
        assert (tmp_path / f"{op}-skew.png").is_file()
    rows = [row for row in read(path).rows if isinstance(row, FusedRow)]
    assert {row.op for row in rows} == set(ops)
    for op in ops:
        mine = [row for row in rows if row.op == op]
        assert len({row.shape for row in mine}) == len(makers_of(op))
        mine = [row for row in mine if row.shape == mine[0].shape]
        best = [row for row in mine if row.implementation == "unfused_best"]
        unfused = [row.time_us for row in mine if row.implementation in ("unfused_nccl", "unfused_sidelane")]
        assert len(best) == 1 and best[0].time_us == min(time for time in unfused if time is not None)
        assert any(row.implementation == "fused" for row in mine)
        auto = [row for row in mine if row.implementation == "auto"]
        assert auto and all(row.note.startswith(f"{op}: ") for row in auto)
        for part, alone in (("compute", "compute_us"), ("collective", "comm_us")):
            times = [row.time_us for row in mine if row.implementation == part]
            assert min(time for time in times if time is not None) == getattr(best[0], alone)
    pictures = {picture.name: picture.text for picture in draw(results, tmp_path / "pictures")}
    assert ("remote_first" in pictures.get("fused-order", "")) is bool(ordered)
    swept = {"embedding_all_to_all", "gemv_all_reduce"} & set(ops)
    assert ("fused-occupancy" in pictures) is bool(swept)
    for op in swept:
        found = [row.schedule for row in rows if row.op == op and row.schedule.endswith(" programs a unit")]
        assert [schedule.partition(", ")[2].split()[0] for schedule in found] == ["1", "2"], found
        assert f"{op}, " in pictures["fused-occupancy"]
    assert "us with 1, " in pictures.get("fused-occupancy", "us with 1, ")
    if "embedding_all_to_all" in ops:
        embedding_rows_are_of_our_kernel_too([row for row in rows if row.op == "embedding_all_to_all"])
    whole = [row for row in rows if row.implementation not in ALONE]
    assert all(row.correct and (not row.note or row.implementation == "auto") for row in whole), rows
    assert all(row.time_us and row.skew_us is not None and row.skew_us >= 0 for row in rows)
    assert all(row.bound_us == max(row.compute_us or 0, row.comm_us or 0) for row in rows)
    assert len(tables_of(results)) == len(ops)


def embedding_rows_are_of_our_kernel_too(rows: list[FusedRow]) -> None:
    made_of = {(row.implementation, row.schedule) for row in rows}
    assert ("compute", "our kernel alone") in made_of
    chains = {("unfused_sidelane", "our kernel, sidelane, copy"), ("unfused_nccl", "our kernel, process group, copy")}
    assert chains <= made_of
    read = 4 * 2 * 2 * 8 * 4  # batch, tables, pooling, dim, bytes
    for row in rows:
        gbps = pytest.approx(read / row.time_us / 1e3, rel=1e-3) if row.time_us else 0
        assert row.gbps == (None if row.implementation == "collective" else gbps)


@needs_triton
def test_times_are_kept_for_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    line = f"fused --device cpu --ranks 2 --ops gemv_all_reduce --repeats 1 --keep --json {tmp_path / 'x.json'}"
    told = CliRunner().invoke(cli.main, line.split(), prog_name="sidelane")
    assert told.exit_code == 0, told.output
    results = read(tmp_path / "x.json")
    (file,) = tmp_path.rglob("fused-cpu.json")
    (time,) = parse(file.read_text()).operators
    mine = [row for row in results.rows if isinstance(row, FusedRow)]
    assert (time.op, time.world_size, time.captured, time.sizes) == ("gemv_all_reduce", 2, False, (20, 16, 1))
    swept = {f"cells, {count} programs a unit" for count in (1, 2)}
    assert swept <= {row.schedule for row in mine if row.correct and row.implementation == "fused"}
    fused = next(row.time_us for row in mine if (row.implementation, row.schedule) == ("fused", "cells"))
    unfused = next(row.time_us for row in mine if row.schedule == "as the operator has it")
    assert time.times == {
        "fused": pytest.approx(fused, rel=1e-3),
        "unfused": pytest.approx(unfused, rel=1e-3),
    }  # rounded


def test_skew_is_of_each_ranks_own_time() -> None:
    from sidelane_lab.studies.fused.pictures import skew_percent, times_of_ranks

    fast = [Interval("rank 0", "workgroup 1", "local", 2.0, 10.0), Interval("rank 0", "workgroup 0", "wait", 0.0, 4.0)]
    late = [Interval("rank 10", "workgroup 0", "wait", 1000.0, 1008.0), Interval("rank 2", "w 0", "wait", 500.0, 515.0)]
    assert times_of_ranks([*late, *fast]) == (10.0, 15.0, 8.0)
    assert skew_percent([(10.0, 15.0, 8.0), (10.0, 10.0, 10.0), (10.0, 11.0, 10.0)]) == pytest.approx(10)
