"""What a wait proves, and whether a signal can get lost on its way to it.

*Set* flags hold what was written last. Counters are added to by many and taken back to 0 only by their owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sidelane.program.ir import Comparison, Signal, SignalOp, Wait
from sidelane.program.verify.report import name_command
from sidelane.program.verify.structure import is_reset
from sidelane.program.verify.unroll import Event, FlagUse, Unrolled

if TYPE_CHECKING:
    from sidelane.program.verify.order import Order

INITIAL = -1
"""Stands for the 0 that a flag holds before anybody writes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """What a wait has behind it.

    Attributes:
        required: bit set of the events that happened in every run in which the wait ended.
        witnesses: the signals that it waits for.
    """

    required: int
    witnesses: tuple[int, ...]


def support(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> Support | None:
    """Work out what must have happened before ``wait`` ended, from what is known so far.

    Returns:
        None if no run satisfies the wait.
    """
    return (_counted if use.counts else _assigned)(events, ancestors, use, wait)


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


def unpaired(unrolled: Unrolled) -> list[str]:
    """Return signals on flags that nobody waits for at all (all that can be said about a program that deadlocks)."""
    awaited = {_key(unrolled, signal) for use in unrolled.flags.values() if use.waits for signal in use.writes}
    return list(_unawaited(unrolled, awaited))


def explain_unsatisfied(order: Order, use: FlagUse, wait: int) -> str:
    """Say why no signal can satisfy ``wait``."""
    events = order.unrolled.events
    stuck = f"deadlock: {order.name(wait)} never ends: "
    if not use.writes:
        return f"{stuck}no command signals this flag"
    if use.counts:
        reachable = [w for w in use.writes if _adds(events[w]) and not order.before(wait, w)]
        total = sum(events[w].value for w in reachable)
        return f"{stuck}the signals that can come before it add up to {total}, it waits for {events[wait].value}"
    right = [w for w in use.writes if _holds(events[wait], events[w].value)]
    if not right:
        values = ", ".join(dict.fromkeys(str(events[w].value) for w in use.writes))
        return f"{stuck}it waits for {events[wait].value}, the flag is only ever set to {values}"
    for signal in right:
        if order.before(wait, signal):
            return f"{stuck}its signal comes after it: {order.chain(wait, signal)}"
    return f"{stuck}{order.name(right[0])} is always overwritten before the wait begins"


def _assigned(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> Support | None:
    """Every signal that the wait may have seen leaves its own past behind it: what they share must have happened."""
    sources = _sources(events, ancestors, use, wait)
    if not sources:
        return None
    pasts = [0 if source == INITIAL else ancestors[source] | 1 << source for source in sources]
    required = pasts[0]
    for past in pasts[1:]:
        required &= past
    first = [source for source, past in zip(sources, pasts, strict=True) if past == required]
    return Support(required, tuple(source for source in first or sources if source != INITIAL))


def _sources(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> list[int]:
    """Writes (or ``INITIAL``) whose value the wait may see and accept."""
    earlier = [write for write in use.writes if ancestors[wait] >> write & 1]
    sources = [] if earlier or not _holds(events[wait], 0) else [INITIAL]
    for write in use.writes:
        if not _holds(events[wait], events[write].value) or ancestors[write] >> wait & 1:
            continue
        if not any(ancestors[later] >> write & 1 for later in earlier):
            sources.append(write)
    return sources


def _counted(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> Support | None:
    """A signal is required if the others that may come before the wait do not add up to its value.

    Without a signal there is also nothing that comes after it, so its successors are left out of the sum with it.
    """
    target = events[wait].value
    adds = _possible_adds(events, ancestors, use, wait)
    total = sum(events[add].value for add in adds)
    if total < target:
        return None
    required, witnesses = 0, []
    for add in adds:
        without = sum(events[other].value for other in adds if other == add or ancestors[other] >> add & 1)
        if total - without < target:
            required |= ancestors[add] | 1 << add
            witnesses.append(add)
    return Support(required, tuple(witnesses))


def _possible_adds(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> list[int]:
    """Adds that the wait may see: not after it, and not wiped out by a reset before it."""
    resets = [w for w in use.writes if not _adds(events[w]) and ancestors[wait] >> w & 1]
    return [
        write
        for write in use.writes
        if _adds(events[write])
        and not ancestors[write] >> wait & 1
        and not any(ancestors[reset] >> write & 1 for reset in resets)
    ]


def _lost_signals(order: Order, use: FlagUse) -> Iterator[str]:
    """Find writes of one flag that can come in either order: one then erases the other."""
    events = order.unrolled.events
    writes = sorted(use.writes, key=order.position.__getitem__)
    for k, first in enumerate(writes):
        # Plain flags: neighbours suffice, the order is transitive. Counters: adds may come in any order, resets not.
        for second in writes[k + 1 :] if use.counts else writes[k + 1 : k + 2]:
            if (_adds(events[first]) and _adds(events[second])) or order.before(first, second):
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
    for source in _sources(events, order.ancestors, use, wait):
        if source != INITIAL and not order.before(source, wait):
            continue
        spoilers = (
            write
            for write in use.writes
            if not _holds(events[wait], events[write].value)
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
    possible = _possible_adds(events, order.ancestors, use, wait)
    certain = [add for add in possible if order.before(add, wait)]
    least = sum(events[add].value for add in certain)
    if least < target:
        return f"lost signal: {order.name(wait)} is not sure to see {target}: only {least} is certain to come before it"
    if _comparison(events[wait]) is Comparison.EQ and sum(events[add].value for add in possible) != target:
        return f"lost signal: {order.name(wait)} may never see {target}: more can be added before it looks"
    for write in use.writes:
        if not _adds(events[write]) and not order.before(write, wait) and not order.before(wait, write):
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


def _adds(event: Event) -> bool:
    assert isinstance(event.command, Signal)
    return event.command.op is SignalOp.ADD


def _comparison(event: Event) -> Comparison:
    assert isinstance(event.command, Wait)
    return event.command.comparison


def _holds(wait: Event, value: int) -> bool:
    return value == wait.value if _comparison(wait) is Comparison.EQ else value >= wait.value
