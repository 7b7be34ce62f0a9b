# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""A GEMM whose blocks claim a chosen share of a compute unit (overlap paper, 3.1).

Equivalent: ``torch.mm(a, b, out=c)``; sums are float32, rounded once. A block computes tiles ``program``, ``program +
blocks``, and so on: with as many blocks as tiles the grid is data-parallel, with fewer persistent. Tiles go in groups
of GROUP rows of tiles, so that those under way share what they read. It is compiled and loaded once for a shape and a
size, and bypasses Triton's launcher, which cannot request more shared memory than a kernel needs.

Example: GROUP 2 and 3 x 2 tiles: tile 0 is (0, 0), 1 (1, 0), 2 (0, 1), 3 (1, 1), 4 (2, 0), 5 (2, 1).

Legend: ``a`` [M, K], ``b`` [K, N], ``c`` [M, N], each contiguous, given as addresses; a tile is TILE_M x TILE_N, of
products over TILE_K at a time. WIDE multiplies in float32, as the CPU interpreter must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidelane.device.language import tl, triton
from sidelane.device.memory import pointer
from sidelane.kernels.arithmetic import DTYPES
from sidelane_lab.shaping.shape import GemmShape, SharedMemory

if TYPE_CHECKING:
    from sidelane.execute.cuda.driver import Driver

GROUP = 8
ALIGNMENT = 16
"""Bytes of which addresses must be multiples."""


def constants_of(shape: GemmShape, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, wide: bool) -> dict[str, Any]:
    """Return the compile-time constants of the kernel.

    Args:
        shape: tiles of the kernel.
        a: [m, k], contiguous, float32, float16 or bfloat16.
        b: [k, n], the same.
        c: [m, n], the same.
        wide: multiply in float32.

    Raises:
        ValueError: shapes, dtypes, strides or alignment of the tensors do not fit.
    """
    sizes = [tuple(tensor.shape) for tensor in (a, b, c)]
    (m, k), n = sizes[0], sizes[1][-1]
    if sizes[1:] != [(k, n), (m, n)] or min(m, n, k) < 1:
        raise ValueError(f"shaped_gemm: shapes (value={sizes}, allowed=[m, k], [k, n], [m, n])")
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in (a, b, c)}
    if len(dtypes) > 1 or not dtypes <= {"float32", "float16", "bfloat16"}:
        raise ValueError(f"shaped_gemm: dtypes (value={sorted(dtypes)}, allowed=one of float32, float16, bfloat16)")
    if not all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in (a, b, c)):
        raise ValueError(f"shaped_gemm: tensors (allowed=contiguous, at multiples of {ALIGNMENT} bytes)")
    tiles = {"TILE_M": shape.tile_m, "TILE_N": shape.tile_n, "TILE_K": shape.tile_k}
    return {"M": m, "N": n, "K": k, **tiles, "GROUP": GROUP, "DTYPE": DTYPES[dtypes.pop()], "WIDE": wide}


@triton.jit
def _tile_place(tile, M: tl.constexpr, N: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                GROUP: tl.constexpr):  # fmt: skip
    """Return row and column, in tiles, of tile number ``tile``."""
    down: tl.constexpr = (M + TILE_M - 1) // TILE_M
    across: tl.constexpr = (N + TILE_N - 1) // TILE_N
    first = tile // (GROUP * across) * GROUP
    rows = tl.minimum(down - first, GROUP)
    within = tile % (GROUP * across)
    return first + within % rows, within // rows


@triton.jit
def _shaped_gemm(
    a, b, c,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = ((M + TILE_M - 1) // TILE_M) * ((N + TILE_N - 1) // TILE_N)
    whole: tl.constexpr = K % TILE_K == 0
    depth = tl.arange(0, TILE_K)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        down, across = _tile_place(tile, M, N, TILE_M, TILE_N, GROUP)
        row = down * TILE_M + tl.arange(0, TILE_M)
        column = across * TILE_N + tl.arange(0, TILE_N)
        # Rows and columns beyond the end load other elements, which are not stored: loads need no mask.
        left = pointer(a, DTYPE, True) + (row % M).to(tl.int64)[:, None] * K + depth[None, :]
        right = pointer(b, DTYPE, True) + depth.to(tl.int64)[:, None] * N + (column % N)[None, :]
        sums = tl.zeros([TILE_M, TILE_N], tl.float32)
        for first in range(0, K, TILE_K):
            if whole:
                x, y = tl.load(left), tl.load(right)
            else:
                there = depth < K - first
                x = tl.load(left, mask=there[None, :], other=0)
                y = tl.load(right, mask=there[:, None], other=0)
            if WIDE:
                x, y = x.to(tl.float32), y.to(tl.float32)
            sums = tl.dot(x, y, sums, input_precision="ieee")
            left += TILE_K
            right += TILE_K * N
        place = pointer(c, DTYPE, True) + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(place, sums.to(DTYPE), mask=(row < M)[:, None] & (column < N)[None, :])


KERNEL = _shaped_gemm


class ShapedGemm:
    """``c = a @ b`` in a shape, launched on the caller's stream.

    Args:
        driver: driver of the device, which is current.
        shape: tiles and residency.
        a, b, c: see :func:`constants_of`.

    Attributes:
        resident: number of blocks that an SM holds at once.
        shared_bytes: shared memory of a block in bytes.

    Raises:
        ValueError: tensors that do not fit together.
        UnavailableError: Triton is not installed, or no block fits an SM.
        DriverError: the driver refused a call.
    """

    def __init__(self, driver: Driver, shape: GemmShape, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        constants = constants_of(shape, a, b, c, wide=False)
        self._driver, self._arguments = driver, [tensor.data_ptr() for tensor in (a, b, c)]
        self._keeps = (a, b, c)
        self._kernel = driver.kernels().load(KERNEL, constants, shape.warps, stages=shape.stages)
        memory = shared_memory(driver)
        self.shared_bytes = shape.asked_bytes(self._kernel.shared_bytes, memory)
        driver.allow_shared(self._kernel.function, memory.block)  # others may have loaded it for more
        self.resident = driver.most_resident(self._kernel.function, self._kernel.threads, self.shared_bytes)

    def bind(self, blocks: int) -> Callable[[], None]:
        """Return a function that launches it with ``blocks`` blocks on torch's current stream."""

        def launch() -> None:
            stream = self._driver.caller_stream()[0]
            call = self._kernel.bind(self._arguments, blocks=blocks, stream=stream, shared_bytes=self.shared_bytes)
            self._driver.submit([call])

        return launch


def shared_memory(driver: Driver) -> SharedMemory:
    """Return the sizes of the device's shared memory."""
    unit, block, reserved = (
        driver.attribute(name)
        for name in (
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
            "RESERVED_SHARED_MEMORY_PER_BLOCK",
        )
    )
    return SharedMemory(unit, block, reserved)
