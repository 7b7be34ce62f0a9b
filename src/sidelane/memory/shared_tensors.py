"""Ordinary CPU tensors that peers can map: those in torch's shared memory (``Tensor.share_memory_``), on Linux.

Their bytes are an unlinked file, which another process finds among the open files of its owner. A file is identified
by its device and inode, which the kernel does not reuse while a process has it mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import mmap
import os
import re
import stat
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, ClassVar, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.memory.available import lacking
from sidelane.memory.ordinary import Allocation, Standing
from sidelane.user_files import open_regular

_MAPS = Path("/proc/self/maps")
_OF_DESCRIPTOR = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_MOST_PATH = 4096
MOST_KNOWN = 1024
"""Largest number of remembered files; the one that was asked for longest ago is forgotten first."""


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class MappedFile:
    """A file of another process. It is unmapped with the last reference to ``bytes``."""

    bytes: torch.Tensor

    @property
    def start(self) -> int:
        return self.bytes.data_ptr()


class SharedTensors:
    """Implementation of :class:`sidelane.memory.ordinary.OrdinaryMemory` for torch's shared memory.

    The kernel is asked in each call which file is mapped at an address: storages exchange their memory, and addresses
    are mapped again.
    """

    most_held = 64

    def __init__(self) -> None:
        self._known: dict[str, tuple[StorageWeakRef, Allocation]] = {}  # by name of the allocation
        self._naming = forks.lock()

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | str:
        if not tensor.is_shared():
            return "it is not in shared memory (Tensor.share_memory_)"
        storage = tensor.untyped_storage()
        area = _area_at(storage.data_ptr())
        if isinstance(area, str):
            return area
        with self._naming:
            known = self._known.pop(area.name, None)
            found = _opened(area, () if known is None else (known[1].handle,)) or _opened(area, _places(area))
            if found is None:
                return "its memory is no file that another process could open"
            if known is None:
                self._forget_those_at(found)
            self._known[found.name] = StorageWeakRef(storage), found
            return found

    def _forget_those_at(self, new: Allocation) -> None:
        """Forget files that were mapped where a new one is, and the oldest one if there are too many."""
        there = [
            name
            for name, (_, old) in self._known.items()
            if old.start < new.start + new.nbytes and new.start < old.start + old.nbytes
        ]
        for name in there or list(self._known)[: max(0, len(self._known) - MOST_KNOWN + 1)]:
            del self._known[name]

    def is_gone(self, allocation: Allocation) -> bool:
        with self._naming:  # one thread asks while another one makes calls
            known = self._known.get(allocation.name)
            storage = None if known is None else torch.UntypedStorage._new_with_weak_ptr(known[0].cdata)
            if storage is None:
                self._known.pop(allocation.name, None)
                return True
            return not 0 <= storage.data_ptr() - allocation.start < allocation.nbytes  # it has other memory now

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
            # A path of a peer names files, not links, but for those of its own descriptors.
            flags = os.O_RDWR if _OF_DESCRIPTOR.fullmatch(handle) else os.O_RDWR | os.O_NOFOLLOW
            descriptor = open_regular(handle, flags)
            try:
                status = os.fstat(descriptor)
                if _name_of(status) != name or status.st_uid != os.geteuid():
                    found = f"{_name_of(status)} of user {status.st_uid}"
                    raise UnavailableError(
                        f"{handle} is another file by now (value={found}, allowed={name} of user {os.geteuid()})"
                    )
                mapping = mmap.mmap(descriptor, status.st_size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            why = lacking(error) if isinstance(error, OSError) else error
            raise UnavailableError(f"{handle} cannot be mapped: {why}") from error
        return MappedFile(torch.frombuffer(mapping, dtype=torch.uint8))


class _Area(NamedTuple):
    """Memory that a process may share with others: an area that is mapped from a file.

    Attributes:
        name: name of the allocation, made of device and inode.
        start: address at which the first byte of the file is mapped, or would be.
        path: path under which the file was opened.
    """

    name: str
    start: int
    path: str


class _AskedArea(ctypes.Structure):
    """``struct procmap_query`` (``linux/fs.h``), by which Linux 6.11 and later tell the area at an address."""

    _fields_: ClassVar = [
        *((name, ctypes.c_uint64) for name in ("nbytes", "query", "address", "start", "end", "mode", "page_bytes")),
        *((name, ctypes.c_uint64) for name in ("offset", "inode")),
        *((name, ctypes.c_uint32) for name in ("major", "minor", "path_bytes", "build_bytes")),
        *((name, ctypes.c_uint64) for name in ("path", "build")),
    ]


_PROCMAP_QUERY = 0xC0686611
_SHARED = 0b1011
"""Mode of an area that is readable, writable and shared."""


def _area_at(address: int) -> _Area | str:
    """Return the area at an address, or the reason why it cannot be shared."""
    try:
        with _MAPS.open("rb") as maps:
            try:
                is_shared, start, device, inode, path = _asked(maps, address)
            except OSError:  # an older kernel
                is_shared, start, device, inode, path = _read(maps, address)
    except OSError:
        return "this system does not say what is mapped where"
    except LookupError:
        return "nothing is mapped at its address"
    return _Area(f"{device:x}:{inode}", start, path) if is_shared else "its memory is not shared"


def _asked(maps: IO[bytes], address: int) -> tuple[bool, int, int, int, str]:
    """Ask for the area at an address: whether it is shared, its start, its file's device, inode and path."""
    path = ctypes.create_string_buffer(_MOST_PATH)
    asked = _AskedArea(nbytes=ctypes.sizeof(_AskedArea), address=address)
    asked.path, asked.path_bytes = ctypes.addressof(path), _MOST_PATH
    fcntl.ioctl(maps, _PROCMAP_QUERY, asked)
    device, start = os.makedev(asked.major, asked.minor), asked.start - asked.offset
    return asked.mode & _SHARED == _SHARED, start, device, asked.inode, os.fsdecode(path.value)


def _read(maps: IO[bytes], address: int) -> tuple[bool, int, int, int, str]:
    """Find the area at an address in the list of all of them."""
    for line in maps:
        # 7ff155f90000-7ff155f91000 rw-s 00000000 00:1b 53      /dev/shm/torch_4065_423713910_0 (deleted)
        start, _, end = line.partition(b" ")[0].partition(b"-")
        if int(start, 16) <= address < int(end, 16):
            _, mode, offset, device, inode, *path = line.split(maxsplit=5)
            major, minor = (int(number, 16) for number in device.split(b":"))
            is_shared = mode.startswith(b"rw") and mode.endswith(b"s")
            first = int(start, 16) - int(offset, 16)
            return is_shared, first, os.makedev(major, minor), int(inode), os.fsdecode(b"".join(path).strip())
    raise LookupError(address)


def _places(area: _Area) -> Iterator[str]:
    """Yield paths under which other processes may find the file of an area."""
    if area.path.startswith("/") and not area.path.endswith(" (deleted)"):
        yield area.path
    with contextlib.suppress(OSError):
        for number in sorted(os.listdir("/proc/self/fd")):
            yield f"/proc/{os.getpid()}/fd/{number}"


def _opened(area: _Area, places: Iterable[str]) -> Allocation | None:
    """Return the allocation of an area; None if its file is at none of these places."""
    for place in places:
        with contextlib.suppress(OSError):
            status = os.stat(place)
            if stat.S_ISREG(status.st_mode) and _name_of(status) == area.name:
                return Allocation(area.name, place, area.start, status.st_size)
    return None


def _name_of(status: os.stat_result) -> str:
    return f"{status.st_dev:x}:{status.st_ino}"


mapped: weakref.WeakValueDictionary[str, MappedFile] = weakref.WeakValueDictionary()
"""Files that this process has mapped, for all lanes."""

_mapping = forks.rlock()
