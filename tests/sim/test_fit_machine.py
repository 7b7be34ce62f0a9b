"""Fitting a description to isolated runs: what a known machine would have measured gives its numbers back."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from pathlib import Path

import pytest

from sidelane_lab.harness.study import Results, write
from sidelane_lab.machines.load import named, parse
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.pairs.workload import parse_gemm
from sidelane_lab.studies.c3.rows import C3Row
from sidelane_lab.studies.collectives import CollectiveRow, predict_alone

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import fit_machine

sys.path.pop(0)
START = named("h200x4")
TRUTH = (
    START.with_value("library.all_gather_us", 9.0)
    .with_value("library.all_gather_gbps", 300.0)
    .with_value("dma.engine_gbps", 360.0)
    .with_value("links.usable_gbps", 360.0)
    .with_value("matmul.efficiency", 0.7)
)
SIZES = (4 << 10, 64 << 10, 1 << 20, 256 << 20, 896 << 20)


def rows_of(machine):
    shapes = [("nccl", "", "all_gather", True)]
    shapes += [
        ("dma", variant, kind, in_place)
        for variant in ("b2b", "pcpy")
        for kind in ("all_gather", "all_to_all")
        for in_place in (True, False)
    ]
    rows = []
    for nbytes in SIZES:
        for implementation, variant, kind, in_place in shapes:
            row = CollectiveRow(
                kind,
                nbytes,
                "bfloat16",
                in_place,
                "graph",
                implementation,
                variant,
                False,
                1.0,
                None,
                None,
                1.0,
                None,
                True,
            )
            rows.append(dataclasses.replace(row, time_us=predict_alone(machine, row)))
    return rows


def test_the_numbers_come_back(tmp_path):
    truth = {"dma.doorbell_us": 6.0, "dma.copy_us": 2.0, "dma.next_copy_us": 2.0, "dma.signal_us": 1.5}
    truth |= {"dma.wait_us": 1.5, "dma.sync_us": 3.0}
    machine = TRUTH
    for path, value in truth.items():
        machine = machine.with_value(path, value)
    fitted = fit_machine.fit_collectives(START, rows_of(machine), "results/x.json")
    assert fitted["library.all_gather_us"] == pytest.approx(9.0, rel=0.1)
    assert fitted["library.all_gather_gbps"] == pytest.approx(300.0, rel=0.02)
    assert fitted["dma.engine_gbps"] == pytest.approx(360.0, rel=0.02)
    assert fitted["dma.local_gbps"] == pytest.approx(START.dma.local_gbps, rel=0.1)
    assert fitted["dma.shared_queues"] == pytest.approx(START.dma.shared_queues, rel=0.05)
    assert fitted["dma.doorbell_us"] == pytest.approx(6.0, rel=0.1)
    assert fitted["dma.signal_us"] == fitted["dma.wait_us"] == pytest.approx(1.5, rel=0.1)
    assert all(q.low < q < q.high and q.of == "results/x.json" for q in fitted.values())


def test_a_protocol_that_shows_in_the_middle_is_found():
    machine = TRUTH.with_value("library.bulk_us", 30.0).with_value("library.low_latency_share", 0.3)
    rows = [
        CollectiveRow("all_gather", n, "bfloat16", True, "graph", "nccl", "", False, 1.0, None, None, 1.0, None, True)
        for n in (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
    ]
    rows = [dataclasses.replace(row, time_us=predict_alone(machine, row)) for row in rows]
    fitted = fit_machine.fit_collectives(START, rows, "x")
    assert fitted["library.bulk_us"] == pytest.approx(30.0, rel=0.1)
    assert fitted["library.low_latency_share"] == pytest.approx(0.3, rel=0.1)


def test_the_text_is_a_part_of_a_machines_file(tmp_path):
    gemm = parse_gemm("cb1")
    c3 = C3Row(
        "cb1", 8192, 8192, 8192, "bfloat16", "all_gather", 896 << 20, "C-long", "serial", "",
        gemm_us(TRUTH, gemm), 2000.0, 2000.0, 3500.0, 1.0, 1.7, 0.0, 0.0, True,
    )  # fmt: skip
    for study, rows in (("collectives", rows_of(TRUTH)), ("c3", [c3])):
        results = Results(
            study, "h200x4", 4, "NVIDIA H200", 4, "2026-01-01T00:00:00+00:00", "abc", "x", {}, tuple(rows)
        )
        write(tmp_path / f"{study}.json", results)
    text = fit_machine.main(START, tmp_path)
    assert tomllib.loads(text)["matmul"]["efficiency"]["value"] == pytest.approx(0.7, rel=0.01)
    machine = parse(f'base = "h200x4"\nname = "mine"\n\n{text}', "mine.toml")
    assert machine.library.all_gather_us.of == "results/h200x4/collectives.json"


def test_nothing_to_fit_to(tmp_path):
    with pytest.raises(ValueError, match="no measurements"):
        fit_machine.main(START, tmp_path)
    assert fit_machine.fit_collectives(START, [], "x") == {}
    assert fit_machine.fit_gemm(START, [], "x") == {}
