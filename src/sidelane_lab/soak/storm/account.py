"""How much memory of a device is taken, once all have let go of what they can, and whose it is as far as that is known.

What is nobody's is the driver's: code, what kernels spill to, what graphs were launched from. It keeps some of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from sidelane.memory import release

SYMMETRIC, WAITING, POOLS, SPANS = "symmetric", "symmetric, waiting", "pools waiting", "pieces retained"
OURS = (SYMMETRIC, WAITING, POOLS, SPANS)
"""Of Sidelane: none of these is left of communicators that are closed."""

TORCH, ALLOCATED, POOL = "torch reserved", "torch allocated", "pool of the driver"
_WHOLE = (SYMMETRIC, WAITING, TORCH, POOL)
"""No two of these have bytes in common, nor is there any in the others that is not in these."""

COUNTED = ("ExecutableGraph", "CudaProgram", "CudaKernel", "Communicator")
"""Objects that have memory of the driver's."""

_RESERVED_NOW = 5  # CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """Of one device, at one time.

    Attributes:
        taken: bytes that nobody else can have, whoever has them: all programs count.
        held: bytes of this process by holder; empty on CPUs.
        alive: objects by class, of those in ``COUNTED``; likewise.
    """

    taken: int
    held: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alive: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def ours_since(self, before: Account) -> dict[str, int]:
        """What Sidelane holds more than before."""
        more = {name: self.held.get(name, 0) - before.held.get(name, 0) for name in OURS}
        return {name: nbytes for name, nbytes in more.items() if nbytes > 0}

    def since(self, before: Account) -> str:
        """What has been added, by holder, in words."""
        by = {name: nbytes - before.held.get(name, 0) for name, nbytes in self.held.items()}
        by["nobody's"] = self.taken - before.taken - sum(by.get(name, 0) for name in _WHOLE)
        alive = "; ".join(f"{count} {name}" for name, count in self.alive.items())
        return f"{', '.join(f'{name} {nbytes:+}' for name, nbytes in by.items())}; alive: {alive or 'not counted'}"


def account(device: torch.device, group: dist.ProcessGroup | None = None) -> Account:
    """Have all ranks let go of what they can, and look. Collective. Between CPU ranks: of tensors in shared memory."""
    gc.collect()
    if device.type == "cpu":
        dist.barrier(group)
        return Account(_shared_bytes())
    from sidelane.execute.cuda import ordinary
    from sidelane.session import pool_cuda

    for _ in range(2):  # what the peers have mapped of this rank's is theirs until they have let go of it
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # torch looks here which memory other streams are through with
        pool_cuda.give_back_pools()
        release.give_back()
        torch.cuda.empty_cache()
        dist.barrier(group)
    free, total = torch.cuda.mem_get_info()
    kept, waiting = release.held_bytes()
    held = {SYMMETRIC: kept, WAITING: waiting, POOLS: pool_cuda.waiting_bytes(), SPANS: ordinary.retained_bytes()}
    held |= {TORCH: torch.cuda.memory_reserved(), ALLOCATED: torch.cuda.memory_allocated(), POOL: _driver_pool(device)}
    found = Account(total - free, held, _alive(COUNTED))
    dist.barrier(group)
    return found


def _alive(names: Sequence[str]) -> dict[str, int]:
    counts = dict.fromkeys(names, 0)
    for each in gc.get_objects():
        name = type(each).__name__
        if name in counts and type(each).__module__.startswith("sidelane"):
            counts[name] += 1
    return counts


def _driver_pool(device: torch.device) -> int:
    """Bytes that the driver's own memory pool of a device has reserved; 0 where it does not say."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libcuda.so.1")
        pool, nbytes = ctypes.c_void_p(), ctypes.c_uint64()
        index = torch.cuda.current_device() if device.index is None else device.index
        if not library.cuDeviceGetDefaultMemPool(ctypes.byref(pool), index):
            library.cuMemPoolGetAttribute(pool, _RESERVED_NOW, ctypes.byref(nbytes))
        return nbytes.value
    return 0


def _shared_bytes() -> int:
    """Of files in shared memory that this process has mapped: tensors, its own and those of others."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/dev/shm/torch_" in line:
                begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
                total += end - begin
    return total
