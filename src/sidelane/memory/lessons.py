"""What ranks tell each other in calls from which they learn (``collectives/learning.py``), which no host waits for.

Such calls are *lessons*, counted by themselves: other calls of a lane may come in between in any number. Each rank has
a ring of posts, how far it is, and how far it has read what all ranks have posted. Nothing is posted over what a rank
has not read yet: who is too far ahead posts nothing, and all ranks find nothing there.

Lessons come in *windows*. In a window that is *in step*, all ranks go by the same posts, those of lessons up to
``frontier(window)``. Rank 0 judges each window before it begins. It says that a verdict is being made, and only then
looks whether somebody has begun the window; a rank says that it has begun it, and only then looks for the verdict. So
one of the two sees the other: a window that anybody begins without a verdict gets none. Who finds one in the making
waits for its end, which waits for nobody.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import SharedBytes
from sidelane.memory.ordering import Fence, full_fence
from sidelane.memory.posts import MOST_TEXT_BYTES, PAGE_BYTES
from sidelane.memory.record import Record

WINDOW = 8
"""Lessons."""

LAG = 32
"""In a window in step the ranks go by lessons up to ``LAG`` before the first lesson behind it. Hosts that are further
apart than ``LAG - WINDOW`` are not in step, nor are those further apart than ``LAG - 2 * WINDOW`` that read once in a
window."""

RING = 64
"""Posts on record. More than ``LAG + WINDOW``: in a window in step everybody posts."""

SLOT_BYTES = Record.HEADER_BYTES + MOST_TEXT_BYTES
PART_BYTES = PAGE_BYTES + RING * SLOT_BYTES

BEGUN, READ, VERDICTS_AT = 0, 1, 8  # words; verdicts are rank 0's
VERDICTS = 8
IN_THE_MAKING, IN_STEP, NOT_IN_STEP = 1, 2, 3


def window_of(lesson: int) -> int:
    """Lessons count from 1.

    >>> [window_of(lesson) for lesson in (1, 8, 9)]
    [0, 0, 1]
    """
    return (lesson - 1) // WINDOW


def frontier(window: int) -> int:
    """The last lesson by whose posts all ranks go in a window in step; 0 before the first.

    >>> [frontier(window) for window in (0, 3, 4, 5)]
    [0, 0, 8, 16]
    """
    return max(0, WINDOW * (window + 1) - LAG)


class OwnLessons(NamedTuple):
    """Where a rank says and reads what :class:`LessonBoard` does, for code that does so itself.

    Attributes:
        lesson: address of the number of the last one begun here, and next to it whether its call is still to be made.
        shown: address of where peers see it.
        read: by rank, addresses of the last lesson of which it has read all posts.
        records: lesson ``n`` is posted in number ``n % len(records)``.
        heard: addresses of the records of all ranks, those of a rank side by side.
    """

    lesson: int
    shown: int
    read: tuple[int, ...]
    records: tuple[Record, ...]
    heard: tuple[int, ...]


class _Part:
    """The memory of one rank."""

    def __init__(self, view: memoryview) -> None:
        self.words = view[: 8 * (VERDICTS_AT + VERDICTS)].cast("Q")
        slots = view[PAGE_BYTES:]
        self.slots = [Record(slots[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for i in range(RING)]
        self.found: list[tuple[int, bytes]] = [(-1, b"")] * RING  # seals and payloads, as they were read last

    def address(self, word: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.words)) + self.words.itemsize * word


class LessonBoard:
    """One rank's view of what all ranks say of lessons. Making one is collective; one thread at a time uses it.

    Args:
        exchange: of the ranks, all on one machine.

    Raises:
        UnavailableError, PeerError, PeerTimeoutError: as :class:`sidelane.memory.host_shared.SharedBytes` does.
    """

    def __init__(self, exchange: Exchange) -> None:
        shared = SharedBytes(exchange, PART_BYTES)
        self.rank, self.world_size = shared.rank, shared.world_size
        self._parts = [_Part(shared.view(rank)) for rank in range(shared.world_size)]
        self._own = self._parts[shared.rank]
        self._next_judged = 0
        self._lesson = (ctypes.c_uint64 * 2)()
        self._fence = Fence()

    @property
    def lesson(self) -> int:
        """The last one that has begun here; :meth:`say` begins the next one."""
        return self._lesson[0]

    def take(self) -> bool:
        """Make the call of the last lesson; True if that is still to be done."""
        found, self._lesson[1] = bool(self._lesson[1]), 0
        return found

    def say(self, payload: bytes) -> bool:
        """Post the next lesson and say that it has begun; False if a rank is so late that there is no room for it."""
        own, lesson = self._own, self._lesson[0] + 1
        kept = all(part.words[READ] >= lesson - RING for part in self._parts)
        if kept:
            own.slots[lesson % RING].write(lesson, 0, payload)
            self._fence.full()  # who sees that it has begun sees the post
        own.words[BEGUN] = self._lesson[0] = lesson
        self._lesson[1] = 1
        self._fence.full()  # what comes next looks for what others say
        return kept

    def posts(self, lesson: int) -> tuple[bytes, ...] | None:
        """What all ranks have posted in a lesson, if they have; empty if one of them has begun it and posted nothing.

        Nothing is posted over it before this rank says that it has read it.
        """
        found: list[bytes] = []
        for part in self._parts:
            seal, known = part.found[lesson % RING]
            if part.slots[lesson % RING].has(lesson, seal):  # most of them are what they were
                found.append(known)
                continue
            payload = self._post(part, lesson)
            if payload is None:
                if part.words[BEGUN] < lesson:
                    return None
                full_fence()
                payload = self._post(part, lesson)  # it may have come since
                if payload is None:
                    return ()
            found.append(payload)
        return tuple(found)

    def has_read(self, lesson: int) -> None:
        """Say that the posts of all lessons up to this one are read here."""
        full_fence()
        self._own.words[READ] = lesson

    def own(self) -> OwnLessons:
        """Where :meth:`say` writes, and what it reads."""
        read = tuple(part.address(READ) for part in self._parts)
        heard = tuple(slot.address for part in self._parts for slot in part.slots)
        lesson, shown = ctypes.addressof(self._lesson), self._own.address(BEGUN)
        return OwnLessons(lesson, shown, read, tuple(self._own.slots), heard)

    def absent(self, lesson: int) -> list[int]:
        """Ranks that have not begun a lesson."""
        return [rank for rank, part in enumerate(self._parts) if part.words[BEGUN] < lesson]

    def verdict(self, window: int) -> bool | None:
        """Whether a window that this rank has said it has begun is in step; None while that is being decided."""
        said = self._parts[0].words[VERDICTS_AT + window % VERDICTS]
        if said == 4 * window + IN_THE_MAKING:
            return None
        return said == 4 * window + IN_STEP

    def judge(self, lesson: int) -> None:
        """Rank 0 says, in a lesson of its own, that the next windows are in step if they are."""
        words = self._own.words
        while True:
            window = max(self._next_judged, window_of(lesson) + 1)
            if any(part.words[READ] < frontier(window) for part in self._parts):
                return
            if window * WINDOW - lesson > LAG:  # further ahead than anything is known
                return
            place = VERDICTS_AT + window % VERDICTS
            words[place] = 4 * window + IN_THE_MAKING
            full_fence()
            nobody = all(part.words[BEGUN] <= WINDOW * window for part in self._parts)
            words[place] = 4 * window + (IN_STEP if nobody else NOT_IN_STEP)
            self._next_judged = window + 1

    def _post(self, part: _Part, lesson: int) -> bytes | None:
        slot, number = part.slots[lesson % RING], lesson % RING
        if slot.number != lesson:
            return None
        seal, record = slot.seal, slot.read()
        if record is None or record[0] != lesson:
            return None
        if slot.has(lesson, seal):  # else it was written in between
            part.found[number] = seal, record[2]
        return record[2]
