"""Programs of collectives among several nodes: of all ranks, from the plans that process groups run, and of libraries.

A rank's *stream* is a queue that moves nothing: it begins each step of the plan on the queues that the step has, and
waits for their ends, as the stream of a caller does. Near steps are the programs that a communicator of the node would
run on copy engines, the fastest variant of each. Far steps are kernels of the vendor's library: rings, direct exchanges
and chains (``rings.py``), on a queue of their own, one after the other, beside the near steps::

    stream    begin 0, end 0 | begin far 0 | begin 1, end 1 | end of far 0 | begin 2 ...
    dma:0     near step 0                    near step 1                     near step 2
    compute:1                  ring of the rail ...

``verify`` proves such a program if it has all ranks. Ranks that stand for all others (``sim/fold.py``) can be built
alone, which ``simulate`` takes.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from sidelane.integrations.nodes.topology import Nodes
from sidelane.program import collective as define
from sidelane.program import ir
from sidelane.program.batch import Batch
from sidelane.program.builders import Transport, algorithms, build, build_batch
from sidelane.program.collective import SLOT_ALIGNMENT, Buffer, Collective, Kind, Span
from sidelane.program.transform import lower
from sidelane_lab.machines.ranges import remembered
from sidelane_lab.machines.spec import HostThreads, Machine
from sidelane_lab.model import node_steps
from sidelane_lab.model.collectives import dependencies
from sidelane_lab.model.rings import RingPosition, chain, exchange, ring_all_reduce, ring_gather, ring_reduce
from sidelane_lab.model.world import (
    ITEM,
    STREAM,
    SUM,
    NodesProgram,
    World,
    block_of,
    chunks_of,
    library_kernel,
    nic_speed,
    passed_share,
    whole_collective,
)
from sidelane_lab.sim import Fold, KernelPart, fold_of, simulate

FEW_COPIES = 4
"""Largest number of copies of a step that copy engines make, one by one; a kernel makes more (``communicator.py``)."""

MOST_CHUNKS = 1 << 16
"""Chunks of the far steps of a broadcast, times ranks: those of larger programs are larger."""

COPIES, COPY_KERNEL = (ir.Engine(ir.EngineKind.LOCAL, index) for index in (17, 18))
FAR = ir.Engine(ir.EngineKind.COMPUTE, 1)


def planned(machine: Machine, kind: Kind, nbytes: int, pieces: int, fold: Fold | None = None) -> NodesProgram:
    """Build the program of what a process group runs: the plans of all its ranks.

    Args:
        machine: several nodes, of several GPUs each.
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, or broadcast (from rank 0).
        nbytes: gathered bytes of an all_gather, the local buffer of the others; rounded up to whole elements.
        pieces: largest number of pieces.
        fold: ranks to build, which stand for all others; None for as few as can.
    """
    count = -(-nbytes // (ITEM * (1 if kind in node_steps.IN_PLACE else machine.world_size)))
    nodes = node_steps.nodes_of([machine.gpus] * machine.nodes)
    first = node_steps.make_plan(
        kind, nodes, 0, (count,), pieces
    )  # of a root, if there is one: no other has more scratch
    if kind is Kind.BROADCAST:
        fold = Fold.whole(machine)
    fold = fold or _fold(machine, first)
    world = World(machine, whole_collective(kind, count * ITEM, machine.world_size), fold)
    steps: tuple[tuple[node_steps.Step, int, int], ...] = ()
    for rank in world.ranks:
        plan = node_steps.make_plan(kind, nodes, rank, (count,), pieces)
        found = _Planned(world, nodes, rank, plan, pieces, first.sizes).build()
        steps = steps or found
    return world.program("hierarchical", steps)


def _fold(machine: Machine, plan: node_steps.NodePlan) -> Fold:
    """Return the ranks that stand for all others: all of them for blocks of two sizes."""
    fars = [step for step in plan.steps if isinstance(step, node_steps.Far)]
    if any(step.input.count % machine.nodes for step in fars if step.kind in node_steps.IN_PLACE):
        return Fold.whole(machine)
    # Programs of several broadcasts answer the roots in one order on all ranks: no place is like another one there.
    alike = machine.dma.host is HostThreads.RANK
    alike = alike and not any(isinstance(step, node_steps.NodeBroadcast) for step in plan.steps)
    near = (_near_collective(step, machine.gpus) for step in plan.steps if isinstance(step, node_steps.Near))
    alike = alike and all(fastest_near(machine, what).is_even for what in near)
    shifts = range(1, machine.nodes) if any(step.kind is Kind.ALL_TO_ALL for step in fars) else (1,)
    return fold_of(machine, tuple((by, 0) for by in shifts), places=1 if alike else machine.gpus)


class _Planned:
    """The queues of one rank, from its plan."""

    def __init__(
        self, world: World, nodes: Nodes, rank: int, plan: node_steps.NodePlan, pieces: int, scratch: Mapping[str, int]
    ) -> None:
        self.world, self.nodes, self.rank, self.plan = world, nodes, rank, plan
        self.node, self.place = nodes.coordinates(rank)
        self.stream = world.queue(rank, STREAM)
        self.far = self.near = 0  # numbers of the next steps, alike on all ranks that meet there
        self.pieces = pieces
        given = Buffer.OUTPUT if world.collective.kind in node_steps.IN_PLACE else Buffer.INPUT
        self.buffers = {node_steps.INPUT: (given, 0), node_steps.OUTPUT: (Buffer.OUTPUT, 0)}
        self.sizes = world.sizes
        world.staging = 0  # alike on all ranks
        for name, count in scratch.items():
            self.buffers[name] = Buffer.STAGING, world.room(count * ITEM)
        fars = [step for step in plan.steps if isinstance(step, node_steps.Far)]
        slots = max((_slot_bytes(step, len(nodes.members)) for step in fars), default=0)
        self.slot_bytes = -(-slots // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.slots = world.room(self.slot_bytes * (len(nodes.members) - 1))
        self.near_staging = world.staging
        self.near_most = 0

    def build(self) -> tuple[tuple[node_steps.Step, int, int], ...]:
        """Add the queues to the world; return the steps with their stamps."""
        found: list[tuple[node_steps.Step, int, int]] = []
        for number, step in enumerate(self.plan.steps):
            begin, end = 2 * number, 2 * number + 1
            found.append((step, begin, end))
            if isinstance(step, node_steps.Far):
                self._far(step, begin, end)
                continue
            self._stamp(begin)
            if isinstance(step, node_steps.Join):
                self.world.join(self.rank, [("far", step.number)])
            elif isinstance(step, node_steps.Copies):
                self._copies(number, step)
            else:
                self._near(number, step)
            self._stamp(end)
        self.world.most_staging = max(self.world.most_staging, self.near_staging + self.near_most)
        return tuple(found)

    def _stamp(self, slot: int) -> None:
        if self.rank == 0:
            self.stream.append(ir.Stamp(slot))

    def where(self, rank: int, span: node_steps.ElementSpan) -> Span:
        """Return the bytes of a span of a plan."""
        buffer, begin = self.buffers[span.buffer]
        return Span(rank, buffer, begin + span.offset * ITEM, span.count * ITEM)

    def _copies(self, number: int, step: node_steps.Copies) -> None:
        moved = [(self.where(self.rank, to), self.where(self.rank, given)) for to, given in _joined(step.pairs)]
        copies = sorted((ir.Copy(to, given) for to, given in moved if to != given), key=self._distance)
        if not copies:
            return
        few = len(step.pairs) <= FEW_COPIES
        kernel = None if few else KernelPart(float(self.world.machine.dma.copy_us))
        self.world.run(self.rank, COPIES if few else COPY_KERNEL, number, copies, kernel, is_handed_over=True)
        self.world.join(self.rank, [number])

    def _near(self, number: int, step: node_steps.Near | node_steps.NodeBroadcast) -> None:
        first, gpus = self.rank - self.place, self.world.machine.gpus
        if isinstance(step, node_steps.NodeBroadcast):
            what: Collective | tuple[tuple[int, int], ...] = tuple(
                (root, span.count * ITEM) for root, span in step.parts
            )
            spans = [self.where(0, span) for _, span in step.parts]
        else:
            what, spans = _near_collective(step, gpus), []
        near = self.near
        self.near += 1
        near_program = fastest_near(self.world.machine, what)
        program, own_flags, local = near_program.program, near_program.dependencies, near_program.local
        self.near_most = max(self.near_most, max(program.staging_bytes, default=0))
        batch = program.collective
        starts = batch.starts(0, Buffer.OUTPUT) if isinstance(batch, Batch) else ()

        def moved(span: Span) -> Span:
            rank = first + span.rank
            if span.buffer == Buffer.STAGING:
                return Span(rank, Buffer.STAGING, self.near_staging + span.offset, span.nbytes)
            if isinstance(step, node_steps.NodeBroadcast):
                part = bisect.bisect_right(starts, span.offset) - 1
                whole, offset = spans[part], span.offset - starts[part]
            else:
                side = step.input if span.buffer == Buffer.INPUT else step.output
                if step.kind is Kind.SCATTER and span.rank not in (self.place, step.root):
                    part = step.output.count
                    begin = step.input.offset + span.rank * part  # where it belongs
                    side = dataclasses.replace(step.input, offset=begin, count=part)
                whole, offset = self.where(rank, side), span.offset
            return Span(rank, whole.buffer, whole.offset + offset, span.nbytes)

        def flag(flag: ir.Flag) -> ir.Flag:
            rank, index = first + flag.rank, flag.index
            if flag not in local:  # by the distance to the other rank, which is the same for all that do the same
                index += (index - flag.rank) % gpus - index % gpus
            of = self.world.hold if flag in own_flags else self.world.flag
            return of(rank, ("near", near, index, flag in local))

        def embedded(commands: Sequence[ir.Command]) -> Iterator[ir.Command]:
            for command in commands:
                match command:
                    case ir.Copy(dst, src):
                        yield ir.Copy(moved(dst), moved(src))
                    case ir.Signal(at, value, op):
                        yield ir.Signal(flag(at), value, op)
                    case ir.Wait(at, value, comparison):
                        yield ir.Wait(flag(at), value, comparison)
                    case ir.Reduce(dst, srcs, reduction):
                        yield ir.Reduce(moved(dst), tuple(map(moved, srcs)), reduction)
                    case _:
                        raise TypeError(f"a near step of copies, sums and flags (value={command!r})")

        queues = [queue for queue in near_program.queues[self.place] if queue.commands]
        for queue in queues:
            name, commands, first_command = (number, queue.engine), embedded(queue.commands), queue.commands[0]
            is_branch = isinstance(first_command, ir.Wait) and first_command.flag in own_flags
            self.world.run(self.rank, queue.engine, name, commands, is_handed_over=not is_branch)
        self.world.join(self.rank, [(number, queue.engine) for queue in queues])

    def _distance(self, copy: ir.Copy) -> tuple[int, int]:
        """Return how far on the rank is whose block a copy reads or writes: an order that is alike for all ranks."""
        kind, counts = self.world.collective.kind, self.world.collective.counts
        for span in (copy.dst, copy.src):
            if span.buffer == Buffer.INPUT or span.buffer == Buffer.OUTPUT:
                if kind is Kind.ALL_REDUCE or self.sizes[span.buffer] != len(counts) * counts[0][0]:
                    continue
                node, place = divmod(span.offset // counts[0][0], self.world.machine.gpus)
                return (node - self.node) % self.world.machine.nodes, (place - self.place) % self.world.machine.gpus
        return 0, 0

    def _far(self, step: node_steps.Far, begin: int, end: int) -> None:
        number = self.far
        self.far += 1
        first, last = ([ir.Stamp(slot)] if self.rank == 0 else [] for slot in (begin, end))
        commands = itertools.chain(first, self._library(step, number), last)
        self.world.run(self.rank, FAR, ("far", number), commands, _kernel(self.world.machine, step))

    def _library(self, step: node_steps.Far, number: int) -> Iterator[ir.Command]:
        """Yield the commands of a far step: those of a library's kernel."""
        rank, order, many = self.rank, node_steps.rail_of(self.nodes, self.place), len(self.nodes.members)

        def flag(of: int, purpose: object) -> ir.Flag:
            return self.world.flag(of, ("far", number, purpose))

        def slot(of: int, at: int) -> Span:
            return Span(of, Buffer.STAGING, self.slots + at * self.slot_bytes, self.slot_bytes)

        ring = RingPosition(order, self.node, flag)
        given, came = self.where(rank, step.input), self.where(rank, step.output)
        if step.kind is Kind.BROADCAST:
            turned = RingPosition([*order[step.root :], *order[: step.root]], (self.node - step.root) % many, flag)
            chunks = chunks_of(given.nbytes, MOST_CHUNKS // (len(self.world.ranks) * self.pieces))
            yield from chain(turned, chunks, lambda of: self.where(of, step.output))
        elif step.kind is Kind.ALL_GATHER:
            own = block_of(came, many)
            yield from ring.begin()
            if own(rank, self.node) != given:
                yield ir.Copy(own(rank, self.node), given)
            yield from ring_gather(ring, given, own)
        elif step.kind is Kind.REDUCE_SCATTER:
            yield from ring.begin()
            yield from ring_reduce(ring, block_of(given, many), slot, came, SUM)
        elif step.kind is Kind.ALL_REDUCE:
            yield from ring.begin()
            yield from ring_all_reduce(ring, block_of(given, many), slot, SUM)
        else:
            sent, arrived = block_of(given, many), block_of(came, many)
            rounds = [(by, order[(self.node + by) % many], order[self.node - by]) for by in range(1, many)]
            yield ir.Copy(arrived(rank, self.node), sent(rank, self.node))
            coordinates = self.nodes.coordinates
            yield from exchange(
                rank,
                rounds,
                flag,
                lambda to: sent(rank, coordinates(to)[0]),
                lambda to, of: arrived(to, coordinates(of)[0]),
            )


def _joined(
    pairs: Sequence[tuple[node_steps.ElementSpan, node_steps.ElementSpan]],
) -> Iterator[tuple[node_steps.ElementSpan, node_steps.ElementSpan]]:
    """Yield copies, those that go on where the one before ends as one."""
    last: tuple[node_steps.ElementSpan, node_steps.ElementSpan] | None = None
    for pair in pairs:
        if last is not None and all(
            (a.buffer, a.tensor, a.end) == (b.buffer, b.tensor, b.offset) for a, b in zip(last, pair, strict=True)
        ):
            last = tuple(node_steps.ElementSpan(a.buffer, a.offset, a.count + pair[0].count, a.tensor) for a in last)  # type: ignore[assignment]
            continue
        if last is not None:
            yield last
        last = pair
    if last is not None:
        yield last


def _slot_bytes(step: node_steps.Far, many: int) -> int:
    if step.kind is Kind.REDUCE_SCATTER:
        return step.output.count * ITEM
    return -(-step.input.count // many) * ITEM if step.kind is Kind.ALL_REDUCE else 0


def _near_collective(step: node_steps.Near, gpus: int) -> Collective:
    part = step.input.count // gpus * ITEM
    if step.kind is Kind.SCATTER:
        return define.scatter([part] * gpus, step.root)
    if step.kind is Kind.ALL_TO_ALL:
        return define.all_to_all([[part] * gpus] * gpus)
    return define.reduce_scatter([part] * gpus, SUM)


@dataclasses.dataclass(frozen=True, slots=True)
class NearProgram:
    """A program of a node, and what is looked up of it for every step.

    Attributes:
        program: the program.
        dependencies: flags that a graph has as dependencies.
        local: flags between queues of one rank.
        queues: queues of each place.
        is_even: all places do the same, each with those that are as far on from it.
    """

    program: ir.Program
    dependencies: frozenset[ir.Flag]
    local: frozenset[ir.Flag]
    queues: tuple[tuple[ir.Queue, ...], ...]
    is_even: bool


@remembered("gpu", "links", "dma", "host", maxsize=64)
def fastest_near(machine: Machine, what: Collective | tuple[tuple[int, int], ...]) -> NearProgram:
    """Return the fastest program of a node for a collective, or for broadcasts of (root, bytes).

    Each is simulated alone.
    """
    node = dataclasses.replace(machine, nodes=1)
    found: list[tuple[float, ir.Program, frozenset[ir.Flag]]] = []
    for program in _near_programs(node, what):
        own = dependencies(program)
        found.append((simulate(program, node, edges=own).time_us, program, own))
    _, program, own = min(found, key=lambda each: each[0])
    queues: list[list[ir.Queue]] = [[] for _ in range(program.world_size)]
    for queue in program.queues:
        queues[queue.rank].append(queue)
    local = frozenset(
        command.flag
        for queue in program.queues
        for command in queue.commands
        if isinstance(command, ir.Signal) and command.flag.rank == queue.rank
    )
    alike = [sorted((_from_its_rank(queue, program.world_size) for queue in one), key=str) for one in queues]
    return NearProgram(program, own, local, tuple(map(tuple, queues)), all(one == alike[0] for one in alike))


def _from_its_rank(queue: ir.Queue, gpus: int) -> tuple[ir.Engine, list[tuple[object, ...]]]:
    """Return what a queue does, with other ranks as distances from its own; sums have their operands in any order."""

    def seen(span: Span) -> tuple[int, str, int]:
        return (span.rank - queue.rank) % gpus, span.buffer, span.nbytes

    found: list[tuple[object, ...]] = []
    for command in queue.commands:
        match command:
            case ir.Copy(dst, src):
                found.append((ir.Copy, seen(dst), seen(src)))
            case ir.Reduce(dst, srcs):
                found.append((ir.Reduce, seen(dst), sorted(map(seen, srcs))))
            case ir.Signal(flag) | ir.Wait(flag):
                found.append((type(command), (flag.rank - queue.rank) % gpus))
    return queue.engine, found


def _near_programs(node: Machine, what: Collective | tuple[tuple[int, int], ...]) -> Iterator[ir.Program]:
    """Return the programs that a communicator of the node may choose from: those for host memory only through it."""
    chosen = (
        one
        for one in algorithms(what.kind if isinstance(what, Collective) else Kind.BROADCAST)
        if node.through_host or not one.through_host
    )
    if isinstance(what, Collective):
        yield from (lower(build(what, one.name), {ir.Copy}) for one in chosen)
        return
    parts = tuple(define.broadcast(nbytes, node.gpus, root, in_place=True) for root, nbytes in what)
    batch, transports = Batch("batch", node.gpus, parts), [Transport.PUSH] * len(parts)
    yield from (lower(build_batch(batch, one.name, transports), {ir.Copy}) for one in chosen if one.merges)


def _kernel(machine: Machine, step: node_steps.Far) -> KernelPart:
    """Return the library's kernel of a far step: what a rank of the rail sends decides its protocol."""
    nbytes, many = max(step.input.count, step.output.count) * ITEM, machine.nodes
    return library_kernel(machine, step.kind, passed_share(step.kind, many) * nbytes / nic_speed(machine))
