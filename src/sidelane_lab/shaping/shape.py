"""Shape of a GEMM kernel: its tiles and stages, and the shared memory by which it limits blocks per compute unit."""

from __future__ import annotations

import dataclasses

GRANULE_BYTES = 128
"""Bytes of which requests for shared memory are multiples."""


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory:
    """Shared memory of a device, in bytes.

    Attributes:
        unit: shared memory of a compute unit.
        block: largest shared memory of a block.
        reserved: shared memory that the system takes for each block.
    """

    unit: int
    block: int
    reserved: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """The tiles of a GEMM, and the share of a compute unit that each of its blocks claims.

    Attributes:
        name: name in messages.
        tile_m, tile_n: rows and columns of the result that a block computes at a time.
        tile_k: length of the products that it loads at a time.
        stages: number of pipeline stages of loads.
        warps: number of warps of a block.
        resident: largest number of blocks that a unit holds, enforced by a request for more shared memory than needed
            (overlap paper, 3.1); None: as many as fit.

    Raises:
        ValueError: a size that Triton cannot tile, or no stage, warp or block.
    """

    name: str
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int = 2
    warps: int = 4
    resident: int | None = None

    def __post_init__(self) -> None:
        for what in ("tile_m", "tile_n", "tile_k"):
            value = getattr(self, what)
            if value < 16 or value & (value - 1):
                raise ValueError(f"GemmShape: {what} (value={value}, allowed=powers of two from 16)")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"GemmShape: warps (value={self.warps}, allowed=1, 2, 4, 8, 16)")
        if self.stages < 1 or (self.resident is not None and self.resident < 1):
            raise ValueError(f"GemmShape: stages, resident (value={self.stages}, {self.resident}, allowed=1 or more)")

    def tiles(self, m: int, n: int) -> int:
        """Return the number of tiles of a result of ``m`` rows and ``n`` columns: blocks of a data-parallel grid."""
        return -(-m // self.tile_m) * -(-n // self.tile_n)

    def asked_bytes(self, needed: int, memory: SharedMemory) -> int:
        """Return the shared memory to request, so that no more than ``resident`` blocks fit a unit.

        Args:
            needed: bytes that the kernel needs.
            memory: shared memory of the device.

        >>> memory = SharedMemory(unit=233472, block=232448, reserved=1024)
        >>> OPT1.asked_bytes(16384, memory), dataclasses.replace(OPT1, resident=2).asked_bytes(16384, memory)
        (16384, 76800)
        """
        if self.resident is None:
            return needed
        # One block more must not fit.
        least = memory.unit // (self.resident + 1) - memory.reserved + 1
        return min(max(needed, -(-least // GRANULE_BYTES) * GRANULE_BYTES), memory.block)


OPT1 = GemmShape(name="opt1", tile_m=64, tile_n=64, tile_k=32)
OPT2 = GemmShape(name="opt2", tile_m=64, tile_n=64, tile_k=64)
"""The overlap paper's tiles (table 1)."""
TUNED = GemmShape(name="tuned", tile_m=128, tile_n=256, tile_k=64, stages=3, warps=8)
"""Shape that is fast for large GEMMs on Hopper."""
SHAPES = {shape.name: shape for shape in (OPT1, OPT2, TUNED)}
