"""Launches of the caller's own kernels, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch of a kernel.

    Attributes:
        kernel: kernel made by ``triton.jit``.
        name: name of the kernel in texts.
        grid: number of programs, in one to three dimensions.
        arguments: tensors and numbers, in the order of the source.
        options: constants, and options of Triton's launcher (``num_warps``, ...).
        board: address of this rank's host memory that the kernel's waits poll (``device/layout.py``).
    """

    kernel: Any
    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    board: int

    @property
    def collective(self) -> str:
        """Name of the operation in errors and in the ledger, as of programs."""
        return "kernel"

    @property
    def variant(self) -> str:
        return self.name
