"""Pools on GPUs: a ``torch.cuda.MemPool`` whose segments are parts of a symmetric region."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.memory.release import becomes_idle
from sidelane.native.arena import ARENAS, ArenaLibrary, load_arenas


class DevicePlacer:
    """Places tensors in the memory of a pool on a GPU.

    Args:
        name: name of the pool.
        region: bytes of the pool.
        gone: called when no tensor refers to them any more.
        timeout_s: seconds that the device may take to become idle.

    Raises:
        UnavailableError: the library cannot be compiled, there are too many pools, or the device is not idle in time.
    """

    def __init__(self, name: str, region: torch.Tensor, gone: Callable[[], object], timeout_s: float) -> None:
        self._name, self._region, self._gone = name, region, gone
        try:
            self._library = load_arenas()
        except (RuntimeError, ImportError, OSError) as error:
            raise UnavailableError(f"pool: what GPUs need cannot be compiled: {error}") from error
        device = region.device
        assert device.index is not None
        # Queued calls may still use this memory, and from now on any stream may write there.
        deadline = time.monotonic() + timeout_s
        while not becomes_idle(device):
            if time.monotonic() > deadline:
                raise UnavailableError(f"pool: {device} has not become idle in {timeout_s} s")
        self._slot = self._library.open(region.data_ptr(), region.nbytes, device.index)
        if self._slot < 0:
            raise UnavailableError(f"pool: pools of this process (value={ARENAS + 1}, allowed={ARENAS} at once)")
        with torch.cuda.device(device):
            self._pool: Any = torch.cuda.MemPool(_allocator(self._library, self._slot))
        self.id: tuple[int, int] = self._pool.id
        self._maker = os.getpid()
        forks.in_copies_of(self, forks.keep_for_ever)

    @property
    def used(self) -> int:
        return int(self._library.used(self._slot))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self._library.refused(self._slot)
        try:
            with torch.cuda.use_mem_pool(self._pool, self._region.device):
                yield
        except torch.OutOfMemoryError as error:
            refused = int(self._library.refused(self._slot))
            if not refused:
                raise
            raise torch.OutOfMemoryError(
                f"{self._name}: torch's allocator asked for {refused} bytes, which do not fit (value={self.used} bytes "
                f"taken of {self._region.nbytes}; allowed=a larger nbytes of sidelane.pool, or fewer tensors at once)"
            ) from error

    def close(self) -> None:
        if os.getpid() == self._maker:
            with _lock:
                _closed.append(self)

    def end(self) -> bool:
        """Return the memory if no tensor or graph uses any of it and the device is idle. Return whether that was so."""
        if self._pool is not None:
            if self._pool.use_count() > 1 or any(segment["active_size"] for segment in self._pool.snapshot()):
                return False
            if not becomes_idle(self._region.device):
                return False
            self._pool = None  # torch frees its segments
        if not self._library.close(self._slot):
            return False
        self._gone()
        return True


def give_back_pools() -> None:
    """Return the memory of deleted pools whose tensors are all deleted, too. Does nothing while a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        waiting, _closed[:] = list(_closed), []
    left = [placer for placer in waiting if not placer.end()]
    with _lock:
        _closed.extend(left)


def _allocator(library: ArenaLibrary, slot: int) -> Any:
    """Return the torch allocator of a slot. It is never freed: torch uses it even at the end of the process."""
    if slot not in _allocators:
        made = torch.cuda.memory.CUDAPluggableAllocator(library.path, *library.names(slot)).allocator()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        _allocators[slot] = made
    return _allocators[slot]


_allocators: dict[int, Any] = {}
_closed: list[DevicePlacer] = []
_lock = forks.rlock()  # the last reference to a pool may be dropped at any point of the code


@forks.in_copies
def _begin_anew() -> None:
    """Forget, in a forked copy, the pools and allocators of the parent, which returns their memory itself."""
    _closed.clear()
    _allocators.clear()
