"""Invocations of one program that a test starts by itself, without a communicator, and waits for."""

from __future__ import annotations

import time
from typing import Any


class Started:
    """An invocation of a loaded program on a GPU; one that is captured counts as done."""

    def __init__(self, executor: Any, epoch: int, handle: int, *, captured: bool, is_kernel: bool) -> None:
        self.executor, self.epoch, self.handle = executor, epoch, handle
        self.captured, self.is_kernel = captured, is_kernel

    def done(self) -> bool:
        if self.captured:
            return True
        executor = self.executor
        return executor.driver.is_idle(self.handle) if self.is_kernel else executor.watch.finished(self.epoch)

    def wait(self) -> None:
        if self.captured:
            return
        if not self.is_kernel:
            self.executor.watch.wait(self.epoch)
            return
        while not self.done():
            self.executor.check()
            time.sleep(1e-4)
        self.executor.check()


def start(loaded: Any, epoch: int, stream: Any) -> Started:
    """Run a loaded program or kernel on a stream."""
    executor, handle = loaded.executor, int(stream.cuda_stream)
    with executor.driver.current():
        captured = executor.driver.is_capturing(handle)
    loaded.run(epoch, (handle, captured))
    is_kernel = type(loaded).__name__ == "CudaKernel"
    return Started(executor, epoch, handle, captured=captured, is_kernel=is_kernel)
