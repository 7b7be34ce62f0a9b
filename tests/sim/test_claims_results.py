"""Predictions against measured files: with files whose times are known, since the model made them."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import statistics
from pathlib import Path

import pytest
import rich.console

from sidelane.cli.output import STDOUT
from sidelane.program.collective import Kind
from sidelane_lab.harness.study import Results, read, write
from sidelane_lab.machines.load import named
from sidelane_lab.machines.ranges import in_between, nearest
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.pipeline import run_pipeline
from sidelane_lab.model.strategies import predict
from sidelane_lab.model.study import table_ii_workload
from sidelane_lab.pairs.workload import Gemm
from sidelane_lab.papers import command
from sidelane_lab.papers.claims import ClaimRole
from sidelane_lab.papers.results import CHAINS, compare, fitted_to, judge_layers, layers_file, role_problems
from sidelane_lab.studies.c3.occupancy_predict import pipeline_of
from sidelane_lab.studies.c3.prediction import predict_together
from sidelane_lab.studies.c3.rows import C3Row
from sidelane_lab.studies.chain import predict_row as predict_chain
from sidelane_lab.studies.collectives import CollectiveRow, predict_alone
from sidelane_lab.studies.collectives import predict_row as predict_ends
from sidelane_lab.studies.gemms import FITTED, SEEN
from sidelane_lab.studies.power.predict import predict_row as predict_watts
from sidelane_lab.studies.power.rows import PowerRow

H200, PAIR = named("h200x4"), named("h200x2")
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
    assert predict_together(H200, c3_row("serial", 1.0)) == (1410.0 + 2175.0,)
    turns, beside = predict_together(H200, c3_row("c3_base", 1.0))
    assert turns == pytest.approx(3585.0, rel=0.03) and beside < 0.7 * turns
    assert predict_together(H200, c3_row("priority", 1.0)) == (beside, turns)
    (on_engines,) = predict_together(H200, c3_row("conccl", 1.0, comm_us=1840.0))
    assert 1840.0 <= on_engines < 1.05 * 1840.0
    for unknown in (
        c3_row("auto", 1.0),
        c3_row("conccl", 1.0, collective="broadcast"),
        c3_row("sm_sp", 1.0),
        c3_row("c3_target", 1.0, units=8),
    ):
        assert predict_together(H200, unknown) == ()


def test_rows_of_partitions_have_their_units():
    assert predict_together(H200, c3_row("c3_rp", 1.0)) == (), "an older file does not say how many"
    (few,), (many,) = (predict_together(H200, c3_row("c3_rp", 1.0, units=units, comm_us=700.0)) for units in (24, 64))
    assert 1410.0 < few < many


def test_a_copy_that_waits_for_the_gemm_comes_after_it():
    """Out of place, NCCL's copy of the own chunk holds up the others; ours waits alone."""
    away = {"collective": "all_to_all", "comm_us": 1000.0, "gemm_us": 2000.0}
    (alone,) = predict_together(H200, c3_row("conccl", 1.0, note="dma auto in place eager", **away))
    (ours,) = predict_together(H200, c3_row("conccl", 1.0, note="dma auto out of place eager", **away))
    (theirs,) = predict_together(H200, c3_row("nccl_ce", 1.0, note="nccl_ce out of place eager", **away))
    chunk_us = NBYTES / 4 / H200.dma.local_gbps / 1e3
    assert ours == pytest.approx(alone + chunk_us, rel=1e-6) and theirs == pytest.approx(3000.0)
    free = H200.with_value("interference.local_waits", 0)
    assert predict_together(free, c3_row("nccl_ce", 1.0, note="nccl_ce out of place eager", **away))[0] < 2200


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
        "worst": "fitted",
        "worst of held out": "held_out",
    }


def test_nothing_is_predicted_of_lists_nor_fitted_to_them(tmp_path):
    single, listed = (collective_row("dma", "b2b", 2100.0, nbytes=1 << 30, tensors=n) for n in (1, 8))
    assert not fitted_to(listed) and predict_alone(H200, single) is not None and predict_alone(H200, listed) is None
    save(tmp_path, "collectives", [single, listed])
    assert len([v for v in compare(H200, tmp_path) if "b2b" in v.claim_id]) == 1


def test_queues_that_share_an_engine_have_two_times_and_the_nearer_counts():
    """A broadcast of 1 GB takes either, from run to run; what to plan with is the longer one."""
    rows = [
        row
        for row in read(Path(__file__).resolve().parents[2] / "results" / "h200x4" / "collectives.json").rows
        if isinstance(row, CollectiveRow)
    ]
    large = [row for row in rows if row.bytes == 1 << 30 and row.launch == "graph" and row.collective == "all_gather"]
    ends = {(row.variant, row.in_place): (row, predict_ends(H200, row)) for row in large if row.implementation == "dma"}
    row, (planned, in_step) = ends["bcst", True]
    assert planned == predict_alone(H200, row) and planned > 1.6 * in_step
    assert row.time_us == pytest.approx(in_step, rel=0.02) and row.p90_us is not None and row.p90_us > 1.4 * row.time_us
    assert len(ends["b2b", True][1]) == 1, "one queue has nobody to share with"
    assert all(len(predict_ends(named("h200x2"), row)) <= 1 for row in large)


@pytest.mark.parametrize("machine", ["h200x2", "h200x4"])
def test_nccl_on_copy_engines_takes_what_copies_and_its_own_chunk_take(machine):
    """84 rows of which no number was taken: the own chunk comes behind the others."""
    rows = [row for row in read(ROOT / "results" / machine / "collectives.json").rows if isinstance(row, CollectiveRow)]
    rows = [row for row in rows if row.implementation == "nccl_ce" and row.launch == "graph" and row.bytes >= 64 << 10]
    errors = [abs((predict_alone(named(machine), row) or 0.0) / row.time_us - 1) for row in rows if row.time_us]
    assert len(errors) == 42 and statistics.median(errors) < 0.1 and max(errors) < 0.19


def test_a_number_from_runs_side_by_side_is_a_mistake(tmp_path, capsys):
    assert role_problems(H200) == []
    cheat = 'base = "h200x4"\nname = "h200x4"\ntitle = "x"\n[interference]\n'
    cheat += 'memory = { value = 1, source = "measured", of = "results/h200x4/c3.json" }\n'
    (tmp_path / "cheat.toml").write_text(cheat)
    save(tmp_path / "h200x4", "c3", [c3_row("serial", 3585.0)])
    options = command.ClaimsOptions(str(tmp_path / "cheat.toml"), json=STDOUT, results=tmp_path, ranges=False)
    assert command.main(options) == 1 and "interference.memory" in capsys.readouterr().err


def test_plausible_ranges_of_our_own_machine(tmp_path):
    save(tmp_path, "collectives", [collective_row("dma", "b2b", 70.0, nbytes=16 << 20)])
    row, *_ = compare(H200, tmp_path, ranges=True)
    assert row.low < row.predicted < row.high


def test_the_machine_in_the_catalogue_is_the_one_that_was_measured():
    """The targets of issue 3, on the files of this checkout; of pairs those of issue 25, but for the worst."""
    found = {v.claim_id: v for v in compare(H200, ROOT / "results" / "h200x4")}
    wholes = (
        "c3/median",
        "collectives/median",
        "collectives/median of held out",
        "collectives/winners",
        "power/median",
        "power/worst",
    )
    for name in wholes:
        assert found[f"h200x4/{name}"].ok, name
    rows = [name.split("/")[-1] for name in found if name.startswith("h200x4/c3/") and name.count("/") == 4]
    assert not found["h200x4/collectives/worst"].ok, "bcst and swap of 1 and 4 GB: results/notes/model.md"
    assert {name: rows.count(name) for name in rows} == dict.fromkeys(
        ("serial", "c3_base", "c3_sp", "conccl", "nccl_ce"), 8
    )
    worst = max(v.error for k, v in found.items() if k.startswith("h200x4/c3/") and k.endswith(("c3_base", "c3_sp")))
    assert worst < 0.105, "NCCL's all-to-all of 512 MiB and a GEMM take longer than one after the other"


@pytest.mark.parametrize(
    ("file", "median", "worst", "mixed", "missed"),
    [
        ("c3-0.1", 0.022, 0.1005, 13, []),
        ("c3-strategies", 0.027, 0.065, 0, []),
        ("c3", 0.02, 0.1005, 8, [("cb2", "all_gather", "c3_base"), ("mb1", "all_gather", "c3_sp")]),
    ],
)
def test_pairs_on_two_gpus_under_every_strategy(file, median, worst, mixed, missed):
    """Issue 25: 3% in the median and 10% at worst for every strategy, from times alone; fitted to two pairs only.

    Rows of ``c3.json`` with a commit are those of the other pairs of 25 November 2026. Two rows measured again miss the
    bounds, by 10.1 and 12.9% (docs/lab/model.md).
    """
    folder, offs, both, over = ROOT / "results" / "h200x2", {}, 0, []
    further = read(folder / "c3.json").rows if file == "c3-0.1" else ()
    for row in (*(r for r in read(folder / f"{file}.json").rows if not r.commit), *(r for r in further if r.commit)):
        if not (ends := predict_together(PAIR, row) if row.time_us else ()):
            continue
        # The median of rounds that went either way lies between both ends: that there are two, is confirmed.
        between = in_between(row.time_us, ends)
        both += between
        off = abs((statistics.fmean(ends) if between else nearest(row.time_us, ends)) / row.time_us - 1)
        if not between:
            offs.setdefault(row.strategy, []).append(off)
        if off > (0.09 if between else worst):
            over.append((row.gemm, row.collective, row.strategy))
    whole = {"c3_base", "c3_sp", "priority", "c3_rp", "c3_sp_rp", "conccl", "nccl_ce"}
    assert all(len(offs[strategy]) >= 11 for strategy in whole)
    medians = {strategy: statistics.median(found) for strategy, found in offs.items()}
    assert max(medians.values()) <= median, medians
    assert sorted(over) == missed and both == mixed


def test_two_h100s_are_a_machine_that_nothing_was_fitted_to():
    """Every concurrent row within 3%; no number comes from their files.

    Rows of ``conccl_rp`` took no unit then, and are compared with nothing: the strategy takes some now. So are those of
    Sidelane's kernels, whose strategies have gone.
    """
    machine = named("h100x2")
    assert not any("h100x2" in quantity.of for quantity in machine.quantities().values())
    found = [v for v in compare(machine, ROOT / "results" / "h100x2") if v.claim_id.startswith("h100x2/c3/cb3")]
    rows = [verdict for verdict in found if verdict.role is not ClaimRole.INPUT]
    assert len(rows) == 14 and {verdict.role for verdict in rows} == {ClaimRole.HELD_OUT}
    errors = [verdict.error for verdict in rows]
    assert statistics.median(errors) < 0.015 and max(errors) < 0.03


def test_pairs_that_were_set_apart_are_no_predictions(tmp_path):
    shutil.copy(ROOT / "results" / "h200x2" / "c3.json", tmp_path)
    roles = {
        name.split("/")[2]: verdict.role
        for name, verdict in ((v.claim_id, v) for v in compare(PAIR, tmp_path))
        if name.startswith("h200x2/c3/") and name.endswith("all_gather/conccl")
    }
    assert roles.pop("cb1_896M") is ClaimRole.FITTED and set(roles.values()) == {ClaimRole.HELD_OUT}


def test_the_right_winner_on_two_gpus():
    """Copy engines or NCCL, from 64 KB on, in graphs: 82 of 84, and all times 5.1% off in the median."""
    offs, times = [], {}
    for row in read(ROOT / "results" / "h200x2" / "collectives.json").rows:
        told = predict_alone(PAIR, row) if row.time_us and row.bytes >= 64 << 10 else None
        if told is not None:
            offs.append(abs(told / row.time_us - 1))
            case = times.setdefault((row.collective, row.bytes, row.in_place), {"dma": [], "nccl": [], "nccl_ce": []})
            case[row.implementation].append((row.time_us, told))
    winners = [
        [min(one[place] for one in case["dma"]) < min(one[place] for one in case["nccl"]) for place in (0, 1)]
        for case in times.values()
        if case["dma"] and case["nccl"]
    ]
    assert len(winners) == 84 and sum(measured is told for measured, told in winners) >= 82
    assert len(offs) == 462 and statistics.median(offs) < 0.052 and max(offs) < 0.37
    assert sum(off > 0.25 for off in offs) <= 23


def test_pipelined_iterations_on_two_gpus():
    """Two streams of GEMMs, as the study has: with one for each, times are twice as far off."""
    rows = [row for row in read(ROOT / "results" / "h200x2" / "occupancy.json").rows if pipeline_of(row) is not None]
    assert len(rows) == 108 and all(row.shape in ("opt1", "opt2") for row in rows)

    def off(row, streams):
        pipeline = dataclasses.replace(pipeline_of(row), streams=streams)
        return abs(run_pipeline(PAIR, pipeline, priority=row.priority).time_us / row.time_us - 1)

    some = [row for row in rows if row.gemm == "cb1" and row.priority]
    as_many = [row for row in some if row.resident >= 6]
    two, each = ([off(row, streams) for row in as_many] for streams in (2, 0))
    assert len(as_many) == 16 and statistics.median(two) < 0.13 and max(two) < 0.36
    assert statistics.median(each) > 0.2 and max(each) > 0.6
    fewer = [row for row in some if row.resident < 6]
    assert len(fewer) == 12 and statistics.median(off(row, 2) for row in fewer) < 0.06


def test_pipelined_iterations_are_judged_by_time_and_by_share(tmp_path):
    whole = read(ROOT / "results" / "h200x2" / "occupancy.json").rows
    row = next(row for row in whole if row.shape == "opt2" and row.grid == "data-parallel")
    other = next(row for row in whole if row.shape == "tuned")
    save(tmp_path, "occupancy", [row, dataclasses.replace(row, normalised=row.normalised / 2), other])
    found = {v.claim_id.rpartition("/")[2]: v for v in compare(PAIR, tmp_path)}
    assert list(found) == ["time", "median", "worst", "share"], "registers of other tiles are not known"
    assert found["time"].role is ClaimRole.SEEN and found["time"].ok
    assert found["share"].points and not found["share"].ok and found["share"].error > 40
    assert "%" in str(command.measured_table([found["share"]]).lines[0].cells)


def test_the_winner_is_judged_from_64_kb_on(tmp_path):
    """Engines and NCCL: two cases right, one wrong, one below 64 KB."""
    rows = [
        collective_row(*way, us, nbytes=nbytes)
        for nbytes, engines, kernels in (
            (1 << 30, 2100.0, 2400.0),
            (NBYTES, 1800.0, 2175.0),
            (64 << 20, 500.0, 90.0),
            (16 << 10, 1.0, 9.0),
        )
        for way, us in ((("dma", "b2b"), engines), (("nccl", ""), kernels))
    ]
    save(tmp_path, "collectives", rows)
    found = {v.claim_id.partition("/collectives/")[2]: v for v in compare(H200, tmp_path)}
    assert not [name for name in found if "/16K/" in name]
    winners, worst = found["winners"], found["worst"]
    assert (winners.claimed, winners.ok) == (95.0, False) and winners.predicted == pytest.approx(200 / 3)
    assert (worst.claimed, worst.ok) == (25.0, False) and found["median"].claimed == pytest.approx(7.0)
    shown = command.measured_table([winners, worst]).lines
    assert ">= 95%" in str(shown[0].cells) and "<= 25%" in str(shown[1].cells)


def test_the_model_agrees_with_itself():
    pair = table_ii_workload("cb1_896M", Kind.ALL_GATHER)
    alone = predict(H200, pair, "c3_sp")
    row = c3_row("c3_sp", 1.0, comm_us=alone.comm_us, gemm_us=alone.gemm_us)
    assert predict_together(H200, row) == pytest.approx((alone.time_us, alone.other_us), rel=0.01)


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
    ((engines,), (kernels,)) = (predict_watts(H200, power_row(*way, 1.0)) for way in (("dma", "b2b"), ("nccl", "")))
    assert 138 < engines < kernels < 700
    adding = [("dma", "b2b"), ("dma", "pcpy"), ("nccl", "")]
    for where in ({"collective": "all_reduce"}, {"collective": "reduce_scatter", "in_place": False}):
        assert all(138 < predict_watts(H200, power_row(*way, 1.0, **where))[0] < 700 for way in adding)
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
        assert predict_watts(H200, other) == ()
    save(tmp_path, "power", [power_row("dma", "b2b", engines), power_row("nccl", "", 2 * kernels)])
    verdicts = {v.claim_id.partition("/power/")[2]: v for v in compare(H200, tmp_path)}
    assert verdicts["all_gather/896M/dma b2b"].ok and not verdicts["all_gather/896M/nccl"].ok
    assert (verdicts["worst"].unit, verdicts["worst"].predicted) == ("percent", pytest.approx(50, abs=0.1))
    roles = [str(verdicts[f"all_gather/896M/{way}"].role) for way in ("dma b2b", "nccl")]
    assert roles == ["fitted", "seen"], "what links draw is from rows on copy engines, with all in view"
    assert compare(dataclasses.replace(H200, power=None), tmp_path) == [], "no power figures, no verdicts"


def test_measurements_are_shown_at_80_columns(tmp_path):
    save(tmp_path, "c3", [c3_row("serial", 3585.0), c3_row("conccl", 3000.0)])
    for ranges in (False, True):
        text = io.StringIO()
        command.show(compare(H200, tmp_path, ranges=ranges), rich.console.Console(file=text, width=80))
        lines = text.getvalue().splitlines()
        assert max(map(len, lines)) <= 80 and "\u2026" not in text.getvalue()
        assert any(line.split()[-1:] == ["NO"] for line in lines) and "c3 cb1_896M" in text.getvalue()


def test_a_file_is_judged_row_by_row_and_as_a_whole(tmp_path):
    folder = tmp_path / "h200x4"
    rows = [c3_row("serial", 3585.0), c3_row("c3_base", 4200.0), c3_row("c3_base", 3000.0, gemm="b"), c3_row("auto", 1)]
    save(folder, "c3", rows)
    save(folder, "collectives", [collective_row("dma", "b2b", 1800.0), collective_row("dma", "b2b", 9.0, nbytes=4096)])
    verdicts = {v.claim_id: v for v in compare(H200, folder)}
    assert verdicts["h200x4/c3/cb1_896M/all_gather/serial"].ok
    assert verdicts["h200x4/c3/cb1_896M/all_gather/c3_base"].error == pytest.approx(0.167, rel=0.02)
    assert str(verdicts["h200x4/c3/cb1_896M/all_gather/serial"].role) == "input", "a sum of what was given"
    assert verdicts["h200x4/c3/median"].predicted == pytest.approx(16.7, rel=0.02), "of what was predicted"
    assert not verdicts["h200x4/c3/median"].ok and not verdicts["h200x4/c3/worst"].ok
    assert "either may come first" in verdicts["h200x4/c3/b_896M/all_gather/c3_base"].incomparable
    assert verdicts["h200x4/collectives/all_gather/896M/in place/dma b2b"].ok
    assert verdicts["h200x4/collectives/worst"].claimed == 25.0 and verdicts["h200x4/collectives/worst"].ok
    assert verdicts["h200x4/gemms/8192x8192x8192"].ok and len(verdicts) == 8 + 3


def test_the_command_takes_the_folder(tmp_path, capsys):
    save(tmp_path / "h200x4", "c3", [c3_row("conccl", 5000.0)])
    assert command.main(command.ClaimsOptions(machine="h200x4", json=STDOUT, results=tmp_path)) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {row["id"].partition("/")[2]: row for row in rows}
    assert [row["ok"] for name, row in found.items() if name.startswith("c3/")] == [False, False, False]
    assert {row["role"] for name, row in found.items() if name.startswith("c3/")} == {"held_out"}
    assert found["gemms/median"]["role"] == "held_out", "it is fitted to GEMMs of gemms.json"


@pytest.mark.parametrize(("name", "worst"), [("h200x4", 0.15), ("h100x4", 0.26)])
def test_layers_that_nothing_was_fitted_to(name, worst):
    """The library's own choices on an H100 are what results/notes/model.md says."""
    machine = named(name)
    layers = read(layers_file(machine, ROOT / "results" / name)).rows
    others = [row for row in layers if row.model not in (*FITTED, *SEEN)]
    errors = [abs(gemm_us(machine, Gemm(row.m, row.n, row.k, row.dtype)) / row.time_us - 1) for row in others]
    assert len(errors) == 60 and statistics.median(errors) <= 0.05 and max(errors) <= worst


def test_verdicts_on_layers_have_roles():
    machine = named("h200x4")
    layers = read(layers_file(machine, ROOT / "results" / "h200x4")).rows
    roles = {verdict.claim_id: verdict.role for verdict in judge_layers(machine, layers, fitted=True)}
    assert roles["h200x4/gemms of layers, first/median"] is ClaimRole.FITTED
    assert roles["h200x4/gemms of layers, seen/median"] is ClaimRole.SEEN
    assert roles["h200x4/gemms of layers/median"] is ClaimRole.HELD_OUT


@pytest.mark.parametrize(("name", "median", "worst"), [("h200x2", 0.05, 0.2), ("h200x4", 0.07, 0.24)])
def test_chains_take_their_gemms_and_the_collective(name, median, worst):
    """All that are in graphs, of all variants that a description has: nothing was fitted to them."""
    machine = named(name)
    rows = read(ROOT / "results" / name / "chain.json").rows
    found = CHAINS.verdicts(machine, rows, "chain")
    assert len(found) == 50 and {verdict.role for verdict in found} == {ClaimRole.HELD_OUT}
    errors = [verdict.error for verdict in found]
    assert statistics.median(errors) < median and max(errors) < worst
    for launch in ("eager", "prelaunched"):
        assert not CHAINS.verdicts(machine, [row for row in rows if row.launch == launch], "chain")
    row = next(row for row in rows if row.launch == "graph" and row.implementation == "nccl" and not row.variant)
    longer = dataclasses.replace(row, gemms_us=row.gemms_us + 100.0)
    assert predict_chain(machine, longer)[0] - predict_chain(machine, row)[0] == pytest.approx(100.0)
    assert predict_chain(machine, dataclasses.replace(row, variant="window")) == ()
