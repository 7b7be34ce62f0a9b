"""Collectives on AMD GPUs: those of CUDA with the HIP runtime's driver. Never run on AMD hardware."""

from __future__ import annotations

import torch

from sidelane.collectives.backend_cuda import CudaBackend
from sidelane.execute.cuda.exported import ExportedMemory
from sidelane.execute.cuda.probe import DriverFeatures, probe
from sidelane.execute.cuda.trigger import HardwareChannels
from sidelane.execute.hip import HipDriver, HipExecutor, probe_graphs
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange


class HipBackend(CudaBackend):
    """See :class:`sidelane.collectives.backend.Backend`.

    SDMA engines move all bytes, and a kernel adds. Collectives in kernels are not offered: they compile for these GPUs,
    but nobody has seen whether their fences hold there.
    """

    kernels_move_bytes = False
    channels = HardwareChannels("GPU_MAX_HW_QUEUES", 4)  # for the streams of one priority

    def _probe(self, exchange: Exchange, device: torch.device) -> DriverFeatures:
        return probe_graphs(device, probe(exchange, device, self.memory, HipDriver), exchange, HipDriver)

    def _make_executor(self, rank: int, device: torch.device, control: ControlBlock, timeout_s: float) -> HipExecutor:
        return HipExecutor(rank, device, control, timeout_s, self.features, driver=HipDriver(device))

    def _make_exported(self) -> ExportedMemory:
        return ExportedMemory(self.executor.driver, None)
