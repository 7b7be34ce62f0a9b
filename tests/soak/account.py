"""The memory of a device that is taken, once all have let go of what they can, and its holders as far as known.

What is nobody's is the driver's: code, what kernels spill to, what graphs were launched from. It keeps some of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from sidelane.memory import release

SYMMETRIC, WAITING, POOLS, SPANS = "symmetric", "symmetric, waiting", "pools waiting", "pieces retained"
OURS = (SYMMETRIC, WAITING, POOLS, SPANS)
"""Holders of Sidelane: none of these has any bytes when communicators are closed."""

TORCH, ALLOCATED = "torch reserved", "torch allocated"
_WHOLE = (SYMMETRIC, WAITING, TORCH)
"""Holders that have no bytes in common, and all that the others have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """The memory of one device, at one time.

    Attributes:
        taken: bytes that nobody else can have, whoever has them: all programs count.
        held: bytes of this process by holder; empty on CPUs.
    """

    taken: int
    held: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def ours_since(self, before: Account) -> dict[str, int]:
        """Return what Sidelane holds more than before."""
        more = {name: self.held.get(name, 0) - before.held.get(name, 0) for name in OURS}
        return {name: nbytes for name, nbytes in more.items() if nbytes > 0}

    def since(self, before: Account) -> str:
        """Return what has been added, by holder, in words."""
        by = {name: nbytes - before.held.get(name, 0) for name, nbytes in self.held.items()}
        by["nobody's"] = self.taken - before.taken - sum(by.get(name, 0) for name in _WHOLE)
        return ", ".join(f"{name} {nbytes:+}" for name, nbytes in by.items())


def account(device: torch.device, group: dist.ProcessGroup | None = None) -> Account:
    """Have all ranks let go of what they can, and look. Collective. Between CPU ranks: at tensors in shared memory."""
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
    held |= {TORCH: torch.cuda.memory_reserved(), ALLOCATED: torch.cuda.memory_allocated()}
    dist.barrier(group)
    return Account(total - free, held)


def _shared_bytes() -> int:
    """Return the bytes of files in shared memory that this process has mapped: tensors, its own and those of others."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/dev/shm/torch_" in line:
                begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
                total += end - begin
    return total
