"""The source of a rank's ordinary tensors in a storm, and memory that lies where others have been."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from soak.judge import Judge

POOLED, CARVED, PRIVATE = 0.2, 0.15, 0.05
"""Shares of tensors in a pool of torch's, in the middle of a larger one, and in memory that peers cannot map."""

MOST_STANDING = 12
"""Bystanders at a time."""

STANDING_BYTES = ((0.7, 512, 64 << 10), (0.25, 64 << 10, 2 << 20), (0.05, 11 << 20, 12 << 20))
CPU_STANDING_BYTES = ((1.0, 512, 64 << 10),)


class Supply:
    """Makes tensors of one rank, by its own chance.

    A *bystander* is memory that no call touches, allocated while others are freed. It holds bytes that are looked at
    when it goes: a rank that wrote through a mapping that is stale would have changed them.

    Args:
        device: the device of the tensors.
        late: chance of this rank.
        judge: compares bystanders.
    """

    def __init__(self, device: torch.device, late: random.Random, judge: Judge) -> None:
        self.device, self.on_gpu = device, device.type != "cpu"
        self._late, self._judge = late, judge
        self._only: Callable[[int], torch.Tensor] | None = None
        self._pools: list[tuple[Any, list[StorageWeakRef]]] = []
        self._library: Any = None  # the driver's, where there is one
        with contextlib.suppress(OSError):
            self._library = ctypes.CDLL("libcuda.so.1")
        self._standing: list[tuple[torch.Tensor, int]] = []
        self.bystanders = 0

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Make bytes (uint8, 1-d) that nobody has."""
        if self._only is not None:
            return self._only(nbytes)
        chance = self._late.random()
        if chance < PRIVATE and (not self.on_gpu or self._library is not None):
            return self._private(nbytes)
        chance -= PRIVATE
        if chance < POOLED and self.on_gpu:
            return self._pooled(nbytes)
        chance -= POOLED
        if chance < CARVED:
            begin = 16 * self._late.randrange(1, 2000)
            return self.plain(begin + nbytes + 16 * self._late.randrange(2000))[begin : begin + nbytes]
        return self.plain(nbytes)

    @contextlib.contextmanager
    def only(self, make: Callable[[int], torch.Tensor] | None) -> Iterator[None]:
        """Have tensors made so meanwhile; None: by chance, as ever."""
        self._only = make
        try:
            yield
        finally:
            self._only = None

    def plain(self, nbytes: int) -> torch.Tensor:
        """Make bytes of torch's allocator, which peers can map."""
        made = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return made if self.on_gpu else made.share_memory_()

    def new_pool(self) -> bool:
        """Take pooled tensors from another pool from now on, and let go of a former one with its last tensor.

        Returns False where there are none.
        """
        if not self.on_gpu:
            return False
        self._pools = [each for each in self._pools if not all(reference.expired() for reference in each[1])]
        self._pools.append((torch.cuda.MemPool(), []))
        return True

    def stand_by(self) -> None:
        """Have one more bystander."""
        sizes = STANDING_BYTES if self.on_gpu else CPU_STANDING_BYTES
        _, least, most = self._late.choices(sizes, [share for share, _, _ in sizes])[0]
        tensor, key = self.plain(self._late.randrange(least, most)), self._late.randrange(256)
        self._standing.append((tensor.fill_(key), key))
        if len(self._standing) > MOST_STANDING:
            self._look(self._late.randrange(len(self._standing)))

    def close(self) -> None:
        """Let go of everything, with a look at all bystanders."""
        while self._standing:
            self._look(0)
        self._judge.settle()
        self._pools.clear()

    def _look(self, number: int) -> None:
        tensor, key = self._standing.pop(number)
        expected = torch.full((1,), key, dtype=torch.uint8, device=self.device).expand(len(tensor))
        self._judge.same(tensor, expected, "bystander", key)
        self.bystanders += 1

    def _pooled(self, nbytes: int) -> torch.Tensor:
        if not self._pools:
            self.new_pool()
        pool, tensors = self._pools[-1]
        with torch.cuda.use_mem_pool(pool):
            made = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        tensors.append(StorageWeakRef(made.untyped_storage()))
        return made

    def _private(self, nbytes: int) -> torch.Tensor:
        if not self.on_gpu:
            return torch.empty(nbytes, dtype=torch.uint8)
        return torch.as_tensor(_Foreign(self._library, nbytes), device=self.device)


class _Foreign:
    """Memory of the driver's own pool, which it does not export. Freed with the last tensor in it."""

    def __init__(self, library: Any, nbytes: int) -> None:
        self._library, self._address = library, ctypes.c_uint64()
        failed = library.cuMemAllocAsync(ctypes.byref(self._address), ctypes.c_size_t(nbytes), ctypes.c_void_p())
        if failed:
            raise MemoryError(f"cuMemAllocAsync of {nbytes} bytes: {failed}")
        data = self._address.value, False
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": data, "version": 3}

    def __del__(self) -> None:
        if self._address.value:  # in the order of the default stream, as all that has used it
            self._library.cuMemFreeAsync(self._address, ctypes.c_void_p())
