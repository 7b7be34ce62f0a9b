"""All-reduce + residual + RMSNorm as a kernel that sends and then adds, and unfused.

The kernel is the one of ``ops.rms_norm``: a block a unit, a row at a time. In cells every word of data travels with a
flag of its own, so that twice the bytes cross a link and nobody waits for anything else; pushed, rows go as they are,
and a flag follows. Unfused: the library's all-reduce, an addition and a norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sidelane.program.collective import Kind
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.fused import FusedKernel, Work
from sidelane_lab.model.gemm_operators import check_sizes
from sidelane_lab.model.workgroups import resident, stream_gbps

FLAGGED = 2
"""Bytes of a word and its flag, next to those of the word (``device/flagged.py``)."""
BLOCK = 2
"""Workgroups of 256 threads that a block of the fused kernel is worth: 8 or 16 warps for a row."""
ELEMENTS = 2048
"""Of a workgroup of an element-wise kernel: eight a thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllReduceNorm:
    """``tokens`` rows of ``hidden`` elements: the sum of all ranks' and a residual, and its norm.

    Attributes:
        pushed: rows travel as they are; False: in cells.
    """

    tokens: int
    hidden: int
    element_bytes: int = 2
    pushed: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)

    name = "all_reduce_rms_norm"
    kind = Kind.ALL_REDUCE

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}"

    def works(self, ranks: int) -> list[Work]:
        """A row goes to all."""
        return [Work(self.tokens, tuple((to, self._sent * self.hidden) for to in range(ranks)))]

    def kernel(self, machine: Machine, occupancy: float) -> FusedKernel:
        """The fused one, without its work: rows are read and sent; what came, and the residual, is read and added."""
        blocks = max(1, int(machine.gpu.units * occupancy))
        peers = machine.world_size - 1
        passes = 1 + (1 if self.pushed else FLAGGED) * peers + 2  # the residual, what came, and both results
        adding_us = self.tokens * self._row_bytes * passes / self._bytes_a_us(machine, min(self.tokens, blocks))
        return FusedKernel((), blocks, self._round_us(machine), reduce_us=adding_us)

    def compute_us(self, machine: Machine) -> float:
        """An addition and a norm, a kernel each."""
        rows = float(self.tokens * self._row_bytes)
        adding = stream_gbps(machine, min(resident(machine), max(1.0, self.tokens * self.hidden / ELEMENTS))) * 1e3
        norm = self._bytes_a_us(machine, min(self.tokens, resident(machine)))
        return 2 * float(machine.matmul.launch_us) + 3 * rows / adding + 2 * rows / norm

    def collective_bytes(self) -> float:
        """Of a rank's buffer."""
        return float(self.tokens * self._row_bytes)

    def held_bytes(self, ranks: int) -> float:
        """Of a rank's memory, at the least: inputs, results, and cells for two calls."""
        return (4 + 2 * FLAGGED * ranks) * self.collective_bytes()

    @property
    def _sent(self) -> float:
        """Bytes of an element on its way."""
        return float(self.element_bytes * (1 if self.pushed else FLAGGED))

    @property
    def _row_bytes(self) -> int:
        return self.hidden * self.element_bytes

    def _round_us(self, machine: Machine) -> Callable[[int], float]:
        return lambda blocks: blocks * self._row_bytes / self._bytes_a_us(machine, blocks)

    @staticmethod
    def _bytes_a_us(machine: Machine, blocks: float) -> float:
        return stream_gbps(machine, min(resident(machine), BLOCK * blocks)) * 1e3
