"""What ranks execute in ``test_device_fsdp`` and ``test_device_ddp``."""

from __future__ import annotations

from typing import Any

import ddp_cases
import fsdp_cases
import straight_cases
import torch
import torch.distributed as dist
from device_cases import Context


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    return _on(context, fsdp_cases, name, *args)


def of_straight(context: Context, name: str, *args: Any) -> Any:
    """The same of what is gathered straight into parameters."""
    return _on(context, straight_cases, name, *args)


def of_ddp(context: Context, name: str, *args: Any) -> Any:
    """The same of DDP."""
    return _on(context, ddp_cases, name, *args)


def _on(context: Context, cases: Any, name: str, *args: Any) -> Any:
    torch.set_default_device(context.device)
    try:
        return getattr(cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)
