"""Collectives on GPUs: a call runs in order on the current stream, an asynchronous call on another stream."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sidelane.choice import Abilities
from sidelane.choice.candidate import DMA, SM
from sidelane.collectives.backend import Backend
from sidelane.collectives.side_stream import SideStream, StreamMark
from sidelane.collectives.work import NO_TIMEOUT, Work, timed_out
from sidelane.config import CHOSEN
from sidelane.errors import PeerTimeoutError, SidelaneError
from sidelane.execute.base import Addresses, CallerStream, Questions, Runnable
from sidelane.execute.cuda import CudaExecutor, CudaProgram, DriverFeatures, probe
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.exported import ExportedMemory
from sidelane.execute.cuda.trigger import CUDA_CHANNELS, CudaArrival, CudaTrigger, require_free_channel
from sidelane.execute.cuda.virtual import VirtualMemory
from sidelane.machine.local import peer_access
from sidelane.machine.peers import PeerMemory, decide, forced
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.memory.heap import SymmetricBlock, SymmetricMemory
from sidelane.memory.pinned import PinnedMemory
from sidelane.memory.torch_symm import TorchSymmetricMemory
from sidelane.program.ir import Value
from sidelane.program.kernel import MOST_RANKS, KernelCall, KernelProgram
from sidelane.program.transform import ended_by

if TYPE_CHECKING:
    from sidelane.execute.cuda.kernel_call import CudaKernelCall

_POLL_S = 50e-6


class CudaBackend(Backend):
    """See :class:`sidelane.collectives.backend.Backend`.

    Attributes:
        kernels_move_bytes: collectives may run in Triton kernels, if Triton is installed.
        channels: hardware channels of the streams of a process.
    """

    executor: CudaExecutor
    kernels_move_bytes = True
    channels = CUDA_CHANNELS

    def __init__(
        self,
        exchange: Exchange,
        device: torch.device,
        control: ControlBlock,
        timeout_s: float,
        *,
        like: CudaBackend | None = None,
        peers: str = CHOSEN,
        memory_bytes: int | None = None,
    ) -> None:
        self.peers = agree_on_peers(exchange, device, peers) if like is None else like.peers
        self.memory: SymmetricMemory = (
            PinnedMemory(exchange, device, memory_bytes)
            if self.peers.through_host
            else TorchSymmetricMemory(exchange, device, timeout_s)
        )
        self.features: DriverFeatures = self._probe(exchange, device) if like is None else like.features
        if self.peers.through_host:
            self.features.require_host_addresses()
        self.executor = self._make_executor(exchange.rank, device, control, timeout_s)
        self.exported = None if self.peers.through_host else self._make_exported()
        self.device = device
        kernels = self.kernels_move_bytes and find_spec("triton") is not None and exchange.world_size <= MOST_RANKS
        implementations = (DMA, SM) if kernels else (DMA,)
        known = self.kernels_move_bytes and not self.peers.through_host
        self.abilities = Abilities(implementations, self.features.graphs, known, self.peers.through_host)
        self._allocating: set[int] = set()  # handles of streams
        self.last_stream: int | None = None  # handle of that of the last call, which compiled code reads and sets
        self._last_captured: int | None = None

    def _probe(self, exchange: Exchange, device: torch.device) -> DriverFeatures:
        return probe(exchange, device, self.memory)

    def _make_executor(self, rank: int, device: torch.device, control: ControlBlock, timeout_s: float) -> CudaExecutor:
        return CudaExecutor(rank, device, control, timeout_s, self.features)

    def _make_exported(self) -> ExportedMemory:
        return ExportedMemory(self.executor.driver, VirtualMemory(self.executor.driver))

    def load_kernel(self, program: KernelProgram, addresses: Addresses, frozen: bool) -> Runnable:
        return self.executor.load_kernel(program, addresses, frozen=frozen)

    @property
    def status_words(self) -> int:
        return self.executor.status_words

    def bind_kernel_call(self, call: KernelCall, *, compiles: bool) -> CudaKernelCall:
        from sidelane.execute.cuda.kernel_call import CudaKernelCall

        return CudaKernelCall(self.executor, call, compiles=compiles)

    def bind_trigger(self, words: Sequence[tuple[int, Value]], loaded: Runnable) -> CudaTrigger:
        assert isinstance(loaded, CudaProgram)
        title = (str(loaded.program.collective), loaded.program.variant)
        require_free_channel(*title, loaded.streams, self.channels)
        loaded.is_triggered = True
        ended = ended_by(loaded.program, self.executor.rank)
        return CudaTrigger(
            self.executor,
            words,
            f"a trigger of {loaded.program.collective}",
            None if ended is None else loaded.addresses.flag(ended),
        )

    def bind_arrival(self, words: Sequence[tuple[int, Value]], loaded: Runnable) -> CudaArrival:
        assert isinstance(loaded, CudaProgram)
        return CudaArrival(self.executor, words, f"an arrival of {loaded.program.collective}")

    def caller_stream(self) -> CallerStream:
        return self.executor.driver.caller_stream()

    @property
    def ahead(self) -> CallerStream:
        return self.executor.held_stream(), False

    def note_followed(self, caller: CallerStream) -> None:
        if self.last_stream == self.executor.held_stream():
            self.last_stream = caller[0]  # the next call there needs no event

    def capture_of(self, caller: CallerStream) -> int:
        return self.executor.driver.capture_of(caller[0])

    def run(
        self, loaded: Runnable, epoch: int, async_op: bool, tensors: Sequence[torch.Tensor | None], caller: CallerStream
    ) -> CudaWork | None:
        if async_op:
            return self._run_aside(loaded, epoch, tensors, caller)
        if caller[0] != (self._last_captured if caller[1] else self.last_stream):
            self._order_after_last(caller)
        loaded.run(epoch, caller)
        return None

    def questions(self) -> Questions | None:
        return self.executor.driver.questions()

    @functools.cached_property
    def aside(self) -> SideStream:
        """The stream of asynchronous calls."""
        return SideStream(self.device)

    def _run_aside(
        self, loaded: Runnable, epoch: int, tensors: Sequence[torch.Tensor | None], caller: CallerStream
    ) -> CudaWork:
        side = self.aside
        stream, aside = side.stream, (side.handle, caller[1])
        if caller[0] != aside[0]:
            self.executor.order(caller[0], aside[0])
            side.caller = torch.cuda.current_stream(stream.device)
        self._order_after_last(aside)
        if caller[1] and isinstance(loaded, CudaProgram) and loaded.marks + loaded.arrivals:
            work: CudaWork = CudaMarkedWork(self, side, loaded)
            _hold_for(stream, [tensor for tensor in tensors if tensor is not None])
            return work
        loaded.run(epoch, aside)
        return self.work_on(side, [tensor for tensor in tensors if tensor is not None], ())

    def work_on(
        self,
        side: SideStream,
        tensors: Sequence[torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
        mark: StreamMark | None = None,
    ) -> CudaWork:
        """Return the work of a call on a stream, which uses these tensors.

        Args:
            side: the stream.
            tensors: tensors of the call.
            outputs: those of them that it writes.
            mark: end of the call, if compiled code has made it; None for all that the stream has so far.
        """
        work = CudaWork(self, side)
        work.end, work.held, work.outputs = mark or StreamMark(side, self.executor.watch), tensors, outputs
        return work

    def engine_streams(self) -> Sequence[int]:
        return self.executor.side_streams

    def set_timeout(self, timeout_s: float) -> None:
        self.executor.timeout_s = self.executor.watch.timeout_s = timeout_s

    def synchronize(self, call: int | None = None) -> None:
        if call is None:
            self.executor.synchronize()
        else:
            self.executor.watch.wait(call)

    def follow_all(self) -> None:
        current, _ = self.caller_stream()
        others = {*self._allocating, self.last_handle()}
        if "aside" in vars(self):  # an asynchronous call was made
            others.add(self.aside.handle)
        for handle in others - {None, current}:
            assert handle is not None
            with contextlib.suppress(DriverError):  # of a stream that is gone
                if not self.executor.driver.is_capturing(handle):
                    self.executor.order(handle, current)

    def note_stream(self) -> None:
        self._allocating.add(self.caller_stream()[0])

    def forget_flags(self, bases: Sequence[int], memory: SymmetricBlock) -> None:
        self.executor.forget_flags(bases, memory)

    def wait_for_stores(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def renew(self, call: int) -> None:
        self.wait_for_stores()  # torch has stored flags there
        self.executor.renew(call)

    def disown(self, error: SidelaneError) -> None:
        self.executor.watch.failure = error

    def close(self) -> None:
        self.executor.close()

    def _order_after_last(self, caller: CallerStream) -> None:
        # The programs of a communicator share flags and staging, so one must end before the next begins. On one stream
        # they do. A graph under capture cannot wait for work outside, only for what it has captured itself.
        handle, capturing = caller
        last = self._last_captured if capturing else self.last_stream
        if last is not None and last != handle and self.executor.driver.is_capturing(last) == capturing:
            self.executor.order(last, handle)
        if capturing:
            self._last_captured = handle
        else:
            self.last_stream = handle

    def last_handle(self) -> int | None:
        """Return the handle of the stream behind whose work the last call ends; None before the first call."""
        return (
            None
            if self.last_stream is None or self.executor.driver.is_capturing(self.last_stream)
            else self.last_stream
        )


class CudaWork(Work):
    """See :class:`sidelane.collectives.work.Work`.

    It holds the tensors until the caller's stream waits for it, so that the caching allocator does not hand out their
    bytes before. A tensor that is freed behind that wait comes back at once, and at the same address: a call on the
    next one is a repeated call. What nobody waits for so is freed by ``record_stream``, which the allocator takes up
    later, at other addresses.

    Args:
        backend: backend of the communicator.
        side: stream of the call.

    Attributes:
        end: end of the call.
        held: tensors that the call uses, as long as it holds them.
    """

    end: StreamMark
    held: Sequence[torch.Tensor] = ()

    def __init__(self, backend: CudaBackend, side: SideStream) -> None:
        dist.Work.__init__(self)
        self._backend, self._side = backend, side

    def __del__(self) -> None:
        if self.held and not sys.is_finalizing():
            _hold_for(self._side.stream, self.held)

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._side.stream

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        is_callers = self.end.follow()
        if is_callers is None:
            self._backend.executor.check()
            with self._backend.executor.driver.current():
                is_callers = self.end.follow()
            if is_callers is None:  # after a failure meanwhile
                self._backend.executor.check()
                raise RuntimeError("wait: the stream cannot wait for the call")
        if held := self.held:
            self.held = ()
            if not is_callers:
                _hold_for(self._side.stream, held)
        if timeout > NO_TIMEOUT:
            until = time.monotonic() + timeout.total_seconds()
            while not self.end.query():
                self._backend.executor.check()
                if time.monotonic() > until:
                    raise PeerTimeoutError(timed_out(timeout, self.outputs))
                time.sleep(_POLL_S)
            self._backend.executor.check_end()
        return True

    def is_completed(self) -> bool:
        return self.end.query()

    def exception(self) -> BaseException | None:
        watch = self._backend.executor.watch
        watch.look_for_aborts()
        return watch.failure

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[self._backend.device])
        # Behind all of that stream the streams of callbacks come.
        self._side.within(functools.partial(future.set_result, list(self.outputs)))
        return future


def _hold_for(stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor]) -> None:
    """Keep the caching allocator from handing out these tensors' bytes again while the stream uses them."""
    for tensor in tensors:
        tensor.record_stream(stream)


class CudaMarkedWork(CudaWork):
    """A program with triggers or arrivals that is being captured into a graph.

    Where each trigger would be fired, the caller's stream gets a mark. After the last mark the program is captured,
    and its copies depend on the marks.

    Args:
        backend: backend of the communicator.
        side: stream on which the program is captured.
        loaded: the program.
    """

    def __init__(self, backend: CudaBackend, side: SideStream, loaded: CudaProgram) -> None:
        super().__init__(backend, side)
        self._loaded = loaded
        self._unmarked = set(range(loaded.marks))
        if not self._unmarked:
            self._capture()

    def mark(self, number: int, caller: CallerStream) -> None:
        """Let the commands that wait for a trigger follow the caller's work so far. Raises DriverError."""
        self._loaded.mark(number, caller[0])
        self._unmarked.discard(number)
        if not self._unmarked:
            self._capture()

    def follow(self, number: int, caller: CallerStream) -> None:
        """Let the caller's next work follow an arrival. Raises as :meth:`wait`, and DriverError."""
        self._require_all_marks()
        self._loaded.follow(number, caller[0])

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._require_all_marks()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        return not self._unmarked and super().is_completed()

    def _capture(self) -> None:
        self._loaded.run(0, (self._side.handle, True))
        self.end = StreamMark(self._side, self._backend.executor.watch)

    def _require_all_marks(self) -> None:
        if self._unmarked:
            raise RuntimeError(f"wait: triggers that were not fired in this capture (value={sorted(self._unmarked)})")


def agree_on_peers(exchange: Exchange, device: torch.device, setting: str) -> PeerMemory:
    """Return the memory between the ranks' GPUs. Collective.

    Args:
        exchange: connection of the ranks.
        device: device of this rank.
        setting: ``Config.peers``.

    Raises:
        MismatchError: ranks have different settings.
        PeerError, PeerTimeoutError: a rank did not take part.
    """

    def own() -> tuple[str, str]:
        gpu, reached = peer_access(device, exchange.world_size) if setting == CHOSEN else ("", {})
        return gpu, json.dumps(reached)

    posted = exchange(f"the memory between GPUs (SIDELANE_PEERS or Config.peers={setting!r})", own)
    if setting != CHOSEN:
        return forced(setting)
    return decide([(gpu, json.loads(reached)) for gpu, reached in posted])
