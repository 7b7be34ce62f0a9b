# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_to_all_rows: an all-to-all with split sizes that only the device knows, as routing of experts gives them.

Equivalent: ``comm.all_to_all`` with ``counts`` as split sizes, for which the host has to wait. The kernel is that of
``gemm``, with unchanged rows, or sums of rows, in place of a product; so are its protocol and its proof.

Rows in float8 travel as rows of bytes: values, and behind them a float32 scale for every 128 elements. Equivalent:
``float8_and_scales``, the format in which DeepEP sends tokens, as two tensors. As one row, any operator that moves rows
moves them.

Legend: COLS elements, or GROUPS groups of SCALED elements, of one row are a program's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.kernels.arithmetic import largest_magnitude
from sidelane.ops.gemm import ARGUMENT_INDICES, rows_sender
from sidelane.ops.handle import check_tensor, is_captured, reporting_refusals
from sidelane.ops.operands import check_rows
from sidelane.ops.operator import CachedLaunch, cached
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

NAME = "all_to_all_rows"


MOST_TERMS = 64
"""Largest number of terms of a sent row."""

COLS = 1024
"""Number of columns of a program."""

SCALED = 128
"""Number of elements that share a scale."""

LARGEST_FLOAT8 = 448.0
"""Largest number of float8_e4m3fn."""

LEAST_LARGEST = 1e-4
"""Least value to which a largest element is taken, so that zeros have a scale."""


def all_to_all_rows(
    comm: Communicator,
    x: torch.Tensor,
    counts: torch.Tensor,
    *,
    most_rows: int,
    terms: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send rows to the ranks of ``counts``, without the host. A call of the communicator.

    The first call of a shape makes its resources, with all ranks; later ones may be captured into a graph, with counts
    that change between replays. The way back is the same with ``counts.T.contiguous()``.

    Args:
        comm: communicator of the ranks.
        x: rows for rank 0, for rank 1, and so on, [rows, H]; float32, float16 or bfloat16; neighbours in a row are
            neighbours in memory. Ranks may have different numbers of rows; rows beyond the counts stay.
        counts: number of rows from rank i to rank j in row i, column j; int32 or int64, on the device, the same on all
            ranks. They are checked only with ``Config(debug=True)``.
        most_rows: largest number of rows that any rank gets, the same on all ranks and in all calls of a shape. Rows
            beyond it are left out.
        terms: numbers of the rows of ``x`` whose sum each sent row is, [rows, k], with k alike on all ranks; int32 or
            int64, contiguous; a negative number stands for none. A row without any keeps its place, and is not sent.
            Sums are float32, rounded once.
        factors: factor of each term, float32[rows, k], contiguous.

    Returns:
        Tensor [most_rows, H]: rows from rank 0, from rank 1, and so on; the rows behind them, and those that were not
        sent, are unchanged. The next call of this shape overwrites it.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def sender() -> CachedLaunch:
        return rows_sender(comm, NAME, most_rows, x.shape[1], x.dtype)

    return send_rows(comm, most_rows, sender, (), x, counts, terms, factors)


def send_rows(
    comm: Communicator,
    most_rows: int,
    sender: Callable[[], CachedLaunch],
    words: tuple[object, ...],
    x: torch.Tensor,
    counts: torch.Tensor,
    terms: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> torch.Tensor:
    """Send rows as :func:`all_to_all_rows` does, with a sender of the caller's.

    Args:
        comm: communicator of the ranks.
        most_rows: largest number of rows that any rank gets.
        sender: function that returns the launch of new layouts (``GemmAllToAll.run`` with options).
        words: all on which the launch depends besides the tensors.
        x: argument of :func:`all_to_all_rows`.
        counts: argument of :func:`all_to_all_rows`.
        terms: argument of :func:`all_to_all_rows`.
        factors: argument of :func:`all_to_all_rows`.
    """

    def make() -> CachedLaunch:
        with reporting_refusals(comm, NAME):
            sent = check_terms(comm, x, terms, factors)
            check_rows(NAME, comm, x, counts, most_rows, sent=sent)
        return functools.partial(sender(), repeated=RepeatedLaunch(ARGUMENT_INDICES))

    run = cached(comm, None if comm.config.debug else (NAME, most_rows, *words), (x, counts, terms, factors), make)
    came: torch.Tensor = run(x, None, counts, terms=terms, factors=factors)
    return came


def check_terms(comm: Communicator, x: torch.Tensor, terms: object, factors: object) -> int | None:
    """Return the number of sums; None without any. Raises ValueError or TypeError for terms that are none of ``x``."""
    if terms is None:
        if factors is not None:
            raise ValueError(f"{NAME}: factors without terms (value=a tensor, allowed=None)")
        return None
    terms = check_tensor(NAME, "terms", terms, comm.device, (torch.int32, torch.int64), (2,))
    if not 1 <= terms.shape[1] <= MOST_TERMS or not terms.is_contiguous():
        text = f"value={tuple(terms.shape)}, allowed=1..{MOST_TERMS} columns, contiguous"
        raise ValueError(f"{NAME}: shape of terms ({text})")
    if factors is not None:
        factors = check_tensor(NAME, "factors", factors, comm.device, (torch.float32,), (2,))
        if factors.shape != terms.shape or not factors.is_contiguous():
            text = f"value={tuple(factors.shape)}, allowed={tuple(terms.shape)}, contiguous"
            raise ValueError(f"{NAME}: shape of factors ({text})")
    is_checked = comm.config.debug and not is_captured(comm)
    if is_checked and terms.numel() and (most := int(terms.max())) >= len(x):
        raise ValueError(f"{NAME}: terms (value={most}, allowed=..{len(x) - 1}), the rows of x")
    return terms.shape[0]


def quantized_rows(x: Tensor) -> Tensor:
    """Return rows in float8 with their scales behind them, as float16 for what moves rows and reads no numbers.

    An element is its float8 times the scale, which is a 448th of the largest of 128 elements. With a NaN among them
    all are NaN.
    """
    rows, columns = x.shape
    first_scale, width = row_widths(columns)
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
    first_scale, width = row_widths(columns)
    packed = packed.view(torch.uint8)
    output = packed.new_empty(len(rows), columns, dtype=dtype)
    arguments = packed.view(torch.float8_e4m3fn), packed.view(torch.float32), output, rows, columns, width, first_scale
    if len(rows):
        launch(_dequantize, (len(rows), -(-columns // COLS)), arguments, {"COLS": COLS, "SCALED": SCALED})
    return output


def float8_and_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as float8_e4m3fn, and a float32 scale for every ``SCALED`` elements."""
    rows, columns = x.shape
    parts = functional.pad(x.float(), (0, -columns % SCALED)).view(rows, -(-columns // SCALED), SCALED)
    largest = parts.abs().amax(-1).clamp(min=LEAST_LARGEST)
    values = (parts * (LARGEST_FLOAT8 / largest)[..., None]).to(torch.float8_e4m3fn)
    return values.flatten(1)[:, :columns], largest / LARGEST_FLOAT8


def row_widths(columns: int) -> tuple[int, int]:
    """Return where scales begin in a row of float8, and where it ends, in bytes: multiples of 16.

    >>> row_widths(7168), row_widths(40)
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
