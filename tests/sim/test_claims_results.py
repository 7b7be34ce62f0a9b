"""Predictions against measured files: with files whose times are known, since the model made them."""

from __future__ import annotations

import dataclasses
import io
import json
import statistics
from pathlib import Path

import pytest
import rich.console

from sidelane.bench.claims import command, figures
from sidelane.bench.claims.gemms import judge_layers
from sidelane.bench.claims.power import predict_watts
from sidelane.bench.claims.results import (
    compare,
    fitted_to,
    layers_file,
    predict_alone,
    predict_together,
    role_problems,
)
from sidelane.bench.gemms.shapes import FITTED, SEEN
from sidelane.bench.results.files import Results, read, write
from sidelane.bench.results.rows.calls import PowerRow
from sidelane.bench.results.rows.collectives import CollectiveRow
from sidelane.bench.results.rows.pairs import C3Row
from sidelane.bench.results.written import STDOUT
from sidelane.c3.workload import Gemm
from sidelane.machine.load import named
from sidelane.model.claims import Role
from sidelane.model.gemm import gemm_us
from sidelane.model.strategies import predict
from sidelane.model.study import table_ii_workload
from sidelane.program.collective import Kind

H200 = named("h200x4")
NBYTES = 896 << 20
ROOT = Path(__file__).resolve().parents[2]


def c3_row(strategy, time_us, comm_us=2175.0, **more):
    values = {
        "gemm": "cb1", "m": 8192, "n": 8192, "k": 8192, "dtype": "bfloat16", "collective": "all_gather",
        "bytes": NBYTES, "c3_class": "C-long", "strategy": strategy, "chosen": "", "gemm_us": 1410.0,
        "comm_us": comm_us, "best_comm_us": 1800.0, "time_us": time_us, "speedup": 1.0, "ideal": 1.7,
        "percent_of_ideal": 0.0, "percent_of_ideal_nccl": 0.0, "correct": True,
    }  # fmt: skip
    return C3Row(**(values | more))


def collective_row(implementation, variant, time_us, nbytes=NBYTES, **more):
    values = {
        "collective": "all_gather", "bytes": nbytes, "dtype": "bfloat16", "in_place": True, "launch": "graph",
        "implementation": implementation, "variant": variant, "prelaunch": False, "time_us": time_us,
        "p10_us": time_us, "p90_us": time_us, "bus_gbps": 1.0, "energy_mj": None, "correct": True,
    }  # fmt: skip
    return CollectiveRow(**(values | more))


def save(folder, study, rows):
    results = Results(study, "h200x4", 4, "NVIDIA H200", 4, "2026-01-01T00:00:00+00:00", "abc", "x", {}, tuple(rows))
    write(folder / f"{study}.json", results)


def test_predictions_start_from_the_isolated_times_of_the_row():
    assert predict_together(H200, c3_row("serial", 1.0)) == 1410.0 + 2175.0
    assert predict_together(H200, c3_row("c3_base", 1.0)) == pytest.approx(3585.0, rel=0.01)
    beside = predict_together(H200, c3_row("conccl", 1.0, comm_us=1840.0))
    assert 1840.0 <= beside < 1.05 * 1840.0
    assert predict_together(H200, c3_row("auto", 1.0)) is None
    assert predict_together(H200, c3_row("conccl", 1.0, collective="broadcast")) is None


def test_a_copy_that_waits_for_the_gemm_comes_after_it():
    """Out of place, NCCL's copy of the own chunk holds up the others; ours waits alone."""
    away = {"collective": "all_to_all", "comm_us": 1000.0, "gemm_us": 2000.0}
    alone = predict_together(H200, c3_row("conccl", 1.0, note="dma auto in place eager", **away))
    ours = predict_together(H200, c3_row("conccl", 1.0, note="dma auto out of place eager", **away))
    theirs = predict_together(H200, c3_row("nccl_ce", 1.0, note="nccl_ce out of place eager", **away))
    chunk_us = NBYTES / 4 / H200.dma.local_gbps / 1e3
    assert ours == pytest.approx(alone + chunk_us, rel=1e-6)
    assert theirs == pytest.approx(3000.0)
    free = H200.with_value("interference.local_waits", 0)
    assert predict_together(free, c3_row("nccl_ce", 1.0, note="nccl_ce out of place eager", **away)) < 2200


def test_rows_that_were_fitted_to_are_not_called_predictions(tmp_path):
    middle, large = 16 << 20, 1 << 30
    assert fitted_to(collective_row("nccl", "", 1.0, nbytes=middle))
    assert fitted_to(collective_row("dma", "b2b", 1.0, nbytes=large))
    assert not fitted_to(collective_row("dma", "b2b", 1.0, nbytes=middle))
    assert not fitted_to(collective_row("dma", "bcst", 1.0, nbytes=large))
    assert not fitted_to(collective_row("nccl", "window", 1.0))
    rows = [collective_row("dma", "b2b", 2100.0, nbytes=large), collective_row("dma", "b2b", 70.0, nbytes=middle)]
    save(tmp_path, "collectives", rows)
    roles = {v.claim_id.partition("/collectives/")[2]: str(v.role) for v in compare(H200, tmp_path)}
    assert roles == {
        "all_gather/1G/in place/dma b2b": "fitted",
        "all_gather/16M/in place/dma b2b": "held_out",
        "median": "fitted",
        "median of held out": "held_out",
    }


def test_nothing_is_predicted_of_lists_nor_fitted_to_them(tmp_path):
    single, listed = (collective_row("dma", "b2b", 2100.0, nbytes=1 << 30, tensors=n) for n in (1, 8))
    assert not fitted_to(listed)
    assert predict_alone(H200, single) is not None
    assert predict_alone(H200, listed) is None
    save(tmp_path, "collectives", [single, listed])
    assert len([v for v in compare(H200, tmp_path) if "b2b" in v.claim_id]) == 1


def test_a_number_from_runs_side_by_side_is_a_mistake(tmp_path, capsys):
    assert role_problems(H200) == []
    cheat = 'base = "h200x4"\nname = "h200x4"\ntitle = "x"\n[interference]\n'
    cheat += 'memory = { value = 1, source = "measured", of = "results/h200x4/c3.json" }\n'
    (tmp_path / "cheat.toml").write_text(cheat)
    save(tmp_path / "h200x4", "c3", [c3_row("serial", 3585.0)])
    options = command.Options(str(tmp_path / "cheat.toml"), json=STDOUT, results=tmp_path, ranges=False)
    assert command.main(options) == 1
    assert "interference.memory" in capsys.readouterr().err


def test_plausible_ranges_of_our_own_machine(tmp_path):
    save(tmp_path, "collectives", [collective_row("dma", "b2b", 70.0, nbytes=16 << 20)])
    row, _ = compare(H200, tmp_path, ranges=True)
    assert row.low < row.predicted < row.high


def test_the_machine_in_the_catalogue_is_the_one_that_was_measured():
    """The targets of issue 3, on the files of this checkout."""
    found = {v.claim_id: v for v in compare(H200, ROOT / "results" / "h200x4")}
    wholes = (
        "c3/median",
        "c3/worst",
        "collectives/median",
        "collectives/median of held out",
        "power/median",
        "power/worst",
    )
    for name in wholes:
        assert found[f"h200x4/{name}"].ok, name
    rows = [name.split("/")[-1] for name in found if name.startswith("h200x4/c3/") and name.count("/") == 4]
    assert {name: rows.count(name) for name in rows} == dict.fromkeys(
        ("serial", "c3_base", "c3_sp", "conccl", "nccl_ce"), 8
    )
    worst = max(v.error for k, v in found.items() if k.startswith("h200x4/c3/") and k.endswith(("c3_base", "c3_sp")))
    assert worst < 0.1


def test_the_model_agrees_with_itself():
    pair = table_ii_workload("cb1_896M", Kind.ALL_GATHER)
    alone = predict(H200, pair, "c3_sp")
    row = c3_row("c3_sp", 1.0, comm_us=alone.comm_us, gemm_us=alone.gemm_us)
    assert predict_together(H200, row) == pytest.approx(alone.time_us, rel=0.01)


def test_collectives_come_from_the_description_alone():
    assert predict_alone(H200, collective_row("dma", "b2b", 1.0)) == pytest.approx(1800.0, rel=0.03)
    assert predict_alone(H200, collective_row("nccl", "", 1.0)) == pytest.approx(2175.0, rel=0.05)
    for other in ({"launch": "eager"}, {"prelaunch": True}, {"collective": "broadcast"}):
        assert predict_alone(H200, collective_row("dma", "b2b", 1.0, **other)) is None
    assert predict_alone(H200, collective_row("symm_mem", "", 1.0)) is None


def power_row(implementation, variant, watts, **more):
    values = {
        "collective": "all_gather", "bytes": NBYTES, "implementation": implementation, "variant": variant,
        "in_place": True, "launch": "graph", "time_us": 1800.0, "watts": watts, "watts_sampled": watts,
        "idle_watts": 120.0, "energy_mj": 1.0, "energy_above_idle_mj": 1.0, "counters_agree_percent": 100.0,
    }  # fmt: skip
    return PowerRow(**(values | more))


def test_watts_are_predicted_for_what_the_dma_collectives_paper_runs(tmp_path):
    engines, kernels = (predict_watts(H200, power_row(*way, 1.0)) for way in (("dma", "b2b"), ("nccl", "")))
    assert 138 < engines < kernels < 700
    adding = [("dma", "b2b"), ("dma", "pcpy"), ("nccl", "")]
    for where in ({"collective": "all_reduce"}, {"collective": "reduce_scatter", "in_place": False}):
        assert all(138 < predict_watts(H200, power_row(*way, 1.0, **where)) < 700 for way in adding)
    for other in (
        power_row("nccl", "window", 1.0),
        power_row("sm", "one_shot", 1.0),
        power_row("dma", "striped", 1.0),
        power_row("dma", "b2b", 1.0, in_place=False),
        power_row("dma", "b2b", 1.0, collective="all_reduce", in_place=False),
        power_row("nccl", "", 1.0, collective="reduce_scatter"),
        power_row("sm", "two_shot", 1.0, collective="all_reduce"),
        power_row("dma", "b2b", 1.0, collective="broadcast"),
    ):
        assert predict_watts(H200, other) is None
    save(tmp_path, "power", [power_row("dma", "b2b", engines), power_row("nccl", "", 2 * kernels)])
    verdicts = {v.claim_id.partition("/power/")[2]: v for v in compare(H200, tmp_path)}
    assert verdicts["all_gather/896M/dma b2b"].ok and not verdicts["all_gather/896M/nccl"].ok
    assert (verdicts["worst"].unit, verdicts["worst"].predicted) == ("percent", pytest.approx(50, abs=0.1))
    assert str(verdicts["all_gather/896M/nccl"].role) == "held_out"
    assert compare(dataclasses.replace(H200, power=None), tmp_path) == [], "no power figures, no verdicts"


def test_measurements_are_shown_at_80_columns(tmp_path):
    save(tmp_path, "c3", [c3_row("serial", 3585.0), c3_row("conccl", 3000.0)])
    for ranges in (False, True):
        text = io.StringIO()
        command.show(compare(H200, tmp_path, ranges=ranges), rich.console.Console(file=text, width=80))
        lines = text.getvalue().splitlines()
        assert max(map(len, lines)) <= 80 and "\u2026" not in text.getvalue()
        assert any(line.split()[-1:] == ["NO"] for line in lines)
        assert "c3 cb1_896M" in text.getvalue()


def test_a_file_is_judged_row_by_row_and_as_a_whole(tmp_path):
    folder = tmp_path / "h200x4"
    save(folder, "c3", [c3_row("serial", 3585.0), c3_row("c3_base", 3000.0), c3_row("auto", 1.0)])
    save(folder, "collectives", [collective_row("dma", "b2b", 1800.0), collective_row("dma", "b2b", 9.0, nbytes=4096)])
    verdicts = {v.claim_id: v for v in compare(H200, folder)}
    assert verdicts["h200x4/c3/cb1_896M/all_gather/serial"].ok
    assert verdicts["h200x4/c3/cb1_896M/all_gather/c3_base"].error == pytest.approx(0.195, rel=0.02)
    assert str(verdicts["h200x4/c3/cb1_896M/all_gather/serial"].role) == "input", "a sum of what was given"
    assert verdicts["h200x4/c3/median"].predicted == pytest.approx(19.5, rel=0.02), "of what was predicted"
    assert not verdicts["h200x4/c3/median"].ok and verdicts["h200x4/c3/worst"].ok
    assert verdicts["h200x4/collectives/all_gather/896M/in place/dma b2b"].ok
    assert "h200x4/collectives/worst" not in verdicts
    assert verdicts["h200x4/gemms/8192x8192x8192"].ok
    assert len(verdicts) == 6 + 3


def test_the_command_takes_the_folder(tmp_path, capsys):
    save(tmp_path / "h200x4", "c3", [c3_row("conccl", 5000.0)])
    assert command.main(command.Options(machine="h200x4", json=STDOUT, results=tmp_path)) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {row["id"].partition("/")[2]: row for row in rows}
    assert [row["ok"] for name, row in found.items() if name.startswith("c3/")] == [False, False, False]
    assert {row["role"] for name, row in found.items() if name.startswith("c3/")} == {"held_out"}
    assert found["gemms/median"]["role"] == "held_out", "it is fitted to GEMMs of gemms.json"


def test_rows_of_many_sizes_share_a_line_of_the_picture():
    ids = (
        "h200x4/collectives/all_gather/896M/in place/dma b2b",
        "h200x4/c3/cb1_1G/all_gather/conccl",
        "h200x4/gemms/1x2x3",
    )
    groups = [figures._group(claim_id.partition("/")[2]) for claim_id in ids]
    assert groups == ["collectives all_gather dma b2b", "all_gather conccl", "gemms"]


@pytest.mark.parametrize(("name", "worst"), [("h200x4", 0.15), ("h100x4", 0.26)])
def test_layers_that_nothing_was_fitted_to(name, worst):
    """The library's own choices on an H100 are what docs/lab/model.md says."""
    machine = named(name)
    layers = read(layers_file(machine, ROOT / "results" / name)).rows
    others = [row for row in layers if row.model not in (*FITTED, *SEEN)]
    errors = [abs(gemm_us(machine, Gemm(row.m, row.n, row.k, row.dtype)) / row.time_us - 1) for row in others]
    assert len(errors) == 60 and statistics.median(errors) <= 0.05 and max(errors) <= worst


def test_verdicts_on_layers_have_roles():
    machine = named("h200x4")
    layers = read(layers_file(machine, ROOT / "results" / "h200x4")).rows
    roles = {verdict.claim_id: verdict.role for verdict in judge_layers(machine, layers, fitted=True)}
    assert roles["h200x4/gemms of layers, first/median"] is Role.FITTED
    assert roles["h200x4/gemms of layers, seen/median"] is Role.SEEN
    assert roles["h200x4/gemms of layers/median"] is Role.HELD_OUT
