"""Tile sizes of the kernel of gemv_all_reduce, and their fit on a compute unit."""

from __future__ import annotations

import dataclasses

import torch

from sidelane.ops.handle import check_choice, power_of_two

MOST_TOKENS = 16
CELLS_BYTES = 512 << 10
"""Largest number of bytes of a rank's float32 partial results that ``auto`` sends in cells; more was not measured
(docs/lab/kernels.md)."""

MOST_STAGES = 8
EVICTIONS = ("", "evict_first")
UNIT_REGISTERS = 64 << 10
SCRATCH_BYTES = 4 << 10
"""Bytes of shared memory of a program for other things than loads: 2 KB and less, as Triton says when it compiles."""

RESERVED_BYTES = 1 << 10
"""Bytes of shared memory of each program that CUDA takes for itself."""

LEAST_SHARED_BYTES = 64 << 10
"""Bytes of shared memory of a compute unit, if the driver does not say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes and resources of the kernel.

    Attributes:
        rows: number of rows of the weight in a tile, a power of two; for more than one token 16 and more.
        columns: number of columns loaded at a time, a power of two, 16 or more.
        warps: number of warps of a program.
        per_unit: number of programs on each compute unit; all of them have to fit at the same time.
        stages: number of turns whose loads are on their way, and the one under way, as far as shared memory has
            room. 1 leaves them in registers.
        evict: cache policy for weights, ``evict_first`` or empty.
    """

    rows: int = 16
    columns: int = 512
    warps: int = 4
    per_unit: int = 2
    stages: int = 4
    evict: str = "evict_first"

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, 1), ("columns", self.columns, 16), ("warps", self.warps, 1)):
            if value < least or value != power_of_two(value):
                raise ValueError(f"Tiling: {name} (value={value}, allowed=a power of two from {least})")
        if not 1 <= self.per_unit <= self.most_per_unit:
            allowed = f"1..{self.most_per_unit} of {self.warps} warps"
            raise ValueError(f"Tiling: per_unit (value={self.per_unit}, allowed={allowed})")
        if not 1 <= self.stages <= MOST_STAGES:
            raise ValueError(f"Tiling: stages (value={self.stages}, allowed=1..{MOST_STAGES})")
        check_choice("Tiling", "evict", self.evict, EVICTIONS)

    @property
    def most_per_unit(self) -> int:
        """Largest number of programs on a compute unit: with 128 registers for each of 512 threads (``registers``)."""
        return max(1, 16 // self.warps)

    @property
    def registers(self) -> int:
        """Largest number of registers of a thread with which all programs fit on a compute unit at the same time."""
        return min(255, UNIT_REGISTERS // (32 * self.warps * self.per_unit) // 8 * 8)

    def stages_in(self, shared_bytes: int, weight_bytes: int, x_bytes: int, tokens: int) -> int:
        """Return the number of stages of a program that has so much shared memory.

        Args:
            shared_bytes: bytes that a program may have (:func:`shared_bytes_of`).
            weight_bytes: size of an element of the weight in bytes.
            x_bytes: size of an element of x in bytes.
            tokens: number of tokens whose x is loaded with each part of the weight, 1 or ``MOST_TOKENS``.

        >>> tiling = Tiling(16, 512, 4, 2, 4)  # 16 KB of a weight of 2 bytes, and 1 KB of x
        >>> [tiling.stages_in(kilobytes << 10, 2, 2, 1) for kilobytes in (113, 55, 49, 21, 20)]
        [4, 4, 3, 2, 1]
        """
        loaded = self.columns * (self.rows * weight_bytes + tokens * x_bytes)
        return max(1, min(self.stages, 1 + (shared_bytes - SCRATCH_BYTES) // loaded))


OF_DOTS = Tiling(32, 128, 4, 2, 5, "")
"""Tiling for more than one token, which tensor cores multiply."""


def tiling_of(tokens: int) -> Tiling:
    """Return the fastest tiling in the measurements (docs/lab/kernels.md, *GEMVs whose sums are cells*)."""
    return OF_DOTS if tokens > 1 else Tiling()


def shared_bytes_of(device: torch.device, per_unit: int) -> int:
    """Return the shared memory in bytes that each of so many programs on a compute unit may have."""
    if device.type == "cpu":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    of_unit = getattr(properties, "shared_memory_per_multiprocessor", LEAST_SHARED_BYTES)
    return int(of_unit) // per_unit - RESERVED_BYTES  # for a single program that is CUDA's limit
