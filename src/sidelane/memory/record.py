"""A record in shared memory with one writer and any number of readers, who get all of it or nothing."""

from __future__ import annotations

import struct
import time
import zlib

from sidelane.memory.ordering import Fence, full_fence


class Record:
    """A number, a status and a payload that change together.

    Words of 8 bytes: sequence, number, status, length and checksum (4 bytes each); then the payload. The sequence is
    odd while the writer is at work and 0 before the first write. A reader accepts what it copied if the sequence is
    even, did not change, and goes with the checksum of everything else. The sequence alone would do on x86; the fences
    make it do elsewhere; the checksum turns a mistake in either into a detected one.

    Args:
        view: where it lives, aligned to 8 bytes, zeroed by whoever allocated it.
    """

    HEADER_BYTES = 32
    _PATIENCE = 400

    def __init__(self, view: memoryview) -> None:
        self._words = view[: self.HEADER_BYTES].cast("Q")
        self._payload = view[self.HEADER_BYTES :]
        self._written: bytes | None = None  # what this object, the writer's, last put there
        self._written_checksum = 0
        self._fence = Fence()

    @property
    def is_blank(self) -> bool:
        """True before the first write."""
        return self._words[0] == 0

    @property
    def number(self) -> int:
        """The number alone, from a single load: a hint whether ``read`` is worth it."""
        return self._words[1]

    def write(self, number: int, status: int, payload: bytes) -> None:
        """Replace the record. Only its owner may, one thread at a time."""
        fresh = payload is not self._written  # calls repeat, and bytes do not change
        if fresh and len(payload) > len(self._payload):
            raise ValueError(f"Record.write: payload bytes (value={len(payload)}, allowed=..{len(self._payload)})")
        words, fence = self._words, self._fence
        sequence = (words[0] | 1) + 1  # a predecessor that never finished leaves an odd one
        words[0] = sequence - 1
        fence.release()
        fence.acquire()
        if fresh:
            self._payload[: len(payload)] = payload
            self._written, self._written_checksum = payload, zlib.crc32(payload)
        words[1], words[2] = number, status
        words[3] = len(payload) << 32 | _checksum(sequence, number, status, self._written_checksum)
        fence.release()
        fence.acquire()
        words[0] = sequence

    def read(self) -> tuple[int, int, bytes] | None:
        """(number, status, payload); None if nothing was written, or if no whole record was there for about 20 ms."""
        for attempt in range(self._PATIENCE):
            if attempt:
                time.sleep(0 if attempt < 20 else 50e-6)
            sequence = self._words[0]
            if sequence == 0:
                return None
            full_fence()
            number, status, sizes = self._words[1], self._words[2], self._words[3]
            length, checksum = sizes >> 32, sizes & 0xFFFFFFFF
            payload = bytes(self._payload[:length])
            full_fence()
            settled = sequence % 2 == 0 and self._words[0] == sequence
            if settled and _checksum(sequence, number, status, zlib.crc32(payload)) == checksum:
                return number, status, payload
        return None


_pack = struct.Struct("<QQQ").pack


def _checksum(sequence: int, number: int, status: int, of_payload: int) -> int:
    return zlib.crc32(_pack(sequence, number, status), of_payload)
