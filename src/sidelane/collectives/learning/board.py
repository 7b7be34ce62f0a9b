"""The shared memory through which ranks learn where tensors lie, while no host waits for another one.

Three things are said on it:

* *Posts.* Calls from which the ranks learn are *tracked*, and numbered by themselves: other calls of a lane may come
  in between in any number. Each rank has a ring of posts, one for each tracked call. Nothing is posted over what a rank
  has not read yet: a rank that is too far ahead posts nothing, and all ranks find nothing there.
* *Verdicts.* Tracked calls come in *windows*. In a window that is *in step*, all ranks go by the same posts, those up
  to ``frontier(window)``. Rank 0 judges each window before it begins. It writes that a verdict is being made, and only
  then looks if a rank has begun the window; a rank writes that it has begun, and only then looks for the verdict. So
  one of the two sees the other: a window that any rank begins without a verdict gets none. A rank that finds a verdict
  in the making waits for its end; rank 0 waits for nobody there.
* *Freed memory.* A thread of each rank writes the names of allocations that were freed, whether calls are made or not,
  and a thread of each peer takes them. A list is replaced once all peers have taken it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import SharedBytes
from sidelane.memory.ordering import Fence
from sidelane.memory.posts import MOST_TEXT_BYTES, PAGE_BYTES
from sidelane.memory.record import Record

WINDOW = 8
"""Tracked calls that are in step, or not, together."""

LAG = 32
"""Tracked calls between the last post by which a window in step goes and the first call behind that window. Hosts that
are further apart than ``LAG - WINDOW`` are not in step."""

RING = 64
"""Posts on record. More than ``LAG + WINDOW``: in a window in step every rank posts."""

SLOT_BYTES = Record.HEADER_BYTES + MOST_TEXT_BYTES
PART_BYTES = PAGE_BYTES + RING * SLOT_BYTES

BEGUN, READ, VERDICTS_AT, TAKEN_AT, MARKS_AT = 0, 1, 8, 16, 32  # words; verdicts are rank 0's, taken lists by owner
VERDICTS, WORDS = 8, MARKS_AT + RING
IN_THE_MAKING, IN_STEP, NOT_IN_STEP = 1, 2, 3

FREED_AT, FREED_BYTES = 1024, Record.HEADER_BYTES + 2048
MOST_FREED = 32
"""Names in one list of freed memory; the others wait for the next."""


def window_of(number: int) -> int:
    """Return the window of a tracked call; they count from 1.

    >>> [window_of(number) for number in (1, 8, 9)]
    [0, 0, 1]
    """
    return (number - 1) // WINDOW


def frontier(window: int) -> int:
    """Return the last tracked call by whose posts all ranks go in a window in step; 0 before the first.

    >>> [frontier(window) for window in (0, 3, 4, 5)]
    [0, 0, 8, 16]
    """
    return max(0, WINDOW * (window + 1) - LAG)


MOST_REMEMBERED = 4096
"""Calls, and posts, that are remembered."""

K = TypeVar("K")
V = TypeVar("V")


def room(remembered: dict[K, V]) -> dict[K, V]:
    """Return a dictionary, emptied where it is full."""
    if len(remembered) >= MOST_REMEMBERED:
        remembered.clear()
    return remembered


class _RankPart:
    """The memory of one rank."""

    def __init__(self, view: memoryview) -> None:
        self.words = view[: 8 * WORDS].cast("Q")
        self.freed = Record(view[FREED_AT : FREED_AT + FREED_BYTES])
        slots = view[PAGE_BYTES:]
        self.slots = [Record(slots[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for i in range(RING)]
        self.payloads: dict[int, bytes] = {}  # that were read, by their marks


class LearningBoard:
    """One rank's view of what all ranks say. Making one is collective; the thread that makes calls uses it, and for
    freed memory one other.

    Args:
        exchange: of the ranks, all on one machine.

    Attributes:
        rank, world_size: of the group.
        number: of the last tracked call that has begun here; :meth:`post` begins the next one.

    Raises:
        UnavailableError, PeerError, PeerTimeoutError: as :class:`sidelane.memory.host_shared.SharedBytes` does.
    """

    def __init__(self, exchange: Exchange) -> None:
        shared = SharedBytes(exchange, PART_BYTES)
        self.rank, self.world_size = shared.rank, shared.world_size
        self._parts = [_RankPart(shared.view(rank)) for rank in range(shared.world_size)]
        self._own = self._parts[shared.rank]
        self._next_judged = 0
        self._marks: dict[bytes, int] = {}  # of payloads
        self._last_mark = 0
        self._fence = Fence()
        self.number = 0

    # --- posts --------------------------------------------------------------------------------------------------------

    def post(self, payload: bytes) -> bool:
        """Post the next tracked call and say that it has begun; False if a rank is so late that there is no room."""
        own, number = self._own, self.number + 1
        kept = all(part.words[READ] >= number - RING for part in self._parts)
        if kept:
            mark = self._marks.get(payload)
            if mark is None:
                self._last_mark = mark = self._last_mark + 1
                room(self._marks)[payload] = mark
            own.words[MARKS_AT + number % RING] = mark
            own.slots[number % RING].write(number, 0, payload)
            self._fence.full()  # who sees that it has begun sees the post
        own.words[BEGUN] = self.number = number
        self._fence.full()  # what comes next looks for what others say
        return kept

    def posts(self, number: int) -> tuple[bytes, ...] | None:
        """Return what all ranks have posted of a tracked call, if they have; empty if one has begun it without a post.

        Nothing is posted over it before this rank says that it has read it. Most posts are the same as earlier ones,
        with the same mark, and need not be read again.
        """
        place = number % RING
        if any(part.words[BEGUN] < number for part in self._parts):
            return None
        self._fence.full()
        found: list[bytes] = []
        for part in self._parts:
            if part.slots[place].number != number:
                return ()
            mark = part.words[MARKS_AT + place]
            payload = part.payloads.get(mark)
            if payload is None:
                record = part.slots[place].read()
                assert record is not None, "a post is kept until all have read it"
                payload = room(part.payloads)[mark] = record[2]
            found.append(payload)
        return tuple(found)

    def has_read(self, number: int) -> None:
        """Say that the posts of all tracked calls up to this one are read here."""
        self._fence.full()
        self._own.words[READ] = number

    def absent(self, number: int) -> list[int]:
        """Name the ranks that have not begun a tracked call."""
        return [rank for rank, part in enumerate(self._parts) if part.words[BEGUN] < number]

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def verdict(self, window: int) -> bool | None:
        """Tell if a window that this rank has said it has begun is in step; None while that is being decided."""
        said = self._parts[0].words[VERDICTS_AT + window % VERDICTS]
        if said == 4 * window + IN_THE_MAKING:
            return None
        return said == 4 * window + IN_STEP

    def judge(self, number: int) -> None:
        """On rank 0, in a tracked call of its own: say that the next windows are in step if they are."""
        words = self._own.words
        while True:
            window = max(self._next_judged, window_of(number) + 1)
            if any(part.words[READ] < frontier(window) for part in self._parts):
                return
            if window * WINDOW - number > LAG:  # further ahead than anything is known
                return
            place = VERDICTS_AT + window % VERDICTS
            words[place] = 4 * window + IN_THE_MAKING
            self._fence.full()
            nobody = all(part.words[BEGUN] <= WINDOW * window for part in self._parts)
            words[place] = 4 * window + (IN_STEP if nobody else NOT_IN_STEP)
            self._next_judged = window + 1

    # --- freed memory, which another thread tells and takes -----------------------------------------------------------

    def tell_freed(self, names: Sequence[str]) -> Sequence[str]:
        """Tell peers of allocations of this rank that were freed; return those told, none until peers took the last."""
        own, peers = self._own, [part for part in self._parts if part is not self._own]
        number, told = own.freed.number, names[:MOST_FREED]
        if not told or any(part.words[TAKEN_AT + self.rank] < number for part in peers):
            return ()
        own.freed.write(number + 1, 0, "\n".join(told).encode())
        return told

    def take_freed(self) -> list[tuple[int, str]]:
        """Return owners and names of allocations of which peers tell for the first time that they were freed."""
        found: list[tuple[int, str]] = []
        for owner, part in enumerate(self._parts):
            if part is self._own or part.freed.number <= self._own.words[TAKEN_AT + owner]:
                continue
            record = part.freed.read()
            if record is not None:
                found += [(owner, name) for name in record[2].decode().split("\n")]
                self._own.words[TAKEN_AT + owner] = record[0]
        return found
