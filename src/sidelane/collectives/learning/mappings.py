"""Memory that ranks map because they learn: allocations of peers that this rank has mapped, and its own that they have.

One thread of a lane maps and unmaps, so that no call takes longer for it, and gives memory back without any call:

1. An owner whose thread finds that an allocation was freed offers it no more. Once its device has ended all calls that
   went ahead until then, and so its peers their reads, it tells them on the board. In all later calls its input lies
   elsewhere, and it knows where its peers expect it: it writes the right bytes over whatever they have read.
2. A peer whose thread takes that leaves out such reads from then on. The owner's bytes come all the same.
3. It unmaps the memory once its device has ended the calls that may still read there.

The thread looks five times a second, so that memory is back with the driver within one. All that an owner offers counts
towards a limit (``Config.mapped_bytes``); an allocation beyond it is not offered, and so is staged.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from sidelane.collectives.learning.board import LearningBoard
from sidelane.errors import UnavailableError
from sidelane.memory.ordinary import Allocation, Mapping, OrdinaryMemory
from sidelane.memory.release import submitters

Name = tuple[int, str]
"""Owner and name of an allocation."""

LOOK_S = 0.2
"""Seconds between two looks at what was freed, here and by peers."""

SHARE = 8
"""Part of a device's memory that peers may have mapped of a rank, by default. A program that runs out of memory may
get so much of what it frees a moment too late."""

NEVER = 1 << 64
"""Number that no call has."""

MOST_WHY = 80
"""Characters of the reason why a rank cannot map an allocation."""


def default_limit_bytes(device: torch.device) -> int:
    """Return how many bytes of a rank's memory peers may have mapped."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // SHARE
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // SHARE


class Mappings:
    """Memory that one lane has mapped, and has offered. The thread that makes calls uses it, and a thread of its own.

    Args:
        memory: ordinary memory of the device.
        board: of the lane.
        limit_bytes: most bytes of this rank's memory that peers may have mapped, over all of its lanes.
        ended: the last call up to which all have ended on this rank's device.
        last_ahead: makes void what was prepared with ordinary memory, and returns the last call before that which went
            ahead; None when the lane has gone. The thread calls it.

    Attributes:
        freed: names of this rank's allocations that were freed, until all ranks have heard of it in posts.
        failed: owners and names of allocations that could not be mapped, and why; likewise.
    """

    def __init__(
        self,
        memory: OrdinaryMemory,
        board: LearningBoard,
        limit_bytes: int,
        ended: Callable[[], int],
        last_ahead: Callable[[], int | None],
    ) -> None:
        self._memory, self._board, self._limit_bytes = memory, board, limit_bytes
        self._ended, self._last_ahead = ended, last_ahead
        self.freed: list[str] = []
        self.failed: list[tuple[int, str, str]] = []
        self._jobs: queue.SimpleQueue[tuple[Name, str | None] | None] = queue.SimpleQueue()
        self._asked = self._done = 0  # allocations to map
        self._mapped: dict[Name, Mapping] = {}
        self._retired: collections.deque[tuple[int, Mapping]] = collections.deque()
        self._offered: dict[str, Allocation] = {}
        self._untold: list[tuple[int, str]] = []  # freed ones, until peers may know; and the last call before that
        self._thread: threading.Thread | None = None
        _lanes.add(self)

    def offers(self, allocation: Allocation) -> bool:
        """Tell if peers may have an allocation of this rank mapped, and look after it from now on if they may."""
        if allocation.name in self._offered:
            return True
        kept = {name: each.nbytes for lane in list(_lanes) for name, each in list(lane._offered.items())}
        kept[allocation.name] = allocation.nbytes
        if allocation.name in self.freed or sum(kept.values()) > self._limit_bytes:
            return False
        self._offered[allocation.name] = allocation
        self._start()
        return True

    def stands(self, allocation: Allocation) -> bool:
        """Tell if an allocation is offered still, and was not freed."""
        return allocation.name in self._offered and not self._memory.is_gone(allocation)

    def map(self, name: Name, handle: str) -> None:
        """Have the thread map an allocation of a peer."""
        self._asked += 1
        self._start()
        self._jobs.put((name, handle))

    def drop(self, name: Name) -> None:
        """Have the thread let go of an allocation that was freed, if it has not heard of it already."""
        self._jobs.put((name, None))

    @property
    def is_pending(self) -> bool:
        """Something is not mapped yet."""
        return self._asked != self._done

    def start(self, name: Name) -> int | None:
        """Return where an allocation begins here; None once it was freed."""
        mapping = self._mapped.get(name)
        return None if mapping is None else mapping.start

    def close(self) -> None:
        """Let go of everything. Nothing may be under way."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(10)
            self._thread = None
        for kept in (self._mapped, self._retired, self._offered):
            kept.clear()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sidelane-maps", daemon=True)
            self._thread.start()

    # --- what the thread does -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._memory.attach_thread()
        next_look = time.monotonic() + LOOK_S
        while True:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=max(0.0, next_look - time.monotonic()))
                if job is None:
                    return
                name, handle = job
                if handle is None:
                    self._let_go([name])
                else:
                    self._open(name, handle)
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK_S

    def _open(self, name: Name, handle: str) -> None:
        try:
            self._mapped[name] = self._memory.map(handle, name[1])
        except UnavailableError as error:
            self.failed.append((*name, str(error)[:MOST_WHY]))
        except Exception as error:  # whatever it is, peers must hear that this rank cannot
            self.failed.append((*name, f"{type(error).__name__}: {error}"[:MOST_WHY]))
        self._done += 1

    def _look(self) -> None:
        """Tell peers of what was freed here, and let go of what they have freed."""
        freed = [name for name, allocation in list(self._offered.items()) if self._memory.is_gone(allocation)]
        if freed:
            self.freed += freed  # before one may be offered again
            last = self._last()
            self._untold += [(last, name) for name in freed]
            for name in freed:
                del self._offered[name]
        ended = self._ended()
        told = self._board.tell_freed([name for last, name in self._untold if last <= ended])
        self._untold = [each for each in self._untold if each[1] not in told]
        self._let_go(self._board.take_freed())
        # To unmap may wait for the device, and that for the host where a prelaunched call waits for its trigger.
        if self._retired and not any(each.waits_for_the_host() for each in list(submitters)):
            while self._retired and self._retired[0][0] <= ended:
                self._retired.popleft()  # the last reference, with which it is unmapped

    def _let_go(self, names: Sequence[Name]) -> None:
        """Have no call to come read what peers have freed, and unmap it behind those that may."""
        mappings = [self._mapped.pop(name) for name in names if name in self._mapped]
        if mappings:
            last = self._last()
            self._retired += [(last, mapping) for mapping in mappings]

    def _last(self) -> int:
        last = self._last_ahead()
        return NEVER if last is None else last


_lanes: weakref.WeakSet[Mappings] = weakref.WeakSet()
