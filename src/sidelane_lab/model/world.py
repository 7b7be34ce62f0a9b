"""The queues, flags and kernels of a program of all ranks of several nodes, or of those that stand for all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from sidelane.program import collective as define
from sidelane.program.collective import SLOT_ALIGNMENT, Buffer, Collective, Kind, ReduceOp, Reduction, Span
from sidelane.program.ir import EPOCH, Command, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.node_steps import Step
from sidelane_lab.sim import Fold, KernelPart, SimulatedRun, simulate

ITEM = 4
SUM = Reduction(ReduceOp.SUM, "int32")
"""Reduction of all programs here, of elements of 4 bytes: integers have one sum, in whatever order they are added."""

STREAM = Engine(EngineKind.LOCAL, 16)
"""Queue of a rank that moves nothing: it begins steps on other queues, and waits for their ends."""

CHUNK_BYTES = 512 << 10
"""Bytes that a chain or a tree passes on at a time: a part of NCCL's buffers."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodesProgram:
    """A program, and what ``simulate`` must know of it.

    Attributes:
        program: program of all ranks, or of those that stand for all others.
        machine: machine for which its variants were chosen.
        edges: flags that take no time.
        kernels: collectives of the library that begin behind flags.
        calls: begins of the parts that the host hands over one after the other.
        fold: ranks that stand for all others; None if all are there.
        steps: steps of rank 0, with the numbers of the stamps at their begins and ends.
    """

    program: Program
    machine: Machine
    edges: frozenset[Flag]
    kernels: Mapping[Flag, KernelPart]
    calls: Mapping[tuple[int, Engine], Sequence[int]]
    fold: Fold | None
    steps: tuple[tuple[Step, int, int], ...] = ()

    def simulate(self, *, record: bool = False) -> SimulatedRun:
        """Run it in virtual time."""
        return simulate(
            self.program,
            self.machine,
            edges=self.edges,
            kernels=self.kernels,
            calls=self.calls,
            fold=self.fold,
            record=record,
        )


class World:
    """Queues and flags of the ranks that are built."""

    def __init__(self, machine: Machine, collective: Collective, fold: Fold) -> None:
        self.machine, self.collective, self.fold, self.ranks = machine, collective, fold, fold.ranks
        self.sizes: dict[str, int] = {
            buffer: collective.buffer_bytes(0, buffer) for buffer in (Buffer.INPUT, Buffer.OUTPUT)
        }
        self.edges: set[Flag] = set()
        self.kernels: dict[Flag, KernelPart] = {}
        self.calls: dict[tuple[int, Engine], list[int]] = {}
        self.staging = self.most_staging = 0
        self._queues: dict[tuple[int, Engine], list[Command]] = {}
        self._flags: dict[int, dict[object, int]] = {}

    def queue(self, rank: int, engine: Engine) -> list[Command]:
        return self._queues.setdefault((rank, engine), [])

    def flag(self, rank: int, purpose: object) -> Flag:
        """Return the flag of a rank for a purpose; ranks that stand for each other have the same."""
        known = self._flags.setdefault(self.fold.rank(rank), {})
        return Flag(rank, known.setdefault(purpose, len(known)))

    def hold(self, rank: int, purpose: object) -> Flag:
        """Return a flag of a rank that takes no time: a dependency between its own queues."""
        flag = self.flag(rank, purpose)
        self.edges.add(flag)
        return flag

    def room(self, nbytes: int) -> int:
        """Return the begin of so many more bytes of staging."""
        begin = self.staging
        self.staging += -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        return begin

    def run(
        self,
        rank: int,
        engine: Engine,
        name: object,
        commands: Iterable[Command],
        kernel: KernelPart | None = None,
        *,
        is_handed_over: bool = False,
    ) -> None:
        """Add a part of a queue behind the stream, which goes on beside it until it joins it.

        Args:
            rank: rank of the queue.
            engine: engine of the queue.
            name: name of the part among those of the rank.
            commands: commands of the part.
            kernel: kernel that makes them; None for commands of engines.
            is_handed_over: True if the host hands the part over when the stream comes to it.
        """
        begin = self.hold(rank, ("begin", name))
        if kernel is not None:
            self.kernels[begin] = kernel
        self.queue(rank, STREAM).append(Signal(begin, EPOCH))
        queue, calls = self.queue(rank, engine), self.calls.setdefault((rank, engine), [])
        queue.append(Wait(begin, EPOCH))
        if is_handed_over:
            calls.append(len(queue))
        queue += commands
        queue.append(Signal(self.hold(rank, ("end", name)), EPOCH))

    def join(self, rank: int, names: Iterable[object]) -> None:
        """Have the stream wait for the ends of parts."""
        self.queue(rank, STREAM).extend(Wait(self.hold(rank, ("end", name)), EPOCH) for name in names)

    def program(self, name: str, steps: tuple[tuple[Step, int, int], ...] = ()) -> NodesProgram:
        for rank in self.ranks:
            self.calls[rank, STREAM] = []
        queues = tuple(Queue(rank, engine, tuple(commands)) for (rank, engine), commands in self._queues.items())
        count = max(map(len, self._flags.values()), default=0)
        program = Program(
            self.collective, name, queues, (max(self.staging, self.most_staging),) * self.machine.world_size, count
        )
        fold = None if self.fold.is_whole else self.fold
        return NodesProgram(program, self.machine, frozenset(self.edges), self.kernels, self.calls, fold, steps)


def whole_collective(kind: Kind, nbytes: int, ranks: int) -> Collective:
    """Return the collective; ``nbytes``: of each rank's part, of an all-reduce and a broadcast of the whole tensor."""
    if kind is Kind.ALL_GATHER:
        return define.all_gather([nbytes] * ranks)
    if kind is Kind.REDUCE_SCATTER:
        return define.reduce_scatter([nbytes] * ranks, SUM)
    if kind is Kind.ALL_REDUCE:
        return define.all_reduce(define.split_evenly(nbytes, ranks, ITEM), SUM, in_place=True)
    if kind is Kind.ALL_TO_ALL:
        return define.all_to_all([(nbytes,) * ranks] * ranks)
    return define.broadcast(nbytes, ranks, 0, in_place=True)


def block_of(whole: Span, many: int) -> Callable[[int, int], Span]:
    """Return the function that gives a rank's block of a number, of so many that a span is cut into."""
    sizes = define.split_evenly(whole.nbytes, many, ITEM)
    starts = define.offsets(sizes)
    return lambda rank, number: Span(rank, whole.buffer, whole.offset + starts[number], sizes[number])


def chunks_of(nbytes: int, most: int) -> list[tuple[int, int]]:
    """Cut bytes into chunks (offset, bytes) that a chain or a tree passes on; into ``most`` at most."""
    count = max(1, min(-(-nbytes // CHUNK_BYTES), most, nbytes // ITEM))
    sizes = define.split_evenly(nbytes, count, ITEM)
    return list(zip(define.offsets(sizes), sizes, strict=True))


def library_kernel(machine: Machine, kind: Kind, bytes_us: float) -> KernelPart:
    """Return the library's kernel of a collective, by the time of its bytes: the faster of its two protocols.

    Nothing is known of its broadcasts: an all-gather's figures stand for them.
    """
    library = machine.library
    timed = Kind.ALL_GATHER if kind is Kind.BROADCAST else kind
    start_us, gbps = (float(getattr(library, f"{timed}_{unit}")) for unit in ("us", "gbps"))
    share = min(1.0, gbps / machine.links.usable_gbps)
    if bytes_us / library.low_latency_share <= library.bulk_us + bytes_us:
        return KernelPart(start_us, 1 / library.low_latency_share, share)
    return KernelPart(start_us + library.bulk_us, 1.0, share)


def passed_share(kind: Kind, members: int) -> float:
    """Return what a rank of a ring passes on, as a share of the larger buffer."""
    return {Kind.ALL_REDUCE: 2 * (members - 1) / members, Kind.BROADCAST: 1.0}.get(kind, (members - 1) / members)


def nic_speed(machine: Machine) -> float:
    """Return the bytes a microsecond that a GPU sends to other nodes."""
    return machine.links.network_gbps * machine.links.nics_per_gpu * 1e3
