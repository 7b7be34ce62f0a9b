"""Pools on CPU ranks: results of operations are moved into a pool, since torch's CPU allocator cannot be replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sidelane import forks
from sidelane.memory.allocator import BlockAllocator
from sidelane.memory.storage import storage_of

_NO_CONTENT = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"})
"""Names of operations whose results are uninitialised, so that moving them needs no copy."""

_LIFTED = frozenset({"aten::lift_fresh", "aten::lift"})
"""Names of operations that return new tensors of ``torch.tensor``, although their schema declares views."""


class HostPlacer:
    """Places tensors in the memory of a pool on a CPU rank.

    Args:
        name: name of the pool.
        region: bytes of the pool; every tensor in it keeps them alive.
        gone: called when no tensor refers to them any more.
    """

    def __init__(self, name: str, region: torch.Tensor, gone: Callable[[], object]) -> None:
        self._name, self._nbytes = name, region.nbytes
        self._region = storage_of(region, 0, region.nbytes, gone)
        self._blocks, self._lock = BlockAllocator(1), forks.rlock()  # a storage may be freed at any point of the code
        self._dropped: list[int] = []
        self._blocks.grow(0, region.nbytes)

    @property
    def used(self) -> int:
        with self._lock:
            self._take_back()
            return self._blocks.used

    def active(self) -> contextlib.AbstractContextManager[object]:
        return _Placing(self)

    def close(self) -> None:
        """Do nothing: tensors keep the region."""

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Allocate a storage of ``nbytes`` (> 0).

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        with self._lock:
            self._take_back()
            found = self._blocks.take(nbytes)
            if found is None:
                raise torch.OutOfMemoryError(
                    f"{self._name}: {nbytes} bytes do not fit (value={self._blocks.used} used of {self._nbytes}); "
                    "make the sidelane.pool with a larger nbytes, or hold fewer tensors at once"
                )
        number, taken = found
        dropped = self._dropped
        return storage_of(self._region, taken.offset, nbytes, lambda: dropped.append(number)).untyped_storage()

    def _take_back(self) -> None:
        while self._dropped:
            self._blocks.drop([self._dropped.pop()])


class _Placing(TorchDispatchMode):
    """Dispatch mode that moves results of operations into a pool."""

    def __init__(self, placer: HostPlacer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._placer = placer

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        outputs = (argument.name for argument in func._schema.arguments if argument.is_out)
        written = [kwargs[name] for name in outputs if isinstance(kwargs.get(name), torch.Tensor)]
        empty = [out for out in written if not out.untyped_storage().nbytes()]
        result = func(*args, **kwargs)
        for out in empty:
            if _fits(out):
                placed = self._move(out, copied=True)
                out.set_(placed.untyped_storage(), placed.storage_offset(), placed.shape, placed.stride())
        name = func._schema.name
        fresh = [each.alias_info is None for each in func._schema.returns]
        if name in _LIFTED:
            fresh = [True]
        if not any(fresh):
            return result
        leaves = pytree.tree_leaves((args, kwargs))
        given = {
            each.untyped_storage()._cdata
            for each in leaves
            if isinstance(each, torch.Tensor) and each.layout is torch.strided and each.device.type != "meta"
        }

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not _fits(value):
                return value
            if value.untyped_storage()._cdata in given and name not in _LIFTED:
                return value
            return self._move(value, copied=name not in _NO_CONTENT)

        if isinstance(result, tuple) and len(fresh) > 1:
            pairs = zip(result, fresh, strict=True)
            return tuple(pytree.tree_map(moved, value) if is_fresh else value for value, is_fresh in pairs)
        return pytree.tree_map(moved, result)

    def _move(self, tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
        """Return a tensor of the same shape and strides in a storage of the pool, with the values if ``copied``."""
        extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storage = self._placer.storage(extent * tensor.itemsize)
        placed = torch.empty(0, dtype=tensor.dtype)
        placed.set_(storage, 0, tensor.shape, tensor.stride())
        if copied:
            placed.copy_(tensor)
        return placed


def _fits(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes > 0
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
