"""Registration of memory that others have allocated, such as NCCL's pools: its tensors are symmetric from then on.

Each rank exports its segments, and maps those of its peers. A tensor in a segment counts as symmetric by its offset, as
one of ``Communicator.empty`` does, so the ranks must use corresponding tensors at the same offsets: NCCL's windows ask
for the same.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from sidelane import log
from sidelane.errors import UnavailableError
from sidelane.memory.heap import SymmetricBlock
from sidelane.memory.posts import SPLITS
from sidelane.memory.release import DeferredRelease
from sidelane.memory.storage import bytes_at
from sidelane.session.communicator import Communicator

Segment = tuple[int, int]
"""Address and bytes of memory that an allocator has from the driver."""

_MOST_REASON = 160


class Registration:
    """Segments of all ranks that peers have mapped. :func:`register_segments` makes it.

    Attributes:
        nbytes: bytes that are symmetric.
        why: reason why some or all of the segments are not; else empty.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._heap, self._numbers = communicator.session.heap, list[int]()
        self.nbytes, self.why = 0, ""

    def add(self, number: int, nbytes: int) -> None:
        """Note a segment by its number in the heap."""
        self._numbers.append(number)
        self.nbytes += nbytes

    def end(self) -> None:
        """Treat the segments as ordinary memory again, on all ranks alike. No call on them may be under way."""
        while self._numbers:
            self._heap.remove(self._numbers.pop())


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
    made, posted = Registration(communicator), _exchange(communicator, shown)
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
        made.add(communicator.allocations.adopt(block), nbytes)
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
    for peer, each in enumerate(_exchange(communicator, shown)):
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
    problems = _exchange(communicator, problem)
    return next(filter(None, problems), (tuple(starts), mappings))


def _exchange(communicator: Communicator, given: Any) -> list[Any]:
    """Exchange a short value with all ranks, as JSON. Return those of all of them."""
    calls = communicator.calls
    number = calls.number()
    with calls.failing_for_good():
        calls.control.post_call(number, f"registration of a memory pool{SPLITS}{json.dumps(given)}")
    return [json.loads(post.differing) for post in calls.posts(number)]
