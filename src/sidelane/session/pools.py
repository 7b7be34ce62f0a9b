"""Pools: the results of any torch operation lie in symmetric memory, as with torch's own memory pools.

On GPUs a pool is a ``torch.cuda.MemPool`` whose segments are parts of a symmetric region. The library of ``arena.c``
gives them out: it is compiled when the first pool is made on a GPU, and kept like ``replay.c``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.resources
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from sidelane import forks
from sidelane.errors import Page, UnavailableError, explained, see
from sidelane.memory.allocator import SEGMENT_BYTES, rounded
from sidelane.memory.heap import POOL
from sidelane.memory.release import becomes_idle
from sidelane.modes import exclude_compilers, untraced
from sidelane.native.build import find_compiler, load_or_compile
from sidelane.session.communicator import Communicator
from sidelane.sizes import parse_bytes

if TYPE_CHECKING:
    from sidelane.session.pool_cpu import HostPlacer

ARENAS = 16
"""Largest number of pools that a process may have at once."""


class _Entered(threading.local):
    """Context managers through which this thread has entered a pool."""

    def __init__(self) -> None:
        self.stack: list[contextlib.AbstractContextManager[object]] = []


@untraced
class SymmetricPool:
    """Symmetric memory for all that torch allocates inside of a ``with`` block. Made by :func:`pool`.

    Attributes:
        name: name of the pool, the same on all ranks.
        nbytes: size in bytes.
    """

    def __init__(self, communicator: Communicator, name: str, region: torch.Tensor) -> None:
        self.name: str = name
        self.nbytes: int = region.nbytes
        heap = communicator.heap
        if not communicator.backend.peers.through_host:  # there its tensors are ordinary memory, as all of callers are
            heap.add_pool(name, region)
        gone = functools.partial(heap.drop_pool, name)
        try:
            self._placer: HostPlacer | DevicePlacer
            if region.is_cuda:
                self._placer = DevicePlacer(name, region, gone, communicator.config.timeout_s)
            else:
                from sidelane.session.pool_cpu import HostPlacer

                self._placer = HostPlacer(name, region, gone)
        except BaseException:
            gone()
            raise
        self._entered = _Entered()

    @property
    def used(self) -> int:
        """Bytes of the tensors in the pool; on GPUs the bytes that torch's allocator has taken for them, and keeps."""
        return self._placer.used

    @property
    def id(self) -> tuple[int, int]:
        """On GPUs the number of torch's memory pool: ``torch.cuda.graph(graph, pool=pool.id)`` places a graph there.

        Raises:
            AttributeError: on CPU ranks.
        """
        return self._placer.id  # type: ignore[union-attr]

    def __enter__(self) -> SymmetricPool:
        active = self._placer.active()
        active.__enter__()
        self._entered.stack.append(active)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.stack.pop().__exit__(kind, error, trace)

    def __del__(self) -> None:
        placer = getattr(self, "_placer", None)
        if placer is not None:
            placer.close()


@exclude_compilers
@explained(Page.ERRORS)
def pool(communicator: Communicator, nbytes: int) -> SymmetricPool:
    """Reserve symmetric memory for torch's allocations inside of ``with``. Collective, of the same size on all ranks.

    ::

        with sidelane.pool(comm, 1 << 30) as memory:
            hidden = model(tokens)      # lies in the pool, with all intermediate tensors
        comm.all_reduce(hidden)         # without staging

    Each rank places tensors independently. If the ranks allocate alike, a tensor lies at one place on all of them and
    is symmetric, like one of :meth:`Communicator.empty`. The first call with a tensor compares its places, and the host
    waits for the peers' hosts; later calls do not. A tensor whose place differs on some rank is staged.
    ``Communicator.reach`` tells which. Asynchronous calls never wait for hosts: they stage tensors that were not
    compared before. As with all symmetric memory, the ranks must use
    corresponding tensors in the same calls: a tensor that is new on one rank only raises MismatchError.

    On GPUs it is a ``torch.cuda.MemPool``: everything that this thread allocates inside is placed there (backward
    passes run on threads of their own: see torch's documentation). torch takes 2 MiB for tensors up to 1 MiB, 20 MiB
    for those up to 10 MiB, and otherwise multiples of 2 MiB; a freed piece is reused on the same stream.

    On CPUs, whose allocator cannot be replaced, a ``TorchDispatchMode`` moves results into the pool: those of factory
    functions (``torch.tensor`` and ``torch.empty`` too), of operations and their backward passes, and of ``out=`` if it
    was empty. This costs a copy, except for uninitialised tensors. Tensors that are not strided or not of class
    ``torch.Tensor`` are not moved, nor are views, tensors without bytes, ``resize_``, and memory of other libraries.

    The pool can be entered several times. Its memory lives as long as tensors in it. It returns to the communicator
    once the pool and its tensors are deleted on all ranks; on GPUs when the next pool is made.

    Args:
        communicator: its symmetric memory is used; tensors in the pool belong to its session.
        nbytes: bytes to reserve on each rank, > 0; rounded up to 2 MiB.

    Returns:
        The pool, to be used in ``with`` blocks, by several threads too.

    Raises:
        TypeError, ValueError: the size is wrong; nothing was allocated.
        MismatchError, PeerError, PeerTimeoutError, UnavailableError: as :meth:`Communicator.empty`. UnavailableError
            also on a GPU without a C compiler, or with too many pools at once.
        torch.OutOfMemoryError: inside of ``with``, if a tensor does not fit.
    """
    if not isinstance(communicator, Communicator):
        raise see(TypeError(f"pool: communicator (value={communicator!r}, allowed=a Communicator)"), Page.ERRORS)
    error: Exception | None = None
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        error = TypeError(f"pool: nbytes (value={nbytes!r}, allowed=a whole number of bytes{_meant(nbytes)})")
    elif nbytes <= 0:
        error = ValueError(f"pool: nbytes (value={nbytes}, allowed=1 and more)")
    if error is not None:
        communicator.refuse("pool", error)
        raise see(error, Page.ERRORS)
    if communicator.device.type == "cuda":
        release_pools()
    region = communicator.empty(rounded(nbytes, SEGMENT_BYTES), dtype=torch.uint8)
    communicator.pools += 1
    name = f"{POOL}{communicator.pools} of {communicator.name}"
    # The ranks agree: if one of them cannot make the pool, none has it.
    return communicator.path.agree(
        "pool", lambda: (SymmetricPool(communicator, name, region), f"{name}, {nbytes} bytes")
    )[1]


def _meant(size: object) -> str:
    """Return an example of a size for an error: the number that the caller meant, if it can be parsed."""
    with contextlib.suppress(ValueError, OverflowError):
        nbytes = parse_bytes(size) if isinstance(size, str) else int(size) if isinstance(size, float) else 0
        if nbytes > 0:
            return f", such as {nbytes}"
    return ", such as 1 << 30"


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
            raise UnavailableError(f"pool: pools of this process open at once (value={ARENAS + 1}, allowed=..{ARENAS})")
        with torch.cuda.device(device):
            self._pool: Any = torch.cuda.MemPool(_allocator(self._library, self._slot))
        self.id: tuple[int, int] = self._pool.id
        self._maker = os.getpid()
        forks.in_copies_of(self, forks.never_finalize)

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
                f"taken of {self._region.nbytes}); make the sidelane.pool with a larger nbytes, or hold fewer tensors "
                "at once"
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


class ArenaLibrary:
    """The functions of the library that ``arena.c`` compiles to.

    Args:
        path: path of the library, by which torch opens it again.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        library = ctypes.CDLL(path)
        self.open = library.sidelane_arena_open
        self.open.argtypes, self.open.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
        self.close = library.sidelane_arena_close
        self.close.argtypes, self.close.restype = [ctypes.c_int], ctypes.c_int
        self.used = library.sidelane_arena_used
        self.used.argtypes, self.used.restype = [ctypes.c_int], ctypes.c_size_t
        self.refused = library.sidelane_arena_refused
        self.refused.argtypes, self.refused.restype = [ctypes.c_int], ctypes.c_size_t

    @staticmethod
    def names(slot: int) -> tuple[str, str]:
        """Return the names of the functions by which torch allocates memory of a slot and frees it."""
        return f"sidelane_arena_malloc_{slot}", f"sidelane_arena_free_{slot}"


@functools.cache
def load_arenas() -> ArenaLibrary:
    """Load the library, compiled now unless an earlier process of this user has compiled it.

    Raises:
        RuntimeError: there is no C compiler, or it failed.
        OSError: the library cannot be written or loaded.
    """
    source = (importlib.resources.files("sidelane.native") / "arena.c").read_bytes()
    compiler = find_compiler()
    made_for = repr((compiler, platform.machine(), platform.libc_ver()))
    name = f"sidelane_arena-{hashlib.blake2b(source + made_for.encode(), digest_size=8).hexdigest()}.so"
    library, words = load_or_compile(name, source, compiler, ArenaLibrary)
    if library is None:
        raise RuntimeError(words)
    return library


def release_pools() -> None:
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
    """Forget, in a forked copy, the library, pools and allocators of the parent, which returns their memory itself."""
    _closed.clear()
    _allocators.clear()
    load_arenas.cache_clear()
