"""Cases that ranks execute in ``test_device_attention``."""

from __future__ import annotations

from typing import Any

import attention_cases
import torch
import torch.distributed as dist
from device_cases import Context


def of(context: Context, name: str, *args: Any) -> Any:
    """One of the cases that CPU ranks run, too, on a stream that is not the legacy default one."""
    torch.set_default_device(context.device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return getattr(attention_cases, name)(dist.group.WORLD, *args)
    finally:
        torch.set_default_device(None)
