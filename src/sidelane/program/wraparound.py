"""Comparison of flags: words of 32 bits on a circle, where growing values wrap around."""

from __future__ import annotations

WORD_BYTES, WORD_MASK = 4, 0xFFFFFFFF
_HALF = 0x80000000


def reached(word: int, value: int) -> bool:
    """Return True if ``word`` is at least ``value``: the step from value to word is less than half of the circle.

    >>> reached(5, 5), reached(4, 5), reached(3, WORD_MASK), reached(WORD_MASK, 3)
    (True, False, True, False)
    """
    return (word - value) & WORD_MASK < _HALF


def as_int32(value: int) -> int:
    """Return the word that holds ``value`` as a signed number, as int32 tensors have it.

    >>> as_int32(5), as_int32(-1), as_int32(WORD_MASK), as_int32(_HALF)
    (5, -1, -1, -2147483648)
    """
    return ((value + _HALF) & WORD_MASK) - _HALF
