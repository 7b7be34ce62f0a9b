"""Races: two accesses to the same bytes, one of them a write, that nothing orders.

The accesses of a program are the same in every invocation. So bytes are examined once, by *site* (a run of a queue, in
all invocations): bytes that the same sites touch in the same way are one *pattern*, and patterns are watched while
``order`` goes through the events. A program that does the same with a hundred tensors costs little more than with one.

Patterns are watched as race detectors watch a variable (FastTrack, Flanagan and Freund, PLDI 2009, section 3):
each access must come after the last write, and a write after all reads since. "After" is must-order here, not the
order of one run, so that findings hold for all runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sidelane.program.collective import Buffer, Span
from sidelane.program.ir import Command, reads, writes
from sidelane.program.verify.layout import Event, Layout, Occurrence, event_at, name_bytes, name_event, name_user

Clock = npt.NDArray[np.int32]

Access = tuple[int, int, int]
"""First byte, byte behind the last, and twice the site, plus 1 if it writes."""


Moment = tuple[int, int, Occurrence]
"""An access: the chain, its number of ticks by then, and the place."""


class Watched:
    """One pattern: its last writer, and the readers since."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer: Moment | None = None
        self.readers: list[Moment] = []


class Accesses:
    """Watcher of the bytes of all buffers.

    Attributes:
        races: pattern and both places of each pair of accesses that nothing orders.
        pairs: number of pairs of accesses that were compared.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._numbers: dict[object, int] = {}
        self._watched: list[Watched] = []
        self._reads: list[list[Watched]] = [[] for _ in layout.sites]
        self._writes: list[list[Watched]] = [[] for _ in layout.sites]
        self._users: list[list[Watched]] = [[] for _ in range(layout.world_size)]
        self._accesses = _accesses(layout)
        for (rank, buffer), accesses in self._accesses.items():
            user = rank if buffer != Buffer.STAGING else -1
            for touching in {tuple(sorted(touching)) for _, _, touching in _cells(accesses)}:
                self._watch(user, touching)
        self.races: list[tuple[Watched, Occurrence, Occurrence]] = []
        self.pairs = 0

    def _watch(self, user: int, touching: tuple[int, ...]) -> None:
        key = (user, touching)
        if key in self._numbers:
            return
        self._numbers[key] = len(self._watched)
        watched = Watched()
        self._watched.append(watched)
        writing = {access >> 1 for access in touching if access & 1}
        for site in writing:
            self._writes[site].append(watched)
        for access in touching:
            if access >> 1 not in writing:
                self._reads[access >> 1].append(watched)
        if user >= 0:
            self._users[user].append(watched)

    def run(self, site: int, stamp: Moment, clock: Clock) -> None:
        """Record a run of commands, at a place whose past is ``clock``."""
        chain = stamp[0]
        for watched in self._reads[site]:
            if watched.writer is not None:
                writer, tick, place = watched.writer
                self.pairs += 1
                if writer != chain and clock[writer] <= tick:
                    self.races.append((watched, place, stamp[2]))
            watched.readers.append(stamp)
        if self._writes[site]:
            self._write(self._writes[site], stamp, clock)

    def user(self, rank: int, stamp: Moment, clock: Clock) -> None:
        """Record an access by a rank's caller, who may read and write all of its input and output."""
        self._write(self._users[rank], stamp, clock)

    def _write(self, all_watched: list[Watched], stamp: Moment, clock: Clock) -> None:
        chain = stamp[0]
        for watched in all_watched:
            if watched.readers:  # these come after the last write, so an access behind them is behind it, too
                self.pairs += len(watched.readers)
                for reader, tick, place in watched.readers:
                    if reader != chain and clock[reader] <= tick:
                        self.races.append((watched, place, stamp[2]))
                watched.readers.clear()
            elif watched.writer is not None:
                writer, tick, place = watched.writer
                self.pairs += 1
                if writer != chain and clock[writer] <= tick:
                    self.races.append((watched, place, stamp[2]))
            watched.writer = stamp

    def describe(self) -> list[str]:
        """Return one line for each race: its bytes and its two commands."""
        raced = {id(watched) for watched, _, _ in self.races}
        if not raced:
            return []
        lines: dict[tuple[object, ...], str] = {}
        for (rank, buffer), accesses in self._accesses.items():
            user = rank if buffer != Buffer.STAGING else -1
            found: dict[tuple[Event, Event], list[tuple[int, int]]] = {}
            for start, end, touching in _cells(accesses):
                watched = self._watched[self._numbers[user, tuple(sorted(touching))]]
                if id(watched) not in raced:
                    continue
                for other, first, second in self.races:
                    if other is watched:
                        pair = _commands(first, second, rank, buffer, start)
                        found.setdefault(pair, []).append((start, end))
            for (one, other_one), ranges in found.items():
                # The same two commands race in every invocation: report the first one only.
                key = (rank, buffer, one[1:4], other_one[1:4], other_one.invocation - one.invocation)
                lines.setdefault(key, _describe(one, other_one, rank, buffer, ranges))
        return list(lines.values())


def _accesses(layout: Layout) -> dict[tuple[int, str], list[Access]]:
    result: dict[tuple[int, str], list[Access]] = defaultdict(list)
    for site, (plan, number) in enumerate(layout.sites):
        _, first, _, behind, _, _ = plan.steps[number]
        for command in plan.queue.commands[first:behind]:
            for span in reads(command):
                result[span.rank, span.buffer].append((span.offset, span.offset + span.nbytes, 2 * site))
            for span in writes(command):
                result[span.rank, span.buffer].append((span.offset, span.offset + span.nbytes, 2 * site + 1))
    return result


def _cells(accesses: list[Access]) -> Iterator[tuple[int, int, set[int]]]:
    """Cut a buffer wherever an access begins or ends; yield each piece with its accesses."""
    whole: dict[tuple[int, int], set[int]] = {}
    for start, end, access in accesses:
        whole.setdefault((start, end), set()).add(access)
    ranges = sorted(whole)
    if all(first[1] <= second[0] for first, second in pairwise(ranges)):
        for start, end in ranges:
            yield start, end, whole[start, end]
        return
    edges = sorted({edge for each in ranges for edge in each})
    cells: list[set[int]] = [set() for _ in edges]
    for start, end in ranges:
        for touching in cells[bisect_left(edges, start) : bisect_left(edges, end)]:
            touching |= whole[start, end]
    for (start, end), touching in zip(pairwise(edges), cells, strict=False):
        if touching:
            yield start, end, touching


def _commands(first: Occurrence, second: Occurrence, rank: int, buffer: str, byte: int) -> tuple[Event, Event]:
    """Return the two commands of two steps that race on a byte: the last one of the first, the first of the second."""
    one, other = sorted((first, second), key=lambda place: (place[0], place[1] is not None))
    firsts, seconds = list(_touching(one, rank, buffer, byte)), list(_touching(other, rank, buffer, byte))
    pairs = [(a, b) for a in firsts for b in seconds]
    writing = (
        (a, b)
        for a, b in sorted(pairs, key=lambda pair: (-pair[0].step, pair[1].step))
        if any(event.command is None or _hits(writes(event.command), rank, buffer, byte) for event in (a, b))
    )
    return next(writing)


def _touching(place: Occurrence, rank: int, buffer: str, byte: int) -> Iterator[Event]:
    _, plan, number = place
    if plan is None:
        yield event_at(place)
        return
    _, first, _, behind, _, _ = plan.steps[number]
    for index in range(first, behind):
        command = plan.queue.commands[index]
        if _hits((*reads(command), *writes(command)), rank, buffer, byte):
            yield event_at(place, index)


def _hits(spans: tuple[Span, ...], rank: int, buffer: str, byte: int) -> bool:
    return any((s.rank, s.buffer) == (rank, buffer) and s.offset <= byte < s.end for s in spans)


def _describe(one: Event, other: Event, rank: int, buffer: str, ranges: list[tuple[int, int]]) -> str:
    where = name_bytes(rank, buffer, ranges)
    if other.command is None:
        one, other = other, one
    verb = _verb(other.command, rank, buffer, ranges[0][0])
    if one.command is None:
        return f"race on {where}: {name_event(other)} {verb} it while {name_user(one)} may use it"
    return (
        f"race on {where}: nothing orders {name_event(one)}, which {_verb(one.command, rank, buffer, ranges[0][0])} it,"
        f" and {name_event(other)}, which {verb} it"
    )


def _verb(command: Command | None, rank: int, buffer: str, byte: int) -> str:
    return "writes" if command is not None and _hits(writes(command), rank, buffer, byte) else "reads"
