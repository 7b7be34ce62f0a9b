"""GEMMs alone: their shapes, and a result that is wrong."""

from __future__ import annotations

import pytest
import torch

from sidelane_lab.studies import gemms


def test_a_wrong_result_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.mm

    def wrong(given: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        right(given, weight, out=out)
        out[0] *= 1.1
        return out

    monkeypatch.setattr(torch, "mm", wrong)
    gemm = gemms.projections(("llama-70b/8",))[5].gemm.for_cpu()
    layers = gemms.LinearLayers(gemm, torch.device("cpu"), 0)
    layers.run()
    assert layers.error(0) == "the result differs from that in float64"
    layers.fill(1)
    assert layers.error(0), "nothing has run"


def test_shapes() -> None:
    everything = gemms.projections()
    assert len(everything) == 160 and len({one.gemm for one in everything}) == 160
    assert set(gemms.FITTED) | set(gemms.SEEN) < set(gemms.MODELS) and not set(gemms.FITTED) & set(gemms.SEEN)
    assert all(gemms.calls_of(one.gemm) * one.gemm.nbytes >= gemms.COLD_BYTES / 2 for one in everything)
