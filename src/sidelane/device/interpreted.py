"""Kernels on CPU ranks, by Triton's interpreter: slow, and with real bytes between real processes."""

from __future__ import annotations

import threading
from typing import Any

import torch
from triton.runtime import interpreter

_one_at_a_time = threading.Lock()


def is_interpreted(kernel: Any) -> bool:
    """True if the interpreter runs it: ``TRITON_INTERPRET=1`` was set when it was made."""
    return isinstance(kernel, interpreter.InterpretedFunction)


def run_interpreted(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run a kernel in this thread until it ends. The interpreter runs one at a time in a process.

    Tensors go by their addresses: the interpreter would write all of their storage back at the end, over what peers
    have written there.
    """
    pointers = [interpreter._implicit_cvt(part) if isinstance(part, torch.Tensor) else part for part in arguments]
    with _one_at_a_time:
        kernel[grid](*pointers, **options)
