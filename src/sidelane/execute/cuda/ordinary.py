"""Ordinary GPU memory that peers can map: ``cudaMalloc`` allocations and spans of expandable segments.

Torch's allocator uses both. The driver numbers allocations and never reuses a number, so that a number tells whether an
address still belongs to the same allocation. Memory that is freed while peers have it mapped stays until they unmap it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.virtual import VirtualMemory
from sidelane.memory.available import lacking
from sidelane.memory.descriptors import DescriptorServer, SharedDescriptor, fetch
from sidelane.memory.ordinary import Allocation, Standing

PREFIX = "@"
"""Prefix of the handles of spans; handles of other memory do not begin with it."""


class PhysicalMemory(NamedTuple):
    """Memory of one ``cuMemCreate``: first byte, size in bytes, and the handle that is retained."""

    start: int
    nbytes: int
    handle: int


class MappedSpan:
    """Adjacent pieces, whose handles are released with the last reference to this object."""

    def __init__(self, memory: VirtualMemory, pieces: tuple[PhysicalMemory, ...]) -> None:
        self.memory, self.pieces = memory, pieces
        self.token = f"s{next(_numbers)}"
        self._looked_at = itertools.cycle(pieces)
        forks.finalize(self, _release, memory, pieces)  # the end of a process releases all

    def is_gone(self) -> bool:
        """Check one piece, another one at each call, and return True if it was unmapped."""
        piece = next(self._looked_at)
        try:
            handle = self.memory.retain(piece.start)
        except DriverError:
            return True
        self.memory.release(handle)
        return handle != piece.handle

    def parts(self) -> list[SharedDescriptor]:
        return [
            SharedDescriptor(piece.nbytes, functools.partial(self.memory.export, piece.handle)) for piece in self.pieces
        ]


class OpenedSpan:
    """A span of another process. It is unmapped with the last reference to this object."""

    def __init__(self, memory: VirtualMemory, start: int, sizes: Sequence[int]) -> None:
        self.start = start
        forks.finalize(self, _close, memory, start, tuple(sizes), len(sizes))


def span_of(memory: VirtualMemory, address: int, nbytes: int) -> Allocation | str:
    """Return the span that holds ``nbytes`` (> 0) from an address on, or the reason why peers cannot map it."""
    pieces: list[PhysicalMemory] = []
    try:
        end, at = address + nbytes, address
        while at < end:
            found = memory.range_at(at)
            if found is None:
                _release(memory, pieces)
                return "the driver knows no allocation at its address"
            pieces.append(PhysicalMemory(*found, memory.retain(found[0])))
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
                span = _spans[key] = MappedSpan(memory, tuple(pieces))
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
        UnavailableError: its owner does not send it, or the driver cannot map it.
    """
    address, _, token = handle.partition("/")
    # The range is reserved as a whole, so that all sizes must be known first.
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
    """Return the bytes of pieces that this process retains since peers may have mapped them."""
    return sum(piece.nbytes for span in list(_spans.values()) for piece in span.pieces)


def _parts_of(token: str) -> Sequence[SharedDescriptor]:
    span = _by_token.get(token)
    if span is None:
        raise UnavailableError("it has been freed")
    return span.parts()


def _server() -> DescriptorServer:
    global _answering
    if _answering is None:
        _answering = DescriptorServer(_parts_of)
    return _answering


def _release(memory: VirtualMemory, pieces: Sequence[PhysicalMemory]) -> None:
    with contextlib.suppress(DriverError):  # the device has failed before
        for piece in pieces:
            memory.release(piece.handle)


def _close(memory: VirtualMemory, start: int, sizes: Sequence[int], mapped: int) -> None:
    # What may be under way there has ended, as in ``_close_allocation``.
    with contextlib.suppress(DriverError):  # the device has failed before
        places = itertools.accumulate(sizes, initial=start)
        for place, nbytes in itertools.islice(zip(places, sizes, strict=False), mapped):
            memory.unmap(place, nbytes)
        memory.give_back(start, sum(sizes))


_numbers = itertools.count(1)
_spans: weakref.WeakValueDictionary[tuple[object, ...], MappedSpan] = weakref.WeakValueDictionary()
"""Spans of this process, for all lanes, by device and pieces."""
_by_token: weakref.WeakValueDictionary[str, MappedSpan] = weakref.WeakValueDictionary()
_making = forks.lock()
_answering: DescriptorServer | None = None


@forks.in_copies
def _know_nothing() -> None:
    """Forget, in a forked copy, the spans of the parent and the server that sends them."""
    global _answering
    _answering = None
    _spans.clear()
    _by_token.clear()


MOST_KNOWN = 4096
"""Largest number of remembered allocations; the oldest is forgotten first."""


class OpenedAllocation:
    """An allocation of another process. It is unmapped with the last reference to this object."""

    def __init__(self, driver: Driver, start: int) -> None:
        self.start = start
        forks.finalize(self, _close_allocation, driver, start)  # the end of a process unmaps all


class ExportedMemory:
    """Implementation of :class:`sidelane.memory.ordinary.OrdinaryMemory` for a GPU.

    Args:
        driver: driver of the device.
        virtual: its calls for memory that is mapped in pieces; None: such memory is not exported, but staged.
    """

    most_held = None  # to unmap one that its owner still has, its peers would have to wait for their copies

    def __init__(self, driver: Driver, virtual: VirtualMemory | None) -> None:
        self._driver, self._virtual = driver, virtual
        self._known: dict[int, Allocation | None] = {}  # by number; None for what has no handle of its own

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | str:
        address = tensor.data_ptr()
        number = self._driver.allocation_number(address)
        # What has no number, or a number but no handle, is asked about each time.
        found = self._known.get(number)
        if number and number not in self._known:
            if len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            found = self._known[number] = self._export(address)
        if found is None:
            if self._virtual is None:
                return "the driver exports no memory that is mapped in pieces"
            return span_of(self._virtual, address, tensor.nbytes)
        if address + tensor.nbytes > found.start + found.nbytes:
            return "it lies in several allocations"
        return found

    def is_gone(self, allocation: Allocation) -> bool:
        if isinstance(allocation.kept, MappedSpan):
            return allocation.kept.is_gone()
        return _name(self._driver.allocation_number(allocation.start)) != allocation.name

    def attach_thread(self) -> None:
        self._driver.attach_thread()

    def standing(self, allocations: Sequence[Allocation]) -> Standing | None:
        driver, ask = self._driver, self._driver.allocation_question()
        places = {place for each in allocations for place in driver.allocations_in(each.start, each.nbytes)}
        numbers = []
        for address, question in sorted(places):
            number = ctypes.c_uint64()
            failed = ask(ctypes.byref(number), question, ctypes.c_void_p(address))
            numbers.append((address, question, 0 if failed else number.value))
        # Numbers are never given twice: those of memory that is there afterwards are its own.
        if not numbers or any(map(self.is_gone, allocations)):
            return None
        return ctypes.cast(ask, ctypes.c_void_p).value or 0, tuple(numbers)

    def map(self, handle: str, name: str) -> OpenedAllocation | OpenedSpan:
        with _opening:
            found = opened.get((self._driver.index, handle, name))
            if found is None:
                try:
                    if handle.startswith(PREFIX):
                        assert self._virtual is not None, "ranks of one machine export spans alike, or none does"
                        found = open_span(self._virtual, handle)
                    else:
                        found = OpenedAllocation(self._driver, self._driver.open_exported(bytes.fromhex(handle)))
                except DriverError as error:
                    raise UnavailableError(f"allocation {name} cannot be mapped: {error}") from error
                opened[self._driver.index, handle, name] = found
            return found

    def _export(self, address: int) -> Allocation | None:
        found = self._driver.allocation_at(address)
        if found is None:
            return None
        number, start, nbytes = found
        try:
            handle = self._driver.export(start)
        except DriverError:
            return None
        return Allocation(_name(number), handle.hex(), start, nbytes)


def _name(number: int) -> str:
    return f"{os.getpid()}:{number}"


def _close_allocation(driver: Driver, start: int) -> None:
    # What may be under way there has ended: its owner has freed it, and waited for its peers' copies before, or the
    # lane is closed.
    try:
        with driver.current():
            driver.close_exported(start)
    except DriverError:  # the device has failed before
        pass


opened: weakref.WeakValueDictionary[tuple[int, str, str], OpenedAllocation | OpenedSpan] = weakref.WeakValueDictionary()
"""Memory of other processes that this one has mapped, for all lanes, by device, handle and name."""

_opening = forks.lock()
