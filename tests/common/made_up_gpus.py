"""CPU ranks that take the path of GPUs: their backend and executor, with compiled code, on a made-up driver.

Symmetric memory is that of CPU ranks, streams are threads (``fake_driver``). Tensors
are torch's on the CPU, for which torch waits for nobody: calls end before they return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from fake_driver import FakeDriver

from sidelane import Communicator
from sidelane.collectives import backend_cuda
from sidelane.execute.cuda import CudaExecutor, DriverFeatures
from sidelane.integrations import order
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


class MadeUpSide:
    """``SideStream`` of a made-up driver."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.handle, self.is_open, self.caller = driver, driver.create_stream(urgent=True), False, 0
        self.stream = self.handle

    def run(self, job: Callable[[], Any]) -> Any:
        self.caller, self.is_open = self.driver.caller, True
        self.order(self.caller, self.handle)
        return self.within(job)

    def within(self, job: Callable[[], Any]) -> Any:
        caller, self.driver.caller = self.driver.caller, self.handle
        try:
            return job()
        finally:
            self.driver.caller = caller

    def current(self) -> int:
        return self.driver.caller

    def follow(self, other: int) -> None:
        if other != self.driver.caller:
            self.order(other, self.driver.caller)

    def join(self) -> None:
        self.order(self.handle, self.driver.caller)

    def order(self, first: int, then: int) -> None:
        event = self.driver.create_event()
        self.driver.submit([self.driver.bind_record(event, first)])
        self.driver.submit([self.driver.bind_wait(event, then)])


class MadeUpMark:
    """``StreamMark`` of a made-up driver."""

    def __init__(self, side: MadeUpSide, watch: Any) -> None:
        self.side, self.watch, self.driver, self.caller = side, watch, side.driver, side.caller
        self.event = side.driver.create_event()
        self.driver.submit([self.driver.bind_record(self.event, side.handle)])

    def follow(self) -> bool | None:
        if self.watch.failure is not None:
            return None
        self.driver.submit([self.driver.bind_wait(self.event, self.driver.caller)])
        return self.driver.caller == self.caller

    def query(self) -> bool:
        return self.driver.has_passed(self.event)


@contextmanager
def made_up_gpus(
    *, finish: bool = True, driver: FakeDriver | None = None, is_async: bool = False
) -> Iterator[FakeDriver]:
    """Communicators of this rank are on a GPU that is none.

    Args:
        finish: calls have ended when they return.
        driver: the driver.
        is_async: asynchronous calls are, on a stream of the driver's; ``owned`` gets the tensors that they keep.
    """
    driver = driver or FakeDriver()
    driver.caller = driver.create_stream()
    real_call, real_repeat = Communicator._call, Communicator.repeat_call

    def call(comm: Communicator, *arguments: Any, **given: Any) -> Any:
        try:
            made = real_call(comm, *(arguments if is_async else (*arguments[:5], False)), **given)
            if finish:
                comm.synchronize()
            return made
        finally:  # of a call that failed, too: torch frees memory of the CPU at once, not in the order of a stream
            if finish:
                driver.synchronize()

    def repeat_call(comm: Communicator, *arguments: Any) -> Any:
        made = real_repeat(comm, *arguments)
        if finish and not arguments[3]:  # on the caller's stream
            driver.synchronize()
        return made

    def captures() -> bool:
        return driver.graph is not None

    def side(_: torch.device) -> MadeUpSide:
        return MadeUpSide(driver)

    patches = (
        mock.patch.object(backend_cuda, "TorchSymmetricMemory", lambda exchange, *_: OwnedMemory(exchange, driver)),
        mock.patch.object(backend_cuda, "probe", return_value=FEATURES),
        mock.patch.object(backend_cuda, "CudaExecutor", lambda *given: CudaExecutor(*given, driver=driver)),
        mock.patch.object(backend_cuda, "VirtualMemory"),
        mock.patch.object(backend_cuda, "ExportedMemory", return_value=None),
        mock.patch.object(backend_cuda.CudaBackend, "wait_for_stores"),
        mock.patch.object(backend_cuda, "SideStream", side),
        mock.patch.object(order, "SideStream", side),
        mock.patch.object(backend_cuda, "StreamMark", MadeUpMark),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", captures),
        mock.patch.object(backend_cuda, "_hold_for", lambda _, tensors: driver.owned.append(tensors)),
        mock.patch.object(communicator, "make_backend", backend_cuda.CudaBackend),
        mock.patch.object(making, "choose_device", return_value=torch.device("cpu")),
        mock.patch.object(Communicator, "_call", call),
        mock.patch.object(Communicator, "repeat_call", repeat_call),
    )
    for patch in patches:
        patch.start()
    try:
        yield driver
    finally:
        for patch in patches:
            patch.stop()
    driver.stop()
