"""Ordinary GPU memory of several pieces that peers reach: expandable segments of torch's allocator.

A span is the run of pieces that holds a tensor, and an allocation to the protocol (``collectives/reach.py``). The
driver gives handles of pieces again once they are released, so this process retains those of each span that peers may
have mapped: until then, equal handles mean the same memory. A span is gone once one of its pieces is no more at its
address; all of its tensors have used all of its pieces, so that none of them is left.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.virtual import VirtualMemory
from sidelane.memory.available import lacking
from sidelane.memory.descriptors import DescriptorServer, Part, fetch
from sidelane.memory.ordinary import Allocation

PREFIX = "@"
"""What handles of spans begin with, and those of no other memory."""


class Piece(NamedTuple):
    """Memory of one ``cuMemCreate``: first byte, size in bytes, and the handle that is retained."""

    start: int
    nbytes: int
    handle: int


class Span:
    """Pieces side by side, whose handles are released with the last reference to this object."""

    def __init__(self, memory: VirtualMemory, pieces: tuple[Piece, ...]) -> None:
        self.memory, self.pieces = memory, pieces
        self.token = f"s{next(_numbers)}"
        self._looked_at = itertools.cycle(pieces)
        forks.finalize(self, _release, memory, pieces)  # the end of a process releases all

    def is_gone(self) -> bool:
        """Looks at one piece, the next one each time."""
        piece = next(self._looked_at)
        try:
            handle = self.memory.retain(piece.start)
        except DriverError:
            return True
        self.memory.release(handle)
        return handle != piece.handle

    def parts(self) -> list[Part]:
        return [Part(piece.nbytes, functools.partial(self.memory.export, piece.handle)) for piece in self.pieces]


class OpenedSpan:
    """A span of another process. It is unmapped with the last reference to this object."""

    def __init__(self, memory: VirtualMemory, start: int, sizes: Sequence[int]) -> None:
        self.start = start
        forks.finalize(self, _close, memory, start, tuple(sizes), len(sizes))


def span_of(memory: VirtualMemory, address: int, nbytes: int) -> Allocation | str:
    """The span that holds so many bytes, > 0, from an address on; or why peers cannot map it."""
    pieces: list[Piece] = []
    try:
        end, at = address + nbytes, address
        while at < end:
            found = memory.range_at(at)
            if found is None:
                _release(memory, pieces)
                return "the driver knows no allocation at its address"
            pieces.append(Piece(*found, memory.retain(found[0])))
            at = found[0] + found[1]
        key = (memory.index, *pieces)
        with _making:
            span = _spans.get(key)
            if span is not None:
                _release(memory, pieces)  # which the span has retained before
            elif not all(memory.is_shareable(piece.handle) for piece in pieces):
                _release(memory, pieces)
                return (
                    "it was made without file descriptors to share it by (torch: TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1)"
                )
            else:
                span = _spans[key] = Span(memory, tuple(pieces))
                _by_token[span.token] = span
            handle = f"{_server().address}/{span.token}"
    except DriverError as error:
        _release(memory, pieces)
        return f"the driver does not export its memory, as that of its own pools ({error})"
    except OSError as error:
        return f"its file descriptors cannot be passed: {lacking(error)}"
    start = span.pieces[0].start
    return Allocation(f"{os.getpid()}:{span.token}", handle, start, at - start, kept=span)


def open_span(memory: VirtualMemory, handle: str) -> OpenedSpan:
    """Map a span of another process.

    Raises:
        UnavailableError: its owner does not give it, or the driver does not map it.
    """
    address, _, token = handle.partition("/")
    # A range is reserved as a whole, and how large it is only all sizes say.
    sizes = [size for size, _ in fetch(address, token)]
    try:
        start = memory.reserve(sum(sizes))
        places = list(itertools.accumulate(sizes, initial=start))
        mapped = 0
        try:
            for mapped, (nbytes, descriptor) in enumerate(fetch(address, token)):
                memory.map(places[mapped], nbytes, descriptor)
        except BaseException:
            _close(memory, start, sizes, mapped)
            raise
    except DriverError as error:
        raise UnavailableError(f"{token} cannot be mapped: {error}") from error
    return OpenedSpan(memory, start, sizes)


def retained_bytes() -> int:
    """Of pieces that this process retains, since peers may have mapped them."""
    return sum(piece.nbytes for span in list(_spans.values()) for piece in span.pieces)


def _parts_of(token: str) -> Sequence[Part]:
    span = _by_token.get(token)
    if span is None:
        raise UnavailableError("it has been freed")
    return span.parts()


def _server() -> DescriptorServer:
    global _answering
    if _answering is None:
        _answering = DescriptorServer(_parts_of)
    return _answering


def _release(memory: VirtualMemory, pieces: Sequence[Piece]) -> None:
    with contextlib.suppress(DriverError):  # the device has failed before
        for piece in pieces:
            memory.release(piece.handle)


def _close(memory: VirtualMemory, start: int, sizes: Sequence[int], mapped: int) -> None:
    # What may be under way there has ended, as in ``exported``.
    with contextlib.suppress(DriverError):  # the device has failed before
        places = itertools.accumulate(sizes, initial=start)
        for place, nbytes in itertools.islice(zip(places, sizes, strict=False), mapped):
            memory.unmap(place, nbytes)
        memory.give_back(start, sum(sizes))


_numbers = itertools.count(1)
_spans: weakref.WeakValueDictionary[tuple[object, ...], Span] = weakref.WeakValueDictionary()
"""Of this process, for all lanes, by device and pieces."""
_by_token: weakref.WeakValueDictionary[str, Span] = weakref.WeakValueDictionary()
_making = forks.lock()
_answering: DescriptorServer | None = None


@forks.in_copies
def _know_nothing() -> None:
    """In a copy: its parent's spans are not its own, nor what answers for them."""
    global _answering
    _answering = None
    _spans.clear()
    _by_token.clear()
