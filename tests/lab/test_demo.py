"""What ``sidelane demo`` shows where there are no GPUs, all of it, between two processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sidelane import cli
from sidelane_lab.studies.demo import NEXT, PAPER, CollectiveCheck, measured, overlap_percents, prove

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ROOT / "src" / "sidelane_lab" / "papers" / "data" / "measured.json"
STRATEGIES = ("c3_base", "nccl_ce", "conccl", "auto")
IMPLEMENTATIONS = ("nccl", "symm_mem", "auto")


def pick(results: Path) -> dict[str, Any]:
    """Pick the figures from the folder of result files."""
    c3, c3_source = _load(results, "h200x4/c3.json")
    collectives, source = _load(results, "h200x2/collectives.json")
    overlaps = [
        [row["gemm"], row["collective"], row["bytes"], row["strategy"], row["percent_of_ideal"]]
        for row in c3
        if row["strategy"] in STRATEGIES
    ]
    gathers: dict[str, dict[str, float]] = {name: {} for name in IMPLEMENTATIONS}
    for row in collectives:
        times = gathers.get(row["implementation"])
        chosen = row["collective"] == "all_gather" and row["launch"] == "graph" and not row["in_place"]
        if times is not None and chosen and row["tensors"] == 1:
            key = str(row["bytes"])
            times[key] = min(row["time_us"], times.get(key, row["time_us"]))
    return {"overlaps": overlaps, "overlap_source": c3_source, "gathers": gathers, "gather_source": source}


def _load(results: Path, name: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    data = json.loads((results / name).read_text(encoding="utf-8"))
    machine = f"{data['gpus']} x {data['device']}"
    source = {"file": f"results/{name}", "machine": machine, "date": data["date"][:10], "commit": data["commit"]}
    return data["rows"], source


def test_a_right_program_is_proved_and_a_wrong_one_refused() -> None:
    proof = prove(3)
    assert proof.verification.commands > 10 and proof.refusal.startswith("race on output@")


def test_wrong_bytes_are_counted() -> None:
    import torch

    row = CollectiveCheck("all_gather")
    row.compare(torch.tensor([1, 2]), torch.tensor([1, 2]))
    row.compare(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert (row.wrong, row.nbytes) == (1, 32)


def test_measured_figures_are_those_of_the_result_files() -> None:
    """After new results: python tests/lab/test_demo.py."""
    assert json.loads(PACKAGED.read_text()) == json.loads(json.dumps(pick(ROOT / "results")))


def test_predictions_stand_beside_what_was_measured() -> None:
    """A model that has gone astray shows here, before anyone sees the picture."""
    predicted, found, again = overlap_percents(measured())
    assert all(abs(predicted[name] - PAPER[name]) < 10 for name in PAPER)
    assert all(abs(again[name] - found[name]) < 10 for name in again)
    assert found["auto"] > found["nccl_ce"] > found["c3_base"]


def test_the_demo(tmp_path: Path) -> None:
    line = f"demo --device cpu --ranks 2 --report {tmp_path} --json {tmp_path / 'demo.json'}"
    result = CliRunner().invoke(cli.main, line.split())
    assert result.exit_code == 0, result.output
    assert {"proof", "checked", "percent_of_ideal", "choices"} <= set(json.loads((tmp_path / "demo.json").read_text()))
    shown = " ".join(result.output.split())
    assert "no race, no deadlock, every byte of every output" in shown and "race on output@1" in shown
    wrong = re.findall(r"^ (\w+) +(\d+) +[\d.]+ +(\d+) +[\d.]+ *$", result.output, re.MULTILINE)
    assert len(wrong) == 7 and all((calls, count) == ("36", "0") for _, calls, count in wrong), result.output
    assert "sidelane c3 --machine h200x4" in shown
    assert "Percent of ideal" in shown and "by the fastest collective that was measured" in shown
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 4 and "results/h200x4/c3.json" in page
    assert "http" not in page.replace("http://www.w3.org", ""), "it holds everything that it shows"


@pytest.mark.parametrize("line", [command for command, _ in NEXT[:2]])
def test_what_it_proposes_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.main, line.split()[1:])
    assert result.exit_code == 0, result.output


if __name__ == "__main__":
    PACKAGED.write_text(json.dumps(pick(ROOT / "results"), indent=1) + "\n", encoding="utf-8")
