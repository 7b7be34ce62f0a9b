"""The one memory fence of the host code, for data that another process reads without a common lock.

Why a fence at all. A rank writes bytes, then a word that says "the bytes are there". x86 makes the stores of one core
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

import threading


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
