"""A made-up driver whose memory is mapped piece by piece, as that of expandable segments: its pieces are files.

What is not mapped cannot be touched: a write through a mapping that has ended is the end of the process.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import torch

from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.exported import ExportedMemory

BYTES = 4096
"""Of a piece: a page."""

_libc = ctypes.CDLL(None, use_errno=True)
_mmap: Any = _libc.mmap
_mmap.restype, _mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_munmap: Any = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NONE, _READ_WRITE = 0, 3
_SHARED, _FIXED, _NOTHING = 0x01, 0x10, 0x4022  # the last: private, anonymous, not reserved


class MadeUpPieces:
    """See ``sidelane.execute.cuda.virtual.VirtualMemory``. A handle that nobody has any more is the next piece's.

    Args:
        places: pieces that fit side by side.
        shareable: whether they can be exported.
        refuses: number of the mapping that fails.

    Attributes:
        base: address of the first place.
        counts: references, by handle.
        mapped: addresses of pieces of others.
        reserved: sizes of ranges for these, by address.
    """

    index = 0

    def __init__(self, places: int = 0, *, shareable: bool = True, refuses: int = -1) -> None:
        self.places, self.shareable, self.refuses = places, shareable, refuses
        self.counts: dict[int, int] = {}
        self.mapped: set[int] = set()
        self.reserved: dict[int, int] = {}
        self._files: dict[int, int] = {}  # by handle
        self._at: dict[int, int] = {}  # handles by address
        self.base = _map(None, max(1, places) * BYTES, _NONE, _NOTHING)

    def create(self, address: int) -> None:
        handle = next(number for number in range(1, 1 << 20) if number not in self._files)
        self._files[handle] = os.memfd_create("piece")
        os.ftruncate(self._files[handle], BYTES)
        self.counts[handle], self._at[address] = 1, handle
        _map(address, BYTES, _READ_WRITE, _SHARED | _FIXED, self._files[handle])

    def free(self, address: int) -> None:
        _map(address, BYTES, _NONE, _NOTHING | _FIXED)
        self.release(self._at.pop(address))

    def tensor(self, numel: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A tensor in pieces of its own, at the lowest free places: those that were freed last come again."""
        size = (offset + numel) * dtype.itemsize
        count, run = -(-size // BYTES), 0
        for number in range(self.places):
            run = 0 if self.base + number * BYTES in self._at else run + 1
            if run == count:
                break
        assert run == count, "there is room"
        addresses = range(self.base + (number + 1 - count) * BYTES, self.base + (number + 1) * BYTES, BYTES)
        for address in addresses:
            self.create(address)
        buffer = (ctypes.c_char * size).from_address(addresses[0])
        weakref.finalize(buffer, lambda: [self.free(address) for address in addresses]).atexit = False
        return torch.frombuffer(buffer, dtype=dtype)[offset:]

    def range_at(self, address: int) -> tuple[int, int] | None:
        start = address - (address - self.base) % BYTES
        return (start, BYTES) if start in self._at else None

    def retain(self, address: int) -> int:
        handle = self._at.get(address)
        if handle is None:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "cuMemRetainAllocationHandle")
        self.counts[handle] += 1
        return handle

    def release(self, handle: int) -> None:
        self.counts[handle] -= 1
        if not self.counts[handle]:
            del self.counts[handle]
            os.close(self._files.pop(handle))

    def is_shareable(self, handle: int) -> bool:
        return self.shareable

    def export(self, handle: int) -> int:
        return os.dup(self._files[handle])

    def reserve(self, nbytes: int) -> int:
        start = _map(None, nbytes, _NONE, _NOTHING)
        self.reserved[start] = nbytes
        return start

    def map(self, address: int, nbytes: int, descriptor: int) -> None:
        if len(self.mapped) == self.refuses:
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemMap")
        assert nbytes == BYTES and address not in self.mapped
        assert any(start <= address < start + size for start, size in self.reserved.items())
        _map(address, nbytes, _READ_WRITE, _SHARED | _FIXED, descriptor)
        self.mapped.add(address)

    def unmap(self, address: int, nbytes: int) -> None:
        _map(address, nbytes, _NONE, _NOTHING | _FIXED)
        self.mapped.remove(address)

    def free_range(self, address: int, nbytes: int) -> None:
        assert self.reserved.pop(address) == nbytes
        assert not any(address <= piece < address + nbytes for piece in self.mapped)
        _munmap(address, nbytes)


class NoOtherMemory:
    """A driver that has no allocations but those of pieces."""

    index = 0

    def allocation_number(self, address: int) -> int:
        return 0

    def allocation_at(self, address: int) -> None:
        return None

    def attach_thread(self) -> None:
        pass


def memory_of(pieces: MadeUpPieces) -> ExportedMemory:
    """What a backend of GPUs has, with made-up memory."""
    return ExportedMemory(NoOtherMemory(), pieces)  # type: ignore[arg-type]


def _map(address: int | None, nbytes: int, access: int, flags: int, descriptor: int = -1) -> int:
    found: int = _mmap(address, nbytes, access, flags, descriptor, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return found
