"""Host memory that several processes of one machine share, made so that nothing can be left behind.

On Linux it is an anonymous file (memfd) that the peers open through ``/proc/<pid>/fd/<fd>``: it never has a name, the
kernel frees it with the last process that maps it, however that process ends, and the size of /dev/shm does not matter.
Elsewhere it is a named temporary file, whose name goes as soon as every peer has it open.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import sys
import tempfile
from typing import Any

import torch.distributed as dist

from sidelane.errors import MismatchError, PeerError, PeerTimeoutError, UnavailableError
from sidelane.memory.available import available_bytes
from sidelane.memory.process import ProcessIdentity

# Reserved piece by piece, so that a signal (Ctrl-C, a profiler's timer) interrupts one piece and not all of it.
_RESERVE_BYTES = 256 << 20


class SharedBytes:
    """``nbytes`` zeroed bytes for each rank of a group, mapped by all of them.

    Making one is collective. A rank that fails makes all fail, with the reason of the one that did.

    Args:
        group: any ProcessGroup with an object collective; the handles travel over it. All ranks on one machine.
        nbytes: size of one rank's part, > 0, the same on every rank.
        refusal: why this rank cannot take part; makes all ranks raise. Empty: it can.

    Raises:
        ValueError: ``nbytes`` is not positive, or this process is not in the group.
        MismatchError: ranks asked for different sizes.
        UnavailableError: ranks on several machines or in several pid namespaces, or not enough memory.
        PeerError: the exchange over ``group`` failed; PeerTimeoutError when its own time-out ran out.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, *, refusal: str = "") -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("SharedBytes: this process is not a rank of the group")
        self.nbytes = nbytes
        # Parts begin on pages of their own: a page is the unit that first touch places in memory near its rank.
        self._stride = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        offer, opened = _offer(self.rank, nbytes, self._stride * self.world_size)
        offer = dataclasses.replace(offer, refusal=refusal)
        try:
            offers: list[_Offer] = exchange(group, offer, "SharedBytes")
            _agree(offers)
            self.peers = tuple(each.process for each in offers)
            mapped, problem = self._attach(offers[0])
            problems: list[str] = exchange(group, problem, "SharedBytes")
        finally:
            opened.close()
        if any(problems):
            if mapped is not None:
                mapped.close()  # not when the traceback of this error goes
            named = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
            raise UnavailableError(f"SharedBytes: cannot share {nbytes} bytes a rank: {named}")
        assert mapped is not None
        self.mapping = mapped

    def offset(self, rank: int) -> int:
        """Where the part of ``rank`` begins in ``mapping``."""
        return rank * self._stride

    def view(self, rank: int) -> memoryview:
        """The bytes of ``rank``. The memory stays mapped as long as the view, or anything made from it, exists."""
        return memoryview(self.mapping)[self.offset(rank) : self.offset(rank) + self.nbytes]

    def _attach(self, first: _Offer) -> tuple[mmap.mmap | None, str]:
        """Map the file that rank 0 made and reserve this rank's part of it; the mapping, or what went wrong."""
        try:
            descriptor = os.open(first.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            hint = ""
            if first.process.namespace != ProcessIdentity.own().namespace:
                hint = "; its pid namespace is another one: start the ranks in one container, or share the namespace"
            return None, f"cannot open the memory of rank 0 (pid {first.process.pid}): {error}{hint}"
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != first.inode:
                return None, f"{first.path} is not the file of rank 0: its pid means another process here"
            _reserve(descriptor, self.offset(self.rank), self._stride)
            # mmap keeps a duplicate of the descriptor for resizing, where it cannot be told not to.
            untracked: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            return mmap.mmap(descriptor, self._stride * self.world_size, **untracked), ""
        except OSError as error:
            return None, f"no memory for {self._stride} bytes: {error}"
        finally:
            os.close(descriptor)


def exchange(group: dist.ProcessGroup, item: Any, what: str) -> list[Any]:
    """``item`` of every rank, by group rank. ``what`` begins the text of an error.

    Raises:
        PeerTimeoutError: the group's time-out ran out.
        PeerError: the exchange failed in another way, as it does when a peer dies in it.
    """
    items: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(items, item, group=group)
    except RuntimeError as error:
        kind = PeerTimeoutError if "time" in str(error).lower() and "out" in str(error).lower() else PeerError
        raise kind(f"{what}: exchange over the process group failed: {error}") from error
    return items


@dataclasses.dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank tells the others before it opens anything; path and inode are rank 0's alone."""

    process: ProcessIdentity
    nbytes: int
    path: str = ""
    inode: tuple[int, int] = (0, 0)
    problem: str = ""
    refusal: str = ""


class _Opened:
    """Rank 0's own hold on the file while the others attach."""

    def __init__(self, descriptor: int = -1, unlink: str = "") -> None:
        self._descriptor = descriptor
        self._unlink = unlink

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if self._unlink:
            os.unlink(self._unlink)
        self._descriptor, self._unlink = -1, ""


def _offer(rank: int, nbytes: int, total_bytes: int) -> tuple[_Offer, _Opened]:
    process = ProcessIdentity.own()
    if rank or nbytes <= 0:
        return _Offer(process, nbytes), _Opened()
    room = available_bytes()
    if room is not None and total_bytes > room:
        return _Offer(process, nbytes, problem=f"{total_bytes} bytes for all ranks, {room} available"), _Opened()
    descriptor, opened = -1, _Opened()
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("sidelane", os.MFD_CLOEXEC)
            path, opened = f"/proc/{process.pid}/fd/{descriptor}", _Opened(descriptor)
        else:
            descriptor, path = tempfile.mkstemp(prefix="sidelane-")
            opened = _Opened(descriptor, unlink=path)
        os.ftruncate(descriptor, total_bytes)
        status = os.fstat(descriptor)
    except OSError as error:
        opened.close()
        return _Offer(process, nbytes, problem=f"cannot make {total_bytes} bytes of shared memory: {error}"), _Opened()
    return _Offer(process, nbytes, path, (status.st_dev, status.st_ino)), opened


def _agree(offers: list[_Offer]) -> None:
    """Raise on every rank alike when the ranks cannot share."""
    machines = {offer.process.machine for offer in offers}
    if len(machines) > 1:
        places = ", ".join(f"rank {rank} on {offer.process.host}" for rank, offer in enumerate(offers))
        raise UnavailableError(f"SharedBytes: the ranks of the group must be on one machine: {places}")
    refused = [rank for rank, offer in enumerate(offers) if offer.refusal]
    if refused:
        named = "; ".join(f"rank {rank}: {offers[rank].refusal}" for rank in refused)
        raise PeerError(f"SharedBytes: not every rank can take part: {named}", refused)
    sizes = [offer.nbytes for offer in offers]
    if len(set(sizes)) > 1:
        named = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
        raise MismatchError(f"SharedBytes: ranks ask for different sizes in bytes: {named}")
    if sizes[0] <= 0:
        raise ValueError(f"SharedBytes: nbytes must be positive (value={sizes[0]})")
    if offers[0].problem:
        raise UnavailableError(f"SharedBytes: rank 0: {offers[0].problem}")


def _reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Make the kernel commit pages now: a page that cannot be had later is a SIGBUS in the middle of a copy."""
    for start in range(offset, offset + nbytes, _RESERVE_BYTES):
        length = min(_RESERVE_BYTES, offset + nbytes - start)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, start, length)
        else:  # macOS: writing is what reserves
            zeros = bytes(1 << 20)
            for position in range(start, start + length, len(zeros)):
                os.pwrite(descriptor, zeros[: start + length - position], position)
