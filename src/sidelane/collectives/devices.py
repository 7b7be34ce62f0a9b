"""From a device to what runs there; each backend is imported on first use."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sidelane.collectives.backend import Backend
from sidelane.memory.control import ControlBlock


def choose_device(device: torch.device | str | int | None) -> torch.device:
    """The device that a caller asked for, with its index; without a wish, the current GPU or else the CPU.

    Raises:
        ValueError: no executor for this type.
    """
    chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cpu, cuda)")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def make_backend(
    group: dist.ProcessGroup, rank: int, device: torch.device, control: ControlBlock, timeout_s: float
) -> Backend:
    """Make memory and executor for ``device``. Collective."""
    if device.type == "cpu":
        from sidelane.collectives.backend_cpu import CpuBackend

        return CpuBackend(group, rank, control, timeout_s)
    from sidelane.collectives.backend_cuda import CudaBackend

    return CudaBackend(group, rank, device, control, timeout_s)
