"""CPU ranks that take the path of GPUs: their backend and executor, with compiled code, on a made-up driver.

Symmetric memory is that of CPU ranks, streams are threads (``fake_driver``). Tensors
are torch's on the CPU, for which torch waits for nobody: calls end before they return.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from fake_driver import FakeDriver

from sidelane import Communicator
from sidelane.collectives import backend_cuda
from sidelane.execute.cuda import CudaExecutor, DriverFeatures
from sidelane.memory.exchange import Exchange
from sidelane.memory.heap import SymmetricBlock
from sidelane.memory.host_shared import ShmMemory
from sidelane.session import communicator, making

FEATURES = DriverFeatures("13.0", 3, stream_memory_ops=True, peer_writes=True, copy_batches=True)


class OwnedMemory(ShmMemory):
    """Symmetric memory of CPU ranks that stays until the streams of a driver have ended."""

    def __init__(self, exchange: Exchange, driver: Any) -> None:
        super().__init__(exchange)
        self._owned: list[object] = driver.owned

    def allocate(self, nbytes: int) -> SymmetricBlock:
        self._owned.append(block := super().allocate(nbytes))
        return block


@contextmanager
def made_up_gpus(*, finish: bool = True, driver: FakeDriver | None = None) -> Iterator[FakeDriver]:
    """Communicators of this rank are on a GPU that is none. ``finish``: calls have ended when they return."""
    driver = driver or FakeDriver()
    driver.caller = driver.create_stream()
    real_call = Communicator._call

    def call(comm: Communicator, *arguments: Any) -> None:
        *asked, _ = arguments
        try:
            real_call(comm, *asked, False)  # an asynchronous call takes a stream of torch's
            if finish:
                comm.synchronize()
        finally:  # of a call that failed, too: torch frees memory of the CPU at once, not in the order of a stream
            if finish:
                driver.synchronize()

    patches = (
        mock.patch.object(backend_cuda, "TorchSymmetricMemory", lambda exchange, *_: OwnedMemory(exchange, driver)),
        mock.patch.object(backend_cuda, "probe", return_value=FEATURES),
        mock.patch.object(backend_cuda, "CudaExecutor", lambda *given: CudaExecutor(*given, driver=driver)),
        mock.patch.object(backend_cuda, "VirtualMemory"),
        mock.patch.object(backend_cuda, "ExportedMemory", return_value=None),
        mock.patch.object(backend_cuda.CudaBackend, "wait_for_stores"),
        mock.patch.object(communicator, "make_backend", backend_cuda.CudaBackend),
        mock.patch.object(making, "choose_device", return_value=torch.device("cpu")),
        mock.patch.object(Communicator, "_call", call),
    )
    for patch in patches:
        patch.start()
    try:
        yield driver
    finally:
        for patch in patches:
            patch.stop()
    driver.stop()
