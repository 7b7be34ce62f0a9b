"""When symmetric memory of a GPU is given back: torch waits for the whole device then, and lets no other thread run.

The last reference may go at any moment, in the garbage collector, too. If a graph is being captured, such a wait ends
the process. If half a call is submitted, or a prelaunched one waits for its trigger, it never ends. So what is dropped
is kept here, and given back at moments that are chosen: when memory is allocated, when a lane is closed, and at once
where there are no lanes. A moment that turns out to be a bad one is left to the next.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from typing import Any, Protocol

import torch

from sidelane import forks

PATIENCE_S = 2.0
"""That a device may take to become idle."""


class Submitter(Protocol):
    """Gives a device work that may wait for what has yet to be submitted, here or by peers."""

    @property
    def lock(self) -> threading.Lock:
        """Held while it submits a call."""
        ...

    def waits_for_the_host(self) -> bool:
        """True if the device has work that only this process can end."""
        ...


class Kept:
    """Keeps something that is to be given back at such a moment, once nobody refers to this object any more."""

    __slots__ = ()

    def __init__(self, what: object, device: torch.device) -> None:
        _kept[id(self)] = device, what  # not in this object: a collection of garbage would finalise both

    def __del__(self) -> None:
        kept = None if sys.is_finalizing() else _kept.pop(id(self), None)
        if kept is None:  # or it is of the process that this one was forked from
            return
        _dropped.append(kept)
        if not lanes:
            give_back()


class KeptBytes(Kept):
    """Bytes of a tensor: ``torch.as_tensor`` makes one that keeps this object as long as its storage lives."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor, tensor.device)
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def keep_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes, 1-d uint8, of which the memory is given back as described above."""
    kept = torch.as_tensor(KeptBytes(tensor), device=tensor.device)
    assert kept.data_ptr() == tensor.data_ptr(), "a copy"
    return kept


def give_back() -> bool:
    """Give back what was dropped, if now is a good moment. True if nothing is left."""
    if not _dropped:
        return True
    if not _giving_back.acquire(blocking=False):
        return False  # another thread does, or this one: a collection of garbage can happen in between
    try:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        with contextlib.ExitStack() as stack:
            for submitter in list(submitters):
                if not submitter.lock.acquire(timeout=PATIENCE_S):
                    return False
                stack.callback(submitter.lock.release)
                if submitter.waits_for_the_host():
                    return False
            batch = list(_dropped)  # others may add to it meanwhile
            if not all(map(becomes_idle, {device for device, _ in batch})):
                return False
            del _dropped[: len(batch)]
            batch.clear()
        return not _dropped
    finally:
        _giving_back.release()


def held_bytes() -> tuple[int, int]:
    """Bytes of tensors that somebody still refers to, and of those that wait for a good moment."""
    kept = sum(what.nbytes for _, what in list(_kept.values()) if isinstance(what, torch.Tensor))
    return kept, sum(what.nbytes for _, what in list(_dropped) if isinstance(what, torch.Tensor))


def becomes_idle(device: torch.device) -> bool:
    """Wait for a device as torch will, but not for ever: ``PATIENCE_S``. True if it had nothing left to do."""
    if not torch.cuda.is_available():
        return True
    waiter = _waiters.get(device)
    if waiter is None or not waiter.is_alive():
        waiter = _waiters[device] = _Waiter(device)
        waiter.start()
    waiter.join(PATIENCE_S)
    return not waiter.is_alive() and waiter.was_idle


class _Waiter(threading.Thread):
    """Waits for a device in place of a thread that has something else to do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(name=f"sidelane-waits-{device}", daemon=True)
        self._where = device
        self.was_idle = False

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # a capture in another thread
            torch.cuda.synchronize(self._where)
            self.was_idle = True


lanes: weakref.WeakSet[Any] = weakref.WeakSet()
"""What is open and may be in the middle of a call."""

submitters: weakref.WeakSet[Submitter] = weakref.WeakSet()

_kept: dict[int, tuple[torch.device, object]] = {}
_dropped: list[tuple[torch.device, object]] = []
_giving_back = forks.lock()
_waiters: dict[torch.device, _Waiter] = {}


@forks.in_copies
def _begin_anew() -> None:
    """In a forked copy of the process: what was kept is its parent's, on whose devices it can give back nothing. What
    it keeps from now on is its own.
    """
    forks.keep_for_ever([*_kept.values(), *_dropped])
    for each in (_kept, _dropped, _waiters, lanes, submitters):
        each.clear()
