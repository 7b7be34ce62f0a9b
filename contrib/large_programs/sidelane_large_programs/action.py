"""Moves of all ranks that leave a program as it is, with the bytes that they map to each other.

A fold's ranks stand for all others if the program is the same after a move of all ranks by ``fold.nodes`` nodes, or by
``fold.places`` places. Such a move also maps the bytes of a rank to those of the rank that it becomes: block 3 of an
output to block 3 + nodes, say. That map is found, not assumed: the queues of the ranks that stand for all others are
compared with those that the builder makes for the ranks that these become, command by command. All must be the same but
for ranks and offsets, and offsets must change by one map for all ranks, which moves whole *cells*: ranges of bytes that
no span of the program cuts. The map of several moves is that of one move several times.

What is proved of such a program (``quotient.py``) holds for the one that the moves make of these queues
(:meth:`Action.expand`). It is the one that is simulated. That a builder makes the same one for all of the ranks is
compared by tests for groups of up to 64 ranks, and by :func:`act` for the first move in each direction and the last.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sidelane.errors import SidelaneError
from sidelane.program.collective import Buffer, Collective, Kind, Span
from sidelane.program.ir import Command, Copy, Flag, Program, Queue, Reduce, Signal, Stamp, Wait, reads, writes
from sidelane_lab.sim.fold import Fold

Numbers = npt.NDArray[np.int64]

BUFFERS = (Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING)


class AsymmetryError(SidelaneError):
    """The ranks of a fold do not stand for all others; the text names the first command that differs."""


def act(build: Callable[[tuple[int, int]], Program], fold: Fold) -> Action:
    """Find the moves of a program.

    Args:
        build: builder of the queues of the ranks that the fold's become by a move of so many nodes and places.
        fold: ranks that stand for all others.

    Raises:
        AsymmetryError: they do not, or bytes are not mapped to each other by whole cells.
    """
    built = build
    build = functools.cache(lambda by: _without_stamps(built(by)))
    program = build((0, 0))
    if not isinstance(program.collective, Collective):
        raise AsymmetryError("moves: of one collective")
    steps = [(fold.nodes, 0)] * (fold.nodes < fold.machine.nodes)
    steps += [(0, fold.places)] * (fold.places < fold.machine.gpus)
    found = _find(program, fold, steps, build)
    last = fold.machine.nodes - fold.nodes, fold.machine.gpus - fold.places
    for by in dict.fromkeys((*steps, last)):
        found.compare(program, build(by), found.element(found.move_rank(by, fold.ranks[0])))
    return found


class Action:
    """A group of moves. *Element* number ``a * across + b`` moves all ranks by ``a`` times the fold's nodes, and by
    ``b`` times its places.

    Args:
        fold: ranks that stand for all others.
        bases: begin of each buffer in one row of all buffers.
        cuts: begins of the cells in that row, and its end.
        nodes, places: cell that each becomes by one step of nodes, and of places.
    """

    def __init__(self, fold: Fold, bases: dict[str, int], cuts: Numbers, nodes: Numbers, places: Numbers) -> None:
        self.fold, self.bases, self.cuts = fold, bases, cuts
        self.cells = len(cuts) - 1
        self.along = fold.machine.nodes // fold.nodes
        self.across = fold.machine.gpus // fold.places
        self.size = self.along * self.across
        self._index = {cut: number for number, cut in enumerate(cuts.tolist())}
        same = np.arange(self.cells)
        self._powers = [[same], [same]]
        for powers, step, many in ((self._powers[0], nodes, self.along), (self._powers[1], places, self.across)):
            for _ in range(many - 1):
                powers.append(step[powers[-1]])
            if (step[powers[-1]] != same).any():
                raise AsymmetryError("moves: one move after another does not come back to where it began")
        if (nodes[places] != places[nodes]).any():
            raise AsymmetryError("moves: by nodes and by places do not give the same in either order")
        self._moved: dict[int, Numbers] = {}

    def move_rank(self, by: tuple[int, int], rank: int) -> int:
        """Return the rank that one becomes by a move of nodes and places."""
        gpus, many = self.fold.machine.gpus, self.fold.machine.nodes
        node, place = divmod(rank, gpus)
        return (node + by[0]) % many * gpus + (place + by[1]) % gpus

    def element(self, rank: int) -> int:
        """Return the element that makes a rank of the one that stands for it."""
        node, place = divmod(rank, self.fold.machine.gpus)
        return node // self.fold.nodes * self.across + place // self.fold.places

    def less(self, one: int, other: int) -> int:
        """Return the element of one move after another one was taken back."""
        (a, b), (c, d) = divmod(one, self.across), divmod(other, self.across)
        return (a - c) % self.along * self.across + (b - d) % self.across

    def moved(self, element: int) -> Numbers:
        """Return the cell that each becomes."""
        found = self._moved.get(element)
        if found is None:
            a, b = divmod(element, self.across)
            found = self._moved[element] = self._powers[1][b][self._powers[0][a]]
        return found

    @functools.cached_property
    def ranks(self) -> Numbers:
        """Return the rank that each becomes by each element, as a table."""
        all_ranks = range(self.fold.machine.world_size)
        steps = ((a * self.fold.nodes, b * self.fold.places) for a in range(self.along) for b in range(self.across))
        return np.array([[self.move_rank(by, rank) for rank in all_ranks] for by in steps])

    def span(self, span: Span) -> tuple[int, int]:
        """Return the first cell of a span, and the one behind its last."""
        begin = self.bases[span.buffer] + span.offset
        try:
            return self._index[begin], self._index[begin + span.nbytes]
        except KeyError:
            raise AsymmetryError(f"moves: {span} cuts a cell") from None

    def expand(self, program: Program) -> Program:
        """Return the program of all ranks that the moves make of the queues of some, without stamps."""
        queues = [
            Queue(int(self.ranks[element][queue.rank]), queue.engine, tuple(self._moved_queue(queue, element)))
            for element in range(self.size)
            for queue in _without_stamps(program).queues
        ]
        return dataclasses.replace(program, queues=tuple(queues))

    def _moved_queue(self, queue: Queue, element: int) -> Iterator[Command]:
        ranks = self.ranks[element].tolist()
        for command in queue.commands:
            match command:
                case Copy(dst, src):
                    yield from (Copy(to, given) for to, given in self._moved_spans((dst, src), element))
                case Reduce(dst, srcs, reduction):
                    for to, *given in self._moved_spans((dst, *srcs), element):
                        yield Reduce(to, tuple(given), reduction)
                case Signal(flag, value, op):
                    yield Signal(Flag(ranks[flag.rank], flag.index), value, op)
                case Wait(flag, value, comparison):
                    yield Wait(Flag(ranks[flag.rank], flag.index), value, comparison)
                case _:
                    raise AsymmetryError(f"moves: of copies, sums and flags (value={command!r})")

    def _moved_spans(self, given: Sequence[Span], element: int) -> Iterator[list[Span]]:
        """Yield spans of one size as they are moved, in as many parts as do not stay together."""
        moved = self.moved(element)
        ranges = [self.span(span) for span in given]
        if all(behind - first == 1 for first, behind in ranges):
            yield [
                Span(
                    int(self.ranks[element][span.rank]),
                    span.buffer,
                    int(self.cuts[moved[first]]) - self.bases[span.buffer],
                    span.nbytes,
                )
                for span, (first, _) in zip(given, ranges, strict=True)
            ]
            return
        cells = np.stack([moved[first:behind] for first, behind in ranges])
        edges = [0, *(np.flatnonzero((np.diff(cells) != 1).any(axis=0)) + 1).tolist(), cells.shape[1]]
        for begin, end in itertools.pairwise(edges):
            yield [
                Span(
                    int(self.ranks[element][span.rank]),
                    span.buffer,
                    int(self.cuts[row[begin]]) - self.bases[span.buffer],
                    int(self.cuts[row[end - 1] + 1] - self.cuts[row[begin]]),
                )
                for span, row in zip(given, cells, strict=True)
            ]

    def compare(self, program: Program, image: Program, element: int) -> None:
        """Require that queues of other ranks are what an element makes of those of some.

        What is between two flags may be cut and ordered in another way: it is one run for the proof.
        """
        for one, other in zip(_without_stamps(program).queues, _without_stamps(image).queues, strict=True):
            moved = self._moved_queue(one, element)
            same = (int(self.ranks[element][one.rank]), one.engine) == (other.rank, other.engine)
            if not same or not all(
                mine == theirs or (isinstance(mine, list) and self._is_same_run(mine, theirs))
                for mine, theirs in itertools.zip_longest(_runs(moved), _runs(other.commands))
            ):
                raise AsymmetryError(f"moves: the queue of rank {other.rank} {other.engine} is not what they make")

    def _is_same_run(self, one: list[Command], other: object) -> bool:
        return isinstance(other, list) and sorted(self._effects(one)) == sorted(self._effects(other))

    def _effects(self, run: list[Command]) -> Iterator[tuple[object, ...]]:
        """Yield what a run does to each cell: where to, and what from."""
        for command in run:
            assert isinstance(command, Copy | Reduce)
            srcs = (command.src,) if isinstance(command, Copy) else command.srcs
            kind = "" if isinstance(command, Copy) else str(command.reduction)
            ranges = [range(*self.span(span)) for span in (command.dst, *srcs)]
            ranks = tuple(span.rank for span in srcs)
            for to, *given in zip(*ranges, strict=True):
                yield kind, command.dst.rank, to, *sorted(zip(ranks, given, strict=True))  # of integers: any order


def _runs(commands: Iterable[Command]) -> Iterator[Command | list[Command]]:
    """Yield the commands on flags, and lists of those between them."""
    for on_flags, found in itertools.groupby(commands, lambda command: isinstance(command, Signal | Wait)):
        if on_flags:
            yield from found
        else:
            yield [*found]


def _without_stamps(program: Program) -> Program:
    if not any(isinstance(command, Stamp) for queue in program.queues for command in queue.commands):
        return program
    queues = (
        dataclasses.replace(queue, commands=tuple(c for c in queue.commands if not isinstance(c, Stamp)))
        for queue in program.queues
    )
    return dataclasses.replace(program, queues=tuple(queues))


def _find(
    program: Program, fold: Fold, steps: Sequence[tuple[int, int]], build: Callable[[tuple[int, int]], Program]
) -> Action:
    sizes = {buffer: max(program.buffer_bytes(r, buffer) for r in fold.ranks) for buffer in BUFFERS}
    bases: dict[str, int] = {}
    end = 0
    for buffer, nbytes in sizes.items():
        bases[buffer] = end
        end += nbytes
    plain = Action(fold, bases, np.array([0, max(end, 1)]), np.zeros(1, np.int64), np.zeros(1, np.int64))
    tables, twins = [], []
    for step in steps:
        pairs: dict[tuple[int, int, int], None] = {}
        copies: dict[tuple[int, ...], None] = {}
        before = program
        # Places may use bytes that others do not: all that become each other in turn are compared, of a node.
        for times in range(1, 1 + (fold.machine.gpus if step[1] and fold.nodes == fold.machine.nodes else 1)):
            image = build((step[0] * times, step[1] * times))
            for mine, theirs in _paired(plain, step, before, image):
                pairs |= dict.fromkeys((a, b, n) for (a, n), (b, _) in zip(mine, theirs, strict=True))
                copies |= dict.fromkeys(
                    (mine[0][0], one[0], theirs[0][0], other[0], one[1])
                    for one, other in zip(mine[1:], theirs[1:], strict=True)
                )
            before = image
        table = np.array([*pairs], np.int64).reshape(-1, 3)
        tables.append(np.concatenate([table, *_blocks(plain, step, program.collective, table)]))
        twins.append(np.array([*copies], np.int64).reshape(-1, 5))
    copied = [twin[:, [at, at + 1, 4]] for twin in twins for at in (0, 2)]
    cuts = _cuts(np.array([*bases.values(), end]), [*tables, *copied])
    maps = {step: _cell_map(cuts, *found) for step, *found in zip(steps, tables, twins, strict=True)}
    same = np.arange(len(cuts) - 1)
    return Action(fold, bases, cuts, *(maps.get(by, same) for by in ((fold.nodes, 0), (0, fold.places))))


_Ranges = list[tuple[int, int]]
"""Begins of ranges in the row of all buffers, and their bytes: where a command writes, then what it reads."""


def _paired(plain: Action, by: tuple[int, int], program: Program, image: Program) -> Iterator[tuple[_Ranges, _Ranges]]:
    """Yield what two commands touch that stand at one place of two queues."""
    for one, other in zip(program.queues, image.queues, strict=True):
        same = (plain.move_rank(by, one.rank), one.engine) == (other.rank, other.engine)
        if not same or len(one.commands) != len(other.commands):
            raise AsymmetryError(f"moves: rank {one.rank} {one.engine} and rank {other.rank} do not do the same")
        for mine, theirs in zip(one.commands, other.commands, strict=True):
            if type(mine) is type(theirs):
                if not isinstance(mine, Copy | Reduce):
                    continue  # compared later
                ours, images = ([*writes(each), *reads(each)] for each in (mine, theirs))
                if [(each.buffer, each.nbytes) for each in ours] == [(each.buffer, each.nbytes) for each in images]:
                    here, there = (
                        [(plain.bases[each.buffer] + each.offset, each.nbytes) for each in found]
                        for found in (ours, images)
                    )
                    yield here, there
                    continue
            raise AsymmetryError(f"moves: {mine} of rank {one.rank} {one.engine} becomes {theirs} of rank {other.rank}")


def _blocks(plain: Action, by: tuple[int, int], collective: object, table: Numbers) -> Iterator[Numbers]:
    """Yield pairs of the callers' blocks of all ranks that no pair has: what other ranks write, or read."""
    assert isinstance(collective, Collective)
    ranks, part = collective.world_size, collective.counts[0][0]
    if collective.kind in (Kind.ALL_REDUCE, Kind.BROADCAST):
        return
    found = table[table[:, 2] <= part]
    found = found[np.argsort(found[:, 0])]
    ends = np.maximum.accumulate(found[:, 0] + found[:, 2])
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        if collective.buffer_bytes(0, buffer) != ranks * part or not part:
            continue
        for rank in range(ranks):
            begin = plain.bases[buffer] + rank * part
            near = np.searchsorted(found[:, 0], begin + part)
            if not near or ends[near - 1] <= begin:
                yield np.array([[begin, plain.bases[buffer] + plain.move_rank(by, rank) * part, part]])


def _cuts(edges: Numbers, relations: Sequence[Numbers]) -> Numbers:
    """Return all edges of ranges, with those that the relations between ranges make of them."""
    begins = np.concatenate([table[:, :2].reshape(-1) for table in relations])
    sizes = np.concatenate([np.repeat(table[:, 2], 2) for table in relations])
    # Of each pair of ranges, in both directions: where one begins, by how much more the other, and the bytes.
    others = np.concatenate([table[:, 1::-1].reshape(-1) for table in relations])
    cuts = np.unique(np.concatenate([edges, begins, begins + sizes]))
    while True:
        first = np.searchsorted(cuts, begins, side="right")
        counts = np.searchsorted(cuts, begins + sizes, side="left") - first
        rows = np.repeat(np.arange(len(begins)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        inner = cuts[first[rows] + within]
        more = np.union1d(cuts, inner - begins[rows] + others[rows])
        if len(more) == len(cuts):
            return cuts
        cuts = more


def _cell_map(cuts: Numbers, table: Numbers, copies: Numbers) -> Numbers:
    """Return the cell that each becomes, by the smallest range that has it; those that none has stay where they are.

    A range that is copied is as fine as the one that it is copied to, or from.
    """
    first = np.searchsorted(cuts, table[:, 0])
    counts = np.searchsorted(cuts, table[:, 0] + table[:, 2]) - first
    onto = np.searchsorted(cuts, table[:, 1])
    rows = np.repeat(np.arange(len(table)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    largest_first = np.argsort(-table[rows, 2], kind="stable")
    found, sizes = np.arange(len(cuts) - 1), np.full(len(cuts) - 1, cuts[-1] + 1)
    cells = (first[rows] + within)[largest_first]
    found[cells], sizes[cells] = (onto[rows] + within)[largest_first], table[rows, 2][largest_first]
    at = np.searchsorted(cuts, copies[:, :4])
    many = np.searchsorted(cuts, copies[:, 0] + copies[:, 4]) - at[:, 0]
    coarse = [(*row, count) for row, count in zip(at.tolist(), many.tolist(), strict=True) if count > 1]
    while True:
        before = sizes.sum()
        for dst, src, dst_image, src_image, count in coarse:
            for one, other, image, other_image in ((dst, src, dst_image, src_image), (src, dst, src_image, dst_image)):
                here, there = slice(one, one + count), slice(other, other + count)
                finer = np.flatnonzero(sizes[here] < sizes[there])
                finer = finer[(found[here][finer] >= image) & (found[here][finer] < image + count)]
                found[other + finer] = found[one + finer] - image + other_image
                sizes[other + finer] = sizes[one + finer]
        if sizes.sum() == before:
            break
    if len(np.unique(found)) < len(found):
        raise AsymmetryError("moves: different bytes become the same")
    if (np.diff(cuts)[found] != np.diff(cuts)).any():
        raise AsymmetryError("moves: a range of bytes becomes one of another size")
    return found
