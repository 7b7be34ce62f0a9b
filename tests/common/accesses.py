"""What a kernel does to memory, block by block, written down while Triton's interpreter runs it.

What that means in words of a shadow: ``steps``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

LOAD, STORE, POLL, BARRIER = "load", "store", "poll", "barrier"
RELEASE, RELAXED, ACQUIRE = "release", "relaxed", "acquire"


@dataclasses.dataclass
class Access:
    """One instruction of a block.

    Attributes:
        what: a load, a store, a poll (a load that is volatile), a barrier of the block's threads, or the ordering of an
            atomic: of an exchange, or of an addition of 0.
        addresses: that it touches, of each element.
        item_bytes: of an element.
        is_exchange: an atomic that stores.
    """

    what: str
    addresses: np.ndarray
    item_bytes: int
    is_exchange: bool = False


@contextmanager
def recorded() -> Iterator[dict[int, list[Access]]]:
    """What the kernels of the block do, by number of a thread block."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    found: dict[int, list[Access]] = {}
    names = (
        "create_masked_load",
        "create_masked_store",
        "create_load",
        "create_store",
        "create_atomic_rmw",
        "create_barrier",
    )
    before: dict[str, Callable[..., Any]] = {name: getattr(Builder, name) for name in names}

    def note(builder: Any, what: str, pointers: Any, mask: Any, *, is_exchange: bool = False) -> None:
        addresses = np.asarray(pointers.data).reshape(-1).astype(np.int64)
        if mask is not None:
            addresses = addresses[np.broadcast_to(np.asarray(mask.data).reshape(-1), addresses.shape)]
        item = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        found.setdefault(int(builder.grid_idx[0]), []).append(Access(what, addresses, item, is_exchange))

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        note(self, POLL if rest[-1] else LOAD, ptrs, mask)
        return before["create_masked_load"](self, ptrs, mask, *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(self, STORE, ptrs, mask)
        return before["create_masked_store"](self, ptrs, value, mask, *rest)

    def atomic(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        ordering = str(sem).rpartition(".")[2].lower()
        note(self, ordering, ptr, mask, is_exchange="XCHG" in str(op).upper())
        return before["create_atomic_rmw"](self, op, ptr, val, mask, sem, scope)

    def barrier(self: Any) -> None:
        found.setdefault(int(self.grid_idx[0]), []).append(Access(BARRIER, np.empty(0, np.int64), 0))

    Builder.create_barrier = barrier
    Builder.create_masked_load, Builder.create_masked_store = masked_load, masked_store
    Builder.create_atomic_rmw = atomic
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(Builder, name, function)
