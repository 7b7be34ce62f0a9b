"""The commands' tables, numbers, pictures and timelines."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter

import pytest
from matplotlib.figure import Figure

from sidelane.c3.strategies import strategies
from sidelane.program.collective import Kind
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.cli.fused import FusedOptions
from sidelane_lab.machines import ranges
from sidelane_lab.machines.load import named
from sidelane_lab.model.panels import mark_cut
from sidelane_lab.model.study import TABLE_II
from sidelane_lab.papers import command as claims
from sidelane_lab.papers import conccl, figures, operator_results, overlap
from sidelane_lab.papers import predictions as sim_study
from sidelane_lab.papers.figure_command import FIGURES
from sidelane_lab.papers.measurements import PairReadings
from sidelane_lab.studies.collectives import CollectiveOptions

MACHINE = named("mi300x8")


def test_c3_prints_given_pairs_by_collective(capsys, tmp_path):
    sim_study.c3_main("h200x4", C3Options(report=tmp_path))
    shown = capsys.readouterr().out
    assert shown.count("cb1_896M") == 2 and "all_gather" in shown and "all_to_all" in shown
    rows = json.loads((tmp_path / "c3_predicted.json").read_text())["rows"]
    found = Counter((row["collective"], row["strategy"]) for row in rows)
    names = [strategy.code for strategy in strategies()]
    assert found == Counter(itertools.product(("all_gather", "all_to_all"), names))


def test_the_notes_of_predicted_pairs_explain_the_columns(capsys):
    sim_study.c3_main("h200x4", C3Options(collectives=(Kind.ALL_GATHER,), strategies=("c3_sp", "c3_rp")))
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r" (-?\d+)@(\d+) .*\b\1@\2: \1, with \2 compute units for the collective alone", shown)
    assert (
        "collective_first: two streams, the collective first; partition: the GEMM first" in shown
        and "compute_first:" not in shown
    )


@pytest.mark.long
def test_c3_writes_a_report(tmp_path, capsys):
    sim_study.c3_main("mi300x8", C3Options(workloads=tuple(TABLE_II), report=tmp_path))
    printed = capsys.readouterr().out
    assert "Percent of ideal by group" in printed and not re.search("c3_(base|sp|rp)|conccl", printed)
    content = json.loads((tmp_path / "c3_predicted.json").read_text())
    assert content["predicted"] is True and content["machine"] == "mi300x8" and len(content["rows"]) == 240
    assert content["numbers"]["dma.copy_us"][1] == "fitted"
    for name in ("c3-kernels", "c3-engines", "c3-all_to_all-4", "timeline-c3_base"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert (tmp_path / f"{name}.svg").stat().st_size > 5000
    assert json.loads((tmp_path / "timeline-conccl.trace.json").read_text())["traceEvents"]


@pytest.fixture
def few_variations(monkeypatch):
    """Bands over the first uncertain number alone, at one end of its range: not over all of them."""
    every = ranges.variations

    def few(machine, numbers):
        return itertools.islice(every(machine, numbers), 1)

    monkeypatch.setattr(ranges, "variations", few)


@pytest.mark.long
@pytest.mark.parametrize("number", ["000/9", "001/13", "003/6", "003/13", "003/15"])
def test_axes_have_names_and_curves_have_bands(number, few_variations, tmp_path, monkeypatch):
    """Every axis has a name, none that begins above 0 goes without a mark, and every curve has a band."""
    drawn = []
    monkeypatch.setattr(figures, "save_both", lambda figure, name, folder: drawn.append(figure))
    FIGURES[number].evaluate([], ranges=True).draw(tmp_path)
    (axes,) = drawn[0].axes
    assert axes.get_xlabel() and axes.get_ylabel()
    curves = [line for line in axes.lines if len(line.get_xdata()) > 2 and line.get_linestyle() != "None"]
    assert len(axes.collections) >= len(curves)
    assert any(band.get_paths()[0].get_extents().height > 0.01 for band in axes.collections)
    least = axes.get_ylim()[0]
    marked = any(not line.get_clip_on() and len(line.get_xdata()) == 2 for line in axes.lines)
    assert least <= 0 or marked, f"its axis begins at {least} without a mark"


@pytest.mark.long  # pictures; test_cli_json runs the command each day
def test_collective_writes_a_report(tmp_path, capsys):
    sim_study.collective_main("mi300x8", CollectiveOptions(report=tmp_path))
    assert "b2b+prelaunch" in capsys.readouterr().out
    rows = json.loads((tmp_path / "collectives_predicted.json").read_text())["rows"]
    assert {(row["implementation"], row["variant"]) for row in rows} == {
        ("nccl", ""),
        *(("dma", variant) for variant in ("pcpy", "bcst", "swap", "b2b")),
    }
    for name in ("all_gather-bfloat16-out-of-place-model", "timeline-all_gather-b2b"):
        assert (tmp_path / f"{name}.png").exists()


def test_bands_are_squares_of_what_single_numbers_do():
    """Two numbers that pull alike and apart, by the definition."""

    def predict(machine):
        copy, sync = float(machine.dma.copy_us), float(machine.dma.sync_us)
        return {"sum": [copy + sync, copy], "difference": [copy - sync]}

    certain = MACHINE
    for path, quantity in MACHINE.quantities().items():
        if path not in ("dma.copy_us", "dma.sync_us"):
            certain = certain.with_value(path, float(quantity))
    copy, sync = MACHINE.dma.copy_us, MACHINE.dma.sync_us
    found = ranges.bands(certain, predict, ("dma",))
    up = ((copy.high - copy) ** 2 + (sync.high - sync) ** 2) ** 0.5
    assert found["sum"].high == pytest.approx((copy + sync + up, copy.high))
    assert found["sum"].low[1] == pytest.approx(copy.low)
    mixed = ((copy.high - copy) ** 2 + (sync - sync.low) ** 2) ** 0.5
    assert found["difference"].high == pytest.approx((copy - sync + mixed,))
    assert ranges.bands(certain, predict, ("links",))["sum"].high == pytest.approx((copy + sync, copy))


def test_ranges_are_drawn_from_the_uncertain_numbers(monkeypatch):
    only = dataclasses.replace(MACHINE)
    for path, quantity in MACHINE.quantities().items():
        if path != "interference.memory":
            only = only.with_value(path, float(quantity))
    (panel,) = FIGURES["000/10"].predict(only, True, "000")
    band = panel.curves["conccl"]
    assert all(low < mean < high for low, mean, high in zip(band.low, band.values, band.high, strict=True))
    assert band.values[-1] == pytest.approx(PairReadings.of(conccl.pair_rows(MACHINE)).mean_speedup("conccl"))


@pytest.mark.parametrize(("least", "strokes"), [(0.0, 0), (-5.0, 0), (0.9, 2)])
def test_an_axis_that_does_not_begin_at_0_is_marked(least, strokes):
    axes = Figure().subplots()
    axes.set_ylim(least, 2)
    mark_cut(axes)
    assert len(axes.lines) == strokes


@pytest.mark.parametrize(("name", "there"), [("mi300x8", True), ("h200x4", False)])
def test_published_values_are_on_the_pictures_of_their_machine_alone(name, there):
    for number in ("000/5", "000/6", "000/7", "000/8", "000/9", "000/10"):
        panels = FIGURES[number].predict(named(name), False, "000")
        labels = [mark.label for panel in panels for mark in panel.marks]
        assert any("published" in label for label in labels) == there, number


@pytest.mark.long
def test_claims_write_a_report(tmp_path, capsys):
    assert claims.main(claims.ClaimsOptions(ranges=False, report=tmp_path)) == 0
    capsys.readouterr()
    written = json.loads((tmp_path / "claims.json").read_text())
    assert len(written["rows"]) > 100 and written["command"] and written["commit"] and "gpu.units" in written["numbers"]
    assert "mi210x4 fused.half_share" in written["numbers"]


@pytest.mark.long
def test_pipelines_print_and_write(tmp_path, capsys):
    overlap.main("a40x4", tmp_path)
    shown = capsys.readouterr().out
    assert "opt1  persistent     16        6" in shown and "mb1 (8192x57344x8192 bfloat16) with all_to_all" in shown


def test_fused_operators_are_reported(tmp_path, capsys):
    operator_results.main(
        "h200x4", FusedOptions(ops=("embedding_all_to_all",), shapes=((2048, 4, 2),), report=tmp_path)
    )
    assert "batch 2048, 4 tables a rank, pooling 2" in capsys.readouterr().out
    content = json.loads((tmp_path / "fused_predicted.json").read_text())
    rows = {(row["implementation"], row["schedule"]): row for row in content["rows"]}
    assert len(rows) == len(content["rows"]) == 14 and {row["launch"] for row in rows.values()} == {"model"}
    unfused, kernel = rows["unfused_nccl", "a kernel a table"], rows["fused", "remote_first"]
    parts_us = rows["compute", "a kernel a table"]["time_us"] + rows["collective", "library"]["time_us"]
    assert kernel["time_us"] < unfused["time_us"] == pytest.approx(parts_us, rel=1e-4)
    lower_percent = 100 * (1 - kernel["time_us"] / unfused["time_us"])
    assert unfused["low_percent"] <= lower_percent <= unfused["high_percent"]
    assert content["numbers"]["fused.put_us"][1] == "assumed"
    trace = json.loads((tmp_path / "timeline-fused-remote_first.trace.json").read_text())
    assert {event["name"] for event in trace["traceEvents"]} >= {"remote work", "own work", "bytes"}
