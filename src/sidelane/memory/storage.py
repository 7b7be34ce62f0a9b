"""Memory of tensors: parts of other memory, which report their deletion; storages that exchange memory; persistent
tensors.

``torch.compile(mode="reduce-overhead")`` runs compiled code once in the memory pool of the graph that it captures next,
and refuses tensors that remain there and are no outputs. Tensors that an operator makes at its first call and keeps
(contexts, counters, addresses) would remain. Such pools serve allocations of their own thread, on its stream. So
another thread allocates persistent tensors (:func:`persistent`).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from sidelane.modes import outside_of_modes

T = TypeVar("T")


class MemoryBytes:
    """Bytes at an address, as arrays describe them."""

    __slots__ = ("__array_interface__", "__cuda_array_interface__")

    def __init__(self, address: int, nbytes: int, is_cuda: bool) -> None:
        interface: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        if is_cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface


class _Part(MemoryBytes):
    """Owner of a storage's memory, which the storage keeps alive."""

    __slots__ = ("_gone", "_whole")

    def __init__(self, whole: torch.Tensor, offset: int, nbytes: int, gone: Callable[[], object]) -> None:
        super().__init__(whole.data_ptr() + offset, nbytes, whole.is_cuda)
        self._whole, self._gone = whole, gone

    def __del__(self) -> None:
        self._gone()


def storage_of(whole: torch.Tensor, offset: int, nbytes: int, gone: Callable[[], object]) -> torch.Tensor:
    """Return bytes of ``whole`` as a 1-d uint8 tensor with its own storage, which keeps ``whole`` alive.

    Args:
        whole: contiguous bytes.
        offset: first byte in ``whole``.
        nbytes: number of bytes, > 0.
        gone: called when the last reference to the storage is dropped, in any thread and at any point of its code.
    """
    assert offset >= 0
    assert 0 < nbytes <= whole.nbytes - offset
    return tensor_of(_Part(whole, offset, nbytes, gone), whole.data_ptr() + offset, whole.device)


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return bytes at an address of this process as a 1-d uint8 tensor, which does not keep them alive."""
    return tensor_of(MemoryBytes(address, nbytes, device.type == "cuda"), address, device)


def tensor_of(described: MemoryBytes, address: int, device: torch.device) -> torch.Tensor:
    """Return bytes as a 1-d uint8 tensor, whose storage keeps ``described`` alive."""
    if device.type == "cuda":
        made = torch.as_tensor(described, device=device)
    else:
        with outside_of_modes():  # the dispatch mode of a pool would move the result
            made = torch.from_numpy(np.asarray(described))
    assert made.data_ptr() == address, "a copy"
    return made


@functools.cache
def exchange_objection() -> str | None:
    """Return the reason why :func:`exchange_memory` does not work with this torch; None if it works."""
    if hasattr(torch.UntypedStorage, EXCHANGE):
        return None
    first, second = torch.arange(24, dtype=torch.uint8), torch.full((40,), 7, dtype=torch.uint8)
    storages = first.untyped_storage(), second.untyped_storage()
    for storage in storages:
        words = _words(storage)
        if words[0] != storage.data_ptr() or words[SIZE] != storage.nbytes():
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
    """Give each storage the memory and size of the other: all tensors of a storage then see the other bytes.

    Exchange them back before a storage is freed or resized.

    Args:
        one: on the device of ``other``; one of the two is empty, or both have the same size.
        other: see ``one``.
    """
    if hasattr(torch.UntypedStorage, EXCHANGE):
        getattr(one, EXCHANGE)(other)
    else:
        _exchange_words(one, other)


EXCHANGE = "_swap_data_ptr_"
"""Name of torch's own method for it, which torch 2.11 lacks: there the words of the two objects are exchanged."""

SIZE = 4
"""Index of the word of the size, after address, context, deleter and device."""


def _words(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_uint64]:
    # They follow the pointer to the virtual table and two reference counts (c10/core/StorageImpl.h).
    return (ctypes.c_uint64 * (SIZE + 1)).from_address(storage._cdata + 16)


def _exchange_words(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    assert one.device == other.device
    first, second = _words(one), _words(other)
    for word in range(len(first)):
        first[word], second[word] = second[word], first[word]


def persistent(device: torch.device, make: Callable[[], T]) -> T:
    """Return the tensors that ``make`` returns, allocated outside of any memory pool of the calling thread.

    Their content is written: the other thread waits for it on a stream of its own, since a default stream may wait for
    peers that wait for this rank. They are no inference tensors even if the first call is made in
    ``torch.inference_mode``, since later calls could not write to them.

    Args:
        device: device on which ``make`` allocates. On CPUs the caller's thread calls ``make``; also in a capture,
            whose mode may forbid allocations of other threads.
        make: makes the tensors on this device, not on torch's default device.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):  # the mode is thread-local: other threads need not leave it
            return make()

    # Found here, since another thread has its own current device.
    index = torch.cuda.current_device() if device.index is None else device.index

    def apart() -> T:
        stream = stream_of(index)
        with torch.cuda.device(index), torch.cuda.stream(stream):
            made = make()
            stream.synchronize()
            return made

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(apart).result()


@functools.cache
def stream_of(index: int) -> torch.cuda.Stream:
    """Return the stream on which other threads make memory of a device."""
    return torch.cuda.Stream(index)
