# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Combination of the ranks' elements, the same in all kernels: floats in float32, in rank order, rounded once.

Integers wrap. NaN spreads through every operation. An integer average truncates towards 0.
"""

from __future__ import annotations

from typing import Any

from sidelane.device.language import tl, triton
from sidelane.device.memory import pointer
from sidelane.program.collective import Reduction

DTYPES = {
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "int32": tl.int32,
    "int64": tl.int64,
}
"""Dtypes that can be reduced, by torch's names (``program.collective.ELEMENT_BYTES``)."""


FLOATS = ("float32", "float16", "bfloat16")


def reduction_constants(reduction: Reduction | None) -> dict[str, Any]:
    """Return the constants of kernels for an operation and a dtype; OP is empty for None, where bytes only move."""
    if reduction is None:
        return {"OP": "", "DTYPE": tl.int8, "ELEMENT_BYTES": 1, "FLOAT": False}
    return {
        "OP": str(reduction.op),
        "DTYPE": DTYPES[reduction.dtype],
        "ELEMENT_BYTES": reduction.element_bytes,
        "FLOAT": reduction.dtype in FLOATS,
    }


@triton.jit
def combine(values, N: tl.constexpr, OP: tl.constexpr, FLOAT: tl.constexpr):
    """Combine a tuple of N tensors, one for each rank; the result is still wide."""
    result = widen(values[0], FLOAT)
    for rank in tl.static_range(1, N):
        result = accumulate(result, widen(values[rank], FLOAT), OP)
    return finish(result, N, OP, FLOAT)


@triton.jit
def load_combined(
    addresses, lanes, mask,
    N: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, FLOAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load elements ``lanes`` from the addresses of N ranks, all before the first is used, and combine them."""
    values = ()
    for rank in tl.static_range(N):
        values = values + (tl.load(pointer(addresses[rank], DTYPE, ALIGNED) + lanes, mask=mask),)
    return combine(values, N, OP, FLOAT).to(DTYPE)


@triton.jit
def widen(value, FLOAT: tl.constexpr):
    """Return a float as float32, and an integer unchanged."""
    return value.to(tl.float32) if FLOAT else value


@triton.jit
def accumulate(result, value, OP: tl.constexpr):
    """Combine the result of earlier ranks with the next rank's ``value``."""
    if OP == "min":
        # A comparison with NaN is false: the first test lets a NaN in, the second never replaces one.
        return tl.where((value != value) | (value < result), value, result)
    elif OP == "max":
        return tl.where((value != value) | (value > result), value, result)
    else:
        return result + value


@triton.jit
def finish(result, N: tl.constexpr, OP: tl.constexpr, FLOAT: tl.constexpr):
    """Complete the result after all N values were accumulated (an average is divided); it is still wide."""
    if OP == "avg":
        # Float: the IEEE quotient. Integer: Triton's // truncates towards zero.
        return tl.div_rn(result, tl.full(result.shape, N, tl.float32)) if FLOAT else result // N
    else:
        return result


@triton.jit
def largest_magnitude(values, AXIS: tl.constexpr):
    """Return the largest absolute value of float32s along an axis, of all of them for None; NaN if there is one.

    Absolute values are ordered as their bits are, and those of NaN are the largest.
    """
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS).to(tl.float32, bitcast=True)
