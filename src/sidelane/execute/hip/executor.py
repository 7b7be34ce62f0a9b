"""The executor for AMD GPUs: that for CUDA with another driver, and flags that do not wrap around."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sidelane.errors import UnavailableError
from sidelane.execute.base import Addresses, Capabilities, Runnable
from sidelane.execute.cuda.executor import CudaExecutor
from sidelane.execute.cuda.probe import DriverFeatures
from sidelane.memory.control import ControlBlock
from sidelane.program.ir import Copy, Program

LAST_EPOCH = 1 << 31
"""Number of the first call that is refused. A released wait gets a value beyond the epoch, which must fit, too."""


class HipExecutor(CudaExecutor):
    """Runs one rank's queues of programs on SDMA engines through the HIP runtime. Never run on AMD hardware.

    See :class:`sidelane.execute.cuda.executor.CudaExecutor` for arguments and methods.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        monitor: ControlBlock,
        timeout_s: float,
        features: DriverFeatures,
        **options: Any,
    ) -> None:
        features = dataclasses.replace(features, rows_by_engines=False)
        super().__init__(rank, device, monitor, timeout_s, features, **options)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({Copy}), "hip")

    def load(self, program: Program, addresses: Addresses, *, captured: bool = False) -> Runnable:
        """See ``CudaExecutor.load``.

        Raises:
            UnavailableError: ``captured``, and this HIP runtime cannot capture memory operations.
        """
        if captured and not self.features.graphs:
            raise UnavailableError(f"a collective cannot be captured into a graph here: {self.features.note}")
        return super().load(program, addresses, captured=captured)

    def renew(self, epoch: int) -> None:
        """See ``CudaSite.renew``.

        Raises:
            UnavailableError: the communicator has made 2,147,483,648 calls. A HIP stream waits for "at least" among
                unsigned numbers, so that flags may not wrap around: a new communicator begins at 1 again.
        """
        if epoch >= LAST_EPOCH:
            raise UnavailableError(
                f"Communicator: calls on AMD GPUs (value={epoch}, allowed=..{LAST_EPOCH - 1}). Make a new communicator"
            )
        super().renew(epoch)
