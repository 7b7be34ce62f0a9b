"""A launch of a kernel of the caller's own, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch.

    Attributes:
        kernel: made by ``triton.jit``.
        name: for people.
        grid: how many programs, in one to three dimensions.
        arguments: in the order of the source: tensors and numbers.
        options: constants, and what Triton's launcher takes (``num_warps``, ...).
        board: memory of the host that the kernel's waits look at (``device/layout.py``), of this rank.
    """

    kernel: Any
    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    board: int

    @property
    def collective(self) -> str:
        """As of programs: what errors and the ledger call it."""
        return "kernel"

    @property
    def variant(self) -> str:
        return self.name
