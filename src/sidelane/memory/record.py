"""Records in shared memory (seqlocks with a checksum): one writer, many readers, no torn reads; and their fence.

Why a fence. A rank writes bytes, then a word that says "the bytes are there". x86 makes the stores of one core
visible in order. ARM does not: another process may see the word first. Python offers no barrier by name. The GIL is
none either: it is a lock of this process only, a thread need not let go of it between two stores, and taking or
releasing it orders accesses in one direction each.

What gives one. Releasing a lock keeps everything before it in front of the release; taking a lock keeps everything
after it behind. A release *followed by* an acquire therefore separates what comes before from what comes after,
provided that the acquire cannot overtake the release. Both ARMv8's LDAXR/STLR and its single-instruction atomics
promise that (they are "RCsc"), and on x86 each is a locked instruction, a full barrier by itself. ``threading.Lock`` is
made of them on every platform.

Single words. A store to an aligned 32- or 64-bit word through ``ctypes`` or a cast ``memoryview`` is one machine store
(CPython copies a constant 4 or 8 bytes), so a reader sees the old value or the new one, never a mix.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib


class _OwnLock(threading.local):
    """A lock for each thread, which no other thread takes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_own = _OwnLock()


def full_fence() -> None:
    """Order every access of this thread before the call in front of every one after it, as other processes see them."""
    # The lock is held between calls, unless Ctrl-C or a signal handler interrupted this function: so do not block.
    lock = _own.lock
    lock.acquire(False)
    lock.release()
    lock.acquire(False)


class Record:
    """A number, a status and a payload that change together.

    Words of 8 bytes: sequence, number, digest (8 bits of status, 24 of length, 32 of checksum), tie; then the payload.
    The sequence is odd while the writer is at work and 0 before the first write. A reader accepts what it copied if the
    sequence is even and did not change, the checksum is that of sequence, status and payload, and the tie is the
    exclusive or of number and digest. On x86 the sequence alone would suffice; elsewhere the fences are needed, too.
    Checksum and tie detect a mistake in either.

    Most writes change the number alone. They store number and tie, which readers may see in either order: a number and
    a tie of different writes do not match, nor do a number and a payload of different writes.

    Args:
        view: memory of the record, aligned to 8 bytes and zeroed.

    Attributes:
        written, status, digest: values of the last write by this object; ``written`` is None during a write.
        room: largest size of a payload in bytes.
    """

    HEADER_BYTES = 32
    _PATIENCE = 400

    def __init__(self, view: memoryview) -> None:
        self._words = view[: self.HEADER_BYTES].cast("Q")
        self._payload = view[self.HEADER_BYTES :]
        self.room = len(self._payload)
        self.written: bytes | None = None
        self.status = self.digest = 0

    @property
    def is_blank(self) -> bool:
        """True before the first write."""
        return self._words[0] == 0

    @property
    def number(self) -> int:
        """The number alone, from a single load: a hint whether ``read`` is worth its time."""
        return self._words[1]

    def looks_like(self, other: Record) -> bool:
        """Return True if both have the same number, status and payload, from single loads: a hint, like ``number``."""
        return self._words[1] == other._words[1] and self._words[2] == other._words[2]

    @property
    def address(self) -> int:
        """Address of the words in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._words))

    def write(self, number: int, status: int, payload: bytes) -> None:
        """Replace the record. Only its owner may, one thread at a time. ``status`` is below 256."""
        words = self._words
        if payload is self.written and status == self.status:  # a repeated call: only its number changes
            words[1] = number  # as in native/replay.c
            words[3] = number ^ self.digest
            return
        length = len(payload)
        if not 0 <= status < 256:
            raise ValueError(f"Record.write: status (value={status}, allowed=0..255)")
        if length > self.room:
            raise ValueError(f"Record.write: payload bytes (value={length}, allowed=..{self.room})")
        self.written = None
        sequence = (words[0] | 1) + 1  # a predecessor that never finished leaves an odd one
        words[0] = sequence - 1
        full_fence()
        self._payload[:length] = payload
        digest = status << 56 | length << 32 | _checksum(sequence, status, payload)
        words[1], words[2], words[3] = number, digest, number ^ digest
        full_fence()
        words[0] = sequence
        self.written, self.status, self.digest = payload, status, digest

    def read(self) -> tuple[int, int, bytes] | None:
        """Return (number, status, payload); None before the first write, or if every read for about 20 ms was torn."""
        for attempt in range(self._PATIENCE):
            if attempt:
                time.sleep(0 if attempt < 20 else 50e-6)
            sequence = self._words[0]
            if sequence == 0:
                return None
            full_fence()
            number, digest, tie = self._words[1:4]
            status, length = digest >> 56, digest >> 32 & 0xFFFFFF
            payload = bytes(self._payload[:length])
            full_fence()
            is_whole = sequence % 2 == 0 and self._words[0] == sequence and number ^ digest == tie
            if is_whole and _checksum(sequence, status, payload) == digest & 0xFFFFFFFF:
                return number, status, payload
        return None


def _checksum(sequence: int, status: int, payload: bytes) -> int:
    """Return the CRC-32 of a payload, started with sequence and status, so that it covers them, too."""
    return zlib.crc32(payload, (sequence << 8 | status) & 0xFFFFFFFF)
