"""Where tests run programs: a world of ranks inside one process, or one rank of a crew; and what the bytes must be.

The world inside one process is quick to make, so that hundreds of programs can be tried; its ranks are executors of
their own whose threads race as those of processes do. The rig is the real thing: shared memory and a control block.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from monitor import Monitor
from ranks import shared_memory

from sidelane.execute.base import Addresses
from sidelane.execute.cpu import CpuExecutor, CpuProgram, Invocation
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import ShmMemory
from sidelane.program.collective import REDUCING, Buffer, Collective, Kind, ReduceOp, Reduction
from sidelane.program.ir import Program, Queue

Delay = Callable[[Queue, int], None]
FLAGS = 512
POISON = 0xA5


class LocalWorld:
    """``n`` executors in this process, with memory that all of them address."""

    def __init__(self, n: int, timeout_s: float = 20.0, delays: Mapping[int, Delay] | None = None) -> None:
        self.monitor = Monitor(n)
        self.flags = [torch.zeros(FLAGS, dtype=torch.int32) for _ in range(n)]
        self.executors = [
            CpuExecutor(rank, self.monitor.of(rank), timeout_s, delay=(delays or {}).get(rank)) for rank in range(n)
        ]

    def load(self, program: Program) -> LoadedEverywhere:
        memory = {
            (rank, buffer): torch.full((program.buffer_bytes(rank, buffer),), POISON, dtype=torch.uint8)
            for rank in range(program.world_size)
            for buffer in Buffer
        }
        buffers = {place: tensor.data_ptr() for place, tensor in memory.items()}
        addresses = Addresses(buffers, tuple(tensor.data_ptr() for tensor in self.flags))
        return LoadedEverywhere([executor.load(program, addresses) for executor in self.executors], memory)

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for executor in self.executors:
            executor.close()


@dataclasses.dataclass
class LoadedEverywhere:
    """A program loaded on every rank of a local world. Keep it while it runs: it holds the memory."""

    ranks: list[CpuProgram]
    memory: dict[tuple[int, Buffer], torch.Tensor]

    def start(self, epoch: int) -> list[Invocation]:
        return [loaded.start(epoch) for loaded in self.ranks]

    def run(self, epoch: int) -> None:
        for pending in self.start(epoch):
            pending.wait()

    def run_checked(self, epoch: int) -> None:
        """One invocation with fresh inputs and poisoned outputs, whose results must be right."""
        collective = self.ranks[0].program.collective
        for rank in range(collective.world_size):
            fill(collective, rank, epoch, self.memory[rank, Buffer.INPUT], self.memory[rank, Buffer.OUTPUT])
        self.run(epoch)
        for rank in range(collective.world_size):
            check(collective, rank, epoch, self.memory[rank, Buffer.INPUT], self.memory[rank, Buffer.OUTPUT])


class Rig:
    """One rank's executor with shared memory and control block, in a group of processes."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float = 30.0, delay: Delay | None = None) -> None:
        self.before = holdings()
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        exchange = Exchange(group, 60.0)
        self.memory, self.control = ShmMemory(exchange), ControlBlock(exchange)
        self.executor = CpuExecutor(self.rank, self.control, timeout_s, delay=delay)
        self.flags = self.memory.allocate(4 * FLAGS)

    def load(self, program: Program) -> LoadedHere:
        blocks = {
            buffer: self.memory.allocate(max(1, *(program.buffer_bytes(r, buffer) for r in range(self.world_size))))
            for buffer in Buffer
        }
        buffers = {
            (rank, buffer): address for buffer, block in blocks.items() for rank, address in enumerate(block.addresses)
        }
        loaded = self.executor.load(program, Addresses(buffers, self.flags.addresses))
        tensors = {b: block.tensor[: program.buffer_bytes(self.rank, b)] for b, block in blocks.items()}
        return LoadedHere(loaded, tensors, self.rank)

    def close(self) -> None:
        self.executor.close()
        self.control.close()
        self.memory.close()


@dataclasses.dataclass
class LoadedHere:
    """A program loaded on this rank, and this rank's buffers."""

    loaded: CpuProgram
    memory: dict[Buffer, torch.Tensor]
    rank: int

    def start(self, epoch: int) -> Invocation:
        """Start with fresh inputs and poisoned outputs."""
        fill(self.loaded.program.collective, self.rank, epoch, self.memory[Buffer.INPUT], self.memory[Buffer.OUTPUT])
        return self.loaded.start(epoch)

    def finish(self, epoch: int, pending: Invocation) -> None:
        pending.wait()
        check(self.loaded.program.collective, self.rank, epoch, self.memory[Buffer.INPUT], self.memory[Buffer.OUTPUT])

    def run_checked(self, epoch: int) -> None:
        self.finish(epoch, self.start(epoch))


def holdings() -> list[str]:
    """Shared memory and engine threads of this process, one line for each."""
    engines = [t for t in threading.enumerate() if t.name.startswith("sidelane-")]
    return shared_memory() + [f"thread {thread.ident} {thread.name}" for thread in engines]


def random_delays(seed: int, probability: float = 0.2, longest_s: float = 0.002) -> Delay:
    """A delay of random length in front of random commands."""
    generator = random.Random(seed)

    def delay(queue: Queue, index: int) -> None:
        if generator.random() < probability:
            time.sleep(generator.random() * longest_s)

    return delay


def input_of(collective: Collective, rank: int, epoch: int) -> torch.Tensor:
    """The bytes that a rank puts in: random; small whole numbers where they are reduced, so that sums are exact."""
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    nbytes = collective.input_bytes(rank)
    if collective.reduction is None:
        return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    count = nbytes // collective.reduction.element_bytes
    numbers = torch.randint(-15, 16, (count,), generator=generator)
    return numbers.to(torch_dtype(collective.reduction)).view(torch.uint8)


def fill(collective: Collective, rank: int, epoch: int, input: torch.Tensor, output: torch.Tensor) -> None:
    """Poison the output of ``rank``, then write its input, which may lie in it."""
    buffers = {Buffer.INPUT: input, Buffer.OUTPUT: output}
    output.fill_(POISON)
    span = collective.input_span(rank, 0, collective.input_bytes(rank))
    buffers[span.buffer][span.offset : span.end] = input_of(collective, rank, epoch)


def check(collective: Collective, rank: int, epoch: int, input: torch.Tensor, output: torch.Tensor) -> None:
    """The output of ``rank`` must hold what the collective defines."""
    wrong = wrong_bytes(collective, rank, epoch, input, output)
    assert not wrong, f"{collective}, epoch {epoch}, rank {rank}: {wrong} wrong bytes"


def wrong_bytes(collective: Collective, rank: int, epoch: int, input: torch.Tensor, output: torch.Tensor) -> int:
    """How many bytes of the output of ``rank`` are not what they must be."""
    buffers = {Buffer.INPUT: input, Buffer.OUTPUT: output}
    span = collective.output_span(rank, 0, collective.output_bytes(rank))
    found = buffers[span.buffer][span.offset : span.end]
    return int((found != output_of(collective, rank, epoch)).sum())


def output_of(collective: Collective, rank: int, epoch: int) -> torch.Tensor:
    """The bytes that must come out on a rank (poison where nothing is due)."""
    inputs = [input_of(collective, source, epoch) for source in range(collective.world_size)]
    output = torch.full((collective.output_bytes(rank),), POISON, dtype=torch.uint8)
    if collective.kind in REDUCING:
        assert collective.reduction is not None
        offset = 0 if collective.kind is Kind.ALL_REDUCE else sum(collective.counts[0][:rank])
        parts = [data[offset : offset + len(output)] for data in inputs]
        return reduced(parts, collective.reduction) if len(output) else output
    for chunk in collective.chunks():
        if chunk.dst_rank == rank:
            data = inputs[chunk.src_rank][chunk.src_offset : chunk.src_offset + chunk.nbytes]
            output[chunk.dst_offset : chunk.dst_offset + chunk.nbytes] = data
    return output


def reduced(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The reduction of bytes, in float64 or int64, which are exact here; rounded once."""
    dtype = torch_dtype(reduction)
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    numbers = torch.stack([part.view(dtype).to(wide) for part in parts])
    match reduction.op:
        case ReduceOp.SUM:
            result = numbers.sum(0)
        case ReduceOp.AVG:
            # Through float32, as the definition says: the quotient is rounded there before it is rounded again.
            total = numbers.sum(0)
            result = (
                (total.float() / len(parts))
                if dtype.is_floating_point
                else torch.div(total.to(dtype), len(parts), rounding_mode="trunc")  # sums wrap in their own type
            )
        case ReduceOp.MIN:
            result = numbers.amin(0)
        case ReduceOp.MAX:
            result = numbers.amax(0)
    return result.to(dtype).view(torch.uint8)


def torch_dtype(reduction: Reduction) -> torch.dtype:
    dtype = getattr(torch, reduction.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
