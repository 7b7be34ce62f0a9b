"""Ordinary CPU tensors that peers can map: those in torch's shared memory (``Tensor.share_memory_``), on Linux.

Their bytes are an unlinked file, which another process finds among the open files of its owner. A file is identified
by its device and inode, which the kernel does not reuse while a process has it mapped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.memory.available import lacking
from sidelane.memory.ordinary import Allocation, Standing

_MAPS = Path("/proc/self/maps")
_FILES = Path("/proc/self/fd")
MOST_KNOWN = 1024
"""Largest number of remembered storages; the oldest is forgotten first."""


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class MappedFile:
    """A file of another process. It is unmapped with the last reference to ``bytes``."""

    bytes: torch.Tensor

    @property
    def start(self) -> int:
        return self.bytes.data_ptr()


class SharedTensors:
    """Implementation of :class:`sidelane.memory.ordinary.OrdinaryMemory` for torch's shared memory."""

    most_held = 64

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Allocation | str]] = {}  # by address of the storage
        self._storages: dict[str, StorageWeakRef] = {}  # by name of the allocation
        self._naming = forks.lock()

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | str:
        if not tensor.is_shared():
            return "it is not in shared memory (Tensor.share_memory_)"
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        known = self._known.get(address)
        if known is not None and not known[0].expired():
            return known[1]
        reference = StorageWeakRef(storage)
        found = _file_at(address)
        if len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[address] = reference, found
        if isinstance(found, Allocation):
            with self._naming:
                self._storages[found.name] = reference
        return found

    def is_gone(self, allocation: Allocation) -> bool:
        with self._naming:  # one thread asks while another one makes calls
            reference = self._storages.get(allocation.name)
            if reference is not None and not reference.expired():
                return False
            self._storages.pop(allocation.name, None)
            return True

    def attach_thread(self) -> None:
        """Do nothing: any thread can map."""

    def standing(self, allocations: Sequence[Allocation]) -> Standing | None:
        return None  # no compiled code makes calls of CPU ranks

    def map(self, handle: str, name: str) -> MappedFile:
        with _mapping:
            found = mapped.get(handle + name)
            if found is None:
                found = mapped[handle + name] = self._map(handle, name)
            return found

    def _map(self, handle: str, name: str) -> MappedFile:
        try:
            descriptor = os.open(handle, os.O_RDWR)
            try:
                status = os.fstat(descriptor)
                if _name_of(status) != name:
                    raise UnavailableError(
                        f"{handle} is another file by now (value={_name_of(status)}, allowed={name})"
                    )
                mapping = mmap.mmap(descriptor, status.st_size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            why = lacking(error) if isinstance(error, OSError) else error
            raise UnavailableError(f"{handle} cannot be mapped: {why}") from error
        return MappedFile(torch.frombuffer(mapping, dtype=torch.uint8))


def _file_at(address: int) -> Allocation | str:
    """Return the file that is mapped at an address, with a path for other processes; or the reason against it."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return "this system does not say what is mapped where"
    for line in lines:
        # 7ff155f90000-7ff155f91000 rw-s 00000000 00:1b 53      /dev/shm/torch_4065_423713910_0 (deleted)
        bounds, mode, offset, *_ = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            if not mode.startswith("rw") or not mode.endswith("s"):
                return "its memory is not shared"
            return _opened_at(start - int(offset, 16), line)
    return "nothing is mapped at its address"


def _opened_at(start: int, line: str) -> Allocation | str:
    device, inode = line.split()[3:5]
    major, minor = (int(number, 16) for number in device.split(":"))
    wanted = os.makedev(major, minor), int(inode)
    named = line.split(maxsplit=5)[5].strip() if len(line.split(maxsplit=5)) > 5 else ""
    places = [Path(named)] if named.startswith("/") and not named.endswith(" (deleted)") else []
    with contextlib.suppress(OSError):
        places += sorted(_FILES.iterdir())
    for place in places:
        with contextlib.suppress(OSError):
            status = place.stat()
            if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == wanted:
                handle = str(place).replace("/self/", f"/{os.getpid()}/")
                return Allocation(_name_of(status), handle, start, status.st_size)
    return "its memory is no file that another process could open"


def _name_of(status: os.stat_result) -> str:
    return f"{status.st_dev:x}:{status.st_ino}"


mapped: weakref.WeakValueDictionary[str, MappedFile] = weakref.WeakValueDictionary()
"""Files that this process has mapped, for all lanes."""

_mapping = forks.rlock()
