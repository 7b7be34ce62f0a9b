"""What a wait proves: the events that happened in every run in which it ended.

*Set* flags hold what was written last. Counters are added to by many and taken back to 0 only by their owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane.program.ir import Comparison, Signal, SignalOp, Wait
from sidelane.program.verify.unroll import Event, FlagUse

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


def _assigned(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> Support | None:
    """Every signal that the wait may have seen leaves its own past behind it: what they share must have happened."""
    sources = acceptable_writes(events, ancestors, use, wait)
    if not sources:
        return None
    pasts = [0 if source == INITIAL else ancestors[source] | 1 << source for source in sources]
    required = pasts[0]
    for past in pasts[1:]:
        required &= past
    first = [source for source, past in zip(sources, pasts, strict=True) if past == required]
    return Support(required, tuple(source for source in first or sources if source != INITIAL))


def acceptable_writes(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> list[int]:
    """Writes (or ``INITIAL``) whose value the wait may see and accept."""
    earlier = [write for write in use.writes if ancestors[wait] >> write & 1]
    sources = [] if earlier or not holds(events[wait], 0) else [INITIAL]
    for write in use.writes:
        if not holds(events[wait], events[write].value) or ancestors[write] >> wait & 1:
            continue
        if not any(ancestors[later] >> write & 1 for later in earlier):
            sources.append(write)
    return sources


def _counted(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> Support | None:
    """A signal is required if the others that may come before the wait do not add up to its value.

    Without a signal there is also nothing that comes after it, so its successors are left out of the sum with it.
    """
    target = events[wait].value
    adds = possible_adds(events, ancestors, use, wait)
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


def possible_adds(events: Sequence[Event], ancestors: Sequence[int], use: FlagUse, wait: int) -> list[int]:
    """Adds that the wait may see: not after it, and not wiped out by a reset before it."""
    resets = [w for w in use.writes if not is_add(events[w]) and ancestors[wait] >> w & 1]
    return [
        write
        for write in use.writes
        if is_add(events[write])
        and not ancestors[write] >> wait & 1
        and not any(ancestors[reset] >> write & 1 for reset in resets)
    ]


def is_add(event: Event) -> bool:
    """True for a signal that adds to its flag, false for one that sets it."""
    assert isinstance(event.command, Signal)
    return event.command.op is SignalOp.ADD


def comparison_of(event: Event) -> Comparison:
    """How a wait compares."""
    assert isinstance(event.command, Wait)
    return event.command.comparison


def holds(wait: Event, value: int) -> bool:
    """True if ``value`` in its flag satisfies ``wait``."""
    return value == wait.value if comparison_of(wait) is Comparison.EQ else value >= wait.value
