"""Deferred release of symmetric GPU memory: torch waits for the whole device when it frees it, and holds the GIL.

The last reference may be dropped at any moment, also by the garbage collector. If a graph is being captured, that wait
ends the process. If half a call is submitted, or a prelaunched call waits for its trigger, the wait never ends. So
dropped memory is kept here and released at safe moments: when memory is allocated, when a lane is closed, and at once
if there are no lanes. If a moment turns out to be unsafe, the release is left to the next one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from sidelane import forks
from sidelane.memory.storage import MemoryBytes, tensor_of

PATIENCE_S = 2.0
"""Seconds that a device may take to become idle."""


class Submitter(Protocol):
    """An object that submits work to a device; the work may wait for later submissions, by this process or by peers."""

    @property
    def lock(self) -> threading.Lock:
        """Lock that is held while a call is submitted."""
        ...

    def waits_for_the_host(self) -> bool:
        """Return True if the device has work that waits for an act of this host."""
        ...


class DeferredRelease:
    """Owner of an object that is released at a safe moment after the last reference to the owner is dropped."""

    __slots__ = ()

    def __init__(self, what: object, device: torch.device) -> None:
        _deferred[id(self)] = device, what  # not in this object: a collection of garbage would finalise both

    def __del__(self, is_at_exit: Callable[[], bool] = sys.is_finalizing) -> None:  # a module's names may be gone then
        deferred = None if is_at_exit() else _deferred.pop(id(self), None)
        if deferred is None:  # at exit, or made by the process that this one was forked from
            return
        _dropped.append(deferred)
        if not lanes:
            release_dropped()


class DeferredBytes(DeferredRelease, MemoryBytes):
    """Bytes of a tensor, whose memory is released as :class:`DeferredRelease` releases it."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        DeferredRelease.__init__(self, tensor, device)
        MemoryBytes.__init__(self, tensor.data_ptr(), tensor.nbytes, tensor.is_cuda)


def deferred_bytes(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return the bytes of a tensor as 1-d uint8; their memory is released at a safe moment.

    Args:
        tensor: the tensor.
        device: device whose kernels use it; None for that of the tensor.
    """
    return tensor_of(DeferredBytes(tensor, device or tensor.device), tensor.data_ptr(), tensor.device)


def release_dropped() -> bool:
    """Release dropped memory, if this moment is safe. Return True if none is left."""
    if not _dropped:
        return True
    if not _giving_back.acquire(blocking=False):
        return False  # another thread is releasing, or this one, interrupted by the garbage collector
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
    """Return the bytes of tensors that are in use, and of those that wait for their release."""
    deferred = sum(what.nbytes for _, what in list(_deferred.values()) if isinstance(what, torch.Tensor))
    return deferred, sum(what.nbytes for _, what in list(_dropped) if isinstance(what, torch.Tensor))


def becomes_idle(device: torch.device) -> bool:
    """Wait for a device, for ``PATIENCE_S`` at most. Return True if it has become idle."""
    if not torch.cuda.is_available():
        return True
    waiter = _waiters.get(device)
    if waiter is None or not waiter.is_alive():
        waiter = _waiters[device] = _Waiter(device)
        waiter.start()
    waiter.join(PATIENCE_S)
    return not waiter.is_alive() and waiter.was_idle


class _Waiter(threading.Thread):
    """Thread that waits for a device, so that the waiting thread can stop after a time-out."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(name=f"sidelane-waits-{device}", daemon=True)
        self._where = device
        self.was_idle = False

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # a capture in another thread
            torch.cuda.synchronize(self._where)
            self.was_idle = True


lanes: weakref.WeakSet[Any] = weakref.WeakSet()
"""Memories of open lanes, whose calls may be under way."""

submitters: weakref.WeakSet[Submitter] = weakref.WeakSet()

_deferred: dict[int, tuple[torch.device, object]] = {}
_dropped: list[tuple[torch.device, object]] = []
_giving_back = forks.lock()
_waiters: dict[torch.device, _Waiter] = {}


@forks.in_copies
def _begin_anew() -> None:
    """Forget, in a forked copy of the process, the memory of the parent, which the copy cannot release."""
    forks.never_finalize([*_deferred.values(), *_dropped])
    for each in (_deferred, _dropped, _waiters, lanes, submitters):
        each.clear()
