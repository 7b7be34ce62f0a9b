"""The study of GEMMs alone, from end to end on a CPU core."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidelane_lab.harness import running
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.study import Results, read
from sidelane_lab.pairs.workload import CPU_GEMM_FLOPS
from sidelane_lab.studies.gemms import (
    COLD_BYTES,
    FITTED,
    MODELS,
    SEEN,
    GemmOptions,
    GemmRow,
    LinearLayers,
    calls_of,
    projections,
)


@pytest.mark.long
def test_every_layer_is_checked_and_timed(tmp_path: Path) -> None:
    path = tmp_path / "gemms.json"
    options = GemmOptions(device="cpu", models=("qwen-32b/4",), quiet=True, warmup=0, repeats=1, json=path)
    results = running.run(options)
    assert isinstance(results, Results) and results.ranks == 1
    rows = [row for row in read(path).rows if isinstance(row, GemmRow)]
    assert [row.layer for row in rows] == [one.layer for one in projections(("qwen-32b/4",))]
    for row in rows:
        operations = 2 * row.m * row.n * row.k
        assert row.correct and row.time_us and operations <= CPU_GEMM_FLOPS
        assert row.tflops == pytest.approx(operations / row.time_us / 1e6, rel=1e-3)
    assert len(tables_of(results)) == 1


def test_a_wrong_result_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.mm

    def wrong(given: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        right(given, weight, out=out)
        out[0] *= 1.1
        return out

    monkeypatch.setattr(torch, "mm", wrong)
    gemm = projections(("llama-70b/8",), "float32")[5].gemm.scaled(16)
    layers = LinearLayers(gemm, torch.device("cpu"), 0)
    layers.run()
    assert layers.error(0) == "the result differs from that in float64"
    layers.fill(1)
    assert layers.error(0), "nothing has run"


def test_shapes() -> None:
    everything = projections()
    assert len(everything) == 160 and len({one.gemm for one in everything}) == 160
    assert set(FITTED) | set(SEEN) < set(MODELS) and not set(FITTED) & set(SEEN)
    assert all(calls_of(one.gemm) * one.gemm.nbytes >= COLD_BYTES / 2 for one in everything)
