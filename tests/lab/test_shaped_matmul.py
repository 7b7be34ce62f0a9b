"""``ShapedMatmul``: under the interpreter with its gradients; where it falls back, and what it goes by."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import forked
import pytest
import torch

from sidelane_lab.shaping.choice import Shaping, ShapingChoice, choose_shaping
from sidelane_lab.shaping.matmul import ShapedMatmul
from sidelane_lab.shaping.shape import GemmShape

ROOT = Path(__file__).resolve().parents[2]
SMALL = GemmShape(name="small", tile_m=16, tile_n=16, tile_k=16)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_values_and_gradients(tmp_path: Path) -> None:
    forked.run(Path(__file__), (), tmp_path, {"TRITON_INTERPRET": "1"})


def main() -> None:
    product = ShapedMatmul(SMALL, blocks=2, blocks_per_unit=1)
    a = torch.randn(20, 24, requires_grad=True)
    b = torch.randn(33, 24, requires_grad=True)
    c = product(a, b.t())  # not contiguous
    assert product.ran == "small: 2 blocks, interpreted"
    torch.testing.assert_close(c, a @ b.t())
    weights = torch.randn_like(c)
    found = torch.autograd.grad((c * weights).sum(), (a, b))
    wanted = torch.autograd.grad(((a @ b.t()) * weights).sum(), (a, b))
    torch.testing.assert_close(found, wanted)
    assert not product(a.detach(), b.detach().t()).requires_grad
    product(a.detach().double(), b.detach().double().t())
    assert product.ran.startswith("torch.matmul") and "float64" in product.ran
    shifted = torch.zeros(4 * 16 + 1)[1:].view(4, 16)
    product(shifted, torch.ones(16, 4))
    assert "16 bytes" in product.ran


def test_without_a_gpu_it_is_torch_s_and_says_so() -> None:
    product = ShapedMatmul("opt1", blocks_per_unit=2)
    a, b = torch.randn(6, 8, requires_grad=True), torch.randn(8, 4)
    c = product(a, b)
    assert product.ran.startswith("torch.matmul: ") and torch.equal(c, a @ b)
    c.sum().backward()
    assert a.grad is not None
    with pytest.raises(ValueError, match="a, b"):
        product(a, a)
    for wrong in ({"tiles": "opt9"}, {"blocks": -1}, {"blocks_per_unit": 0}):
        with pytest.raises(ValueError, match="ShapedMatmul"):
            ShapedMatmul(**wrong)


def test_the_choice_of_a_file() -> None:
    measured = ROOT / "results" / "h200x2" / "occupancy.json"
    found = choose_shaping(measured, (8192, 8192, 8192), "all_reduce")
    assert found.shaping.shape == "tuned" and found.shaping.priority and not found.shaping.limited
    product = ShapedMatmul(shaping=found)
    product(torch.ones(2, 2), torch.ones(2, 2))
    assert "as many blocks as fit" in product.ran and found.reason in product.ran
    limited = dataclasses.replace(found, shaping=Shaping("opt2", 7, 2, True, True, 1.0), saved=0.3)
    assert (ShapedMatmul(shaping=limited)._shape.resident, ShapedMatmul(shaping=limited)._blocks) == (2, 7)
    assert isinstance(found, ShapingChoice)


def test_files_without_the_pair_are_refused(tmp_path: Path) -> None:
    measured = ROOT / "results" / "h200x2"
    with pytest.raises(ValueError, match="allowed=8192x57344x8192 with all_reduce, 8192x8192x8192 with all_reduce"):
        choose_shaping(measured / "occupancy.json", (1, 2, 3), "all_to_all")
    with pytest.raises(ValueError, match="study occupancy"):
        choose_shaping(measured / "c3.json", (8192, 8192, 8192), "all_to_all")
    (tmp_path / "list.json").write_text(json.dumps([]))
    with pytest.raises(ValueError, match="study occupancy"):
        choose_shaping(tmp_path / "list.json", (8192, 8192, 8192), "all_to_all")


if __name__ == "__main__":
    from sidelane.device.triton_interpreter import quick_interpreter

    with quick_interpreter():
        main(*sys.argv[1:])
