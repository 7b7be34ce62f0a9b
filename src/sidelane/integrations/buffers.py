"""Symmetric memory of a group: buffers for FSDP2's calls, and pools that programs register.

Memory that others have allocated, such as NCCL's pools, can be registered: each rank exports its segments, and maps
those of its peers. A tensor in a segment counts as symmetric by its offset, as one of ``Communicator.empty`` does, so
the ranks must use corresponding tensors at the same offsets: NCCL's windows ask for the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidelane import log
from sidelane.errors import UnavailableError
from sidelane.memory.heap import SymmetricBlock, SymmetricHeap
from sidelane.memory.posts import SPLITS
from sidelane.memory.release import DeferredRelease
from sidelane.memory.storage import bytes_at, storage_of
from sidelane.session import Communicator

Segment = tuple[int, int]
"""Address and bytes of memory that an allocator has from the driver."""

_MOST_REASON = 160


class FsdpBuffers:
    """Pool of symmetric buffers for FSDP2, by stream and size."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._free: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._leased: dict[int, bool] = {}  # by address: True if it returns to the pool

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a symmetric buffer, which returns to the pool when its last view has gone.
        Collective if all of them are in use. If no room is left, it is ordinary memory, on all ranks alike, and calls
        stage it.

        FSDP2 takes and drops its buffers in one order on all ranks, and orders the stream on which it takes one behind
        the work on the dropped ones, as torch's allocator requires, too. So a free buffer is free on all ranks. The
        exception are tensors passed to other backends, whose threads drop their references late (Gloo's some time after
        ``wait`` has returned). Their memory goes back to the allocator, whose ranks compare what they have dropped.
        """
        nbytes = max(1, math.prod(size) * dtype.itemsize)
        cuda = self._comm.device.type == "cuda"
        free = self._free.setdefault((torch.cuda.current_stream().cuda_stream if cuda else 0, nbytes), [])
        try:
            whole = free.pop(0) if free else self._comm.empty(nbytes, dtype=torch.uint8)
        except UnavailableError:
            return torch.empty(*size, dtype=dtype, device=self._comm.device)
        self._leased[whole.data_ptr()] = True
        part = storage_of(whole, 0, nbytes, lambda: self._came_back(free, whole))
        return part[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)

    def is_not_to_come_back(self, tensor: torch.Tensor) -> None:
        """Keep a tensor out of the pool, because another backend holds it."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._leased:
            self._leased[address] = False

    def clear(self) -> None:
        """Drop the free buffers."""
        self._free.clear()

    def _came_back(self, free: list[torch.Tensor], whole: torch.Tensor) -> None:
        if self._leased.pop(whole.data_ptr()):
            free.append(whole)


class Registering:
    """Mixin in front of a backend class of torch: pools of memory become symmetric in a group's communicator.

    Attributes:
        life: returns the maker of the group's communicators, a :class:`sidelane.integrations.lifetime.GroupLifetime`,
            as long as the group lives; None for ordinary memory.
    """

    life: Callable[[], Any] = staticmethod(lambda: None)

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """Make all that a ``torch.cuda.MemPool`` holds now symmetric, so that the group's calls need not stage it.

        Collective. The ranks use corresponding tensors at the same offsets of their segments, as ``symm=True`` asks of
        them with NCCL. A pool whose segments differ between the ranks, or that they cannot map, is staged, and the log
        says why. The pool is kept until it is deregistered.

        Args:
            pool: pool of any allocator: torch's own, or the one of NCCL (``ncclMemAlloc``).
            symm: accepted for NCCL's sake; the segments are symmetric either way.
        """
        self.deregister_mem_pool(pool)  # NCCL registers what has come since, too
        device, life = torch.device("cuda", torch.cuda.current_device()), self.life()
        made = None if life is None or life.no_memory("cuda") else life.for_memory(device)
        if made is not None:
            segments = [(each["address"], each["total_size"]) for each in pool.snapshot()]
            self._registered()[pool.id] = register_segments(made, segments, pool)

    def deregister_mem_pool(self, pool: Any) -> None:
        """End the registration of a pool, on all ranks alike.

        The calls on its tensors have ended, and the graphs that hold them are replayed no more.
        """
        found = self._registered().pop(pool.id, None)
        if found is not None:
            found.end()

    def clear(self) -> None:
        """Drop the registrations."""
        self._registered().clear()

    def _registered(self) -> dict[tuple[int, int], Registration]:
        """Return the registrations by the number of the pool."""
        found: dict[tuple[int, int], Registration] = vars(self).setdefault("_pools", {})
        return found


@dataclasses.dataclass(slots=True)
class Registration:
    """Segments of all ranks that peers have mapped. :func:`register_segments` makes it.

    Attributes:
        heap: symmetric memory of the ranks.
        numbers: numbers of the segments in it.
        nbytes: bytes that are symmetric.
        why: reason why some or all of the segments are not; else empty.
    """

    heap: SymmetricHeap
    numbers: list[int] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    why: str = ""

    def end(self) -> None:
        """Treat the segments as ordinary memory again, on all ranks alike. No call on them may be under way."""
        while self.numbers:
            self.heap.remove(self.numbers.pop())


def register_segments(communicator: Communicator, segments: Sequence[Segment], owner: object) -> Registration:
    """Make segments symmetric. Collective. What some rank cannot map stays ordinary memory, on all ranks alike.

    Args:
        communicator: its calls may then use the segments without staging.
        segments: this rank's, in any order: the ranks have made them in one order.
        owner: object that keeps the segments allocated; it is kept until the registration has ended.

    Raises:
        UnavailableError: a graph is being captured.
        PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    backend, device = communicator.backend, communicator.device
    if (exported := backend.exported) is not None:  # addresses do not tell the order
        segments = sorted(segments, key=lambda segment: exported.number_of(segment[0]))
    sizes = [nbytes for _, nbytes in segments]
    shown = [len(sizes), sum(sizes), zlib.crc32(repr(sizes).encode())]  # the sizes of many do not fit into a post
    communicator.path.agree("register", lambda: (None, "registration of a memory pool"))
    made, posted = Registration(communicator.heap), exchanged(communicator, shown)
    if any(other != shown for other in posted):
        made.why = f"the ranks have other segments (number and bytes on each rank: {[each[:2] for each in posted]})"
        segments = []
    for address, nbytes in segments:
        found = _map(communicator, address, nbytes)
        if isinstance(found, str):
            made.why = found
            continue
        starts, mappings = found
        block = SymmetricBlock(bytes_at(address, nbytes, device), starts, DeferredRelease((mappings, owner), device))
        made.numbers.append(communicator.allocations.adopt(block))
        made.nbytes += nbytes
    if made.why:
        log.calls.warning("a memory pool is not symmetric, and calls on it are staged: %s", made.why)
    return made


def _map(communicator: Communicator, address: int, nbytes: int) -> tuple[tuple[int, ...], list[Any]] | str:
    """Return the addresses of a segment of each rank, and the mappings that hold them; or why some rank has none."""
    exported, rank = communicator.backend.exported, communicator.rank
    found = "this device exports no memory" if exported is None else exported.allocation_of(address, nbytes)
    shown = found if isinstance(found, str) else (found.name, found.handle, address - found.start)
    starts: list[int] = []
    mappings: list[Any] = [found]
    problem = ""
    for peer, each in enumerate(exchanged(communicator, shown)):
        if isinstance(each, str):
            problem = problem or f"rank {peer}: {each}"
        elif peer == rank:
            starts.append(address)
        elif exported is not None and not problem:
            name, handle, offset = each
            try:
                mappings.append(exported.map(handle, name))
                starts.append(mappings[-1].start + offset)
            except UnavailableError as error:
                problem = f"rank {rank}: {error}"[:_MOST_REASON]
    problems = exchanged(communicator, problem)
    return next(filter(None, problems), (tuple(starts), mappings))


def exchanged(communicator: Communicator, given: Any) -> list[Any]:
    """Exchange a short value with all ranks, as JSON. Return those of all of them."""
    calls = communicator.calls
    number = calls.number()
    with calls.failing_for_good():
        calls.control.post_call(number, f"exchange of values{SPLITS}{json.dumps(given)}")
    return [json.loads(post.differing) for post in calls.posts(number)]
