"""Buffers that FSDP2's parameters are gathered into, taken again and again, in one order on all ranks.

A free buffer must be free on all ranks, and all ranks must take the same one: otherwise one rank makes a new one, which
is a collective, and another one does not, or a gather writes to memory that a peer does not read. The ranks do not
communicate for that; they rely on program order: ranks train one model, so FSDP2 gathers and frees its layers in one
order on all of them, and a buffer is free when FSDP2 frees its last parameter (``RingPart.release``), even if other
references to it remain. The order of references would not be the same on all ranks: threads of other backends, and
Python's collector of cycles, drop theirs at any time. If a gather is dropped before its parameters had it (an error,
which ends the communicator on all ranks), the last reference releases the buffer.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidelane.errors import UnavailableError
from sidelane.memory.storage import storage_of


class NoRoom(UnavailableError):
    """Error: no symmetric memory is left for one more buffer; nothing has been changed."""


class Ring:
    """Symmetric buffers that are taken again when all of their parts were released. See the module.

    Args:
        allocate: function that returns a new buffer of so many bytes. Collective.
        device: device of the buffers.

    Attributes:
        behind_backward: a backward has freed parameters since the last one was taken.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self._allocate, self._handle = allocate, torch.get_device_module(device)
        self._free: deque[_Free] = deque()
        self._phase = 0
        self.behind_backward = False

    def take(self, nbytes: int, stream: Any, *, at_once: bool) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a buffer, ordered on ``stream`` behind its last use, and a function to call when it is free again.

        Args:
            nbytes: size of the buffer in bytes.
            stream: stream of its first use.
            at_once: accept a buffer that has become free since the last call. Its last use may run still: a gather that
                shall overlap with that use takes an older buffer, or a new one.

        Raises:
            NoRoom: no memory is left; on all ranks alike.
        """
        found = next((one for one in tuple(self._free) if one.matches(nbytes, self._phase, at_once)), None)
        if found is None:
            try:
                whole = self._allocate(nbytes)
            except UnavailableError as error:
                raise NoRoom(str(error)) from None
        else:
            self._free.remove(found)
            stream.wait_event(found.event)
            whole = found.whole
        self._phase += 1
        return whole, lambda: self._came_back(whole)

    def clear(self) -> None:
        """Drop the free buffers."""
        self._free.clear()

    def _came_back(self, whole: torch.Tensor) -> None:
        # FSDP2 has just freed the parameters, on the stream that has computed with them.
        if not sys.is_finalizing():
            self._free.append(_Free(whole, self._handle.current_stream().record_event(), self._phase))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Free:
    """A free buffer, the event of its last use, and the phase in which it became free."""

    whole: torch.Tensor
    event: Any
    phase: int

    def matches(self, nbytes: int, phase: int, at_once: bool) -> bool:
        return self.whole.nbytes == nbytes and (at_once or self.phase < phase)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RingPart:
    """Memory of one parameter.

    Attributes:
        memory: bytes of the parameter, with a storage of their own.
        release: function that gives it back once, however often it is called, and with the last reference at the
            latest.
    """

    memory: torch.Tensor
    release: Callable[[], None]

    @classmethod
    def empty(cls, device: torch.device) -> RingPart:
        """Return a part without memory, for a parameter without elements."""
        return cls(torch.empty(0, dtype=torch.uint8, device=device), lambda: None)


def cut(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], free: Callable[[], None]) -> list[RingPart]:
    """Cut a buffer into parts.

    Args:
        whole: the buffer.
        offsets: offset of each part in bytes.
        sizes: size of each part in bytes; 0 for parts without memory.
        free: function called when all parts were given back.
    """
    count = _Countdown(sum(map(bool, sizes)), free)
    made = []
    for offset, nbytes in zip(offsets, sizes, strict=True):
        if nbytes:
            once = _Once(count)
            made.append(RingPart(storage_of(whole, offset, nbytes, once), once))
        else:
            made.append(RingPart.empty(whole.device))
    return made


class _Once:
    """Function that runs at its first call only, in whichever thread."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = [then]

    def __call__(self) -> None:
        try:
            then = self._then.pop()
        except IndexError:
            return
        then()


class _Countdown:
    """Function that runs when it has been called so many times, in any threads."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count, self._then, self._lock = count, then, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count:
                return
        self._then()
