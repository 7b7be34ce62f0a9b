"""A rank's part of the control block: where its words and records lie, and what a post of a call is."""

from __future__ import annotations

import dataclasses
import zlib

from sidelane.memory.record import Record

RING_CALLS = 64
MOST_TEXT_BYTES = 1024
"""Of what is said of a call: the split sizes of 16 ranks fit."""

SPLITS = " splits "
"""Stands in a signature in front of what may differ between the ranks."""

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
    """What one rank posted for one call.

    Attributes:
        rank: whose post it is.
        signature: what the call is there.
        refusal: why it cannot be made; None: it can.
        blames: the rank at fault, where the one that posted only repeats what another one did.
    """

    rank: int
    signature: str
    refusal: str | None
    blames: int | None = None

    @property
    def common(self) -> str:
        """What of the signature is the same on all ranks."""
        return self.signature.partition(SPLITS)[0]

    @property
    def differing(self) -> str:
        """What of it may differ."""
        return self.signature.partition(SPLITS)[2]


class PostBoard:
    """The memory of one rank, as words and records."""

    def __init__(self, view: memoryview) -> None:
        self.words = view[: 8 * 8].cast("Q")
        self.step = Record(view[64 : 64 + STEP_BYTES])
        self.abort = Record(view[1024 : 1024 + ABORT_BYTES])
        slots = view[PAGE_BYTES:]
        self.slots = [Record(slots[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for i in range(RING_CALLS)]

    def slot(self, call: int) -> Record:
        return self.slots[call % RING_CALLS]

    def has_read(self, call: int) -> bool:
        """True if this rank reads no posts of a call any more: it has, or has begun a later one without."""
        return self.words[AGREED] >= call or self.words[BEGUN] > call

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
    """``text`` as utf-8 without NUL in at most ``limit`` bytes, cut between characters, ending in a digest when cut."""
    data = text.replace("\0", "\ufffd").encode(errors="replace")
    if len(data) <= limit:
        return data
    mark = f"...#{zlib.crc32(data):08x}".encode()
    return data[: limit - len(mark)].decode(errors="ignore").encode() + mark
