# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Rows in float8 that travel as rows of bytes: values, and behind them a float32 scale for every 128 elements.

Equivalent: ``float8_and_scales``, the format in which DeepEP sends tokens, as two tensors. As one row, any
operator that moves rows moves them.

Legend: COLS elements, or GROUPS groups of SCALED elements, of one row are a program's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.kernels.arithmetic import largest_magnitude

COLS = 1024
"""Number of columns of a program."""

SCALED = 128
"""Number of elements that share a scale."""

LARGEST_FLOAT8 = 448.0
"""Largest number of float8_e4m3fn."""

LEAST_LARGEST = 1e-4
"""Least value to which a largest element is taken, so that zeros have a scale."""


def quantized_rows(x: Tensor) -> Tensor:
    """Return rows in float8 with their scales behind them, as float16 for what moves rows and reads no numbers.

    An element is its float8 times the scale, which is a 448th of the largest of 128 elements. With a NaN among them
    all are NaN.
    """
    rows, columns = x.shape
    first_scale, width = _widths(columns)
    packed = x.new_empty(rows, width, dtype=torch.uint8)
    values, places = packed.view(torch.float8_e4m3fn), packed.view(torch.float32)
    if x.device.type == "cpu":  # Triton's interpreter rounds to float8 without carrying
        scaled, scales = float8_and_scales(x)
        values[:, :columns] = scaled
        places[:, first_scale // 4 : first_scale // 4 + scales.shape[1]] = scales
    elif rows:
        arguments = x, values, places, columns, x.stride(0), width, first_scale
        options = {"GROUPS": COLS // SCALED, "SCALED": SCALED, "LARGEST": LARGEST_FLOAT8}
        launch(_quantize, (rows, -(-columns // COLS)), arguments, {**options, "LEAST": LEAST_LARGEST})
    return packed.view(torch.float16)


def dequantized_rows(packed: Tensor, rows: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return rows of what :func:`quantized_rows` made, by their numbers [rows, 1], -1 for zeros."""
    first_scale, width = _widths(columns)
    packed = packed.view(torch.uint8)
    output = packed.new_empty(len(rows), columns, dtype=dtype)
    arguments = packed.view(torch.float8_e4m3fn), packed.view(torch.float32), output, rows, columns, width, first_scale
    if len(rows):
        launch(_dequantize, (len(rows), -(-columns // COLS)), arguments, {"COLS": COLS, "SCALED": SCALED})
    return output


def float8_and_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as float8_e4m3fn, and a float32 scale for every ``SCALED`` elements."""
    rows, columns = x.shape
    parts = functional.pad(x.float(), (0, -columns % SCALED)).view(rows, -1, SCALED)
    largest = parts.abs().amax(-1).clamp(min=LEAST_LARGEST)
    values = (parts * (LARGEST_FLOAT8 / largest)[..., None]).to(torch.float8_e4m3fn)
    return values.view(rows, -1)[:, :columns], largest / LARGEST_FLOAT8


def _widths(columns: int) -> tuple[int, int]:
    """Return where scales begin in a row of float8, and where it ends, in bytes: multiples of 16.

    >>> _widths(7168), _widths(40)
    ((7168, 7392), (48, 64))
    """
    first = -(-columns // 16) * 16
    return first, first + -(-4 * -(-columns // SCALED) // 16) * 16


@triton.jit
def _quantize(
    x, values, scales, columns, x_stride, width, first_scale,
    GROUPS: tl.constexpr, SCALED: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    inside = column < columns
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    largest = tl.maximum(largest_magnitude(wide, 1), LEAST, tl.PropagateNan.ALL)
    small = (wide * (LARGEST / largest)[:, None]).to(values.dtype.element_ty)
    tl.store(values + row * width + column, small, mask=inside)
    tl.store(scales + (row * width + first_scale) // 4 + group, largest / LARGEST, mask=group * SCALED < columns)


@triton.jit
def _dequantize(
    values, scales, output, rows, columns, width, first_scale,
    COLS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    source = tl.load(rows + row).to(tl.int64)
    inside = column < columns
    place = source * width + column
    is_there = inside & (place >= 0)  # a row that is none begins at -width
    wide = tl.load(values + place, mask=is_there).to(tl.float32)  # the interpreter has no 0 of float8
    scale = tl.load(scales + (source * width + first_scale) // 4 + column // SCALED, mask=is_there, other=0)
    found = tl.where(is_there, wide * scale, 0.0)
    tl.store(output + row * columns + column, found.to(output.dtype.element_ty), mask=inside)


QUANTIZE, DEQUANTIZE = _quantize, _dequantize
