"""What a ``Reduce`` does to bytes, and inputs for which the order of a sum and the number of its roundings show."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sidelane.program.collective import ReduceOp, Reduction

Array = npt.NDArray[Any]


def reduced(reduction: Reduction, operands: Sequence[bytes]) -> bytes:
    """Combine operands element by element in their order.

    Floats accumulate in float32 and round once, to nearest even; integers wrap. An average divides the sum, integers
    towards 0.
    """
    total = _widened(operands[0], reduction.dtype).copy()
    # Wrong bytes may be any floats, and overflow: results are compared as bits, and nobody has to hear of it.
    with np.errstate(all="ignore"):
        for operand in operands[1:]:
            _COMBINE[reduction.op](total, _widened(operand, reduction.dtype), out=total)
        if reduction.op is ReduceOp.AVG:
            total = _divided(total, len(operands))
        return _narrowed(total, reduction.dtype).tobytes()


def operands(reduction: Reduction, count: int, ranks: int, rng: random.Random) -> list[bytes]:
    """One operand of ``count`` elements for each rank.

    Floats are normal numbers of mixed magnitudes whose sums stay finite. In most elements two ranks have large numbers
    that cancel each other, and the others small ones, of which less is left the later the two meet.
    """
    dtype = reduction.dtype
    if dtype in _INTEGERS:
        return [rng.randbytes(count * reduction.element_bytes) for _ in range(ranks)]
    bits, low, span, position, sign = _FLOATS[dtype]
    raw = np.frombuffer(rng.randbytes(4 * (ranks + 1) * count), np.uint32).reshape(ranks + 1, count)
    dice, raw = raw[ranks], raw[:ranks]
    exponents = (raw >> 23 & 0xFF) * span >> 8
    if ranks > 1:
        columns = np.flatnonzero(dice & 3)
        one = (dice[columns] >> 2 & 0x7FFF) % ranks
        other = (one + 1 + (dice[columns] >> 17) % (ranks - 1)) % ranks
        exponents[:, columns] >>= 1
        exponents[one, columns] = span - 1 - (exponents[one, columns] >> 2)
    values = raw & (sign | (1 << position) - 1) | (low + exponents) << position
    if ranks > 1:
        values[other, columns] = values[one, columns] ^ sign
    return [row.tobytes() for row in values.astype(bits)]


def _widened(data: bytes, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    return np.frombuffer(data, _INTEGERS.get(dtype, np.float32))


def _narrowed(total: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        bits = total.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return total.astype(np.float16) if dtype == "float16" else total


def _divided(total: Array, count: int) -> Array:
    if np.issubdtype(total.dtype, np.floating):
        return total / np.float32(count)
    quotient, rest = np.divmod(total, count)  # rounds down, so that negative quotients with a rest are one too low
    return np.asarray(quotient + ((rest != 0) & (total < 0)), total.dtype)


_COMBINE = {ReduceOp.SUM: np.add, ReduceOp.AVG: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}

_INTEGERS = {"int32": np.int32, "int64": np.int64}

# Type of the bits, lowest exponent, how many there are, their position, sign bit. Sums of 16 numbers below 2**11 are
# finite in float16; float32 cannot hold all that the exponents of others span.
_FLOATS = {
    "float32": (np.uint32, 127 - 16, 32, 23, 1 << 31),
    "float16": (np.uint16, 1, 25, 10, 1 << 15),
    "bfloat16": (np.uint16, 127 - 24, 32, 7, 1 << 15),
}
