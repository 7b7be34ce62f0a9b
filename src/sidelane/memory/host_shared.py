"""Host memory that processes of one machine share, and that leaves no files behind; symmetric CPU tensors there.

It is an anonymous file (memfd) that the peers open through ``/proc/<pid>/fd/<fd>``: it never has a name, the kernel
frees it with the last process that maps it, however that process ends, and the size of /dev/shm does not matter.

The kernel overcommits shared memory, and kills a process later: so what is available is looked up before, and pages are
reserved when the memory is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import mmap
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sidelane import forks
from sidelane.errors import CommunicatorClosedError, MismatchError, UnavailableError
from sidelane.memory.exchange import Exchange
from sidelane.memory.heap import SymmetricBlock
from sidelane.memory.liveness import Liveness
from sidelane.user_files import open_regular

# Reserved piece by piece, so that a signal (Ctrl-C, a profiler's timer) interrupts one piece and not all of it.
_RESERVE_BYTES = 256 << 20
_MEMFD = "sidelane"
"""Name of the anonymous files."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of an anonymous file: nobody can change its size, or its seals."""

_LIMITS = {
    errno.EMFILE: "files that this process may have open (ulimit -n)",
    errno.ENFILE: "files that this machine may have open (/proc/sys/fs/file-max)",
    errno.ENOSPC: "memory, or room where the file lies",
    errno.ENOMEM: "memory, or mappings (/proc/sys/vm/max_map_count)",
    errno.EDQUOT: "room for this user",
    errno.EACCES: "permissions of this user",
    errno.EPERM: "permissions of this user",
}


class SharedBytes:
    """``nbytes`` zeroed bytes for each rank of a group, mapped by all of them.

    Making one is collective. If a rank fails, all fail with its reason.

    Args:
        exchange: connection of the ranks, all on one machine.
        nbytes: size of one rank's part, > 0, the same on every rank.

    Raises:
        ValueError: ``nbytes`` is not positive.
        MismatchError: ranks asked for different sizes.
        UnavailableError: ranks on several machines or in several pid namespaces, or not enough memory.
        PeerError, PeerTimeoutError: as :class:`sidelane.memory.exchange.Exchange` does.
    """

    def __init__(self, exchange: Exchange, nbytes: int) -> None:
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.nbytes, self._liveness = nbytes, exchange.liveness
        # Parts begin on page boundaries: the kernel places a page near the rank that touches it first.
        self._stride = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with contextlib.ExitStack() as opened:  # the file of rank 0, open while the others attach
            posted = exchange(
                "shared memory", lambda: _offer(self.rank, nbytes, self._stride * self.world_size, opened)
            )
            offers = list(itertools.starmap(_Offer, posted))
            _agree(offers, self._liveness)
            mapped: mmap.mmap | None = None

            def attach() -> str:
                nonlocal mapped
                mapped, problem = self._attach(offers[0])
                return problem

            problems = exchange("shared memory, mapped", attach)
        if any(problems):
            if mapped is not None:
                mapped.close()  # now, not when the traceback of this error is freed
            named = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
            raise UnavailableError(f"shared memory: cannot share {nbytes} bytes a rank: {named}")
        assert mapped is not None
        self.mapping = mapped

    def offset(self, rank: int) -> int:
        """Return the offset of the part of ``rank`` in ``mapping``, in bytes."""
        return rank * self._stride

    def view(self, rank: int) -> memoryview:
        """Return the bytes of ``rank``. They stay mapped as long as the view, or an object made from it, exists."""
        return memoryview(self.mapping)[self.offset(rank) : self.offset(rank) + self.nbytes]

    def _attach(self, first: _Offer) -> tuple[mmap.mmap | None, str]:
        """Map the file of rank 0, and reserve this rank's part of it. Return the mapping, or None and the problem."""
        total_bytes = self._stride * self.world_size
        maker, own = self._liveness.process(0), self._liveness.process(self.rank)
        # So that a post can name open files of its rank only.
        path = f"/proc/{maker.pid}/fd/{first.descriptor}"
        try:
            descriptor = open_regular(path, os.O_RDWR)
        except OSError as error:
            hint = ""
            if maker.namespace != own.namespace:
                hint = "; its pid namespace is another one: start the ranks in one container, or share the namespace"
            return None, f"cannot open the memory of rank 0 (pid {maker.pid}): {lacking(error)}{hint}"
        try:
            if why := first.why_not(descriptor, total_bytes):
                return None, f"{path} is not the file of rank 0: {why}"
            _reserve(descriptor, self.offset(self.rank), self._stride)
            # mmap keeps a duplicate of the descriptor for resizing, where it cannot be told not to.
            untracked: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            return mmap.mmap(descriptor, total_bytes, **untracked), ""
        except OSError as error:
            return None, f"cannot map and reserve {self._stride} bytes: {lacking(error)}"
        finally:
            os.close(descriptor)


class ShmMemory:
    """Allocator of symmetric CPU blocks for one group. All ranks on one machine.

    Args:
        exchange: connection of the ranks, through which memory handles are exchanged.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange: Exchange | None = exchange

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """Allocate ``nbytes`` (> 0) on every rank, zeroed and page-aligned. Collective; the bytes are reserved at once.

        The memory is unmapped once the block and every tensor made from it are gone; the kernel frees it when that is
        so in every process.

        Raises:
            ValueError: ``nbytes`` is not positive.
            MismatchError: ranks asked for different sizes.
            PeerError: a rank failed or died in the exchange; PeerTimeoutError: one did not come.
            UnavailableError: not enough memory, or ranks on several machines.
            CommunicatorClosedError: ``close`` was called.
        """
        if self._exchange is None:
            raise CommunicatorClosedError("ShmMemory.allocate: the memory was closed")
        shared = SharedBytes(self._exchange, nbytes)
        # frombuffer holds on to the mapping, so a tensor outlives the block, this object and the group.
        tensors = tuple(
            torch.frombuffer(shared.mapping, dtype=torch.uint8, count=nbytes, offset=shared.offset(rank))
            for rank in range(shared.world_size)
        )
        return SymmetricBlock(tensors[shared.rank], tuple(tensor.data_ptr() for tensor in tensors), tensors)

    def close(self) -> None:
        """Drop the exchange. Tensors that callers still hold remain valid. Idempotent."""
        self._exchange = None


class _Offer(NamedTuple):
    """The post of a rank before the memory is mapped; only rank 0 sets descriptor and inode."""

    nbytes: int
    descriptor: int = -1
    inode: tuple[int, int] = (0, 0)
    problem: str = ""

    def why_not(self, descriptor: int, nbytes: int) -> str:
        """Return the reason why an open file is none that rank 0 makes for so many bytes; "" if it is one.

        Nothing is written, enlarged or mapped before: the post came through the store, and anyone may have written it.
        """
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != self.inode:
            return "its pid means another process here"
        if (status.st_uid, status.st_size) != (os.geteuid(), nbytes):
            return f"owner and bytes (value={status.st_uid, status.st_size}, allowed={os.geteuid(), nbytes})"
        shown = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
        if shown != f"/memfd:{_MEMFD}" or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != SEALS:
            return "it is no sealed memory of that name"
        return ""


def _offer(rank: int, nbytes: int, total_bytes: int, opened: contextlib.ExitStack) -> _Offer:
    if rank or nbytes <= 0:
        return _Offer(nbytes)
    room = available_bytes()
    if room is not None and total_bytes > room:
        return _Offer(nbytes, problem=f"bytes of all ranks together (value={total_bytes}, allowed=1..{room})")
    try:
        descriptor = os.memfd_create(_MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        forks.in_copies_of(opened.enter_context(io.FileIO(descriptor, "r+")), io.FileIO.close)
        os.ftruncate(descriptor, total_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        status = os.fstat(descriptor)
    except (OSError, OverflowError) as error:
        why = lacking(error) if isinstance(error, OSError) else str(error)
        return _Offer(nbytes, problem=f"cannot make {total_bytes} bytes of shared memory: {why}")
    return _Offer(nbytes, descriptor, (status.st_dev, status.st_ino))


def _agree(offers: list[_Offer], liveness: Liveness) -> None:
    """Raise on every rank alike if the ranks cannot share memory."""
    processes = [liveness.process(rank) for rank in range(len(offers))]
    if len({process.machine for process in processes}) > 1:
        places = ", ".join(f"rank {rank} on {process.host}" for rank, process in enumerate(processes))
        raise UnavailableError(f"shared memory: the ranks of the group must be on one machine: {places}")
    sizes = [offer.nbytes for offer in offers]
    if len(set(sizes)) > 1:
        named = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
        raise MismatchError(f"shared memory: ranks ask for different sizes in bytes: {named}")
    if sizes[0] <= 0:
        raise ValueError(f"shared memory: nbytes must be positive (value={sizes[0]})")
    if offers[0].problem:
        raise UnavailableError(f"shared memory: rank 0: {offers[0].problem}")


def _reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the kernel commit the pages now: a page that it lacks later would be a SIGBUS in the middle of a copy."""
    for start in range(offset, offset + nbytes, _RESERVE_BYTES):
        os.posix_fallocate(descriptor, start, min(_RESERVE_BYTES, offset + nbytes - start))


def available_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping or exceeding a container's limit; None if unknown."""
    limits = [value for value in (_machine(), *_control_groups()) if value is not None]
    return min(limits, default=None)


def lacking(error: OSError) -> str:
    """Return the text of a system error, with the resource that is exhausted.

    >>> lacking(OSError(errno.EMFILE, "Too many open files"))
    'no more files that this process may have open (ulimit -n): [Errno 24] Too many open files'
    """
    limit = _LIMITS.get(error.errno or 0)
    return str(error) if limit is None else f"no more {limit}: {error}"


def _machine() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups() -> list[int | None]:
    """Return the free bytes in the memory control groups of this process: versions 2 and 1, from outside and inside."""
    rooms: list[int | None] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders, names = ("/sys/fs/cgroup" + path, "/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folders = ("/sys/fs/cgroup/memory" + path, "/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        rooms.extend(_room(Path(folder), *names) for folder in folders)
    return rooms


def _room(folder: Path, limit_name: str, usage_name: str) -> int | None:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not (limit.isdigit() and usage.isdigit()):  # "max", or no such group
        return None
    # Inactive file pages count as usage, but the kernel drops them when memory is allocated.
    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line.count(" ") == 1)
    return max(0, int(limit) - int(usage) + int(statistics.get("inactive_file", 0)))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
