"""Helpers with which tests of ranks begin, on CPUs and on GPUs: a rank's tensors are on its default device."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from sidelane import Communicator, Config
from sidelane.choice.candidate import SM, SM_VARIANTS
from sidelane.program.collective import Kind


def communicator(group: dist.ProcessGroup, **settings: Any) -> Communicator:
    return Communicator(group, device=torch.get_default_device(), config=Config(**{"timeout_s": 30, **settings}))


def place(comm: Communicator, symmetric: bool, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A poisoned tensor in symmetric or ordinary memory."""
    tensor = comm.empty(numel, dtype=dtype) if symmetric else torch.empty(numel, dtype=dtype)
    tensor.view(torch.uint8).fill_(0xA5)
    return tensor


def delay() -> None:
    """Some milliseconds of this rank's time, on the host or on its stream."""
    if torch.get_default_device().type == "cuda":
        torch.cuda._sleep(10_000_000)
    else:
        time.sleep(0.005)


def variants(comm: Communicator, kind: Kind) -> tuple[str, ...]:
    """All that this machine has for a reduction."""
    return ("auto", "b2b", "pcpy", *(SM_VARIANTS[kind] if SM in comm.abilities.implementations else ()))
