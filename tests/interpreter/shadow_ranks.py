"""Ranks as processes under Triton's interpreter: what every block of a kernel does is what its shadow says.

Run as a program with ``TRITON_INTERPRET=1``; the arguments are the number of ranks and a mistake that is planted in
each shadow: ``none``, ``copy`` (one is left out), ``order`` (signals in front of copies), ``flag`` (of another block).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

import torch
from accesses import RELAXED, Access, recorded
from kernel_ranks import World

from sidelane.device import (
    broadcast_parcels,
    exchange_parcels,
    layout,
    parcels,
    pull,
    push,
    reduce_direct,
    reduce_parcels,
    reduce_pull,
    reduce_push,
)
from sidelane.device.launch import Launch
from sidelane.program import pushed
from sidelane.program.collective import (
    Buffer,
    Kind,
    ReduceOp,
    Reduction,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from sidelane.program.ir import Copy, Flag, Queue, Reduce, Signal, Wait
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.shadows import SHADOWS
from sidelane.program.shadows.parcels import place_bytes
from sidelane.program.verify import verify_sequence

TILE = 64
for module in (push, pull, reduce_direct, reduce_pull, parcels, broadcast_parcels):
    module.TILE_BYTES = TILE
pushed.TILE_BYTES = TILE
reduce_direct.PAIR_TILE_BYTES = reduce_direct.FEW_TILE_BYTES = TILE
INTS = Reduction(ReduceOp.SUM, "int32")

Byte = tuple[int, str, int]
"""Rank, buffer, offset."""

Step = tuple[str, frozenset[object], frozenset[object]]
"""``signal`` or ``wait`` with (rank, index) of flags; ``move`` with the bytes read, and those written."""

SIGNAL, WAIT, MOVE = "signal", "wait", "move"


class Places:
    """What lies where in one rank's process."""

    def __init__(
        self,
        world: World,
        blocks: int,
        phases: int,
        buffers: dict[tuple[int, str], tuple[int, int]],
        place_bytes: int,
    ) -> None:
        self._phases = phases
        self._world, self._blocks, self._buffers, self._place_bytes = world, blocks, buffers, place_bytes
        n = world.world_size
        self._parcels = layout.CELLS_OFFSET + 2 * n * layout.SLOT_BYTES

    def byte(self, address: int) -> Byte:
        """Of a caller's buffer, of staging, or of the place of a parcel, which shadows have in staging."""
        for rank, arena in enumerate(self._world.arenas):
            first = arena + self._parcels
            if first <= address < first + 2 * self._world.world_size * layout.PARCEL_BYTES:
                place, offset = divmod(address - first, layout.PARCEL_BYTES)
                return rank, str(Buffer.STAGING), place * self._place_bytes + offset
        for (rank, buffer), (start, nbytes) in self._buffers.items():
            if start <= address < start + nbytes:
                return rank, buffer, address - start
        raise AssertionError(f"a kernel touches {address:#x}, which is nobody's")

    def flag(self, address: int) -> tuple[int, int]:
        """Number of a flag as shadows have it: phase, block and sender, of as many as there are."""
        rank, place = self._in_arena(address)
        phase, rest = divmod((place - layout.FLAGS_OFFSET) // 4, layout.MAX_BLOCKS * layout.MAX_RANKS)
        phase = self._phases - 1 if phase == layout.PHASES - 1 else phase  # the last one of kernels with many
        block, sender = divmod(rest, layout.MAX_RANKS)
        assert block < self._blocks and sender < self._world.world_size
        return rank, (phase * self._blocks + block) * self._world.world_size + sender

    def is_control(self, address: int) -> bool:
        """In an arena or on the board: counters, flags, and what the host reads."""
        board = self._world.board
        return board <= address < board + 4 * layout.BOARD_WORDS or any(
            arena <= address < arena + layout.CELLS_OFFSET for arena in self._world.arenas
        )

    def _in_arena(self, address: int) -> tuple[int, int]:
        return next(
            (rank, address - arena)
            for rank, arena in enumerate(self._world.arenas)
            if arena <= address < arena + layout.CELLS_OFFSET
        )


def steps_of(accesses: Sequence[Access], places: Places) -> list[Step]:
    """What a block has done."""
    found: list[Step] = []
    has_moved = False
    for access in accesses:
        addresses = [int(address) for address in access.addresses]
        if access.what in ("load", "store"):
            if all(map(places.is_control, addresses)):
                continue
            bytes_ = {places.byte(address + k) for address in addresses for k in range(access.item_bytes)}
            reads, writes = (bytes_, set()) if access.what == "load" else (set(), bytes_)
            _add(found, (MOVE, frozenset(reads), frozenset(writes)))
            has_moved = True
            continue
        flags = frozenset(map(places.flag, addresses))
        assert not (access.is_exchange and access.what == RELAXED and has_moved), "it orders nothing before it"
        _add(found, (SIGNAL if access.is_exchange else WAIT, flags, frozenset()))
    return found


def steps_said(queue: Queue) -> list[Step]:
    """What a shadow says that a block does."""
    found: list[Step] = []
    for command in queue.commands:
        match command:
            case Signal(flag):
                _add(found, (SIGNAL, frozenset([(flag.rank, flag.index)]), frozenset()))
            case Wait(flag):
                _add(found, (WAIT, frozenset([(flag.rank, flag.index)]), frozenset()))
            case Copy(dst, src):
                _add(found, _moved((src,), dst, found))
            case Reduce(dst, srcs):
                _add(found, _moved(srcs, dst, found))
    return found


def _moved(srcs: Sequence[Span], dst: Span, steps: list[Step]) -> Step:
    """What was written in the same step is at hand: a block that stores it once more does not load it."""
    at_hand = steps[-1][2] if steps and steps[-1][0] == MOVE else frozenset()
    reads = frozenset(byte for src in srcs for byte in _bytes_of(src))
    return MOVE, reads - at_hand, frozenset(_bytes_of(dst))


def _add(steps: list[Step], new: Step) -> None:
    """Neighbours of one sort are one step."""
    if steps and steps[-1][0] == new[0]:
        what, first, second = steps.pop()
        new = (what, first | new[1], second | new[2])
    steps.append(new)


def _bytes_of(span: Span) -> Iterator[Byte]:
    return ((span.rank, str(span.buffer), offset) for offset in range(span.offset, span.end))


def _without(stays: frozenset[Byte], steps: list[Step]) -> list[Step]:
    kept: list[Step] = []
    for what, first, second in steps:
        if what != MOVE or second - stays or not first <= stays:
            _add(kept, (what, first, second - stays))
    return kept


def compare(found: list[Step], said: list[Step], stays: frozenset[Byte], where: str) -> None:
    """``stays``: bytes that a kernel may store as they are, since they are in their place."""
    found, said = _without(stays, found), _without(stays, said)
    assert [step[0] for step in found] == [step[0] for step in said], (where, found, said)
    for number, (one, other) in enumerate(zip(found, said, strict=True)):
        for part, (mine, theirs) in enumerate(zip(one[1:], other[1:], strict=True)):
            differs = sorted(mine ^ theirs, key=str)[:5]
            assert not differs, f"{where}, step {number}: {one[0]}{', written' * part}: {differs}"


def planted(queue: Queue, mistake: str) -> Queue:
    """A block's shadow with a mistake, where there is room for it."""
    commands = list(queue.commands)
    copies = [number for number, command in enumerate(commands) if isinstance(command, Copy | Reduce)]
    signals = [number for number, command in enumerate(commands) if isinstance(command, Signal)]
    if mistake == "copy" and copies:
        del commands[copies[-1]]
    elif mistake == "order" and copies:
        commands.insert(copies[0], commands.pop(signals[-1]))
    elif mistake == "flag":
        signal = commands[signals[0]]
        assert isinstance(signal, Signal)
        commands[signals[0]] = Signal(Flag(signal.flag.rank, signal.flag.index + 1), signal.value)
    return dataclasses.replace(queue, commands=tuple(commands))


class Case:
    """A kernel on this rank, with the memory that it needs.

    Attributes:
        work: its launch.
        buffers: where each (rank, buffer) lies, and its bytes.
        stays: bytes that are in their place already.
    """

    def __init__(self, world: World, kernel: KernelProgram) -> None:
        self._world, self._kernel = world, kernel
        collective, n, rank = kernel.collective, world.world_size, world.rank
        sizes = {name: collective.buffer_bytes(rank, name) for name in (Buffer.INPUT, Buffer.OUTPUT)}
        self._tensors: dict[Buffer, torch.Tensor] = {}
        self.buffers: dict[tuple[int, str], tuple[int, int]] = {}
        for name, size in sizes.items():
            self._tensors[name], addresses = world.carve(size)
            self.buffers |= {(peer, str(name)): (addresses[peer], size) for peer in range(n) if size}
        shadow_staging = self._staging_bytes()
        _, stagings = world.carve(shadow_staging)
        self.buffers |= {(peer, str(Buffer.STAGING)): (stagings[peer], shadow_staging) for peer in range(n)}
        self.inputs = [collective.input_span(peer, 0, collective.input_bytes(peer)) for peer in range(n)]
        self.outputs = [collective.output_span(peer, 0, collective.output_bytes(peer)) for peer in range(n)]
        self.stays = frozenset[Byte]()
        if collective.in_place and not kernel.two_shot and collective.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL):
            part = kernel.part_bytes
            self.stays = frozenset(_bytes_of(Span(rank, Buffer.OUTPUT, rank * part, part)))
        if collective.in_place and n == 1:  # there is nothing to move
            self.stays = frozenset(_bytes_of(self.outputs[rank]))
        self.work = self._arrange(stagings)

    def fill(self) -> None:
        """Poison the output, then write the input, which may lie in it."""
        for tensor in self._tensors.values():
            tensor.fill_(0xA5)
        self._view(self.inputs[self._world.rank]).copy_(self._input(self._world.rank))

    def check(self) -> None:
        """The output is what it must be."""
        collective, n, rank = self._kernel.collective, self._world.world_size, self._world.rank
        inputs, part = [self._input(peer) for peer in range(n)], self._kernel.part_bytes
        match collective.kind:
            case Kind.ALL_GATHER:
                want = torch.cat(inputs)
            case Kind.BROADCAST:
                want = inputs[collective.root or 0]
            case Kind.ALL_TO_ALL:
                want = torch.cat([data[rank * part : (rank + 1) * part] for data in inputs])
            case _:
                total = torch.stack([data.view(torch.int32) for data in inputs]).sum(0, dtype=torch.int32)
                want = total.view(torch.uint8)
                if collective.kind is Kind.REDUCE_SCATTER:
                    want = want[rank * part : (rank + 1) * part]
        assert torch.equal(self._view(self.outputs[rank]), want), str(collective)

    def _view(self, span: Span) -> torch.Tensor:
        return self._tensors[Buffer(span.buffer)][span.offset : span.end]

    def _input(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(0, 250, (self.inputs[rank].nbytes,), dtype=torch.uint8, generator=generator)

    def _address(self, span: Span) -> int:
        return self.buffers[span.rank, str(span.buffer)][0] + span.offset if span.nbytes else 0

    def _staging_bytes(self) -> int:
        kernel, n = self._kernel, self._world.world_size
        if kernel.protocol is Protocol.PULL:
            return pull.staging_bytes(kernel.part_bytes, n, distinct=kernel.distinct)
        if kernel.protocol is Protocol.PARCELS:
            return 0
        if kernel.protocol is Protocol.SEND:
            return max(1, n - 1) * pushed.chunks_of(kernel.part_bytes, self._world.most_blocks).peer_bytes
        return reduce_pull.aligned(kernel.part_bytes) * n

    def _arrange(self, stagings: tuple[int, ...]) -> Launch:
        kernel, site, rank = self._kernel, self._world.site, self._world.rank
        inputs, outputs = tuple(map(self._address, self.inputs)), tuple(map(self._address, self.outputs))
        part, distinct, gather = kernel.part_bytes, kernel.distinct, kernel.two_shot
        if kernel.protocol is Protocol.PUSH:
            return push.arrange(site, outputs, inputs[rank], part, distinct=distinct)
        if kernel.protocol is Protocol.PULL:
            return pull.arrange(site, outputs[rank], inputs[rank], stagings, part, distinct=distinct)
        reduction, root = kernel.collective.reduction, kernel.collective.root
        if kernel.protocol is Protocol.PARCELS:
            if root is not None:
                return broadcast_parcels.arrange(site, outputs[rank], part, root)
            given = (site, outputs[rank], inputs[rank], part)
            if reduction is None:
                return exchange_parcels.arrange(*given, distinct=distinct)
            return reduce_parcels.arrange(*given, reduction, distinct=distinct)
        assert reduction is not None
        sizes = (part, kernel.total_bytes, reduction)
        if kernel.protocol is Protocol.SEND:
            return reduce_push.arrange(site, outputs, inputs[rank], stagings, *sizes)
        if kernel.protocol is Protocol.DIRECT:
            targets = outputs if gather else (outputs[rank],)
            return reduce_direct.arrange(site, targets, inputs, *sizes, gather=gather)
        return reduce_pull.arrange(site, outputs[rank], inputs[rank], stagings, *sizes, gather=gather)


def compare_blocks(world: World, kernel: KernelProgram, generation: int, mistake: str) -> int:
    """Run a kernel, see that its bytes are right, and hold every block against its shadow; how many steps it had."""
    case = Case(world, kernel)
    case.fill()
    with recorded() as accesses:
        world.launch(case.work)
    case.check()
    blocks = case.work.blocks
    turns = SHADOWS[kernel.protocol](kernel, blocks, TILE)
    verify_sequence(turns)
    shadow = turns[generation % len(turns)]
    phases = shadow.flag_count // (blocks * world.world_size)
    places = Places(world, blocks, phases, case.buffers, place_bytes(kernel))
    queues = {queue.engine.index: queue for queue in shadow.queues_of(world.rank)}
    assert set(accesses) == set(queues), "the blocks of the launch"
    total = 0
    for block, queue in queues.items():
        where = f"rank {world.rank} block {block} of {kernel.protocol}, {kernel.variant}, {kernel.collective}"
        said = steps_said(planted(queue, mistake))
        compare(steps_of(accesses[block], places), said, case.stays, where)
        total += len(said)
    world.release()
    return total


def kernels(n: int) -> Iterator[KernelProgram]:
    """Every protocol that has a shadow, in every way that it is for, with fewer tiles than blocks and more."""
    parts = {1: (100,), 2: (4, 64, 100, 300)}.get(n, (64, 300))
    for protocol, in_place, part in itertools.product(SHADOWS, (False, True), parts):
        if protocol in (Protocol.PUSH, Protocol.PULL):
            yield KernelProgram(all_gather([part] * n, in_place=in_place), "one_shot", protocol, 2)
            if not (protocol is Protocol.PUSH and in_place):
                yield KernelProgram(all_to_all([[part] * n] * n, in_place=in_place), "one_shot", protocol, 2)
            continue
        if protocol is Protocol.PARCELS:
            yield KernelProgram(all_gather([part] * n, in_place=in_place), "one_shot", protocol, 2)
            yield KernelProgram(all_to_all([[part] * n] * n, in_place=in_place), "one_shot", protocol, 2)
            yield KernelProgram(broadcast(part, n, n // 2, in_place=True), "one_shot", protocol, 2)
            yield KernelProgram(reduce_scatter([part] * n, INTS, in_place=in_place), "one_shot", protocol, 2)
            yield KernelProgram(all_reduce([part] * n, INTS, in_place=in_place), "one_shot", protocol, 2)
            continue
        if protocol is Protocol.SEND:
            for shards in ([4 * part] * n, [12 * part] * (n - 1) + [part])[part > 100 :]:  # up to five chunks
                yield KernelProgram(all_reduce(shards, INTS, in_place=in_place), "two_shot_push", protocol, 2)
            continue
        yield KernelProgram(reduce_scatter([part] * n, INTS, in_place=in_place), "one_shot", protocol, 2)
        shorter = [part] * (n - 1) + [part // 8 * 4]
        yield KernelProgram(all_reduce(shorter, INTS, in_place=in_place), "two_shot", protocol, 2)
        if not (protocol is Protocol.DIRECT and in_place):
            yield KernelProgram(all_reduce(shorter, INTS, in_place=in_place), "one_shot", protocol, 2)


def main(world_size: int, mistake: str) -> int:
    torch.set_num_threads(1)
    world = World(world_size)
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                world.become(rank)
                steps = 0
                some = [kernel for kernel in kernels(world_size) if any(map(any, kernel.collective.counts))]
                for generation, kernel in enumerate(some, 1):
                    steps += compare_blocks(world, kernel, generation, mistake)
                print(f"rank {rank}: {steps} steps")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return 0 if codes == [0] * world_size else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
