"""Rules for the values of flags, which make all invocations alike.

An epoch is the number of a call: it grows from invocation to invocation, by any step, for as long as a program lives,
and flags are words of 32 bits. A proof about the first invocations holds for all only if the effect of a signal on a
wait depends only on the invocations to which both belong. Three rules ensure that.

1. *One slope.* All values of a flag change alike with the epoch: ``k * epoch + b`` with one k for every signal, wait
   and reset, in all programs of a sequence.
2. *No overlap.* Where k > 0, two such b differ by less than k. Then any value set by an earlier invocation is less than
   the value that a later one waits for, and any value set by a later one is more than an earlier one waits for, by
   whichever step epochs grow; and within an invocation the difference is that of the constants.
3. *Counters count from 0.* Signals that add, add a constant; waits for such flags wait for a constant; their owner
   resets them to 0, and no rank sets them to anything else. (``counters`` proves that the reset comes in every
   invocation, at the right time.)

The circle. Hardware compares flags by the sign of a 32-bit difference. ``RENEWAL_CALLS`` bounds the age of a flag's
value: after so many calls, communicators make all flags count as set by the call before (``collectives/renewal``). So
two values that meet are less than ``MAX_SLOPE * RENEWAL_CALLS`` apart, plus the difference of the constants, which is
less than half of the circle.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidelane.program.ir import RENEWAL_CALLS, Signal, SignalOp, Value, Wait
from sidelane.program.verify.layout import ADD, SIGNAL, WAIT, FlagUse, Layout, QueuePlan, name_command

MAX_FLAG_VALUE = 2**31 - 1
"""Largest value of a flag of 32 bits: hardware compares by the sign of the difference (cuStreamWaitValue32, GEQ)."""

MAX_SLOPE = 2**30 // RENEWAL_CALLS

MAX_BASE = 2**30 - 1
"""Largest constant of values that follow the epoch; unwritten flags hold 0, and are compared with these as well."""


def check_values(layout: Layout) -> list[str]:
    """Return one line for each value that breaks the rules; for a flag that breaks one, for one pair of uses."""
    return [line for use in layout.flags for line in _flag(use)]


def is_reset(queue_rank: int, signal: Signal) -> bool:
    """Return True for the signal by which the owner of a flag resets it to 0 after its wait; no queue waits for it."""
    return signal.flag.rank == queue_rank and signal.op is SignalOp.SET and signal.value == Value(0)


def _flag(use: FlagUse) -> Iterator[str]:
    everything = [*use.writes, *use.waits]
    values = {plan.steps[number][3:5] for plan, number in everything}
    if values == {(0, 1)} and not use.counts:
        return  # plain epochs
    lines = [line for where in everything for line in _alone(where)]
    yield from lines
    if lines:
        return
    if use.counts:
        yield from _counter(use)
    slopes = sorted({per_epoch for _, per_epoch in values})
    if len(slopes) > 1:
        first, second = (next(w for w in everything if w[0].steps[w[1]][4] == k) for k in (slopes[0], slopes[-1]))
        yield (
            f"{_name(second)}: flag {use.flag.index} of rank {use.flag.rank} changes by {slopes[-1]} an epoch here, "
            f"and by {slopes[0]} in {_name(first)} (allowed=one change for all uses of a flag)"
        )
    elif slopes[0]:
        bases = sorted(base for base, _ in values)
        if bases[-1] - bases[0] >= slopes[0]:
            first, second = (next(w for w in everything if w[0].steps[w[1]][3] == b) for b in (bases[0], bases[-1]))
            yield (
                f"{_name(second)}: {bases[-1] - bases[0]} more than {_name(first)} in the same epoch, of flag "
                f"{use.flag.index} of rank {use.flag.rank}, which changes by {slopes[0]} an epoch: signals of one "
                f"invocation would pass for those of another (allowed={slopes[0] - 1} more)"
            )


def _alone(where: tuple[QueuePlan, int]) -> Iterator[str]:
    """Yield the errors of a value by itself, whatever the other values are."""
    plan, number = where
    kind, _, _, base, per_epoch, _ = plan.steps[number]
    value = Value(base, per_epoch)
    if kind == ADD and per_epoch:
        yield f"{_name(where)}: adds {value}; a counter adds the same in all epochs, and is reset to 0"
        return
    least = 1 if kind == ADD else 0
    if not 0 <= per_epoch <= MAX_SLOPE:
        yield f"{_name(where)}: the value {value} does not fit (allowed=changes of 0..{MAX_SLOPE} an epoch)"
    elif per_epoch and not (least <= value.at(1) and base <= MAX_BASE):
        allowed = f"{least} and more in the first epoch, and at most {MAX_BASE} beside what changes"
        yield f"{_name(where)}: the value {value} does not fit (allowed={allowed})"
    elif not least <= value.at(1) <= MAX_FLAG_VALUE:
        yield f"{_name(where)}: the value {value} does not fit (allowed={least}..{MAX_FLAG_VALUE})"
    elif kind == WAIT and value.at(1) < 1:
        yield f"unpaired wait: {_name(where)} is satisfied before anybody signals"


def _counter(use: FlagUse) -> Iterator[str]:
    total = 0
    for plan, number in use.writes:
        kind, index, _, base, _, _ = plan.steps[number]
        command = plan.queue.commands[index]
        assert isinstance(command, Signal)
        if kind == SIGNAL and not is_reset(plan.queue.rank, command):
            adding = next(where for where in use.writes if where[0].steps[where[1]][0] == ADD)
            yield (
                f"{_name((plan, number))}: other signals add to this flag, as {_name(adding)} does; "
                "a counter is only ever reset to 0, by its own rank"
            )
            return
        if kind == ADD:
            total += base
    if total > MAX_FLAG_VALUE:
        yield (
            f"flag {use.flag.index} of rank {use.flag.rank}: all that is added to it is {total} "
            f"(allowed=..{MAX_FLAG_VALUE})"
        )


def _name(where: tuple[QueuePlan, int]) -> str:
    plan, number = where
    index = plan.steps[number][1]
    command = plan.queue.commands[index]
    assert isinstance(command, Signal | Wait)
    return name_command(plan.queue.rank, plan.queue.engine, index, command)
