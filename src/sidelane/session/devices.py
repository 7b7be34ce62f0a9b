"""From a device to what runs there; each backend is imported on first use."""

from __future__ import annotations

import torch

from sidelane.collectives.backend import Backend
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange


def choose_device(device: torch.device | str | int | None) -> torch.device:
    """The device that a caller asked for, with its index; without a wish, the current GPU or else the CPU.

    Raises:
        ValueError: no executor for this type, or no such device here.
    """
    try:
        chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):  # names that torch does not know
        raise ValueError(f"Communicator: device (value={device!r}, allowed=cpu, cuda, cuda:N)") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cpu, cuda)")
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cpu: {why})")
    if chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if chosen.index >= torch.cuda.device_count():
        raise ValueError(f"Communicator: device (value={chosen}, allowed=cuda:0..{torch.cuda.device_count() - 1}, cpu)")
    return chosen


def make_backend(
    exchange: Exchange,
    device: torch.device,
    control: ControlBlock,
    timeout_s: float,
    *,
    like: Backend | None = None,
) -> Backend:
    """Make memory and executor for ``device``. Collective.

    Args:
        exchange: of the ranks.
        device: of this rank.
        control: where the ranks tell each other.
        timeout_s: of calls.
        like: one of the same ranks and device, of which nothing is found out again.
    """
    if device.type == "cpu":
        from sidelane.collectives.backend_cpu import CpuBackend

        return CpuBackend(exchange, control, timeout_s)
    from sidelane.collectives.backend_cuda import CudaBackend

    assert like is None or isinstance(like, CudaBackend)
    return CudaBackend(exchange, device, control, timeout_s, like=like)
