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
from sidelane_lab.cli.collectives import FusedOptions
from sidelane_lab.harness import drawing
from sidelane_lab.machines import numbers as machine_files
from sidelane_lab.machines import ranges
from sidelane_lab.machines.load import named
from sidelane_lab.model.operators import ORDERS
from sidelane_lab.model.panels import draw_all, mark_cut
from sidelane_lab.model.study import TABLE_II
from sidelane_lab.papers import command as claims
from sidelane_lab.papers import conccl, operator_results, overlap
from sidelane_lab.papers import fused as fused_paper
from sidelane_lab.papers import predictions as sim_study
from sidelane_lab.papers.claims import published
from sidelane_lab.papers.measurements import PairReadings
from sidelane_lab.studies.collectives import CollectiveOptions
from sidelane_lab.studies.fused import predict as sim_fused

MACHINE = named("mi300x8")


def test_c3_prints_given_pairs_by_collective(capsys, tmp_path):
    sim_study.c3_main("h200x4", C3Options(report=tmp_path))
    shown = capsys.readouterr().out
    assert shown.count("cb1_896M") == 2 and "all_gather" in shown and "all_to_all" in shown
    rows = json.loads((tmp_path / "c3_predicted.json").read_text())["rows"]
    found = Counter((row["collective"], row["strategy"]) for row in rows)
    names = [strategy.name for strategy in strategies()]
    assert found == Counter(itertools.product(("all_gather", "all_to_all"), names))


def test_the_notes_of_predicted_pairs_explain_the_columns(capsys):
    sim_study.c3_main("h200x4", C3Options(collectives=(Kind.ALL_GATHER,), strategies=("c3_sp", "c3_rp")))
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r" (-?\d+)@(\d+) .*\b\1@\2: \1, with \2 compute units for the collective alone", shown)
    assert "c3_sp: two streams, the collective first; c3_rp: the GEMM first" in shown and "c3_base:" not in shown


@pytest.mark.long
def test_c3_writes_a_report(tmp_path, capsys, monkeypatch, drawn):
    # Without the variations that draw ranges: one study, not fifty.
    certain = MACHINE
    for path, quantity in MACHINE.quantities().items():
        certain = certain.with_value(path, float(quantity))
    monkeypatch.setattr(machine_files, "find", lambda name: certain)
    sim_study.c3_main("mi300x8", C3Options(workloads=tuple(TABLE_II), report=tmp_path))
    assert "Percent of ideal by group" in capsys.readouterr().out
    content = json.loads((tmp_path / "c3_predicted.json").read_text())
    assert content["predicted"] is True and content["machine"] == "mi300x8"
    assert len(content["rows"]) == 240
    assert content["numbers"]["dma.copy_us"][1] == "fitted"
    for name in ("c3-compute-units", "c3-ideal", "c3-strategies", "c3-conccl", "c3-isolated", "timeline-c3_base"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert (tmp_path / f"{name}.svg").stat().st_size > 5000
    assert json.loads((tmp_path / "timeline-conccl.trace.json").read_text())["traceEvents"]
    check_axes(drawn)


@pytest.fixture
def few_variations(monkeypatch):
    """Bands over the first uncertain number alone, at one end of its range: not over all of them."""
    every = ranges.variations

    def few(machine, numbers):
        return itertools.islice(every(machine, numbers), 1)

    monkeypatch.setattr(ranges, "variations", few)


@pytest.fixture
def drawn(monkeypatch):
    """Every figure that is written, by its name."""
    figures, write = {}, drawing.save_both

    def record(figure, name, folder, **more):
        figures[name] = figure
        return write(figure, name, folder, **more)

    monkeypatch.setattr(drawing, "save_both", record)
    return figures


def check_axes(figures):
    """Every axis has a name, none that begins above 0 goes without a mark, and every curve has a band."""
    for name, figure in figures.items():
        if name.startswith("timeline"):
            continue
        for axes in figure.axes:
            assert axes.get_xlabel() and (axes.get_ylabel() or axes is not figure.axes[0]), name
            curves = [line for line in axes.lines if len(line.get_xdata()) > 2 and line.get_linestyle() != "None"]
            assert len(axes.collections) >= len(curves), name
            least = axes.get_ylim()[0]
            marked = any(not line.get_clip_on() and len(line.get_xdata()) == 2 for line in axes.lines)
            assert least <= 0 or marked, f"{name}: its axis begins at {least} without a mark"


@pytest.mark.long  # pictures; test_cli_json runs the command each day
def test_collective_writes_a_report(tmp_path, capsys, few_variations, drawn):
    sim_study.collective_main("mi300x8", CollectiveOptions(report=tmp_path))
    assert "b2b+prelaunch" in capsys.readouterr().out
    rows = json.loads((tmp_path / "collectives_predicted.json").read_text())["rows"]
    assert {(row["implementation"], row["variant"]) for row in rows} == {
        ("nccl", ""),
        *(("dma", variant) for variant in ("pcpy", "bcst", "swap", "b2b")),
    }
    for name in ("dma-phases", "dma-all_gather", "dma-all_to_all", "timeline-all_gather-b2b"):
        assert (tmp_path / f"{name}.png").exists()
    check_axes(drawn)
    bands_of = drawn["dma-all_gather"].axes[0].collections
    assert len(bands_of) == 6 and any(band.get_paths()[0].get_extents().height > 0.01 for band in bands_of)


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
    (panel,) = next(figure for figure in conccl.figures() if figure.name == "c3-conccl").panels(only, True)
    band = panel.curves["conccl"]
    assert all(low < mean < high for low, mean, high in zip(band.low, band.values, band.high, strict=True))
    assert band.values[-1] == pytest.approx(PairReadings.of(conccl.pair_rows(MACHINE)).mean_speedup("conccl"))


@pytest.mark.parametrize(("least", "strokes"), [(0.0, 0), (-5.0, 0), (0.9, 2)])
def test_an_axis_that_does_not_begin_at_0_is_marked(least, strokes):
    axes = Figure().subplots()
    axes.set_ylim(least, 2)
    mark_cut(axes)
    assert len(axes.lines) == strokes


@pytest.mark.long
@pytest.mark.parametrize(("name", "there"), [("mi300x8", True), ("h200x4", False)])
def test_published_values_are_on_the_pictures_of_their_machine_alone(name, there, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(drawing, "save_both", lambda figure, name, folder: drawn.setdefault(name, figure))
    draw_all(conccl.figures(), named(name), tmp_path, ranges=False)
    for figure in drawn.values():
        assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    words = [text.get_text() for text in drawn["c3-conccl"].axes[0].get_legend().get_texts()]
    assert any("published" in word for word in words) == there


@pytest.mark.long
def test_claims_write_a_report(tmp_path, capsys):
    assert claims.main(claims.ClaimsOptions(ranges=False, report=tmp_path)) == 0
    capsys.readouterr()
    written = json.loads((tmp_path / "claims.json").read_text())
    assert len(written["rows"]) > 100 and written["command"] and written["commit"] and "gpu.units" in written["numbers"]
    assert "mi210x4 fused.half_share" in written["numbers"]
    assert (tmp_path / "claims.png").stat().st_size > 20000
    assert (tmp_path / "claims.svg").exists()


PANELS = ("base", "reduction", "overlap", "tiles-ar", "tiles-a2a")


@pytest.mark.long
def test_pipelines_print_and_write(tmp_path, capsys, few_variations, drawn):
    overlap.main("a40x4", tmp_path)
    shown = capsys.readouterr().out
    assert "opt1  persistent     16        6" in shown and "mb1 (8192x57344x8192 bfloat16) with all_to_all" in shown
    assert {path.stem for path in tmp_path.glob("overlap-*.png")} == {f"overlap-{key}" for key in PANELS}
    assert json.loads((tmp_path / "timeline-pipeline-priority.trace.json").read_text())["traceEvents"]
    check_axes(drawn)


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
    assert {path.stem for path in tmp_path.glob("*.png")} >= {"fused-predicted", "fused-occupancy", "fused-order"}


def test_every_figure_of_the_papers_has_one_drawer():
    figures = [(paper.numbers[0], number) for paper in claims.PAPERS for one in paper.figures for number in one.numbers]
    assert len(figures) == len(set(figures)) and len(figures) == 6 + 6 + 5 + 6
    names = [one.name for paper in claims.PAPERS for one in paper.figures]
    assert len(names) == len(set(names))


def test_published_and_predicted_values_of_fused_operators_are_drawn_together(tmp_path):
    drawn = draw_all(fused_paper.PAPER.figures, named("mi210x4"), tmp_path, ranges=False)
    assert len(drawn) == 7 and all(path.is_file() for path in drawn)
    assert set(fused_paper.GAINS) <= set(published())
    assert all("<!-- published" in path.with_suffix(".svg").read_text() for path in drawn)


def test_a_late_rank_and_a_smaller_grid_are_asked_for():
    def kernel(**asked):
        options = FusedOptions(ops=("embedding_all_to_all",), shapes=((1024, 64, 70),), **asked)
        return next(row.time_us for row in sim_fused.predict(named("h200x4"), options) if row.schedule in ORDERS)

    plain, late, half = (kernel(**asked) for asked in ({}, {"late_us": 50.0}, {"occupancy": 0.5}))
    assert late == pytest.approx(plain + 50, rel=0.01)
    assert half > 1.05 * plain
