"""Parts that all clients share: the device of a rank, some data, and a file with what the rank has computed.

A client is a program as a user writes it. It takes the name of the backend and imports nothing of Sidelane: the
installed package offers torch the name. ``gloo+enable`` is Gloo with :func:`enable`, in the clients that call it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BACKEND, _, ENABLE = (sys.argv[1] if len(sys.argv) > 1 else "sidelane").partition("+")
GPUS = torch.cuda.is_available()
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if GPUS else torch.device("cpu")
OUT = "CLIENTS_OUT"  # folder for the files; without it, rank 0 prints what the file would have

if GPUS:
    torch.cuda.set_device(DEVICE)
torch.set_num_threads(1)
torch.manual_seed(0)


def model(width: int = 32) -> torch.nn.Sequential:
    """Return a small model, the same on every rank."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    return torch.nn.Sequential(*layers)


def batches(steps: int, width: int = 32) -> list[torch.Tensor]:
    """Return a batch for each step, other ones on every rank."""
    generator = torch.Generator().manual_seed(1 + RANK)
    return [torch.randn(8, width, generator=generator) for _ in range(steps)]


def sums(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Return a sum of each tensor's own part: parameters that differ in a digit differ in it."""
    parts = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return [part.detach().double().sum().item() for part in parts]


def enable(model: torch.nn.Module) -> None:
    """Let Sidelane make the calls of a model of FSDP2, if the backend's name asks for it."""
    if ENABLE:
        from sidelane import fsdp

        fsdp.enable(model)


def finish(values: Iterable[float], further: Iterable[dict[str, Any]] = ()) -> None:
    """Write what this rank has computed, and the report of what Sidelane did in it; end the process group.

    ``further``: rows of the report about calls that came through no process group.
    """
    from sidelane import report

    rows = [*map(dataclasses.asdict, report().rows), *further]
    said = {"values": [float(value) for value in values], "rows": rows}
    if folder := os.environ.get(OUT):
        Path(folder, f"{RANK}.json").write_text(json.dumps(said))
    elif RANK == 0:
        print(*said["values"], report(), sep="\n")
    if dist.is_initialized():
        dist.destroy_process_group()
