"""Layout of a rank's part of the control block: words and records, and the posts of calls in them."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import zlib

from sidelane.memory.record import Record

RING_CALLS = 64
MOST_TEXT_BYTES = 1024
"""Largest number of bytes of the text of a post, with its NUL: the split sizes of 16 ranks fit."""

SPLITS = "\x1fsplits "
"""Separator in a signature in front of the part that may differ between ranks. Texts of callers do not contain it."""

DIGEST = re.compile(r" #[0-9a-f]{12}\b")
"""Digest of a call in its signature, by which ranks compare what the words leave out."""

STEP_TEXT_BYTES = 512
PAGE_BYTES = 4096
STEP_BYTES = Record.HEADER_BYTES + STEP_TEXT_BYTES
ABORT_BYTES = 2048
SLOT_BYTES = Record.HEADER_BYTES + 2 * MOST_TEXT_BYTES  # a signature and a refusal
PART_BYTES = PAGE_BYTES + RING_CALLS * SLOT_BYTES
BEGUN, ENDED, CLOSED, AGREED = range(4)  # words
OK, REFUSED, REPEATED = range(3)  # status of a call; from REPEATED on, with the rank at fault added
FAILED, TIMED_OUT = range(2)  # status of an abort
RUNS, WAITS = range(2)  # status of a step


@dataclasses.dataclass(frozen=True, slots=True)
class PostedCall:
    """The post of one rank for one call.

    Attributes:
        rank: rank that posted it.
        signature: signature of the call on that rank.
        refusal: reason why the rank does not make the call; None if it does.
        blames: rank at fault, if the refusal only repeats that of another rank.
    """

    rank: int
    signature: str
    refusal: str | None
    blames: int | None = None

    @property
    def common(self) -> str:
        """The part of the signature that must be the same on all ranks."""
        return self.signature.partition(SPLITS)[0]

    @property
    def shown(self) -> str:
        """The same in the words that errors show, without the digest of what the words stand for."""
        return DIGEST.sub("", self.common)

    @property
    def differing(self) -> str:
        """The part of the signature that may differ between ranks."""
        return self.signature.partition(SPLITS)[2]


def different(one: PostedCall, other: PostedCall) -> str:
    """Return the words of two calls that differ, each behind its rank; with digests where the words are the same."""
    same = one.shown == other.shown
    return "; ".join(f"rank {post.rank}: {post.common if same else post.shown}" for post in (one, other))


class PostMemory:
    """The memory of one rank, as words and records."""

    def __init__(self, view: memoryview) -> None:
        self.words = view[: 8 * 8].cast("Q")
        self.step = Record(view[64 : 64 + STEP_BYTES])
        self.abort = Record(view[1024 : 1024 + ABORT_BYTES])
        self.handed = Record(view[1024 + ABORT_BYTES : PAGE_BYTES])
        slots = view[PAGE_BYTES:]
        self.slots = [Record(slots[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for i in range(RING_CALLS)]

    @property
    def begun_address(self) -> int:
        """Address of the word that holds the last call begun."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.words)) + self.words.itemsize * BEGUN

    def slot(self, call: int) -> Record:
        return self.slots[call % RING_CALLS]

    def posted(self, rank: int, call: int) -> PostedCall | None:
        slot = self.slot(call)
        if slot.number != call:  # one load, before the whole record is read and checked
            return None
        record = slot.read()
        if record is None or record[0] != call:
            return None
        signature, refusal = (text.decode(errors="replace") for text in record[2].split(b"\0", 1))
        status = record[1]
        if status == OK:
            return PostedCall(rank, signature, None)
        return PostedCall(rank, signature, refusal, status - REPEATED if status >= REPEATED else None)


def fit(text: str, limit: int = MOST_TEXT_BYTES - 1) -> bytes:
    """Return ``text`` as utf-8 without NUL in at most ``limit`` bytes; a text that is cut ends in a digest."""
    data = text.replace("\0", "\ufffd").encode(errors="replace")
    if len(data) <= limit:
        return data
    mark = f"...#{zlib.crc32(data):08x}".encode()
    return data[: limit - len(mark)].decode(errors="ignore").encode() + mark
