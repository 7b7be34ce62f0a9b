"""Steps of a thread block: what a kernel has done, and what its shadow says, in the same words.

A *step* is what lies between two synchronisations of a block: flags that it signals, flags that it waits for, a barrier
of its threads, or bytes that it reads and writes. What is relaxed is ordered with none of these: flags that are
signalled without a release, and those that are polled and never acquired. A cell is stored with its flag, and waited
for where it lies. Counters and the status words belong to the waiting itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from accesses import ACQUIRE, BARRIER, LOAD, POLL, RELAXED, RELEASE, STORE, Access
from shadows.arena import ARENA, CELL_BYTES, cell_flag, ll_slot, loaded_flag, once_flag, once_slot
from shadows.blocks import BLOCK_FLAGS, block_of

from sidelane.device import layout
from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Copy, Flag, Program, Queue, Reduce, Signal, Wait

Byte = tuple[int, str, int]
"""Rank, buffer, offset; of a cell its number among all."""

Step = tuple[str, frozenset[object], frozenset[object]]
"""``signal`` or ``wait`` with flags; ``move`` with the bytes read, and those written; ``barrier``."""

SIGNAL, WAIT, MOVE = "signal", "wait", "move"
CELL = "cell"
FIRST_CELL = cell_flag(0, 0, 0, 1, 0).index
CELLS_OF_A_SLOT = cell_flag(0, 1, 0, 2, 0).index - cell_flag(0, 0, 0, 2, 0).index
NOTHING: frozenset[object] = frozenset()


@dataclasses.dataclass
class Done:
    """What a block does.

    Attributes:
        steps: in order.
        relaxed_signals, relaxed_waits: flags.
    """

    steps: list[Step] = dataclasses.field(default_factory=list)
    relaxed_signals: set[object] = dataclasses.field(default_factory=set)
    relaxed_waits: set[object] = dataclasses.field(default_factory=set)

    def add(self, what: str, first: frozenset[object] = NOTHING, second: frozenset[object] = NOTHING) -> None:
        """One more step; neighbours of one sort are one."""
        if self.steps and self.steps[-1][0] == what:
            _, before, there = self.steps.pop()
            first, second = before | first, there | second
        self.steps.append((what, first, second))

    @property
    def has_barrier(self) -> bool:
        return any(what == BARRIER for what, *_ in self.steps)


class Places:
    """What lies where in one rank's process.

    Args:
        arenas: address of each rank's.
        status_words: of this rank.
        buffers: address and bytes of each (rank, buffer) of the call.
        table: likewise of what the kernel of a list knows of it.
    """

    def __init__(
        self,
        arenas: tuple[int, ...],
        status_words: int,
        buffers: Mapping[tuple[int, str], tuple[int, int]],
        table: tuple[int, int],
    ) -> None:
        self._arenas, self._status_words, self._buffers, self._table = arenas, status_words, buffers, table
        self._slots_bytes = 2 * len(arenas) * layout.LL_SLOT_BYTES
        self._block_slots_bytes = 2 * len(arenas) * layout.BLOCK_SLOT_BYTES

    def byte(self, address: int) -> Byte:
        """Of a caller's buffer, of staging, or of a slot of block flags."""
        for rank, arena in enumerate(self._arenas):
            at = address - arena - layout.LL_OFFSET - self._slots_bytes
            if 0 <= at < self._block_slots_bytes:
                return rank, str(Buffer.STAGING), ARENA + at
        for (rank, buffer), (start, nbytes) in self._buffers.items():
            if start <= address < start + nbytes:
                return rank, buffer, address - start
        raise AssertionError(f"a kernel touches {address:#x}, which is nobody's")

    def cell(self, address: int) -> Byte | None:
        """That which begins there, if one does."""
        for rank, arena in enumerate(self._arenas):
            at = address - arena - layout.LL_OFFSET
            if 0 <= at < self._slots_bytes:
                assert at % layout.CELL_BYTES == 0
                return rank, CELL, at // layout.CELL_BYTES
        return None

    def flag(self, address: int) -> Flag | None:
        """As shadows number them; None for counters and status words."""
        for rank, arena in enumerate(self._arenas):
            at = address - arena - layout.FLAGS_OFFSET
            if 0 <= at < 4 * layout.PHASES * layout.MAX_BLOCKS * layout.MAX_RANKS:
                return Flag(rank, at // 4)
        return None

    def is_control(self, address: int) -> bool:
        """Counters, flags, what the host reads, and what it has written."""
        ranges = [(arena, layout.LL_OFFSET) for arena in self._arenas]
        ranges += [(self._status_words, 4 * (layout.STATUS_WORDS + layout.MAX_BLOCKS)), self._table]
        return any(start <= address < start + nbytes for start, nbytes in ranges)


def steps_of(accesses: Sequence[Access], places: Places) -> Done:
    """What a block has done."""
    done = Done()
    polled: set[object] = set()  # LL words, of one tile
    for access in accesses:
        addresses = [int(address) for address in access.addresses]
        if access.what == POLL:
            found = {places.cell(address) for address in addresses} - {None}
            polled |= found
            done.relaxed_waits |= {places.flag(address) for address in addresses} - {None} if not found else set()
            continue
        if access.what in (LOAD, STORE) and all(map(places.is_control, addresses)):
            continue
        if polled:
            done.add(WAIT, frozenset(polled))
            done.add(MOVE, frozenset(polled))
            polled = set()
        if access.what == BARRIER:
            done.add(BARRIER)
        elif access.what == STORE and addresses and places.cell(addresses[0]):
            assert access.item_bytes == layout.CELL_BYTES, "a cell is one store"
            done.add(MOVE, NOTHING, frozenset(map(places.cell, addresses)))
        elif access.what in (LOAD, STORE):
            touched = frozenset(places.byte(address + k) for address in addresses for k in range(access.item_bytes))
            done.add(MOVE, *((touched, NOTHING) if access.what == LOAD else (NOTHING, touched)))
        else:
            flags = frozenset(map(places.flag, addresses))
            if access.is_exchange and access.what == RELAXED:
                done.relaxed_signals |= flags
            elif access.is_exchange:
                assert access.what == RELEASE
                done.add(SIGNAL, flags)
            else:
                assert access.what == ACQUIRE
                done.relaxed_waits -= flags
                done.add(WAIT, flags)
    return done


def steps_said(queues: Sequence[Queue], world_size: int) -> Done:
    """Return what a shadow says that a block does: one queue with an order, and what is apart. Cells go in front, or
    between the barriers where they are known to be loaded.

    Cells from a rank to itself stand for registers, and are no access.
    """
    done, cells = Done(), dict[Flag, tuple[frozenset[object], frozenset[object]]]()
    for queue in queues:
        if not block_of(queue)[1]:
            continue
        moved = NOTHING, NOTHING
        loaded: Flag | None = None
        for command in queue.commands:
            match command:
                case Copy(dst, src):
                    moved = frozenset(_bytes_of(src, world_size)), frozenset(_bytes_of(dst, world_size))
                case Signal(flag) if flag.index < BLOCK_FLAGS:
                    done.relaxed_signals.add(flag)
                case Signal(flag) if _is_loaded(flag, world_size):
                    loaded = flag
                case Signal(flag):
                    assert moved[1] == {_cell_of(flag, world_size)}, "a cell has the flag that it is stored with"
                case Wait(flag):
                    done.relaxed_waits.add(flag)
        if loaded is not None:
            cells[loaded] = moved
        elif moved[1]:
            done.add(MOVE, *moved)
    in_order = [command for queue in queues if not block_of(queue)[1] for command in queue.commands]
    for number, command in enumerate(in_order):
        match command:
            case Signal(flag):
                done.add(SIGNAL, frozenset([flag]))
            case Wait(flag) if flag.index < BLOCK_FLAGS:
                done.add(WAIT, frozenset([flag]))
            case Wait(flag) if _is_loaded(flag, world_size):
                for other in in_order[number:]:
                    if not isinstance(other, Wait) or not _is_loaded(other.flag, world_size):
                        break
                    if other.flag in cells:
                        done.add(MOVE, *cells.pop(other.flag))
                done.add(BARRIER)
            case Wait(flag):
                done.add(WAIT, frozenset([_cell_of(flag, world_size)]))
            case Copy(dst, src):
                _say_moved(done, (src,), dst, world_size)
            case Reduce(dst, srcs):
                _say_moved(done, srcs, dst, world_size)
    assert not cells, "cells of which nobody knows that they were loaded"
    return done


def compare(found: Done, said: Done, shadow: Program, stays: frozenset[Byte], where: str) -> None:
    """Hold what a block has done against what its shadow says.

    Args:
        found: by the interpreter.
        said: by its shadow.
        shadow: of all ranks. Signals for which none of them waits are left out there.
        stays: bytes that a kernel may load, and store as they are, since they are in their place.
        where: for people.
    """
    waited = {command.flag for queue in shadow.queues for command in queue.commands if isinstance(command, Wait)}
    for name in ("relaxed_signals", "relaxed_waits"):
        mine, theirs = getattr(found, name) & waited, getattr(said, name)
        assert mine == theirs, f"{where}: {name}: {_some(mine ^ theirs)}"
    ours = list(_kept(found, stays, waited, has_barrier=said.has_barrier))
    shadows = list(_kept(said, stays, waited, has_barrier=True))
    assert [step[0] for step in ours] == [step[0] for step in shadows], (
        f"{where}: {[s[0] for s in ours]} {[s[0] for s in shadows]}"
    )
    for number, ((what, first, second), (_, other_first, other_second)) in enumerate(zip(ours, shadows, strict=True)):
        more = (first - other_first) - (stays if what == MOVE else NOTHING)
        differs = more | (other_first - first)
        assert not differs, f"{where}, step {number}: {what}: {_some(differs)}"
        assert second == other_second, f"{where}, step {number}: {what}, written: {_some(second ^ other_second)}"


def _kept(done: Done, stays: frozenset[Byte], waited: set[Flag], *, has_barrier: bool) -> Iterator[Step]:
    """Steps without what says nothing: barriers where no shadow has one, or at the end; bytes that stay."""
    kept = Done()
    for what, first, second in done.steps:
        if what == SIGNAL:
            first = first & waited
        if what == MOVE:
            if not second - stays and first <= stays and first | second:
                continue
            second = second - stays
        if (what == BARRIER and has_barrier) or first or second:
            kept.add(what, first, second)
    if kept.steps and kept.steps[-1][0] == BARRIER:
        kept.steps.pop()
    return iter(kept.steps)


def _say_moved(done: Done, srcs: Sequence[Span], dst: Span, world_size: int) -> None:
    """What was written in the same step is at hand: a block that stores it once more does not load it."""
    at_hand = done.steps[-1][2] if done.steps and done.steps[-1][0] == MOVE else NOTHING
    reads = frozenset(byte for src in srcs for byte in _bytes_of(src, world_size))
    written = frozenset(_bytes_of(dst, world_size))
    registers = {byte for byte in reads | written if _is_register(byte, world_size)}
    done.add(MOVE, reads - at_hand - registers, written - registers)


def touched(command: Copy | Reduce, world_size: int) -> frozenset[Byte]:
    """All bytes that a command reads or writes, without registers."""
    spans = (command.dst, *(command.srcs if isinstance(command, Reduce) else (command.src,)))
    found = frozenset(byte for span in spans for byte in _bytes_of(span, world_size))
    return frozenset(byte for byte in found if not _is_register(byte, world_size))


def _is_register(byte: Byte, world_size: int) -> bool:
    rank, buffer, number = byte
    return buffer == CELL and number // CELLS_OF_A_SLOT % world_size == rank


def _bytes_of(span: Span, world_size: int) -> Iterator[Byte]:
    first = ll_slot(span.rank, 0, 0, world_size, 0, 0).offset
    if span.buffer == Buffer.STAGING and span.offset >= first:
        numbers = range((span.offset - first) // CELL_BYTES, -(-(span.end - first) // CELL_BYTES))
        return ((span.rank, CELL, number) for number in numbers)
    return ((span.rank, str(span.buffer), offset) for offset in range(span.offset, span.end))


def bytes_of(span: Span) -> frozenset[Byte]:
    """Of a caller's buffer."""
    return frozenset((span.rank, str(span.buffer), offset) for offset in range(span.offset, span.end))


def _cell_of(flag: Flag, world_size: int) -> Byte:
    first = once_flag(0, 0, 0, world_size, 0).index
    if flag.index < first:
        return flag.rank, CELL, flag.index - FIRST_CELL
    place, cell = divmod(flag.index - first, CELLS_OF_A_SLOT)
    sender, slot = once_slot(place % world_size, world_size)
    return sender, CELL, (place // world_size * world_size + slot) * CELLS_OF_A_SLOT + cell


def _is_loaded(flag: Flag, world_size: int) -> bool:
    return loaded_flag(0, 0, world_size, 0).index <= flag.index < once_flag(0, 0, 0, world_size, 0).index


def _some(differs: set[object] | frozenset[object]) -> list[object]:
    return sorted(differs, key=str)[:5]
