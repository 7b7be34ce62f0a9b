"""Races: two accesses to the same bytes, one of them a write, that nothing orders.

Who touches which bytes is the same in every invocation of a program. So bytes are looked at once, by *site* (a step of
a queue, or a rank's caller, in all invocations), and bytes that the same sites touch are compared once: a program that
does the same with a hundred tensors costs little more than with one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from sidelane.program.collective import Buffer
from sidelane.program.ir import Command, reads, writes
from sidelane.program.verify.order import Order
from sidelane.program.verify.report import name_bytes, name_event, name_user
from sidelane.program.verify.unroll import Event

Access = tuple[int, int, int, bool]
"""First byte, byte behind the last, site, whether it writes."""

Cell = tuple[int, int, dict[int, bool]]
"""First byte, byte behind the last, the sites that touch it and whether they write it."""


def check_races(order: Order) -> tuple[list[str], int]:
    """Compare all accesses to every byte.

    User events touch the whole input and output of their rank, and never staging.

    Returns:
        One line for each race, and the number of pairs compared.
    """
    sites = _sites(order)
    known: dict[frozenset[tuple[int, bool]], list[tuple[int, int]]] = {}
    pairs = 0
    lines: dict[tuple[object, ...], str] = {}
    for (rank, buffer), accesses in _accesses(order, sites).items():
        found: dict[tuple[Event, Event], list[tuple[int, int]]] = {}
        for start, end, touching in _cells(accesses):
            pattern = frozenset(touching.items())
            if pattern not in known:
                known[pattern], compared = _races(order, {n: touching[site] for site in touching for n in sites[site]})
                pairs += compared
            for first, second in known[pattern]:
                found.setdefault(_commands(order, first, second, rank, buffer, start), []).append((start, end))
        for (one, other), ranges in found.items():
            # The same two commands race in every invocation: say it once, for the first.
            key = (rank, buffer, one[1:5], other[1:5], other.invocation - one.invocation)
            lines.setdefault(key, _describe(one, other, rank, buffer, ranges))
    return list(lines.values()), pairs


def _sites(order: Order) -> list[list[int]]:
    """The events of each site, by invocation."""
    found: dict[tuple[object, ...], list[int]] = {}
    programs = order.unrolled.programs
    for number, event in enumerate(order.unrolled.events):
        program = None if event.command is None else id(programs[event.invocation - 1])
        found.setdefault((program, event.rank, event.engine, event.step), []).append(number)
    return list(found.values())


def _accesses(order: Order, sites: list[list[int]]) -> dict[tuple[int, Buffer], list[Access]]:
    result: dict[tuple[int, Buffer], list[Access]] = defaultdict(list)
    unrolled = order.unrolled
    for site, (first, *_) in enumerate(sites):
        event = unrolled.events[first]
        if event.command is None:
            for buffer in (Buffer.INPUT, Buffer.OUTPUT):
                if nbytes := unrolled.buffer_bytes(event.rank, buffer):
                    result[event.rank, buffer].append((0, nbytes, site, True))
        for command in event.run:
            for span in reads(command):
                result[span.rank, span.buffer].append((span.offset, span.end, site, False))
            for span in writes(command):
                result[span.rank, span.buffer].append((span.offset, span.end, site, True))
    return result


def _cells(accesses: list[Access]) -> list[Cell]:
    """Cut a buffer wherever an access begins or ends; give each piece with its sites and whether they write it."""
    edges = sorted({edge for start, end, _, _ in accesses for edge in (start, end)})
    cells: list[Cell] = [(start, end, {}) for start, end in pairwise(edges)]
    for start, end, site, is_write in accesses:
        for cell in cells[bisect_left(edges, start) : bisect_left(edges, end)]:
            cell[2][site] = cell[2].get(site, False) or is_write
    return cells


def _races(order: Order, touching: dict[int, bool]) -> tuple[list[tuple[int, int]], int]:
    """Find unordered pairs. Neighbours suffice, since the order is transitive: write-write, write-read, read-write."""
    races = []
    compared = 0
    last_write: int | None = None
    readers: list[int] = []
    for event in sorted(touching, key=order.position.__getitem__):
        if touching[event] and readers:
            before, readers = readers, []
        else:
            before = [] if last_write is None else [last_write]
        compared += len(before)
        races += [(first, event) for first in before if not order.before(first, event)]
        if touching[event]:
            last_write = event
        else:
            readers.append(event)
    return races, compared


def _commands(order: Order, first: int, second: int, rank: int, buffer: Buffer, byte: int) -> tuple[Event, Event]:
    """Of two steps that race on a byte, the commands that do: the last one of the first, the first of the second."""
    one, other = order.unrolled.events[first], order.unrolled.events[second]
    pairs = [(a, b) for a in _touching(one, rank, buffer, byte) for b in _touching(other, rank, buffer, byte)]
    writing = (
        (a, b)
        for a, b in sorted(pairs, key=lambda pair: (-pair[0].step, pair[1].step))
        if any(event.command is None or _writes(event.command, rank, buffer, byte) for event in (a, b))
    )
    return next(writing)


def _touching(event: Event, rank: int, buffer: Buffer, byte: int) -> Iterator[Event]:
    if event.command is None:
        yield event
    for index, command in enumerate(event.run):
        touched = (*reads(command), *writes(command))
        if any((s.rank, s.buffer) == (rank, buffer) and s.offset <= byte < s.end for s in touched):
            yield event.at(index)


def _writes(command: Command, rank: int, buffer: Buffer, byte: int) -> bool:
    return any((s.rank, s.buffer) == (rank, buffer) and s.offset <= byte < s.end for s in writes(command))


def _describe(one: Event, other: Event, rank: int, buffer: Buffer, ranges: list[tuple[int, int]]) -> str:
    where = name_bytes(rank, buffer, ranges)
    if other.command is None:
        one, other = other, one
    verb = _verb(other, rank, buffer, ranges[0][0])
    if one.command is None:
        return f"race on {where}: {name_event(other)} {verb} it while {name_user(one)} may use it"
    return (
        f"race on {where}: nothing orders {name_event(one)}, which {_verb(one, rank, buffer, ranges[0][0])} it, "
        f"and {name_event(other)}, which {verb} it"
    )


def _verb(event: Event, rank: int, buffer: Buffer, byte: int) -> str:
    return "writes" if event.command is not None and _writes(event.command, rank, buffer, byte) else "reads"
