"""Whether a signal can get lost on its way to its wait, and whether signals and waits have each other.

Works on a finished happens-before order (``order``), for which ``support`` said what each wait proves.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.ir import Comparison, Signal
from sidelane.program.verify.order import Order
from sidelane.program.verify.report import name_command
from sidelane.program.verify.structure import is_reset
from sidelane.program.verify.support import (
    INITIAL,
    Support,
    acceptable_writes,
    comparison_of,
    holds,
    is_add,
    possible_adds,
    support,
)
from sidelane.program.verify.unroll import FlagUse, Unrolled


def check_flags(order: Order) -> list[str]:
    """Return lost signals, waits that may hang although they are signalled, and waits and signals without each other.

    Each wait must need a signal of its own invocation: one that an older signal satisfies holds nothing back.
    """
    violations: dict[str, None] = {}
    awaited: set[tuple[object, ...]] = set()
    idle: dict[tuple[object, ...], str] = {}
    events, ancestors = order.unrolled.events, order.ancestors
    for use in order.unrolled.flags.values():
        lost = list(_lost_signals(order, use))
        violations |= dict.fromkeys(lost)
        for wait in use.waits:
            found = support(events, ancestors, use, wait)
            assert found is not None, "a deadlock, which is reported before"
            fresh = [signal for signal in found.witnesses if events[signal].invocation == events[wait].invocation]
            awaited.update(_key(order.unrolled, signal) for signal in fresh)
            if not fresh:
                idle.setdefault(_key(order.unrolled, wait), _idle(order, use, found, wait))
            if not lost and (problem := _may_hang(order, use, wait)):
                violations[problem] = None
    return [*violations, *idle.values(), *_unawaited(order.unrolled, awaited)]


def check_progress(order: Order) -> list[str]:
    """Return one line for each cycle and each wait that never ends; then signals on flags that nobody waits for at all.

    That is all that can be said about a program that deadlocks. Nothing if it does not.
    """
    if not order.stuck and not order.cycles:
        return []
    events = order.unrolled.events
    lines: dict[tuple[object, ...], str] = {}  # by command: the first invocation in which it hangs says it all
    for use, wait in order.stuck:
        key = (events[wait].rank, events[wait].engine, events[wait].step)
        lines.setdefault(key, f"deadlock: {order.name(wait)} never ends: {_why_stuck(order, use, wait)}")
    signalled = order.unrolled.flags.values()
    awaited = {_key(order.unrolled, signal) for use in signalled if use.waits for signal in use.writes}
    return [*lines.values(), *order.cycles, *_unawaited(order.unrolled, awaited)]


def _why_stuck(order: Order, use: FlagUse, wait: int) -> str:
    """Say why no signal can satisfy ``wait``."""
    events = order.unrolled.events
    if not use.writes:
        return "no command signals this flag"
    if use.counts:
        reachable = [w for w in use.writes if is_add(events[w]) and not order.before(wait, w)]
        total = sum(events[w].value for w in reachable)
        return f"the signals that can come before it add up to {total}, it waits for {events[wait].value}"
    right = [w for w in use.writes if holds(events[wait], events[w].value)]
    if not right:
        values = ", ".join(dict.fromkeys(str(events[w].value) for w in use.writes))
        return f"it waits for {events[wait].value}, the flag is only ever set to {values}"
    for signal in right:
        if order.before(wait, signal):
            return f"its signal comes after it: {order.chain(wait, signal)}"
    return f"{order.name(right[0])} is always overwritten before the wait begins"


def _lost_signals(order: Order, use: FlagUse) -> Iterator[str]:
    """Find writes of one flag that can come in either order: one then erases the other."""
    events = order.unrolled.events
    writes = sorted(use.writes, key=order.position.__getitem__)
    for k, first in enumerate(writes):
        # Plain flags: neighbours suffice, the order is transitive. Counters: adds may come in any order, resets not.
        for second in writes[k + 1 :] if use.counts else writes[k + 1 : k + 2]:
            if (is_add(events[first]) and is_add(events[second])) or order.before(first, second):
                continue
            # Name the one first that a run would have first: in the hazard, the earlier invocation's write comes late.
            one, other = sorted((first, second))
            yield (
                f"lost signal on flag {use.flag.index} of rank {use.flag.rank}: nothing orders {order.name(one)} and "
                f"{order.name(other)}, so that one can erase the other"
            )
            return


def _may_hang(order: Order, use: FlagUse, wait: int) -> str | None:
    """Check that the flag, once right, stays right until the wait has seen it."""
    events = order.unrolled.events
    if use.counts:
        return _may_miscount(order, use, wait)
    culprit = None
    for source in acceptable_writes(events, order.ancestors, use, wait):
        if source != INITIAL and not order.before(source, wait):
            continue
        spoilers = (
            write
            for write in use.writes
            if not holds(events[wait], events[write].value)
            and not (source != INITIAL and order.before(write, source))
            and not order.before(wait, write)
        )
        spoiler = next(spoilers, None)
        if spoiler is None:
            return None
        culprit = spoiler if culprit is None else culprit
    reason = "no signal is certain to come before it" if culprit is None else f"{order.name(culprit)} may come first"
    return f"lost signal: {order.name(wait)} may never see {events[wait].value}: {reason}"


def _may_miscount(order: Order, use: FlagUse, wait: int) -> str | None:
    events = order.unrolled.events
    target = events[wait].value
    possible = possible_adds(events, order.ancestors, use, wait)
    certain = [add for add in possible if order.before(add, wait)]
    least = sum(events[add].value for add in certain)
    if least < target:
        return f"lost signal: {order.name(wait)} is not sure to see {target}: only {least} is certain to come before it"
    if comparison_of(events[wait]) is Comparison.EQ and sum(events[add].value for add in possible) != target:
        return f"lost signal: {order.name(wait)} may never see {target}: more can be added before it looks"
    for write in use.writes:
        if not is_add(events[write]) and not order.before(write, wait) and not order.before(wait, write):
            return f"lost signal: {order.name(wait)} may never see {target}: {order.name(write)} may come first"
    return None


def _idle(order: Order, use: FlagUse, found: Support, wait: int) -> str:
    if found.witnesses:
        why = f"is already satisfied by {order.name(found.witnesses[0])}"
    else:
        why = "needs none of its signals: others suffice" if use.counts else "is satisfied before anybody signals"
    return f"unpaired wait: {order.name(wait)} {why}"


def _unawaited(unrolled: Unrolled, awaited: set[tuple[object, ...]]) -> Iterator[str]:
    done: set[tuple[object, ...]] = set()
    for use in unrolled.flags.values():
        for write in use.writes:
            event = unrolled.events[write]
            key = _key(unrolled, write)
            if key in awaited or key in done:
                continue
            done.add(key)
            assert isinstance(event.command, Signal)
            assert event.engine is not None
            if not is_reset(event.rank, event.command):
                name = name_command(event.rank, event.engine, event.step, event.command)
                yield f"unpaired signal: {name}: no wait of rank {use.flag.rank} needs it"


def _key(unrolled: Unrolled, number: int) -> tuple[object, ...]:
    """What identifies a command in all invocations of its program."""
    event = unrolled.events[number]
    return id(unrolled.programs[event.invocation - 1]), event.rank, event.engine, event.step
