"""Measured pairs next to what a machine's description predicts of them, and what of it is drawn."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sidelane.cli import main
from sidelane_lab.harness import report
from sidelane_lab.harness.study import read
from sidelane_lab.machines.load import named
from sidelane_lab.studies.c3 import pictures, prediction
from sidelane_lab.studies.c3.prediction import draw_groups
from sidelane_lab.studies.c3.rows import C3Row

MEASURED = Path(__file__).parents[2] / "results" / "h200x4" / "c3.json"


def test_predictions_are_held_against_a_file(tmp_path: Path) -> None:
    given = ["c3", "--machine", "h200x4", "--results", str(MEASURED), "--json", str(tmp_path / "c.json")]
    told = CliRunner().invoke(main, [*given, "--report", str(tmp_path / "report")])
    assert told.exit_code == 0, told.output
    assert "nccl_copy_engines: not predicted" in told.output
    content = json.loads((tmp_path / "c.json").read_text())
    assert (content["study"], content["machine"], content["measured"]) == ("c3_compared", "h200x4", "h200x4")
    rows = [row for row in content["rows"] if row["strategy"] == "conccl"]
    assert rows and all(abs(row["predicted_us"] / row["time_us"] - 1) < 0.15 for row in rows)
    assert {row["predicted_us"] for row in content["rows"] if row["strategy"] == "nccl_ce"} == {None}
    names = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert names == {"c3-kernels", "c3-engines"}
    wrong = CliRunner().invoke(main, ["c3", "--machine", "h200x4", "--results", str(tmp_path / "c.json")])
    assert wrong.exit_code and "not a result file" in wrong.output
    assert CliRunner().invoke(main, [*given, "cb1_896M"]).exit_code, "the pairs are those of the file"


def test_a_report_of_a_known_machine_has_its_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, drawn = read(MEASURED), []
    rows = [row for row in results.rows if isinstance(row, C3Row)]
    monkeypatch.setattr(pictures, "draw_strategies", lambda *given: [])
    monkeypatch.setattr(pictures, "draw_groups", lambda rows, predicted, *given: drawn.append(predicted) or [])
    assert report.draw(results, tmp_path) == []
    compared = prediction.compare(named("h200x4"), rows)
    assert not any(one.row.chosen for one in compared)
    speedups = prediction.speedups(compared)
    assert drawn == [speedups]
    assert {key[3] for key in speedups} == {"serial", "c3_base", "c3_sp", "conccl"}
    few = [row for row in rows if (row.gemm, row.collective) == (rows[0].gemm, rows[0].collective)]
    assert draw_groups(few, {}, results, tmp_path) == [], "nothing to average"
    gone = dataclasses.replace(next(row for row in rows if row.strategy == "conccl"), strategy="conccl_rp_left")
    assert prediction.compare(named("h200x4"), [gone]) == [], "a strategy that has gone since"
    pictures_of = [draw_groups(some, {}, results, tmp_path) for some in (rows, [*rows, gone])]
    assert pictures_of[0] == pictures_of[1] != []
