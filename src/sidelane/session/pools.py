"""Pools: the results of any torch operation lie in symmetric memory, as with torch's own memory pools."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import torch

from sidelane.collectives.allocator import SEGMENT_BYTES, rounded
from sidelane.collectives.pool_tensors import POOL
from sidelane.errors import Page, explained, see
from sidelane.modes import keep_compilers_out, untraced
from sidelane.session.communicator import Communicator
from sidelane.sizes import parse_bytes


class Placer(Protocol):
    """Places tensors in the memory of a pool, by the means of its device."""

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        ...

    def active(self) -> contextlib.AbstractContextManager[object]:
        """While entered, what this thread allocates is placed there."""
        ...

    def close(self) -> None:
        """Nobody will enter any more. What was placed there stays, and keeps the memory."""
        ...


@untraced
class SymmetricPool:
    """Symmetric memory for whatever torch allocates inside a ``with`` block. Made by :func:`pool`.

    Attributes:
        name: the same on all ranks.
        nbytes: size.
    """

    def __init__(self, communicator: Communicator, name: str, region: torch.Tensor) -> None:
        self.name, self.nbytes = name, region.nbytes
        heap = communicator.lane.session.heap
        heap.add_pool(name, region)
        gone = functools.partial(heap.drop_pool, name)
        try:
            self._placer = self._make(name, region, gone, communicator.config.timeout_s)
        except BaseException:
            gone()
            raise
        self._mine = threading.local()

    @staticmethod
    def _make(name: str, region: torch.Tensor, gone: Callable[[], object], timeout_s: float) -> Placer:
        if region.is_cuda:
            from sidelane.session.pool_cuda import DevicePlacer

            return DevicePlacer(name, region, gone, timeout_s)
        from sidelane.session.pool_cpu import HostPlacer

        return HostPlacer(name, region, gone)

    @property
    def used(self) -> int:
        """Bytes that tensors have; on GPUs what torch's allocator has taken for them, and keeps."""
        return self._placer.used

    @property
    def id(self) -> tuple[int, int]:
        """On GPUs the number of torch's memory pool: ``torch.cuda.graph(graph, pool=pool.id)`` places a graph there.

        Raises:
            AttributeError: on CPU ranks.
        """
        found: tuple[int, int] = self._placer.id  # type: ignore[attr-defined]
        return found

    def __enter__(self) -> SymmetricPool:
        stack = contextlib.ExitStack()
        stack.enter_context(self._placer.active())
        self._entered().append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered().pop().__exit__(kind, error, trace)

    def __del__(self) -> None:
        placer = getattr(self, "_placer", None)
        if placer is not None:
            placer.close()

    def _entered(self) -> list[contextlib.ExitStack]:
        found: list[contextlib.ExitStack] | None = getattr(self._mine, "entered", None)
        if found is None:
            found = self._mine.entered = []
        return found


@keep_compilers_out
@explained(Page.ERRORS)
def pool(communicator: Communicator, nbytes: int) -> SymmetricPool:
    """Reserve symmetric memory in which torch places what it allocates inside ``with``. Collective, of one size.

    ::

        with sidelane.pool(comm, 1 << 30) as memory:
            hidden = model(tokens)      # lies in the pool, with all that led to it
        comm.all_reduce(hidden)         # without staging

    Each rank places tensors by itself. Where the ranks allocate alike, a tensor lies at one place on all of them, and
    is symmetric like one of :meth:`Communicator.empty`: the first call that it is in compares that, and its host waits
    for the peers' hosts; calls after it do not. A tensor that lies elsewhere on some rank is ``mapped``: it is reached
    without staging, but its host waits in every call. ``Communicator.reach`` says which. Asynchronous calls wait for
    nobody's host: they stage what was not compared before. As with all symmetric memory, what is one rank's n-th use of
    a tensor must be that of the others, too: a tensor that is new on one rank only is a MismatchError.

    On GPUs it is a ``torch.cuda.MemPool``: everything that this thread allocates inside is placed there (backward
    passes run on threads of their own: see torch's documentation). torch takes 2 MiB for tensors up to 1 MiB, 20 MiB
    for those up to 10 MiB, and otherwise multiples of 2 MiB; a piece that it has given back serves the same stream.

    On CPUs, whose allocator cannot be replaced, a ``TorchDispatchMode`` moves results there: of factory functions
    (``torch.tensor`` and ``torch.empty`` too), of operations, with their backward passes, and of ``out=`` where that
    was empty. That is a copy more, but for uninitialised tensors. What is no strided tensor of class ``torch.Tensor``
    stays where it is, as do views, tensors without bytes, ``resize_``, and what other libraries allocate.

    Entering the pool again goes on in it. The memory lives as long as tensors made in it, and goes back to the
    communicator when the pool and they have gone on all ranks; on GPUs when the next pool is made.

    Args:
        communicator: whose symmetric memory. Tensors in a pool are for its session.
        nbytes: to reserve on each rank, > 0; rounded to 2 MiB.

    Returns:
        The pool, to be used in ``with`` blocks, by several threads too.

    Raises:
        TypeError, ValueError: no such size; nothing was allocated.
        MismatchError, PeerError, PeerTimeoutError, UnavailableError: as :meth:`Communicator.empty`. UnavailableError
            also where a GPU's pool cannot be had: no C compiler, or too many pools at once.
        torch.OutOfMemoryError: inside ``with``, where a tensor does not fit any more.
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
        from sidelane.session.pool_cuda import give_back_pools

        give_back_pools()
    region = communicator.empty(rounded(nbytes, SEGMENT_BYTES), dtype=torch.uint8)
    lane = communicator.lane
    lane.pools += 1
    name = f"{POOL}{lane.pools} of {lane.name}"
    # All ranks or none: one may lack what its device needs.
    return lane.path.agree("pool", lambda: (SymmetricPool(communicator, name, region), f"{name}, {nbytes} bytes"))[1]


def _meant(size: object) -> str:
    """An example: the number that was meant, where it can be known."""
    with contextlib.suppress(ValueError, OverflowError):
        nbytes = parse_bytes(size) if isinstance(size, str) else int(size) if isinstance(size, float) else 0
        if nbytes > 0:
            return f", such as {nbytes}"
    return ", such as 1 << 30"
