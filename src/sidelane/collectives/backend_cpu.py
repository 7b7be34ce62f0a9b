"""Collectives between CPU processes: a call blocks its caller, and an asynchronous one runs on a thread, in order."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sidelane.choice import Abilities
from sidelane.errors import UnavailableError
from sidelane.execute.base import Addresses, LoadedProgram
from sidelane.execute.cpu import CpuExecutor
from sidelane.memory.control import ControlBlock
from sidelane.memory.shm import ShmMemory
from sidelane.program.kernel import KernelProgram


class CpuBackend:
    """See :class:`sidelane.collectives.backend.Backend`."""

    abilities = Abilities()

    def __init__(self, group: dist.ProcessGroup, rank: int, control: ControlBlock, timeout_s: float) -> None:
        self.memory = ShmMemory(group)
        self.executor = CpuExecutor(rank, control, timeout_s)
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="sidelane-async")
        self._last: concurrent.futures.Future[None] | None = None

    def load_kernel(self, program: KernelProgram, addresses: Addresses, frozen: bool) -> LoadedProgram:
        raise UnavailableError(f"{program.collective.kind}: variant {program.variant!r} runs on GPUs only")

    def capturing(self) -> bool:
        return False

    def run(
        self, loaded: LoadedProgram, epoch: int, async_op: bool, tensors: Sequence[torch.Tensor], frozen: bool
    ) -> CpuWork | None:
        if async_op:
            # The future keeps the tensors: a caller may drop them before the thread gets there.
            self._last = self._thread.submit(_run, loaded, epoch, tensors)
            return CpuWork(self._last, self.executor)
        self.synchronize()
        loaded.start(epoch, None).wait()
        return None

    def synchronize(self) -> None:
        if self._last is not None:
            _result(self._last, self.executor)
            self._last = None

    def close(self) -> None:
        self.executor.close()  # first: it ends what the thread may be waiting for
        self._thread.shutdown(wait=True, cancel_futures=True)


class CpuWork:
    """See :class:`sidelane.collectives.backend.Work`."""

    def __init__(self, future: concurrent.futures.Future[None], executor: CpuExecutor) -> None:
        self._future, self._executor = future, executor

    def wait(self) -> None:
        _result(self._future, self._executor)

    def is_completed(self) -> bool:
        return self._future.done()


def _result(future: concurrent.futures.Future[None], executor: CpuExecutor) -> None:
    try:
        future.result()
    except KeyboardInterrupt:
        # It reached this thread, not the one that runs the collective: end that one, which tells the peers.
        executor.close()
        raise


def _run(loaded: LoadedProgram, epoch: int, tensors: Sequence[torch.Tensor]) -> None:
    loaded.start(epoch, None).wait()
