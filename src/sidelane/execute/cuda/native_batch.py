"""A batch of memory operations in the layout of the driver's library, for calls that must cost the host little.

The binding copies its list of operations at every call, which takes longer than the call itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

_UNION_BYTES = 48  # cuda.h: CUstreamBatchMemOpParams holds six 64-bit words,
_VALUE_OFFSET = 16  # and both operations have kind, address and value at 0, 8 and 16

Bound = tuple[Callable[..., Any], tuple[Any, ...]]


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

    def bind(self, stream: int) -> Bound:
        """The call that submits the batch; see ``driver.Bound``."""
        api, function = self._api, self._function

        def submit(*call: Any) -> tuple[Any]:
            error = function(*call)
            return (api.CUresult(error) if error else error,)

        submit.__name__ = "cuStreamBatchMemOp"
        submit.keep = self._array  # type: ignore[attr-defined]  # the last argument but one points there
        array = ctypes.c_void_p(ctypes.addressof(self._array))
        return submit, (ctypes.c_void_p(stream), ctypes.c_uint(self._count), array, ctypes.c_uint(0))
