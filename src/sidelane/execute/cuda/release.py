"""Rescue of streams that hang: read the flags of all ranks, and release waits that cannot end.

CUDA maps the streams of a context to a few hardware channels (``CUDA_DEVICE_MAX_CONNECTIONS``: 8), whatever their
priority, and a stream that hangs holds its channel. Measured on H200s with driver 580: while fewer streams hang than
there are channels, memory operations run on any other stream, and copies on some. From then on only the memory
operations of a second context run. It takes memory and a tenth of a second, so that it is made when it is needed. Host
memory is pinned at start-up, since pinning can wait for the device.

A thread that loads a kernel waits for running kernels and waiting streams. Until then, other threads' calls for copies
do not return either, while memory operations do (H200, driver 580). So copies are submitted by a separate thread, which
is abandoned if it does not return.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

from sidelane import forks
from sidelane.execute.base import Addresses
from sidelane.execute.cuda.driver import Driver, DriverError, SecondContext
from sidelane.execute.cuda.native import MemoryOps
from sidelane.execute.cuda.stall import RELEASE_STEP
from sidelane.program.collective import MAX_NODE_RANKS
from sidelane.program.ir import Comparison, Program, Wait
from sidelane.program.wraparound import WORD_MASK

FLAG_CAPACITY = 8192
"""Largest number of flags of one rank, over all flag memories of its programs, that can be released."""

LANES = 8
"""Number of streams for reading and releasing: one may share a channel with a hanging stream, hardly all of them."""

_WORD_BYTES = 4
READ_CAPACITY = 512
"""Number of flags of each rank that are read to explain a stall: more than any program has."""

_READ_PATIENCE_S = 0.02
_RELEASE_PATIENCE_S = 0.1
SUBMIT_S = 5.0  # seconds that submitting a copy may take once the streams have been released
_MAX_BATCH = 255


class FlagRescue:
    """Flags of the programs of one executor. Any thread that is attached to the device may use it, one at a time.

    Attributes:
        has_stored: the stores of a release have landed: every wait that was submitted before it passes once a stream
            comes to it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lanes = [driver.create_stream(urgent=True) for _ in range(LANES)]
        self._second: SecondContext | None = None
        # A part for each lane: what a lane reads late must not touch what another has read.
        self._scratch = driver.host_words(len(self._lanes) * MAX_NODE_RANKS * READ_CAPACITY)
        self._reader: threading.Thread | None = None
        self._reads_on: int | None = None  # the lane that it is busy with
        # By address of a flag memory of this rank: number of flags, and the values of waits for equality.
        self._regions: dict[int, tuple[int, dict[int, int]]] = {}
        self.has_stored = False
        self._has_work = False  # the lanes may have some
        self._submitting = forks.lock()  # held while stores are submitted: no region is forgotten meanwhile

    def register(self, program: Program, rank: int, addresses: Addresses) -> None:
        """Remember the flags that ``rank`` waits for in ``program``.

        Raises:
            ValueError: there are too many.
        """
        base = addresses.flags[rank]
        count, equal = self._regions.get(base, (0, {}))
        count = max(count, program.flag_count)
        others = sum(size for place, (size, _) in self._regions.items() if place != base)
        if others + count > FLAG_CAPACITY:
            raise ValueError(f"load: flags (value={others + count}, allowed=..{FLAG_CAPACITY})")
        for queue in program.queues_of(rank):
            for command in queue.commands:
                if isinstance(command, Wait) and command.comparison is Comparison.EQ and not command.value.per_epoch:
                    equal[command.flag.index] = command.value.base
        self._regions[base] = (count, equal)

    def forget(self, bases: Sequence[int]) -> bool:
        """Store to these flag memories no more: they are about to be freed. Their streams must have passed all waits.

        Returns:
            True; False if a store is under way and does not come to its end, so that the memory must not be freed.
        """
        deadline = time.monotonic() + SUBMIT_S
        if not self._submitting.acquire(timeout=SUBMIT_S):  # by a thread that hangs in the driver
            return False
        try:
            for base in bases:
                self._regions.pop(base, None)
            if not self._has_work:  # and nothing is asked of streams, while one may be captured
                return True
            ends: list[Callable[[], bool]] = [functools.partial(self._driver.is_idle, lane) for lane in self._lanes]
            if self._second is not None:
                ends.append(self._second.is_idle)
            return all(_becomes(end, deadline) for end in ends)
        except DriverError:
            return False
        finally:
            self._submitting.release()

    def release(self, epoch: int) -> None:
        """Write to every flag a value that fulfils its waits: far beyond ``epoch``, or the value of a frozen wait.

        A peer's late signal can restore an old value, and a frozen program resets its flags: call it repeatedly.

        Raises:
            DriverError: no lane works, and there is no memory for a second context.
        """
        with self._submitting:
            self._has_work = True
            self.has_stored |= self._release(self._batches((epoch + RELEASE_STEP) & WORD_MASK))

    def _release(self, batches: Sequence[MemoryOps]) -> bool:
        """Store on all lanes that are idle, or else in a second context. Return True once the stores have landed."""
        if self._second is None:
            lanes = [lane for lane in self._lanes if lane != self._reads_on and self._driver.is_idle(lane)]
            for lane in lanes:
                self._driver.submit(self._driver.bind_memory_ops(batch, lane) for batch in batches)
            if any(self._becomes_idle(lane, _RELEASE_PATIENCE_S / LANES) for lane in lanes):
                return True
            self._second = self._driver.second_context()
        if self._second.is_idle():
            self._second.submit(batches)
        return _becomes(self._second.is_idle, time.monotonic() + _RELEASE_PATIENCE_S)

    def read(self, program: Program, addresses: Addresses, timeout_s: float) -> dict[int, Sequence[int]]:
        """Return the flag words of all ranks of ``program``; nothing if reading takes longer than ``timeout_s``."""
        if not 0 < program.flag_count <= READ_CAPACITY or self._reader is not None:
            return {}  # there is no end of the last read
        found: list[dict[int, Sequence[int]]] = []
        reader = threading.Thread(
            target=lambda: found.append(self._read(program, addresses, timeout_s)), name="sidelane-reads", daemon=True
        )
        reader.start()
        reader.join(timeout_s + _READ_PATIENCE_S)
        if reader.is_alive():
            self._reader = reader
        return found[0] if found else {}

    def _read(self, program: Program, addresses: Addresses, timeout_s: float) -> dict[int, Sequence[int]]:
        self._driver.attach_thread()
        self._has_work = True
        count = program.flag_count
        deadline = time.monotonic() + timeout_s
        for number, lane in enumerate(self._lanes):
            try:
                if not self._driver.is_idle(lane):
                    continue
                self._reads_on = lane
                if self._read_on(number, addresses, count):
                    first = number * MAX_NODE_RANKS * READ_CAPACITY
                    words = self._scratch.array[first : first + count * len(addresses.flags)].reshape(-1, count)
                    return {rank: row.tolist() for rank, row in enumerate(words)}
            except DriverError:
                return {}
            finally:
                self._reads_on = None
            if time.monotonic() > deadline:
                break
        return {}

    def close(self) -> bool:
        """Store and read nothing more, wait for the streams, and destroy them.

        Returns:
            True; False if work of theirs does not come to its end, so that flags, words and scratch must be kept.
        """
        if self._reader is not None:
            self._reader.join(SUBMIT_S)
        has_ended = self.forget(list(self._regions)) and (self._reader is None or not self._reader.is_alive())
        for lane in self._lanes:
            if lane != self._reads_on:
                self._driver.destroy_stream(lane)
        if self._second is not None:
            self._second.close()
        return has_ended

    def _batches(self, passing: int) -> list[MemoryOps]:
        writes = [
            (base + _WORD_BYTES * index, equal.get(index, passing))
            for base, (count, equal) in list(self._regions.items())
            for index in range(count)
        ]
        batches = []
        for start in range(0, len(writes), _MAX_BATCH):
            batch = self._driver.memory_ops()
            for address, value in writes[start : start + _MAX_BATCH]:
                batch.write(address, value)
            batches.append(batch)
        return batches

    def _read_on(self, number: int, addresses: Addresses, count: int) -> bool:
        """Copy all flags to the host on one lane. Return False if the lane hangs."""
        lane, part = self._lanes[number], self._scratch.address + _WORD_BYTES * number * MAX_NODE_RANKS * READ_CAPACITY
        nbytes = _WORD_BYTES * count
        self._driver.submit(
            self._driver.bind_copy(part + nbytes * rank, base, nbytes, lane)
            for rank, base in enumerate(addresses.flags)
        )
        return self._becomes_idle(lane, _READ_PATIENCE_S)

    def _becomes_idle(self, lane: int, patience_s: float) -> bool:
        return _becomes(functools.partial(self._driver.is_idle, lane), time.monotonic() + patience_s)


def _becomes(is_true: Callable[[], bool], deadline: float) -> bool:
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True
