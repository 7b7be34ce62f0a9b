"""NCCL's all-gathers on copy engines, as FSDP2 is told: at their best, in registered windows.

A communicator of its own with ``NCCL_CTA_POLICY_ZERO``, and two buffers in symmetric windows for each gathered size. A
gather is in place, which copy engines take (``baselines/baselines_cuda.py``). Reduce-scatters are NCCL's own:
copy engines do not add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from sidelane_lab.baselines.baselines_cuda import NcclCopyEngines, Windows
from sidelane_lab.baselines.candidate import all_gather
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies.fsdp.ways import gathered_bytes


class Engines:
    """The communicator of a study, and its windows by size, which the cases share.

    Args:
        device: of this rank.
        timeout_s: of its process group.
        meter: ranks agree through it before each step that is collective.

    Raises:
        UnavailableError: on every rank, if any rank could not make the communicator.
    """

    def __init__(self, device: torch.device, timeout_s: float, meter: Meter) -> None:
        self._device, self._meter = device, meter
        self._nccl = NcclCopyEngines(device, timeout_s, meter)
        self._windows: dict[int, Windows] = {}

    def gather_of(self, params: Sequence[Any]) -> WindowGather:
        """A gather for some of FSDP2's groups of parameters. Collective.

        Raises:
            UnavailableError: on every rank, if any rank could not make the windows.
        """
        group = self._nccl.group
        assert group is not None
        sizes = {gathered_bytes(one, torch.bfloat16, group.size()) for one in params}
        for nbytes in sorted(sizes - set(self._windows)):
            self._windows[nbytes] = Windows(self._device, self._meter, group, nbytes, nbytes)
        return WindowGather(group, {nbytes: self._windows[nbytes] for nbytes in sizes})

    def close(self) -> None:
        """Let go of the windows. Collective."""
        for windows in self._windows.values():
            windows.close()
        self._windows.clear()


class WindowGather(AllGather):
    """Gathers in windows, in turn.

    Attributes:
        held: bytes of the windows.
    """

    def __init__(self, group: dist.ProcessGroup, windows: dict[int, Windows]) -> None:
        self._group, self._windows = group, windows
        self._turns = dict.fromkeys(windows, 0)
        self._outside = 0
        self.held = sum(2 * nbytes for nbytes in windows)

    def note(self) -> str:
        """What went otherwise than it was to."""
        return f"{self._outside} gathers had no window" if self._outside else ""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nbytes = math.prod(int(length) for length in size) * dtype.itemsize
        if nbytes not in self._windows:
            self._outside += 1
            return torch.empty(*size, dtype=dtype, device=device)
        # FSDP2 copies a gathered layer out before it begins the gather behind the next: two windows take turns.
        self._turns[nbytes] ^= 1
        return self._windows[nbytes].buffers[self._turns[nbytes]][:nbytes].view(dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = all_gather(output_tensor, input_tensor, group=self._group, async_op=async_op)
        return work
