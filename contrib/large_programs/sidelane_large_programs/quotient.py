"""Proof of a program of any size by the queues of the ranks that stand for all others.

It is the library's proof (``sidelane.program.verify``), gone through in one particular order, of which only one part in
``action.size`` is computed. The library's pass goes through the events of all ranks in any order that waits allow;
any such order finds the same. This one takes a step of a queue together with its images by all moves, an *orbit*. A
wait's signal is an image of a signal in an orbit that was taken before, or was not: then all images wait, too. By
induction the state behind each orbit (clocks, values of flags, last accesses, contents of bytes) is mapped to itself by
all moves, so that of the ranks that stand for all others says everything.

What must be translated is where two ranks meet. A signal to a flag of another rank, in the eyes of the rank that stands
for that one, comes from an image of the signaller, with an image of its clock; so do accesses to another rank's bytes,
and contents that come from there. The moves leave no rank where it is, so that a flag has one signal at most of an
orbit. Two images of one step are never ordered (the moves would else carry on the order in a circle), so that none can
be taken before another one wrongly: if they touch the same bytes, and one writes, that is a race.

- *structure*: the library's ``check_structure`` of these queues; moves keep ranks, flags and cells within their bounds.
- *values of flags*: the library's ``check_values``, with each flag as that of the rank that stands for its own.
- *lost signals, pairing*: the library's ``FlagStates``, which is given images of chains and clocks; two invocations.
- *deadlocks*: a queue that does not come to its end in this pass does not in the library's.
- *races*: each access behind the last write, and each write behind the reads since, cell by cell.
- *origins*: cell by cell; a sum is the list of the cells that went into it. Each step of the moves must map the
  collective to itself, which is checked for every rank; then the outputs of the other ranks are right, too.

Refused rather than proved are counters (signals that add), prelaunched programs and other reductions than sums of
integers. ``tests/test_large_programs.py`` compares the verdicts with the library's on the same programs and mistakes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from sidelane.errors import ProgramError
from sidelane.program.collective import INTEGERS, Buffer, Collective, Kind, ReduceOp, Span
from sidelane.program.ir import Copy, Flag, Program, Queue, Reduce, Signal, SignalOp, Stamp, Wait, reads, writes
from sidelane.program.verify.counters import Counters
from sidelane.program.verify.flags import FlagStates, check_values
from sidelane.program.verify.layout import RUN, SIGNAL, WAIT, Layout, Occurrence, event_at, lay_out_programs, name_event
from sidelane.program.verify.structure import check_structure
from sidelane_large_programs.action import Action, AsymmetryError, Numbers

INVOCATIONS = 2


def prove(program: Program, action: Action) -> int:
    """Prove the program that moves make of the queues of some ranks.

    Args:
        program: queues of the ranks that stand for all others.
        action: moves, as ``act`` finds them.

    Returns:
        Number of pairs of accesses that were compared.

    Raises:
        ProgramError: the program is wrong; the text names ranks, commands and bytes.
        AsymmetryError: nothing can be said by symmetry.
    """
    title = f"prove: refused {program.collective} {program.variant}"

    def refuse(lines: Sequence[str]) -> None:
        if lines:
            raise ProgramError(title, lines)

    _require_coverage(program)
    refuse(check_structure(program))
    folded, elements = _folded(program, action)
    layout = lay_out_programs((folded,) * INVOCATIONS)
    refuse(check_values(layout))
    order = _Pass(layout, action, elements)
    refuse([f"deadlock: {name_event(event_at(place))} never ends" for _, place in sorted(order.blocked.items())])
    refuse([*order.flags.violations(), *order.accesses.races])
    refuse(_Origins(program, action).check(order.places))
    return order.accesses.pairs


def _require_coverage(program: Program) -> None:
    if not isinstance(program.collective, Collective) or program.prelaunched:
        raise AsymmetryError("prove: of one collective that is not prelaunched")
    for queue in program.queues:
        for command in queue.commands:
            match command:
                case Signal(op=SignalOp.SET) | Wait() | Copy() | Stamp():
                    continue
                case Reduce(reduction=reduction) if reduction.op is ReduceOp.SUM and reduction.dtype in INTEGERS:
                    continue
            raise AsymmetryError(f"prove: of copies, sums of integers and flags that are set (value={command!r})")


def _folded(program: Program, action: Action) -> tuple[Program, dict[int, list[int]]]:
    """Return the program with each flag as that of the rank that stands for its own, and the elements that make these,
    by the queue's ``id`` and the command's index. Stamps are left out.
    """
    queues, elements = [], {}
    fold = action.fold
    for queue in program.queues:
        commands, found = [], []
        for command in queue.commands:
            if isinstance(command, Stamp):
                continue
            element = 0
            if isinstance(command, Signal):
                flag = command.flag
                element = action.element(flag.rank)
                command = Signal(Flag(fold.rank(flag.rank), flag.index), command.value, command.op)
            commands.append(command)
            found.append(element)
        queues.append(Queue(queue.rank, queue.engine, tuple(commands)))
        elements[id(queues[-1])] = found
    return dataclasses.replace(program, queues=tuple(queues)), elements


class _Ticks:
    """Ticks of the images of chains: all images of a chain tick together."""

    def __init__(self, chains: int) -> None:
        self._ticks = [0] * chains

    def __getitem__(self, chain: int) -> int:
        return self._ticks[chain % len(self._ticks)]

    def __setitem__(self, chain: int, ticks: int) -> None:
        self._ticks[chain % len(self._ticks)] = ticks


class _Pass:
    """One pass through all invocations: ``order.HappensBefore``, orbit by orbit.

    The image of chain c by element e has number ``e * chains + c``.

    Attributes:
        flags, accesses: findings.
        places: runs, in one possible order.
        blocked: the wait at which each stuck chain stands.
    """

    def __init__(self, layout: Layout, action: Action, elements: dict[int, list[int]]) -> None:
        plans = layout.plans_of(1)
        ranks = list(dict.fromkeys(plan.queue.rank for plan in plans))
        self.layout, self.action, self.elements = layout, action, elements
        self.chains = count = len(plans)
        self.places: list[Occurrence] = []
        self.blocked: dict[int, Occurrence] = {}
        self.ticks = _Ticks(count)
        self.flags = FlagStates(layout, Counters(), self.ticks)  # type: ignore[arg-type]  # a list, of images as well
        self.accesses = _Accesses(layout, action, count, self.ticks)
        self._plans = {plan.chain: plan for plan in plans}
        self._clocks = np.zeros((count, action.size * count), np.int32)
        self._images: dict[int, Numbers] = {}
        self._invocation, self._step = [1] * count, [0] * count
        self._of_rank = {rank: [plan.chain for plan in plans if plan.queue.rank == rank] for rank in ranks}
        self._over = dict.fromkeys(ranks, 0)
        self._ended = dict.fromkeys(ranks, 0)
        self._ready: deque[int] = deque()
        for rank in ranks:
            self._end(rank, 0)
        while self._ready:
            self._advance(self._ready.popleft())

    def _seen_from(self, element: int) -> Numbers:
        """Return where the entries of a clock stand in the eyes of the rank that an element makes."""
        found = self._images.get(element)
        if found is None:
            action = self.action
            a, b = divmod(element, action.across)
            along = (np.arange(action.along)[:, None] + a) % action.along * action.across
            images = (along + (np.arange(action.across)[None, :] + b) % action.across).reshape(-1, 1)
            found = self._images[element] = (images * self.chains + np.arange(self.chains)).reshape(-1)
        return found

    def _advance(self, chain: int) -> None:
        """Advance a chain, and its images with it, as far as it can go."""
        clock, plan, flags = self._clocks[chain], self._plans[chain], self.flags
        invocation = self._invocation[chain]
        if invocation > INVOCATIONS or self._over[plan.queue.rank] < invocation - 1:
            return
        elements = self.elements[id(plan.queue)]
        self.blocked.pop(chain, None)
        for number in range(self._step[chain], len(plan.steps)):
            kind, index, target, base, per_epoch, equal = plan.steps[number]
            place, value = (invocation, plan, number), base + per_epoch * invocation
            if kind == RUN:
                self.accesses.run(target, chain, place, clock)
                self.places.append(place)
            elif kind == WAIT:
                if not flags.wait(target, value, equal, chain, clock, place):
                    self._step[chain] = number
                    self.blocked[chain] = place
                    return
            else:
                assert kind == SIGNAL
                element = elements[index]
                sender, seen = chain, clock
                if element:
                    sender = self.action.less(0, element) * self.chains + chain
                    seen = clock[self._seen_from(element)]
                self._ready.extend(flags.write(target, value, sender, seen, place))
        self._step[chain], self._invocation[chain] = 0, invocation + 1
        rank = plan.queue.rank
        if chain != self._of_rank[rank][0]:
            self.ticks[chain] = clock[chain] = self.ticks[chain] + 1
        self._ended[rank] += 1
        if self._ended[rank] == len(self._of_rank[rank]):
            self._end(rank, invocation)

    def _end(self, rank: int, invocation: int) -> None:
        """End an invocation of a rank: its caller joins all queues, uses its buffers and calls again."""
        self._ended[rank], self._over[rank] = 0, invocation
        chains = self._of_rank[rank]
        user, clock = chains[0], self._clocks[chains[0]]
        for chain in chains[1:]:
            np.maximum(clock, self._clocks[chain], out=clock)
        self.accesses.user(rank, user, (invocation, None, rank), clock)
        self.ticks[user] = clock[user] = self.ticks[user] + 1
        for chain in chains[1:]:
            np.copyto(self._clocks[chain], clock)
        self._ready.extend(chains)


_Access = tuple[int, int, int, int, Occurrence]
"""The move of its rank by nodes and by places, in steps; the chain, its ticks by then, and the place."""


class _Cells:
    """Cells that the same sites, moved alike, touch in the same way: the last writer, and the readers since."""

    __slots__ = ("name", "readers", "writer")

    def __init__(self, name: str) -> None:
        self.name = name
        self.writer: _Access | None = None
        self.readers: list[_Access] = []


class _Accesses:
    """Accesses to the bytes of the ranks that stand for all others: ``races.Accesses``, of cells.

    Attributes:
        races: one line for each pair of accesses that nothing orders.
        pairs: number of pairs of accesses that were compared.
    """

    def __init__(self, layout: Layout, action: Action, chains: int, ticks: _Ticks) -> None:
        self._action, self._chains, self._ticks = action, chains, ticks
        self.pairs = 0
        self._raced: dict[str, None] = {}
        self._reads: list[list[tuple[_Cells, int, int]]] = [[] for _ in layout.sites]
        self._writes: list[list[tuple[_Cells, int, int]]] = [[] for _ in layout.sites]
        self._users: dict[int, list[tuple[_Cells, int, int]]] = {}
        touched: dict[tuple[int, int], set[int]] = {}
        for site, (plan, number) in enumerate(layout.sites):
            _, first, _, behind, _, _ = plan.steps[number]
            for command in plan.queue.commands[first:behind]:
                for is_write, found in enumerate((reads(command), writes(command))):
                    for span in found:
                        rank, element, cells = _home(action, span)
                        access = ((element * len(layout.sites)) + site) * 2 + is_write
                        for cell in cells.tolist():
                            touched.setdefault((rank, cell), set()).add(access)
        staging = int(action.bases[Buffer.STAGING])
        watched: dict[object, _Cells] = {}
        for (rank, cell), accesses in touched.items():
            user = rank if action.cuts[cell] < staging else -1
            key = user, tuple(sorted(accesses))
            if key not in watched:
                watched[key] = self._watch(user, accesses, len(layout.sites), f"cell {cell} of rank {rank}")

    def _watch(self, user: int, accesses: set[int], sites: int, name: str) -> _Cells:
        cells, across = _Cells(name), self._action.across
        writing = {access >> 1 for access in accesses if access & 1}
        for access in accesses:
            element, site = divmod(access >> 1, sites)
            entry = (cells, *divmod(element, across))
            if access & 1:
                self._writes[site].append(entry)
            elif access >> 1 not in writing:
                self._reads[site].append(entry)
        if user >= 0:
            self._users.setdefault(user, []).append((cells, 0, 0))
        return cells

    @property
    def races(self) -> list[str]:
        return [*self._raced]

    def run(self, site: int, chain: int, place: Occurrence, clock: Numbers) -> None:
        """Record a run of commands, and its images."""
        tick = self._ticks[chain]
        for cells, a, b in self._reads[site]:
            mine = (a, b, chain, tick, place)
            if cells.writer is not None:
                self._compare(cells, cells.writer, mine, clock)
            cells.readers.append(mine)
        self._write(self._writes[site], chain, tick, place, clock)

    def user(self, rank: int, chain: int, place: Occurrence, clock: Numbers) -> None:
        """Record an access by a rank's caller to its input and output."""
        self._write(self._users.get(rank, []), chain, self._ticks[chain], place, clock)

    def _write(
        self, found: list[tuple[_Cells, int, int]], chain: int, tick: int, place: Occurrence, clock: Numbers
    ) -> None:
        for cells, a, b in found:
            mine = (a, b, chain, tick, place)
            if cells.readers:
                for reader in cells.readers:
                    self._compare(cells, reader, mine, clock)
                cells.readers.clear()
            elif cells.writer is not None:
                self._compare(cells, cells.writer, mine, clock)
            cells.writer = mine

    def _compare(self, cells: _Cells, first: _Access, second: _Access, clock: Numbers) -> None:
        """Check that one access comes after another one; the clock is in the eyes of the second one's own rank."""
        self.pairs += 1
        a, b, chain, tick, place = first
        c, d, other, _, where = second
        if (a, b, chain) == (c, d, other):
            return
        action = self._action
        number = ((a - c) % action.along * action.across + (b - d) % action.across) * self._chains + chain
        if clock[number] <= tick:
            one, two = (name_event(event_at(each)) for each in (place, where))
            self._raced[f"race on {cells.name}: nothing orders {one}, and {two}, or their images"] = None


def _home(action: Action, span: Span) -> tuple[int, int, Numbers]:
    """Return a span as the rank sees it that stands for its own: that rank, the move of whoever touches the span, and
    the cells.
    """
    first, behind = action.span(span)
    back = action.less(0, action.element(span.rank))
    return action.fold.rank(span.rank), back, action.moved(back)[first:behind]


class _Origins:
    """Contents of the cells of the ranks that stand for all others: ``provenance``, by numbers.

    A content is the cell that the caller left (``rank * cells + cell``), or the negative number of a sum of such.
    """

    def __init__(self, program: Program, action: Action) -> None:
        assert isinstance(program.collective, Collective)
        self.action, self.collective = action, program.collective
        counts = program.collective.counts
        self.even = all(row.count(counts[0][0]) == len(row) for row in {id(row): row for row in counts}.values())
        self.output_bytes = program.collective.buffer_bytes(0, Buffer.OUTPUT)  # where they are even, of all ranks
        self.input_bytes = program.collective.buffer_bytes(0, Buffer.INPUT)
        self.contents = {rank: rank * action.cells + np.arange(action.cells) for rank in action.fold.ranks}
        self.sums: list[Numbers] = [np.zeros(0, np.int64)]

    def check(self, places: Sequence[Occurrence]) -> list[str]:
        """Return a line for each rank whose output, or input, is not what the collective defines."""
        for invocation, plan, number in places:
            assert plan is not None
            if invocation == 1:
                _, first, _, behind, _, _ = plan.steps[number]
                for command in plan.queue.commands[first:behind]:
                    self._execute(command)
        lines = [line for rank in self.contents for line in self._differences(rank)]
        if not lines:
            self._require_kept_spec()
        return lines

    def _execute(self, command: object) -> None:
        match command:
            case Copy(dst, src):
                self._put(dst, self._get(src))
            case Reduce(dst, srcs):
                parts = [self._get(src) for src in srcs]
                values = []
                for each in zip(*parts, strict=True):
                    self.sums.append(np.sort(np.concatenate([self._terms(int(one)) for one in each])))
                    values.append(1 - len(self.sums))
                self._put(dst, np.array(values, np.int64))

    def _terms(self, content: int) -> Numbers:
        return self.sums[-content] if content < 0 else np.array([content])

    def _get(self, span: Span) -> Numbers:
        rank, back, cells = _home(self.action, span)
        return self._moved(self.action.less(0, back), self.contents[rank][cells])

    def _put(self, span: Span, values: Numbers) -> None:
        rank, back, cells = _home(self.action, span)
        if len(values) != len(cells):
            raise AsymmetryError(f"prove: what is written to {span} is cut in another way")
        self.contents[rank][cells] = self._moved(back, values)

    def _moved(self, element: int, values: Numbers) -> Numbers:
        """Return contents as a move makes them."""
        if not element:
            return values
        if (values >= 0).all():
            return self._moved_cells(element, values)
        result = values.copy()
        for at, value in enumerate(values.tolist()):
            if value < 0:
                self.sums.append(np.sort(self._moved_cells(element, self.sums[-value])))
                result[at] = 1 - len(self.sums)
            else:
                result[at] = self._moved_cells(element, values[at : at + 1])[0]
        return result

    def _moved_cells(self, element: int, values: Numbers) -> Numbers:
        ranks, cells = np.divmod(values, self.action.cells)
        moved: Numbers = self.action.ranks[element][ranks] * self.action.cells + self.action.moved(element)[cells]
        return moved

    def _spec(self, rank: int) -> tuple[Numbers, Numbers | None, Numbers]:
        """Return the cells of a rank's output, the ranks of their origins (None: a sum of all), and their cells."""
        action, collective = self.action, self.collective
        begin = action.bases[Buffer.OUTPUT]
        first, behind = np.searchsorted(action.cuts, [begin, begin + self.output_bytes])
        cells = np.arange(first, behind)
        offsets, part = action.cuts[first:behind] - begin, collective.counts[0][0]
        if collective.kind is Kind.ALL_REDUCE:
            origins = action.cuts[first:behind]
            if not collective.in_place:
                raise AsymmetryError("prove: of an all-reduce in place")
            return cells, None, np.searchsorted(action.cuts, origins)
        if not self.even:
            raise AsymmetryError("prove: of parts of one size")
        if collective.kind is Kind.ALL_GATHER:
            ranks = offsets // part
            origins = action.cuts[first:behind] if collective.in_place else offsets % part + action.bases[Buffer.INPUT]
        elif collective.in_place:
            raise AsymmetryError(f"prove: of a {collective.kind} that is not in place")
        elif collective.kind is Kind.ALL_TO_ALL:
            ranks, origins = offsets // part, rank * part + offsets % part + action.bases[Buffer.INPUT]
        elif collective.kind is Kind.REDUCE_SCATTER:
            ranks, origins = None, rank * part + offsets + action.bases[Buffer.INPUT]
        else:
            raise AsymmetryError(f"prove: {collective.kind} is not the same for all ranks")
        found = np.minimum(np.searchsorted(action.cuts, origins), action.cells - 1)
        sizes = np.diff(action.cuts)
        if (action.cuts[found] != origins).any() or (sizes[found] != sizes[cells]).any():
            raise AsymmetryError("prove: an output and the input that belongs there are cut in different ways")
        return cells, ranks, found

    def _differences(self, rank: int) -> Iterator[str]:
        action, contents = self.action, self.contents[rank]
        cells, ranks, origins = self._spec(rank)
        if ranks is not None:
            wrong = contents[cells] != ranks * action.cells + origins
        else:
            everyone = np.arange(action.fold.machine.world_size) * action.cells
            wrong = np.array(
                [
                    not np.array_equal(self._terms(content), everyone + origin)
                    for content, origin in zip(contents[cells].tolist(), origins.tolist(), strict=True)
                ]
            )
        if wrong.any():
            yield f"wrong bytes: rank {rank} ends with {wrong.sum()} ranges of its output that hold other bytes"
        begin = action.bases[Buffer.INPUT]
        first, behind = np.searchsorted(action.cuts, [begin, begin + self.input_bytes])
        if (contents[first:behind] != rank * action.cells + np.arange(first, behind)).any():
            yield f"wrong bytes: rank {rank} ends with another input"

    def _require_kept_spec(self) -> None:
        """Check that one step of moves by nodes, and by places, maps the collective to itself."""
        action = self.action
        steps = {action.across % action.size if action.along > 1 else 0, int(action.across > 1)}
        for element in steps - {0}:
            moved, images = action.moved(element), action.ranks[element]
            for rank in range(action.fold.machine.world_size):
                cells, ranks, origins = self._spec(rank)
                others, wanted_ranks, wanted = self._spec(int(images[rank]))
                at = moved[cells] - others[0] if len(others) else moved[cells]
                inside = len(others) == len(cells) and ((at >= 0) & (at < len(others))).all()
                if not inside or (wanted[at] != moved[origins]).any():
                    raise AsymmetryError("prove: the moves do not keep the collective as it is")
                if ranks is not None and wanted_ranks is not None and (wanted_ranks[at] != images[ranks]).any():
                    raise AsymmetryError("prove: the moves do not keep the collective as it is")
