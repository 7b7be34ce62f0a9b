"""The shaped GEMM under Triton's CPU interpreter, against float64; and as an H200 gets it, compiled here."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from marks import needs_triton

from sidelane_lab.shaping.shape import OPT1, GemmShape, SharedMemory

SMALL = GemmShape(name="small", tile_m=16, tile_n=32, tile_k=16)
HOPPER = SharedMemory(unit=233472, block=232448, reserved=1024)


@needs_triton
def test_against_float64(tmp_path: Path) -> None:
    forked.run(Path(__file__), (), tmp_path, {"TRITON_INTERPRET": "1"})


def compare(shape: GemmShape, m: int, n: int, k: int, dtype: torch.dtype, blocks: int) -> None:
    from sidelane_lab.shaping.gemm import KERNEL, constants_of

    generator = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randn(size, generator=generator).to(dtype) for size in ((m, k), (k, n)))
    c = torch.full((m, n), float("nan"), dtype=dtype)
    constants = constants_of(shape, a, b, c, wide=True)
    KERNEL[(blocks,)](*(tensor.data_ptr() for tensor in (a, b, c)), **constants)
    wanted = a.double() @ b.double()
    # The interpreter truncates to bfloat16 where hardware rounds: one unit in the last place.
    error = {torch.float32: 2.0**-18, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(c.double(), wanted, rtol=error, atol=error * k**0.5)


def main() -> None:
    compare(SMALL, 1, 1, 1, torch.float32, 1)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        compare(SMALL, 33, 65, 19, dtype, 4)  # fewer blocks than tiles: persistent
    compare(SMALL, 150, 70, 32, torch.float32, SMALL.tiles(150, 70))  # ten rows of tiles: two groups; data-parallel
    compare(SMALL, 31, 31, 48, torch.float16, 9)  # more blocks than tiles
    compare(OPT1, 65, 63, 33, torch.bfloat16, 1)


@needs_triton
def test_on_hopper_it_uses_tensor_cores_and_overlaps_its_loads() -> None:
    shape = OPT1
    from triton.backends.compiler import GPUTarget

    from sidelane.execute.cuda.kernel_launch import compile_for
    from sidelane_lab.shaping import gemm as shaped_gemm

    square = matrix(1024, 1024)
    constants = shaped_gemm.constants_of(shape, square, square, square, wide=False)
    made = compile_for(GPUTarget("cuda", 90, 32), shaped_gemm.KERNEL, constants, shape.warps, shape.stages)
    assert "wgmma" in made.asm["ptx"] and "cp.async" in made.asm["ptx"]
    assert made.metadata.shared >= shape.stages * (shape.tile_m + shape.tile_n) * shape.tile_k * 2
    assert not getattr(made.metadata, "global_scratch_size", 0), "it needs Triton's launcher"


def matrix(rows: int, columns: int, address: int = 256, dtype: torch.dtype = torch.bfloat16) -> Any:
    given = {"shape": (rows, columns), "dtype": dtype, "is_contiguous": lambda: True, "data_ptr": lambda: address}
    return SimpleNamespace(**given)


@needs_triton
def test_tensors_that_it_does_not_take() -> None:
    from sidelane_lab.shaping.gemm import constants_of

    a, b, c = matrix(4, 8), matrix(8, 6), matrix(4, 6)
    assert constants_of(OPT1, a, b, c, wide=False)["K"] == 8
    for wrong, text in (
        ((a, a, c), "shapes"),
        ((a, b, matrix(4, 7)), "shapes"),
        ((a, b, matrix(4, 6, dtype=torch.float32)), "dtypes"),
        ((matrix(4, 8, address=8), b, c), "16 bytes"),
    ):
        with pytest.raises(ValueError, match=text):
            constants_of(OPT1, *wrong, wide=False)


@pytest.mark.parametrize("resident", range(1, 14))
def test_no_more_blocks_fit_than_are_asked_for(resident: int) -> None:
    shape = dataclasses.replace(OPT1, resident=resident)
    asked = shape.asked_bytes(16384, HOPPER)
    fitting = HOPPER.unit // (asked + HOPPER.reserved)
    needed = HOPPER.unit // (16384 + HOPPER.reserved)
    assert fitting == min(resident, needed)
    assert 16384 <= asked <= HOPPER.block


def test_shapes_that_there_are_not() -> None:
    for wrong in ({"tile_m": 48}, {"tile_k": 8}, {"warps": 3}, {"stages": 0}, {"resident": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dataclasses.replace(OPT1, **wrong)
    assert OPT1.tiles(65, 64) == 2


if __name__ == "__main__":
    from sidelane.device.triton_interpreter import quick_interpreter

    with quick_interpreter():
        main(*sys.argv[1:])
