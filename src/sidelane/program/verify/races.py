"""Races: two accesses to the same bytes, one of them a write, that nothing orders."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise

from sidelane.program.collective import Buffer
from sidelane.program.ir import reads, writes
from sidelane.program.verify.order import Order
from sidelane.program.verify.report import name_bytes, name_user
from sidelane.program.verify.unroll import Event

Access = tuple[int, int, int, bool]
"""First byte, byte behind the last, event, whether it writes."""


def check_races(order: Order) -> tuple[list[str], int]:
    """Compare all accesses to every byte.

    User events touch the whole input and output of their rank, and never staging.

    Returns:
        One line for each race, and the number of pairs compared.
    """
    found: dict[tuple[int, Buffer, int, int], list[tuple[int, int]]] = {}
    pairs = 0
    for (rank, buffer), accesses in _accesses(order).items():
        for start, end, touching in _cells(accesses):
            races, compared = _races(order, touching)
            pairs += compared
            for first, second in races:
                found.setdefault((rank, buffer, first, second), []).append((start, end))
    lines: dict[tuple[object, ...], str] = {}
    for (rank, buffer, first, second), ranges in found.items():
        # The same two commands race in every invocation: say it once, for the first.
        events = order.unrolled.events
        distance = events[second].invocation - events[first].invocation
        key = (rank, buffer, events[first][1:4], events[second][1:4], distance)
        lines.setdefault(key, _describe(order, first, second, rank, buffer, ranges))
    return list(lines.values()), pairs


def _accesses(order: Order) -> dict[tuple[int, Buffer], list[Access]]:
    result: dict[tuple[int, Buffer], list[Access]] = defaultdict(list)
    unrolled = order.unrolled
    for number, event in enumerate(unrolled.events):
        if event.command is None:
            for buffer in (Buffer.INPUT, Buffer.OUTPUT):
                if nbytes := unrolled.buffer_bytes(event.rank, buffer):
                    result[event.rank, buffer].append((0, nbytes, number, True))
            continue
        for span in reads(event.command):
            result[span.rank, span.buffer].append((span.offset, span.end, number, False))
        for span in writes(event.command):
            result[span.rank, span.buffer].append((span.offset, span.end, number, True))
    return result


def _cells(accesses: list[Access]) -> list[tuple[int, int, dict[int, bool]]]:
    """Cut a buffer wherever an access begins or ends; give each piece with its events and whether they write it."""
    edges = sorted({edge for start, end, _, _ in accesses for edge in (start, end)})
    cells: list[tuple[int, int, dict[int, bool]]] = [(start, end, {}) for start, end in pairwise(edges)]
    for start, end, event, is_write in accesses:
        for cell in cells[bisect_left(edges, start) : bisect_left(edges, end)]:
            cell[2][event] = cell[2].get(event, False) or is_write
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


def _describe(order: Order, first: int, second: int, rank: int, buffer: Buffer, ranges: list[tuple[int, int]]) -> str:
    where = name_bytes(rank, buffer, ranges)
    events = order.unrolled.events
    if events[second].command is None:
        first, second = second, first
    verb = _verb(events[second], rank, buffer, ranges)
    if events[first].command is None:
        return f"race on {where}: {order.name(second)} {verb} it while {name_user(events[first])} may use it"
    return (
        f"race on {where}: nothing orders {order.name(first)}, which {_verb(events[first], rank, buffer, ranges)} it, "
        f"and {order.name(second)}, which {verb} it"
    )


def _verb(event: Event, rank: int, buffer: Buffer, ranges: list[tuple[int, int]]) -> str:
    written = writes(event.command) if event.command else ()
    start, end = ranges[0]
    hit = any((span.rank, span.buffer) == (rank, buffer) and span.offset < end and start < span.end for span in written)
    return "writes" if hit else "reads"
