"""Side effects of a repeated call on Python objects, in the form that ``replay.c`` carries out."""

from __future__ import annotations

import enum
from typing import Any


class Effect(enum.IntEnum):
    """Kind of a side effect on the target, name and value of a :data:`Note`."""

    SET = 0
    """``target.name = value``"""
    SET_NUMBER = 1
    """``target.name = number of the call``"""
    SET_PAIR = 2
    """``target.name = (number of the call, value)``"""
    APPEND_PAIR = 3
    """``target((number of the call, value))``: a bound ``append``"""
    COUNT = 4
    """``target[0] += 1``, of a list"""


Note = tuple[Effect, Any, str, Any]
"""A side effect: (effect, target, name, value)."""
