"""The made-up driver with calls that are C functions of integers, as a driver's are: compiled code makes them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from fake_driver import FakeDriver, c_function

from sidelane.execute.cuda.native import Bound, address_argument, address_array

_U64, _WORD = ctypes.c_uint64, ctypes.c_void_p


class NativeDriver(FakeDriver):
    """Nothing that is called may raise."""

    def __init__(self) -> None:
        super().__init__()
        self._reductions: list[Any] = []
        self._copy = c_function(self._submit_copy, 4)
        self._copies = c_function(self._submit_copies, 5)
        self._reduce = c_function(self._submit_reduce, 6)

    def submit(self, calls: Iterable[Bound]) -> None:
        super().submit((functools.partial(function, *arguments), ()) for function, arguments in calls)

    def bind_memory_ops(self, ops: Any, stream: int, part: slice = slice(None)) -> Bound:
        return _plain(super().bind_memory_ops(ops, stream, part))

    def bind_record(self, event: int, stream: int, *, external: bool = False) -> Bound:
        return _plain(super().bind_record(event, stream, external=external))

    def bind_wait(self, event: int, stream: int) -> Bound:
        return _plain(super().bind_wait(event, stream))

    def bind_copy(self, dst: int, src: int, nbytes: int, stream: int) -> Bound:
        return self._copy, (address_argument(dst), address_argument(src), _WORD(nbytes), _WORD(stream))

    def bind_copies(self, copies: Sequence[tuple[int, int, int]], stream: int) -> Bound:
        columns = [address_array(column) for column in zip(*copies, strict=True)]
        return self._copies, (*columns, _WORD(len(copies)), _WORD(stream))

    def bind_reduce(self, dst: int, srcs: Sequence[int], nbytes: int, reduction: Any, stream: int) -> Bound:
        if reduction not in self._reductions:
            self._reductions.append(reduction)
        number, sources = self._reductions.index(reduction), address_array(srcs)
        return self._reduce, (address_argument(dst), sources, *map(_WORD, (len(srcs), nbytes, number, stream)))

    def _submit_copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        super().submit([super().bind_copy(dst, src, nbytes, stream)])

    def _submit_copies(self, dsts: int, srcs: int, sizes: int, count: int, stream: int) -> None:
        rows = zip(*((_U64 * count).from_address(column) for column in (dsts, srcs, sizes)), strict=True)
        super().submit([super().bind_copies(list(rows), stream)])

    def _submit_reduce(self, dst: int, srcs: int, count: int, nbytes: int, number: int, stream: int) -> None:
        sources = list((_U64 * count).from_address(srcs))
        super().submit([super().bind_reduce(dst, sources, nbytes, self._reductions[number], stream)])


def _plain(bound: Bound) -> Bound:
    submit, arguments = bound
    return c_function(lambda: submit(*arguments), 0), ()
