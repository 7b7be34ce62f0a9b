"""What a repeated call notes down about itself, as ``replay.c`` reads it."""

from __future__ import annotations

import enum
from typing import Any


class Effect(enum.IntEnum):
    """What is done with the target, the name and the value of a :data:`Note`."""

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
"""(effect, target, name, value)"""
