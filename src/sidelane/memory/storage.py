"""Storages of a part of other memory, which say when their last reference goes; and storages that exchange memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sidelane.modes import outside_of_modes


class _Part:
    """What a storage refers to, for as long as it lives."""

    __slots__ = ("__array_interface__", "__cuda_array_interface__", "_gone", "_whole")

    def __init__(self, whole: torch.Tensor, offset: int, nbytes: int, gone: Callable[[], object]) -> None:
        self._whole, self._gone = whole, gone
        interface: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (whole.data_ptr() + offset, False),
            "strides": None,
            "version": 3,
        }
        if whole.is_cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface

    def __del__(self) -> None:
        self._gone()


def storage_of(whole: torch.Tensor, offset: int, nbytes: int, gone: Callable[[], object]) -> torch.Tensor:
    """Bytes of ``whole`` as a 1-d uint8 tensor with a storage of its own, which keeps ``whole``.

    Args:
        whole: contiguous bytes.
        offset: of the first byte.
        nbytes: how many, > 0.
        gone: called when the last reference to the storage goes: in any thread, and in the middle of anything.
    """
    assert offset >= 0
    assert 0 < nbytes <= whole.nbytes - offset
    part = _Part(whole, offset, nbytes, gone)
    if whole.is_cuda:
        made = torch.as_tensor(part, device=whole.device)
    else:
        with outside_of_modes():  # a pool's would move it, as it moves results
            made = torch.from_numpy(np.asarray(part))
    assert made.data_ptr() == whole.data_ptr() + offset, "a copy"
    return made


@functools.cache
def exchange_objection() -> str | None:
    """Why :func:`exchange_memory` does not work here; None where it does."""
    if hasattr(torch.UntypedStorage, _EXCHANGE):
        return None
    first, second = torch.arange(24, dtype=torch.uint8), torch.full((40,), 7, dtype=torch.uint8)
    storages = first.untyped_storage(), second.untyped_storage()
    for storage in storages:
        words = _words(storage)
        if words[0] != storage.data_ptr() or words[_SIZE] != storage.nbytes():
            return f"storages of torch {torch.__version__} cannot exchange their memory"
    before = [storage.data_ptr() for storage in storages]
    _exchange_words(*storages)
    worked = [storage.data_ptr() for storage in storages] == before[::-1] and [each.nbytes() for each in storages] == [
        40,
        24,
    ]
    _exchange_words(*storages)
    return None if worked else f"storages of torch {torch.__version__} cannot exchange their memory"


def exchange_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Give each storage the memory of the other, with its size: whatever refers to a storage sees the other bytes.

    Whoever frees a storage, or changes its size, exchanges back before.

    Args:
        one: on the device of ``other``; one of the two is empty, or both have the same size.
        other: see ``one``.
    """
    if hasattr(torch.UntypedStorage, _EXCHANGE):
        getattr(one, _EXCHANGE)(other)
    else:
        _exchange_words(one, other)


_EXCHANGE = "_swap_data_ptr_"
"""torch's own call for it, which torch 2.11 does not have. There the same words of the two objects are exchanged."""

_SIZE = 4
"""Word of the size, behind the address, its context, what frees it and the device."""


def _words(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_uint64]:
    # Behind the table of virtual functions and two counters of references (c10/core/StorageImpl.h).
    return (ctypes.c_uint64 * (_SIZE + 1)).from_address(storage._cdata + 16)


def _exchange_words(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    assert one.device == other.device
    first, second = _words(one), _words(other)
    for word in range(len(first)):
        first[word], second[word] = second[word], first[word]
