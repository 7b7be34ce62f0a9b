"""Collectives on GPUs: a call takes its place on the current stream; an asynchronous one has a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist

from sidelane.choice import Abilities
from sidelane.choice.candidate import DMA, LAUNCHES, SIGNALS, SM
from sidelane.errors import SidelaneError
from sidelane.execute.base import Addresses, LoadedProgram
from sidelane.execute.cuda import CudaExecutor, probe
from sidelane.execute.cuda.prelaunched import CudaPrelaunched
from sidelane.memory.control import ControlBlock
from sidelane.memory.torch_symm import TorchSymmetricMemory
from sidelane.program.ir import Program
from sidelane.program.kernel import MOST_RANKS, KernelProgram

_MOST_STREAMS = 64


class CudaBackend:
    """See :class:`sidelane.collectives.backend.Backend`."""

    def __init__(
        self, group: dist.ProcessGroup, rank: int, device: torch.device, control: ControlBlock, timeout_s: float
    ) -> None:
        self.memory = TorchSymmetricMemory(group, device, timeout_s)
        self.executor = CudaExecutor(rank, device, control, timeout_s, probe(group, device, self.memory))
        self.device = device
        kernels = find_spec("triton") is not None and dist.get_world_size(group) <= MOST_RANKS
        self.abilities = Abilities((DMA, SM) if kernels else (DMA,), LAUNCHES, SIGNALS)
        self._streams: dict[int, torch.cuda.Stream] = {}  # by handle: to make one takes longer than to find it
        self._async_stream: torch.cuda.Stream | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self._last_captured: torch.cuda.Stream | None = None

    def load_kernel(self, program: KernelProgram, addresses: Addresses, frozen: bool) -> LoadedProgram:
        return self.executor.load_kernel(program, addresses, frozen=frozen)

    def hold(self, program: Program, addresses: Addresses, host_trigger: bool) -> CudaHeld:
        return CudaHeld(self, CudaPrelaunched(self.executor, program, addresses, host_trigger=host_trigger))

    def capturing(self) -> bool:
        driver = self.executor.driver
        return driver.is_capturing(driver.current_stream())

    def capture_of(self, stream: torch.Stream | None) -> int:
        assert isinstance(stream, torch.cuda.Stream), "programs start on streams that run has chosen"
        return self.executor.driver.capture_of(stream.cuda_stream)

    def run(
        self, loaded: LoadedProgram, epoch: int, async_op: bool, tensors: Sequence[torch.Tensor | None], frozen: bool
    ) -> CudaWork | None:
        current = self.current_stream()
        if not async_op:
            self._order_after_last(current, frozen)
            loaded.start(epoch, current)
            return None
        stream = self._async_stream
        if stream is None:
            stream = self._async_stream = torch.cuda.Stream(self.device, priority=-1)
        stream.wait_stream(current)
        self._order_after_last(stream, frozen)
        loaded.start(epoch, stream)
        for tensor in tensors:
            if tensor is not None:
                # The caching allocator must not hand out these bytes again while the other stream uses them.
                tensor.record_stream(stream)
        return CudaWork(self, stream)

    def synchronize(self) -> None:
        self.executor.synchronize()

    def close(self) -> None:
        self.executor.close()

    def _order_after_last(self, stream: torch.cuda.Stream, capturing: bool) -> None:
        # The programs of a communicator share flags and staging, so one must end before the next begins. On one stream
        # they do. A graph under capture cannot wait for work outside, only for what it has captured itself.
        last = self._last_captured if capturing else self._last_stream
        if last is not None and last.cuda_stream != stream.cuda_stream and self._is_capturing(last) == capturing:
            stream.wait_stream(last)
        if capturing:
            self._last_captured = stream
        else:
            self._last_stream = stream

    def follow(self, stream: torch.cuda.Stream) -> None:
        """The next call comes behind the work of ``stream``."""
        self._last_stream = stream

    def last_handle(self) -> int | None:
        """Handle of the stream behind whose work the last call has ended; None before the first."""
        last = self._last_stream
        return None if last is None or self._is_capturing(last) else int(last.cuda_stream)

    def current_stream(self) -> torch.cuda.Stream:
        """The caller's."""
        handle = self.executor.driver.current_stream()
        stream = self._streams.get(handle)
        if stream is None:
            if len(self._streams) >= _MOST_STREAMS:
                self._streams.clear()
            stream = self._streams[handle] = torch.cuda.current_stream(self.device)
        return stream

    def _is_capturing(self, stream: torch.cuda.Stream) -> bool:
        return self.executor.driver.is_capturing(stream.cuda_stream)


class CudaHeld:
    """See :class:`sidelane.collectives.backend.Held`."""

    def __init__(self, backend: CudaBackend, program: CudaPrelaunched) -> None:
        self._backend, self._program = backend, program
        self._home = torch.cuda.ExternalStream(program.home, device=backend.device)

    @property
    def trigger_address(self) -> int:
        return self._program.trigger_address

    def arm(self, epoch: int) -> None:
        self._program.arm(epoch, after=self._backend.last_handle())
        self._backend.follow(self._home)

    def fire(self) -> None:
        stream = self._backend.current_stream()
        self._program.fire(stream.cuda_stream)
        self._backend.follow(stream)  # which waits for the end: the next call needs no event to come behind it

    def fire_from_host(self) -> None:
        self._program.fire_from_host()

    def wait(self, *, begun: bool) -> None:
        self._program.join(self._backend.current_stream().cuda_stream, begun=begun)

    def finish(self) -> None:
        self._program.finish(fire=False)

    def give_up(self) -> None:
        self._program.finish(fire=True)

    def drain(self) -> None:
        with contextlib.suppress(SidelaneError):
            self._program.finish(fire=False)


class CudaWork:
    """See :class:`sidelane.collectives.backend.Work`."""

    def __init__(self, backend: CudaBackend, stream: torch.cuda.Stream) -> None:
        self._backend = backend
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._backend.executor.check()
        torch.cuda.current_stream(self._backend.device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())
