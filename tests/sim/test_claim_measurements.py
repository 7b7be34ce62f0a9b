"""``sidelane claims --measured``: every claim of the papers beside our result files, or why there is nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sidelane.program.collective import Kind
from sidelane_lab.cli.model import claims
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.command import CLAIMS
from sidelane_lab.papers.files import FILES, find_results
from sidelane_lab.papers.measurements import CollectiveReadings, FusedReadings
from sidelane_lab.papers.rows import MeasuredClaim, ratio_of
from sidelane_lab.papers.rows import measure_claim as measured_of

RESULTS = Path(__file__).resolve().parents[2] / "results"
C3 = {"gemm": "cb1", "bytes": 1 << 20, "class": "C-long", "gemm_us": 100.0, "comm_us": 300.0, "correct": True}


def write(path: Path, study: str, rows: list[dict[str, Any]], **fields: Any) -> Path:
    content = {"study": study, "machine": "here", "device": "NVIDIA H200", "ranks": 2, "rows": rows, **fields}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def measure_claim(claim_id: str, sources: list[Path]) -> list[MeasuredClaim]:
    return measured_of(CLAIMS[claim_id], sources)


def test_prelaunched_calls_are_read_from_their_trigger_on(tmp_path: Path) -> None:
    usual = {"collective": "all_gather", "in_place": False, "correct": True, "launch": "eager", "bytes": 2 << 20}
    rows = [
        {**usual, "implementation": "nccl", "variant": "", "trigger": "call", "launch": "graph", "time_us": 20.0},
        {**usual, "implementation": "dma", "variant": "pcpy", "trigger": "call", "launch": "graph", "time_us": 30.0},
        {**usual, "implementation": "dma", "variant": "pcpy", "trigger": "stream", "time_us": 15.0},
        {**usual, "implementation": "dma", "variant": "pcpy", "trigger": "kernel", "time_us": 10.0},
        {**usual, "implementation": "dma", "variant": "pcpy", "trigger": "host", "time_us": 1.0},
    ]
    file = find_results([write(tmp_path / "prelaunch.json", "prelaunch", rows)], "prelaunch", "prelaunch.json")[0]
    readings = CollectiveReadings(file)
    assert readings.gain(Kind.ALL_GATHER, "pcpy", "pcpy+prelaunch", [2 << 20]) == pytest.approx(3)
    assert readings.behind(Kind.ALL_GATHER, ("pcpy+prelaunch",), [2 << 20]) == pytest.approx(0.5)


def test_fused_operators_are_read_at_shapes_that_the_paper_has(tmp_path: Path) -> None:
    """Rows of a GEMV had come into the embedding's curve, and poolings of 1 and 8 into a mean of bags of 70."""

    def row(op: str, shape: str, implementation: str, schedule: str, time_us: float) -> dict[str, Any]:
        fields = {"op": op, "shape": shape, "implementation": implementation, "schedule": schedule}
        return {**fields, "launch": "graph", "time_us": time_us}

    bags, gemv = "batch 1024, 64 tables a rank, pooling {}, dim 256", "{}x8192, {} tokens"
    rows = []
    for n in (1, 2, 3):
        rows.append(row("embedding_all_to_all", bags.format(32), "fused", f"oblivious, {2 * n} programs a unit", 9 - n))
        rows.append(row("gemv_all_reduce", gemv.format(8192, 1), "fused", f"cells, {n} programs a unit", 40.0 + n))
    shapes = {bags.format(70): 8.0, bags.format(1): 1.0, gemv.format(8192, 1): 6.0, gemv.format(8192, 16): 1.0}
    for shape, us in shapes.items():
        op = "gemv_all_reduce" if "tokens" in shape else "embedding_all_to_all"
        rows += [row(op, shape, "unfused_nccl", "", 10.0), row(op, shape, "fused", "remote_first", us)]
    readings = FusedReadings(find_results([write(tmp_path / "fused.json", "fused", rows)], "fused", "fused.json")[0])
    assert readings.by_programs() == {2: 8.0, 4: 7.0, 6: 6.0}
    assert readings.by_programs("gemv_all_reduce") == {1: 41.0, 2: 42.0, 3: 43.0}
    assert readings.lower("embedding_all_to_all") == pytest.approx([20.0])
    assert readings.lower("gemv_all_reduce") == pytest.approx([40.0])


def test_the_best_of_all_variants_is_read_where_some_are_prelaunched(tmp_path: Path) -> None:
    usual = {"collective": "all_gather", "in_place": False, "correct": True, "launch": "graph", "bytes": 1 << 30}
    rows = [
        {**usual, "implementation": "nccl", "variant": "", "time_us": 20.0},
        {**usual, "implementation": "dma", "variant": "pcpy", "time_us": 30.0},
    ]
    write(tmp_path / "one" / "collectives.json", "collectives", rows)
    write(tmp_path / "two" / "collectives.json", "collectives", rows, machine="there")
    fired = {
        **usual,
        "implementation": "dma",
        "variant": "pcpy",
        "trigger": "kernel",
        "launch": "eager",
        "time_us": 9.0,
    }
    write(tmp_path / "two" / "prelaunch.json", "prelaunch", [*rows, fired], machine="there")
    found = {one.machine: one.value for one in measure_claim("DM-T1-4", [tmp_path])}
    assert found == {"there": "pcpy+prelaunch at 1 of 1 sizes", "here": "pcpy at 1 of 1 sizes"}


PAIR = ("gemm", "bytes", "collective")
BY_CALL = ("collective", "implementation", "variant", "bytes", "in_place")
DRAWN = {
    "c3": (*PAIR, "strategy"),
    "heuristics": (*PAIR, "heuristic"),
    "occupancy": (*PAIR, "implementation", "shape", "blocks", "resident", "priority"),
    "collectives": (*BY_CALL, "launch", "prelaunch", "tensors"),
    "prelaunch": (*BY_CALL, "launch", "trigger"),
    "power": BY_CALL,
    "chain": ("bytes", "implementation", "variant", "launch", "in_place"),
    "phases": ("operation", "variant", "launch", "bytes"),
    "fused": ("op", "shape", "implementation", "schedule", "launch"),
    "isolated": (*PAIR, "what", "means", "units", "implementation", "variant"),
}
"""Columns that readings tell rows apart by."""


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_readings_tell_all_rows_of_our_files_apart(path: Path) -> None:
    """A curve of two operators, or of two of anything else, would have the rows of the last one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    columns = DRAWN.get(content.get("study"), ()) if isinstance(content, dict) else ()
    rows = [row for row in content["rows"] if row.get("shape") != "tuned"] if columns else []
    keys = Counter(tuple(row.get(column) for column in columns) for row in rows if row.get("time_us") is not None)
    assert [key for key, count in keys.items() if count > 1] == []


def test_no_reading_lacks_its_rows_in_our_files() -> None:
    readings = {claim_id: claim.reading for claim_id, claim in CLAIMS.items() if claim.reading is not None}
    measured = {claim_id for claim_id in readings if measure_claim(claim_id, [RESULTS])}
    there = {path.name for path in RESULTS.glob("*/*.json")}
    assert measured == {claim_id for claim_id, reading in readings.items() if FILES[reading.study] in there}


def test_a_pair_is_read_as_papers_define_it(tmp_path: Path) -> None:
    rows = [
        {**C3, "collective": "all_to_all", "strategy": strategy, "time_us": us}
        for strategy, us in (("serial", 400.0), ("c3_base", 350.0), ("conccl", 320.0))
    ]
    rows += [{**row, "bytes": 2 << 20, "percent_of_ideal": 159.0 * (row["strategy"] == "conccl")} for row in rows]
    rows[-1]["time_us"] = 200.0  # less than either alone
    file = write(tmp_path / "c3.json", "c3", rows)
    values = {claim_id: measure_claim(claim_id, [file])[0].value for claim_id in ("C3-ID-01", "CC-03", "CC-04")}
    assert values["C3-ID-01"] == pytest.approx(400 / 300, rel=1e-3)
    assert values["CC-03"] == pytest.approx(100 * (400 / 320 - 1) / (400 / 300 - 1), rel=1e-3)
    assert values["CC-04"] == pytest.approx(400 / 320, rel=1e-3)
    assert not measure_claim("C3-SP-01", [file]), "no pair ran under c3_sp"


def test_pairs_of_every_class_tell_if_units_are_worth_taking(tmp_path: Path) -> None:
    def rows(beside: str, whole_us: float) -> list[dict[str, Any]]:
        memory = {**C3, "collective": "all_gather", "bound": "memory", "gemm": "add", "sweep": ""}
        swept = {**memory, "strategy": "conccl_rp", "time_us": 290.0, "units": 16, "sweep": beside}
        others = [{**memory, "strategy": name, "time_us": us} for name, us in (("serial", 400.0), ("conccl", whole_us))]
        compute = [{**row, "bound": "compute", "gemm": "cb1", "sweep": "8 1"} for row in (*others, swept)]
        return [*others, swept, *compute]

    file = write(tmp_path / "c3-classes.json", "c3", rows("8 310, 16 290, 32 295", 300.0))
    assert measure_claim("C3-CU-09", [tmp_path])[0].value == 16
    assert measure_claim("CC-05", [tmp_path])[0].value == {"conccl_rp": 113.8, "conccl": 100.0}
    write(file, "c3", rows("8 310, 16 301", 300.0))
    assert measure_claim("C3-CU-09", [file])[0].value == 0
    file.rename(tmp_path / "c3.json")
    assert not measure_claim("C3-CU-09", [tmp_path / "c3.json"]), "a file of other pairs"


def test_wrong_rows_one_rank_and_predictions_do_not_count(tmp_path: Path) -> None:
    row = {**C3, "collective": "all_to_all", "strategy": "serial", "time_us": 400.0}
    assert not measure_claim("C3-ID-01", [write(tmp_path / "a" / "c3.json", "c3", [{**row, "correct": False}])])
    assert not find_results([write(tmp_path / "b" / "c3.json", "c3", [row], ranks=1)], "c3", "c3.json")
    assert not find_results([write(tmp_path / "c" / "c3.json", "c3", [row], predicted=True)], "c3", "c3.json")
    copied = {
        "operation": "copy",
        "variant": "b2b",
        "bytes": 4096,
        "control_us": 1.0,
        "schedule_us": 1.0,
        "sync_us": 1.0,
        "copy_us": 1.0,
        "total_us": 4.0,
        "launch": "model",
    }
    both = write(tmp_path / "d" / "phases.json", "phases", [{**copied, "launch": "eager"}, {**copied, "copy_us": 4.0}])
    assert [found.value for found in measure_claim("DM-PH-01", [both])] == [75], "the model's row is left out"
    with pytest.raises(ValueError, match="not a result file"):
        find_results([tmp_path / "nothing.json"], "c3", "c3.json")


def test_ratios_are_of_single_numbers() -> None:
    assert ratio_of(4, 1.0) == 0.25 and ratio_of({"a": 1}, {"a": 1}) is None and ratio_of(0, 3.0) is None


def test_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(claims, ["--measured", "--results", str(RESULTS), "--json", "-"])
    assert result.exit_code == 0, result.stderr
    rows = {row["id"]: row for row in json.loads(result.stdout)}
    assert set(rows) == set(published()) and all(bool(row["measured"]) != bool(row["why"]) for row in rows.values())
    machines = [one["machine"] for one in rows["CC-03"]["measured"]]
    assert machines[0] == "h200x2", "the file with the most pairs comes first"

    shown = CliRunner().invoke(claims, ["--measured", "--results", str(tmp_path)])
    assert "no c3.json has it" in shown.output and "measured: 0 of 174" in shown.output
    refused = CliRunner().invoke(claims, ["--measured", "--no-ranges"])
    assert refused.exit_code != 0 and "does not go with --measured" in refused.output
