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

import numpy as np
import torch
from accesses import RELAXED, Access, recorded
from kernel_ranks import World

from sidelane.device import layout, pull, push
from sidelane.device.launch import Launch
from sidelane.program.collective import Buffer, Collective, Span, all_gather, all_to_all
from sidelane.program.ir import Copy, Flag, Queue, Signal, Wait
from sidelane.program.kernel import KernelProgram, Protocol
from sidelane.program.shadows import SHADOWS
from sidelane.program.verify import verify

TILE = 64
push.TILE_BYTES = pull.TILE_BYTES = TILE

Byte = tuple[int, str, int]
"""Rank, buffer, offset."""

Step = tuple[str, frozenset[object], frozenset[object]]
"""``signal`` or ``wait`` with (rank, index) of flags; ``move`` with the bytes read, and those written."""

SIGNAL, WAIT, MOVE = "signal", "wait", "move"


class Places:
    """What lies where in one rank's process."""

    def __init__(self, world: World, blocks: int, buffers: dict[tuple[int, str], tuple[int, int]]) -> None:
        self._world, self._blocks, self._buffers = world, blocks, buffers

    def byte(self, address: int) -> Byte:
        """Of a caller's buffer or of staging."""
        for (rank, buffer), (start, nbytes) in self._buffers.items():
            if start <= address < start + nbytes:
                return rank, buffer, address - start
        raise AssertionError(f"a kernel touches {address:#x}, which is nobody's")

    def flag(self, address: int) -> tuple[int, int]:
        """Number of a flag as shadows have it: phase, block and sender, of as many as there are."""
        rank, place = self._in_arena(address)
        phase, rest = divmod((place - layout.FLAGS_OFFSET) // 4, layout.MAX_BLOCKS * layout.MAX_RANKS)
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
                _add(found, (MOVE, frozenset(_bytes_of(src)), frozenset(_bytes_of(dst))))
    return found


def _add(steps: list[Step], new: Step) -> None:
    """Neighbours of one sort are one step."""
    if steps and steps[-1][0] == new[0]:
        what, first, second = steps.pop()
        new = (what, first | new[1], second | new[2])
    steps.append(new)


def _bytes_of(span: Span) -> Iterator[Byte]:
    return ((span.rank, str(span.buffer), offset) for offset in range(span.offset, span.end))


def compare(found: list[Step], said: list[Step], stays: frozenset[Byte], where: str) -> None:
    """``stays``: bytes that a kernel may store as they are, since they are in their place."""
    found = [(what, first, second - stays) for what, first, second in found]
    found = [step for step in found if step[0] != MOVE or step[2] or not step[1] <= stays]
    assert [step[0] for step in found] == [step[0] for step in said], (where, found, said)
    for number, (one, other) in enumerate(zip(found, said, strict=True)):
        for part, (mine, theirs) in enumerate(zip(one[1:], other[1:], strict=True)):
            differs = sorted(mine ^ theirs, key=str)[:5]
            assert not differs, f"{where}, step {number}: {one[0]}{', written' * part}: {differs}"


def planted(queue: Queue, mistake: str) -> Queue:
    """A block's shadow with a mistake, where there is room for it."""
    commands = list(queue.commands)
    copies = [number for number, command in enumerate(commands) if isinstance(command, Copy)]
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


def check(world: World, protocol: Protocol, collective: Collective, mistake: str, *, distinct: bool) -> int:
    """Run one kernel, see that its bytes are right, and compare. How many steps were compared."""
    n, rank, in_place = world.world_size, world.rank, collective.in_place
    part = KernelProgram(collective, "one_shot", protocol, 1).part_bytes
    inputs = [np.random.default_rng(part + peer).integers(0, 256, n * part, dtype=np.uint8) for peer in range(n)]
    output, outputs = world.carve(n * part)
    output.fill_(0xA5)
    stagings: tuple[int, ...] = ()
    need = 0
    if protocol is Protocol.PULL:
        need = pull.staging_bytes(part, n, distinct=distinct)
        _, stagings = world.carve(need)
    size = n * part if distinct else part
    own = torch.from_numpy(inputs[rank][:size])
    if in_place:
        input = output if distinct else output[rank * part : (rank + 1) * part]
    else:
        input = torch.empty(size, dtype=torch.uint8)
    input.copy_(own)
    work: Launch
    if protocol is Protocol.PUSH:
        work = push.arrange(world.site, outputs, input.data_ptr(), part, distinct=distinct)
    else:
        work = pull.arrange(world.site, output.data_ptr(), input.data_ptr(), stagings, part, distinct=distinct)
    with recorded() as accesses:
        world.launch(work)
    parts = [inputs[peer][rank * part : (rank + 1) * part] if distinct else inputs[peer][:part] for peer in range(n)]
    assert np.array_equal(output.numpy(), np.concatenate(parts))
    shadow = SHADOWS[protocol](KernelProgram(collective, "one_shot", protocol, work.blocks), work.blocks, TILE)
    verify(shadow)
    buffers: dict[tuple[int, str], tuple[int, int]] = {
        (peer, str(Buffer.OUTPUT)): (outputs[peer], n * part) for peer in range(n)
    }
    buffers |= {(peer, str(Buffer.STAGING)): (stagings[peer], need) for peer in range(len(stagings))}
    if not in_place:
        buffers[rank, str(Buffer.INPUT)] = (input.data_ptr(), size)
    places = Places(world, work.blocks, buffers)
    stays = frozenset(_bytes_of(Span(rank, Buffer.OUTPUT, rank * part, part))) if in_place else frozenset[Byte]()
    queues = {queue.engine.index: queue for queue in shadow.queues_of(rank)}
    assert set(accesses) == set(queues), "the blocks of the launch"
    total = 0
    for block, queue in queues.items():
        where = f"rank {rank} block {block} of {protocol}, {collective}"
        found, said = steps_of(accesses[block], places), steps_said(planted(queue, mistake))
        compare(found, said, stays, where)
        total += len(said)
    world.release()
    return total


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
                for protocol, distinct, in_place in itertools.product(SHADOWS, (False, True), (False, True)):
                    if protocol is Protocol.PUSH and distinct and in_place:
                        continue
                    for part in (1, 64, 100, 300):
                        define = all_to_all([[part] * world_size] * world_size, in_place=in_place)
                        define = define if distinct else all_gather([part] * world_size, in_place=in_place)
                        steps += check(world, protocol, define, mistake, distinct=distinct)
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
