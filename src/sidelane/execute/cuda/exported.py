"""Ordinary GPU memory that peers reach: allocations of ``cudaMalloc``, such as the segments of torch's allocator, and
spans of its expandable segments.

The driver numbers allocations and never gives a number twice, so that a number says whether an address is still the
memory that it was. Memory that is freed while peers have it mapped stays until they let go of it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

import torch

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.spans import PREFIX, OpenedSpan, Span, open_span, span_of
from sidelane.execute.cuda.virtual import VirtualMemory
from sidelane.memory.ordinary import Allocation, Standing

MOST_KNOWN = 4096
"""Allocations remembered; the oldest goes first."""


class OpenedAllocation:
    """An allocation of another process. It is unmapped with the last reference to this object."""

    def __init__(self, driver: Driver, start: int) -> None:
        self.start = start
        forks.finalize(self, _close, driver, start)  # the end of a process unmaps all


class ExportedMemory:
    """See :class:`sidelane.memory.ordinary.OrdinaryMemory`."""

    most_held = None  # to unmap one that its owner still has, its peers would have to wait for their copies

    def __init__(self, driver: Driver, virtual: VirtualMemory) -> None:
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
            return span_of(self._virtual, address, tensor.nbytes)
        if address + tensor.nbytes > found.start + found.nbytes:
            return "it lies in several allocations"
        return found

    def is_gone(self, allocation: Allocation) -> bool:
        if isinstance(allocation.kept, Span):
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


def _close(driver: Driver, start: int) -> None:
    # What may be under way there has ended: its owner has freed it, and waited for its peers' copies before, or the
    # lane is closed.
    try:
        with driver.current():
            driver.close_exported(start)
    except DriverError:  # the device has failed before
        pass


opened: weakref.WeakValueDictionary[tuple[int, str, str], OpenedAllocation | OpenedSpan] = weakref.WeakValueDictionary()
"""What this process has mapped, for all lanes, by device, handle and name."""

_opening = forks.lock()
