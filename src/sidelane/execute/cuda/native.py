"""Calls of the driver's own library, for those that must cost the host little.

The binding turns its lists into arrays at every call, which takes longer than the call itself.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

_UNION_BYTES = 48  # cuda.h: CUstreamBatchMemOpParams holds six 64-bit words,
_VALUE_OFFSET = 16  # and both operations have kind, address and value at 0, 8 and 16


@functools.cache
def load_native(name: str) -> Any:
    """A function of the driver's library; None where it has no such name."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


class NativeCall:
    """A function of the library that gives its error as the binding does: the call of a ``driver.Bound``.

    Args:
        api: ``cuda.bindings.driver``.
        function: made by :func:`load_native`.
        name: of the call, for error messages.
        memory: what its arguments point into, kept for as long as the call.
    """

    def __init__(self, api: Any, function: Any, name: str, memory: object) -> None:
        self.__name__ = name
        self._api, self._function, self._memory = api, function, memory

    def __call__(self, *arguments: Any) -> tuple[Any]:
        error = self._function(*arguments)
        return (self._api.CUresult(error) if error else error,)


class NativeBatch:
    """Operations that all have one value, which is set once and submitted on any stream.

    Args:
        api: ``cuda.bindings.driver``.
        function: ``cuStreamBatchMemOp`` of the library.
        params: the operations, with ``value`` in each.
        value: what they hold.

    Raises:
        ValueError: the layout is another one than cuda.h had when this was written.
    """

    def __init__(self, api: Any, function: Any, params: Sequence[Any], value: int) -> None:
        self._api, self._function, self._count = api, function, len(params)
        self._array = (ctypes.c_char * (_UNION_BYTES * len(params)))()
        for index, param in enumerate(params):
            ctypes.memmove(ctypes.addressof(self._array) + _UNION_BYTES * index, int(param.getPtr()), _UNION_BYTES)
        places = range(_VALUE_OFFSET, len(self._array), _UNION_BYTES)
        self._values = [ctypes.c_uint32.from_buffer(self._array, place) for place in places]
        if any(word.value != value for word in self._values):
            raise ValueError("NativeBatch: no value where it should be: an unknown layout of memory operations")

    def set(self, value: int) -> None:
        """Give every operation this value, modulo 2**32. Submitting copies it."""
        for word in self._values:
            word.value = value & 0xFFFFFFFF

    def bind(self, stream: int) -> tuple[NativeCall, tuple[Any, ...]]:
        """The call that submits the batch; see ``driver.Bound``."""
        call = NativeCall(self._api, self._function, "cuStreamBatchMemOp", self._array)
        array = ctypes.c_void_p(ctypes.addressof(self._array))
        return call, (ctypes.c_void_p(stream), ctypes.c_uint(self._count), array, ctypes.c_uint(0))
