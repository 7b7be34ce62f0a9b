"""The shaped GEMM on a GPU: compiled and loaded once for a shape and a size, launched on the caller's stream.

It bypasses Triton's launcher, which cannot request more shared memory than a kernel needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidelane.execute.cuda.driver import Driver
from sidelane_lab.shaping import kernel as shaped_gemm
from sidelane_lab.shaping.shape import GemmShape, SharedMemory


class ShapedGemm:
    """``c = a @ b`` in a shape.

    Args:
        driver: driver of the device, which is current.
        shape: tiles and residency.
        a, b, c: see ``kernels.shaped_gemm``.

    Attributes:
        resident: number of blocks that an SM holds at once.
        shared_bytes: shared memory of a block in bytes.

    Raises:
        ValueError: tensors that do not fit together.
        UnavailableError: Triton is not installed, or no block fits an SM.
        DriverError: the driver refused a call.
    """

    def __init__(self, driver: Driver, shape: GemmShape, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        constants = shaped_gemm.constants_of(shape, a, b, c, wide=False)
        self._driver, self._arguments = driver, [tensor.data_ptr() for tensor in (a, b, c)]
        self._keeps = (a, b, c)
        self._kernel = driver.kernels().load(shaped_gemm.KERNEL, constants, shape.warps, stages=shape.stages)
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
