"""What ranks execute in ``test_device_fsdp``."""

from __future__ import annotations

from typing import Any

import fsdp_cases
import torch
import torch.distributed as dist
from device_cases import Context


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too."""
    torch.set_default_device(context.device)
    try:
        return getattr(fsdp_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)
