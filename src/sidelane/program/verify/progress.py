"""Deadlocks: waits that never end, and cycles of waits."""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.verify.layout import Event, Occurrence, event_at
from sidelane.program.verify.order import HappensBefore
from sidelane.program.verify.report import name_chain, name_event


def check_progress(order: HappensBefore) -> list[str]:
    """Return one line for each wait that never ends, or else for each cycle; then signals that no queue waits for at
    all. A program that deadlocks allows no further findings. The list is empty if it does not. If a signal can get
    lost, only that is reported: a wait may then hang in this order, and end in another run.
    """
    if not order.blocked:
        return []
    if lost := order.flags.lost():
        return lost
    lines: dict[tuple[object, ...], str] = {}  # by command: only the first invocation in which it hangs is reported
    for chain in sorted(order.blocked):
        place = order.blocked[chain]
        if why := _why_stuck(order, place):
            lines.setdefault(place[1:], f"deadlock: {name_event(event_at(place))} never ends: {why}")
    if not lines:
        lines = {(text,): text for text in _cycles(order)}
    return [*lines.values(), *order.flags.unpaired()]


def _why_stuck(order: HappensBefore, place: Occurrence) -> str:
    """Return the reason why no signal can satisfy a wait; empty if one could, but does not come."""
    invocation, plan, number = place
    assert plan is not None
    _, _, target, base, per_epoch, equal = plan.steps[number]
    use, wanted = order.layout.flags[target], base + per_epoch * invocation
    if not use.writes:
        return "no command signals this flag"
    if use.counts:
        total = sum(amount for _, amount, done in _writes(order, target) if not done)
        have = order.flags.counters[target].sum
        if have + total < wanted:
            return f"the signals that can come before it add up to {have + total}, it waits for {wanted}"
    right = [
        (where, done)
        for where, value, done in _writes(order, target)
        if use.counts or value == wanted or (value > wanted and not equal)
    ]
    if not right:
        values = ", ".join(dict.fromkeys(str(value) for _, value, _ in _writes(order, target)))
        return f"it waits for {wanted}, the flag is only ever set to {values}"
    coming = [where for where, done in right if not done]
    if not coming:
        return f"{name_event(event_at(right[0][0]))} is always overwritten before the wait begins"
    if all(where[1] is not None and where[1].chain == plan.chain for where in coming):
        return f"its signal comes after it: {name_chain([event_at(place), event_at(coming[0])], [False])}"
    return ""


def _writes(order: HappensBefore, target: int) -> Iterator[tuple[Occurrence, int, bool]]:
    """Yield each write of a flag: its place, the value that it sets or adds, and whether it has happened."""
    layout = order.layout
    for invocation in range(1, len(layout.programs) + 1):
        plans = layout.plans_of(invocation)
        for plan, number in layout.flags[target].writes:
            if any(plan is each for each in plans):
                _, _, _, base, per_epoch, _ = plan.steps[number]
                where = (invocation, plan, number)
                yield where, base + per_epoch * invocation, order.has_done(where)


def _cycles(order: HappensBefore) -> Iterator[str]:
    """Follow each wait to a signal that it needs, and from there to the wait that blocks the signal."""
    told: set[Occurrence] = set()
    for start in sorted(order.blocked):
        path: list[Occurrence] = []  # waits, each of which waits for the next
        signals: list[Occurrence] = []
        place = order.blocked[start]
        while place not in path and place not in told:
            path.append(place)
            signal = _missing(order, place)
            signals.append(signal)
            place = order.holder(signal)
        if place in told:
            continue
        told.update(path)
        first = path.index(place)
        events: list[Event] = [event_at(place)]
        for wait, signal in zip(reversed(path[first:]), reversed(signals[first:]), strict=True):
            events += [event_at(signal), event_at(wait)]
        yield f"deadlock: {name_chain(events, [k % 2 == 1 for k in range(len(events) - 1)])}"


def _missing(order: HappensBefore, place: Occurrence) -> Occurrence:
    """Return a signal that a wait needs, and that has not come."""
    invocation, plan, number = place
    assert plan is not None
    _, _, target, base, per_epoch, equal = plan.steps[number]
    wanted, counts = base + per_epoch * invocation, order.layout.flags[target].counts
    return next(
        where
        for where, value, done in _writes(order, target)
        if not done and (counts or value == wanted or (value > wanted and not equal))
    )
