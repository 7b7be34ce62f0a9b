"""Buffers that FSDP2's parameters are gathered into, taken again and again, in one order on all ranks.

What is free must be free on all ranks, and the same buffer be taken on all of them: else one rank makes a new one,
which is a collective, and another one does not, or a gather writes where a peer does not look. Nothing is agreed upon
for that. It rests on program order alone: ranks train one model, so FSDP2 gathers and frees its layers in one order on
all of them, and a buffer is free when FSDP2 frees its last parameter (``RingPart.release``), no matter who still
refers to it. References go in no such order: threads of other backends, and Python's collector of cycles, drop theirs
when they get to it. Where a gather is dropped before its parameters had it (an error, which ends the communicator on
all ranks), the last reference does it.
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
    """There is no symmetric memory left for one more buffer; nothing has happened."""


class Ring:
    """Symmetric buffers that are taken again when all of their parts were released. See the module.

    Args:
        allocate: a new buffer of so many bytes. Collective.
        device: of the buffers.

    Attributes:
        behind_backward: a backward has freed parameters since the last one was taken.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self._allocate, self._handle = allocate, torch.get_device_module(device)
        self._free: deque[_Free] = deque()
        self._turn = 0
        self.behind_backward = False

    def take(self, nbytes: int, stream: Any, *, at_once: bool) -> tuple[torch.Tensor, Callable[[], None]]:
        """A buffer, ordered on ``stream`` behind what used it before; and what to call when it is free.

        Args:
            nbytes: of the buffer.
            stream: on which it is used first.
            at_once: one that has become free since the last time will do. What used it may run still: a gather that
                shall run next to that takes an older one, or a new one.

        Raises:
            NoRoom: on all ranks alike.
        """
        found = next((one for one in tuple(self._free) if one.matches(nbytes, self._turn, at_once)), None)
        if found is None:
            try:
                whole = self._allocate(nbytes)
            except UnavailableError as error:
                raise NoRoom(str(error)) from None
        else:
            self._free.remove(found)
            stream.wait_event(found.event)
            whole = found.whole
        self._turn += 1
        return whole, lambda: self._came_back(whole)

    def clear(self) -> None:
        """Let go of what is free."""
        self._free.clear()

    def _came_back(self, whole: torch.Tensor) -> None:
        # FSDP2 has just freed the parameters, on the stream that has computed with them.
        if not sys.is_finalizing():
            self._free.append(_Free(whole, self._handle.current_stream().record_event(), self._turn))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Free:
    """A buffer, behind what it is free, and when it became so."""

    whole: torch.Tensor
    event: Any
    turn: int

    def matches(self, nbytes: int, turn: int, at_once: bool) -> bool:
        return self.whole.nbytes == nbytes and (at_once or self.turn < turn)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RingPart:
    """Memory of one parameter.

    Attributes:
        memory: its bytes, with a storage of their own.
        release: gives it back: once, however often it is called, and with the last reference at the latest.
    """

    memory: torch.Tensor
    release: Callable[[], None]

    @classmethod
    def empty(cls, device: torch.device) -> RingPart:
        """Of a parameter of which nobody has anything."""
        return cls(torch.empty(0, dtype=torch.uint8, device=device), lambda: None)


def cut(whole: torch.Tensor, places: Sequence[int], sizes: Sequence[int], free: Callable[[], None]) -> list[RingPart]:
    """Parts of a buffer.

    Args:
        whole: the buffer.
        places: where each begins, in bytes.
        sizes: bytes of each; 0 for parts without memory.
        free: called when all were given back.
    """
    count = _Countdown(sum(map(bool, sizes)), free)
    made = []
    for place, nbytes in zip(places, sizes, strict=True):
        if nbytes:
            once = _Once(count)
            made.append(RingPart(storage_of(whole, place, nbytes, once), once))
        else:
            made.append(RingPart.empty(whole.device))
    return made


class _Once:
    """Calls what it was given the first time that it is called, by whichever thread."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = [then]

    def __call__(self) -> None:
        try:
            then = self._then.pop()
        except IndexError:
            return
        then()


class _Countdown:
    """Calls what it was given when it has been called so many times, in any threads."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count, self._then, self._lock = count, then, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count:
                return
        self._then()
