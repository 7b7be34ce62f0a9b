"""Symmetric memory on GPUs, by ``torch.distributed._symmetric_memory`` (its CUDA backend).

It differs from ``symm_mem.empty`` followed by ``symm_mem.rendezvous`` on the caller's group:

- Memory does not come from torch's pool of symmetric segments: the segment that a rank gets there depends on what it
  has freed so far, and a rank that gets a used one skips the rendezvous in which its peers wait.
- torch numbers the exchanges of a rendezvous per process, not per group. A rank that took part in another group's
  rendezvous meanwhile would look for its peers under other numbers, and hang. A store that renumbers the keys, under a
  group name of its own, keeps sub-groups apart.
- Multicast objects are never made, whatever the environment says.
- Ranks may share a device, which torch refuses unless a variable allows it: one GPU is enough to try several ranks.
- Freeing memory waits for the whole device, so that it is done at safe moments (``memory/release.py``).
- torch passes the handles of memory through one socket per process. Threads with a communicator each would receive
  each other's handles, so a process makes one rendezvous at a time, in an order that locks of rank 0 decide.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidelane import forks
from sidelane.errors import (
    CommunicatorClosedError,
    MismatchError,
    Page,
    PeerError,
    PeerTimeoutError,
    UnavailableError,
)
from sidelane.memory.exchange import Exchange
from sidelane.memory.heap import SymmetricBlock
from sidelane.memory.release import DeferredRelease, deferred_bytes, lanes, release_dropped
from sidelane.memory.storage import persistent

_POLL_S = 500e-6


@contextlib.contextmanager
def alone_in(pids: Sequence[int], timeout_s: float) -> Iterator[None]:
    """Hold the locks of the processes of all ranks, taken in the order of process ids, so that there is no deadlock.

    Raises:
        PeerTimeoutError: one did not become free within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        for pid in sorted(set(pids)):
            lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            forks.in_copies_of(lock, socket.socket.close)  # a forked copy would keep the lock
            while not _took(lock, pid):
                if time.monotonic() > deadline:
                    text = f"allocate: process {pid} was in the middle of another one"
                    raise PeerTimeoutError(text, (pids.index(pid),))
                time.sleep(_POLL_S)
        yield


def _took(lock: socket.socket, pid: int) -> bool:
    try:
        lock.bind(f"\0sidelane/{pid}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


DEFAULT_TIMEOUT_S = 600.0
# torch reads these at each rendezvous. Multicast objects are useless here, and on some hosts they have put GPUs out of
# service.
_FOR_TORCH = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


class TorchSymmetricMemory:
    """Allocator of symmetric GPU blocks for one group, all ranks on one machine.

    Making one is collective.

    Args:
        exchange: connection of the ranks.
        device: CUDA device of this rank.
        timeout_s: seconds that a rank may take to come to an allocation.

    Raises:
        ValueError: the device is no CUDA device.
        PeerError, PeerTimeoutError: a rank did not take part.
    """

    def __init__(self, exchange: Exchange, device: torch.device, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if device.type != "cuda":
            raise ValueError(f"TorchSymmetricMemory: device (value={device}, allowed=cuda)")
        self._rank, self._world_size = exchange.rank, exchange.world_size
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._exchange: Exchange | None = exchange
        self._timeout_s = timeout_s
        # Rank 0 names the instance: torch keeps groups by name, in all of the process.
        name = exchange("symmetric memory", lambda: f"sidelane/{os.getpid()}/{next(_instances)}")[0]
        self._name = name
        wait_for = functools.partial(exchange.wait_for, "allocate: map")
        self._store = RenumberingStore(dist.PrefixStore(name, exchange.store), wait_for)
        self._group = dist.ProcessGroup(self._store, self._rank, self._world_size)  # the group, under that name
        _c10d()._register_process_group(name, self._group)
        self._is_known = False
        lanes.add(self)

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """Allocate ``nbytes`` (> 0) on every rank, zeroed. Collective. Synchronises the current stream.

        Raises:
            ValueError: ``nbytes`` is not positive.
            MismatchError: ranks asked for different sizes.
            UnavailableError: a device has no room, its driver cannot share memory, or torch's symmetric memory was set
                to another backend. Raised on every rank alike.
            PeerError, PeerTimeoutError: a rank did not take part.
            CommunicatorClosedError: ``close`` was called.
        """
        if self._exchange is None:
            raise CommunicatorClosedError("TorchSymmetricMemory.allocate: the memory was closed")
        if nbytes <= 0:
            raise ValueError(f"allocate: nbytes must be positive (value={nbytes})")
        release_dropped()
        tensor: torch.Tensor | None = None

        def take() -> tuple[int, str, int]:
            nonlocal tensor
            tensor, problem = self._take(nbytes)
            return nbytes, problem, os.getpid()

        offers = self._exchange("allocate", take)
        sizes = [size for size, _, _ in offers]
        if len(set(sizes)) > 1:
            named = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
            raise MismatchError(f"allocate: ranks ask for different sizes in bytes: {named}")
        problems = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(offers) if text]
        if problems:
            raise UnavailableError(f"allocate: no symmetric memory of {nbytes} bytes: {'; '.join(problems)}")
        assert tensor is not None
        if self._world_size == 1:
            return SymmetricBlock(deferred_bytes(tensor), (tensor.data_ptr(),), None)
        handle = self._map(tensor, [pid for _, _, pid in offers])
        # Blocks begin at the tensor; torch's addresses begin at the allocation.
        offset = tensor.data_ptr() - handle.buffer_ptrs[self._rank]
        addresses = tuple(base + offset for base in handle.buffer_ptrs)
        return SymmetricBlock(deferred_bytes(tensor), addresses, DeferredRelease(handle, self._device))

    def close(self) -> None:
        """Drop the exchange. Tensors that callers still hold remain valid. Idempotent."""
        if self._exchange is not None:
            _c10d()._unregister_process_group(self._name)
        self._exchange = None
        lanes.discard(self)
        release_dropped()

    def _map(self, tensor: torch.Tensor, pids: Sequence[int]) -> Any:
        """Map the memory of all ranks while none of their processes makes another rendezvous; return torch's handle."""
        assert self._exchange is not None
        handle: Any = None

        def map_all() -> None:
            nonlocal handle
            rendezvous = functools.partial(self._rendezvous, tensor)
            handle = persistent(self._device, rendezvous) if _COMPILES_GRAPHS in sys.modules else rendezvous()

        with contextlib.ExitStack() as stack:

            def enter_alone() -> None:
                if self._rank == 0:
                    stack.enter_context(alone_in(pids, self._timeout_s / 2))  # the others wait meanwhile

            self._exchange("allocate: one at a time", enter_alone)
            self._exchange("allocate: map", map_all)
        return handle

    def _rendezvous(self, tensor: torch.Tensor) -> Any:
        """Map the memory of all ranks. Collective.

        Raises:
            PeerTimeoutError: a rank did not come. PeerError: a rank died or failed in another way.
        """
        symmetric_memory = _symmetric_memory()
        self._store.begin_round()
        try:
            with _set_in_environment():
                try:
                    return symmetric_memory.rendezvous(tensor, self._name)
                except RuntimeError as error:
                    # Some versions of torch look groups up in a separate table. Other versions compare allocation
                    # counts for groups in that table, which may differ between ranks: so it is filled only if torch
                    # misses the group.
                    if "no group info" not in str(error) or self._is_known:
                        raise
                self._is_known = True
                symmetric_memory.set_group_info(self._name, self._rank, self._world_size, self._store)
                return symmetric_memory.rendezvous(tensor, self._name)
        except PeerError:
            raise  # raised by the store
        except dist.DistError as error:
            raise PeerError(f"allocate: exchanging memory handles failed: {error}") from error
        except RuntimeError as error:
            how = "Config.peers='host' (SIDELANE_PEERS=host) takes host memory"
            raise UnavailableError(f"allocate: the peers' memory cannot be mapped: {error}; {how}") from error

    def _take(self, nbytes: int) -> tuple[torch.Tensor | None, str]:
        """Allocate zeroed memory that peers can map. Return it, or None and the problem."""
        symmetric_memory = _symmetric_memory()
        backend = symmetric_memory.get_backend(self._device)
        if backend != "CUDA":
            return None, f"torch's symmetric memory is set to another backend (value={backend}, allowed=CUDA)"
        try:
            with torch.cuda.device(self._device):
                tensor: torch.Tensor = symmetric_memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device)
                tensor.zero_()
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            return None, str(error).splitlines()[0]
        return tensor, ""


class RenumberingStore(dist.Store):
    """Store that replaces the numbers in torch's rendezvous keys by numbers that are equal on all ranks.

    torch's keys are ``<prefix>/<number>/<rank>``. The number is replaced by that of the rendezvous on this store and,
    within it, the order in which numbers first appear: in the second rendezvous, ``CUDASymmetricMemory/7/0`` and
    ``.../8/0`` become ``2/0/0`` and ``2/1/0``, on a rank where torch is at 7 as on one where it is at 3.

    Args:
        store: store that holds the values.
        wait_for: waits until no rank is missing (see :meth:`Exchange.wait_for`): it notices a rank that dies, for which
            torch would wait until the time-out.
    """

    def __init__(self, store: dist.Store, wait_for: Callable[[Callable[[], Sequence[int]]], None]) -> None:
        super().__init__()
        self._store, self._wait_for = store, wait_for
        self._round = 0
        self._numbers: dict[str, int] = {}

    def begin_round(self) -> None:
        """Begin the next rendezvous: the next keys belong to it."""
        self._round += 1
        self._numbers.clear()

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._renumber(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._renumber(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, with the time-out of the communicator."""
        renamed = [self._renumber(key) for key in keys]

        def missing() -> list[int]:
            return [int(key.rpartition("/")[2]) for key in renamed if not self._store.check([key])]

        self._wait_for(missing)

    def _renumber(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        step = self._numbers.setdefault(f"{prefix}/{number}", len(self._numbers))
        return f"{self._round}/{step}/{rank}"


@contextlib.contextmanager
def _set_in_environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _FOR_TORCH}
    os.environ.update(_FOR_TORCH)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _c10d() -> Any:
    from torch._C import _distributed_c10d

    return _distributed_c10d


_COMPILES_GRAPHS = "torch._inductor.cudagraph_trees"
"""Module of ``torch.compile``, which may be running this code in the memory pool of a graph where it is loaded.

No tensors may remain in such a pool, and a handle keeps two arrays of addresses from torch's allocator: then
``persistent`` makes it on another thread, which costs time otherwise.
"""


def _symmetric_memory() -> Any:
    found = getattr(_c10d(), "_SymmetricMemory", None)
    if found is None:
        raise UnavailableError(
            "this PyTorch has no symmetric memory (needs 2.11 or newer, built with CUDA)", page=Page.INSTALLATION
        )
    return found


_instances = itertools.count()
