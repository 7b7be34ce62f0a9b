"""Where the addresses of buffers stand among prepared calls: what to change, to make the calls elsewhere.

It is found out by preparing them twice, with one buffer further, and looking at what has changed: arguments of the
driver's functions, and words of the memory that these point to.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from sidelane.execute.base import Addresses, Follower
from sidelane.execute.cuda.native import Bound, steps_of

FAR = 1 << 20
"""Bytes: a multiple of whatever a kernel is compiled for."""

_WORD = 8


def followers(
    bind: Callable[[Addresses], Sequence[Bound] | None], addresses: Addresses, buffers: Sequence[tuple[int, str]]
) -> tuple[Sequence[Bound], tuple[Follower, ...]] | None:
    """Prepared calls of nobody else, and what in them follows some buffers.

    Args:
        bind: prepares them, with all that names a buffer anew.
        addresses: where.
        buffers: that may move.

    Returns:
        None where Python makes any of them, or where more changes than an address.
    """
    calls = bind(addresses)
    if calls is None or any(not isinstance(step[0], int) for step in steps_of(calls)):
        return None
    found: list[Follower] = []
    for buffer in buffers:
        moved = {**addresses.buffers, buffer: addresses.buffers[buffer] + FAR}
        others = bind(dataclasses.replace(addresses, buffers=moved))
        if others is None:
            return None
        for step, (call, other) in enumerate(zip_longest(calls, others)):
            if call is None or other is None or call[0] is not other[0]:
                return None
            for argument, (before, after) in enumerate(zip(call[1], other[1], strict=True)):
                for address, value, by in _differences(before, after):
                    if by != FAR:
                        return None
                    delta = (value - addresses.buffers[buffer]) % (1 << 64)
                    found.append(Follower(buffer, delta, step, argument, address))
    return calls, tuple(found)


def _differences(before: Any, after: Any) -> Iterator[tuple[int, int, int]]:
    """What is not the same of an argument: where (0: itself), what it is, and by how much it grows."""
    there, elsewhere = _memory_of(before), _memory_of(after)
    if there is None or elsewhere is None:
        one, other = before.value or 0, after.value or 0
        if one != other:
            yield 0, one, other - one
        return
    if len(there) != len(elsewhere):
        yield 0, 0, 0
        return
    for index, (one, other) in enumerate(zip(there, elsewhere, strict=True)):
        if one != other:
            yield ctypes.addressof(there) + _WORD * index, one, other - one


def _memory_of(argument: Any) -> ctypes.Array[ctypes.c_uint64] | None:
    """What a call reads by an argument, in words; None for a plain value."""
    values = getattr(getattr(argument, "memory", None), "values", None)  # of a kernel
    held = values if values is not None else getattr(argument, "_obj", argument)  # of ctypes.byref
    if not isinstance(held, ctypes.Array | ctypes.Structure):
        return None
    return (ctypes.c_uint64 * (ctypes.sizeof(held) // _WORD)).from_address(ctypes.addressof(held))
