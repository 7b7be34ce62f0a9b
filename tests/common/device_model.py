"""Devices of ranks that read each other's inputs where they come again, as a model: what ``learn_model`` stands on.

A device runs the calls of its host later and in order, in four steps each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TRUSTS = "end a call without the owners' confirmation"
CONFIRMS_EARLY = "confirm before the right bytes are there"
WRITES_EARLY = "write over what a peer may still be reading into"
BEGINS_EARLY = "begin the next call before the peers have read"
DEVICE_MISTAKES = (TRUSTS, CONFIRMS_EARLY, WRITES_EARLY, BEGINS_EARLY)
"""Programs that look as good."""

KEEPS, FREES, HAS_MORE, HAS_PRIVATE, HAS_NEW_OUTPUT = range(5)
"""What a rank does before a call."""

ALL = (KEEPS, FREES, HAS_MORE, HAS_PRIVATE, HAS_NEW_OUTPUT)

STARTS, READS, WRITES, ENDS = range(4)
"""What a device does next."""

PRIVATE = 0
STAGED = -1
"""Where what is read lies: not in memory of the caller."""

LEFT_OUT = -2
"""Nothing is read: it would lie in memory that its owner has freed."""


Names = int | tuple[int, ...]
"""Of an input; of the inputs of a call with a list of tensors."""


class Plan(NamedTuple):
    """What a device does in a call.

    Attributes:
        memory: name of the input in truth; names.
        sources: where it reads, by rank.
        late: ranks whose outputs it writes to, since they have read elsewhere; and the output it writes to.
    """

    memory: Names
    sources: tuple[Names, ...]
    late: tuple[tuple[int, int], ...] = ()


class Rank(NamedTuple):
    """A rank's device.

    Attributes:
        plans: of its calls so far.
        open: what it has mapped: owner and name.
        retired: what it closes when its device has ended a call: owner, name and call.
        run: calls that its device has ended.
        step: what that does next.
        held: for each of its names the call whose input is there.
        found: what it has read in this call, by rank.
    """

    plans: tuple[Plan, ...]
    open: frozenset[tuple[int, int]]
    retired: frozenset[tuple[int, int, int]]
    run: int
    step: int
    held: tuple[int, ...]
    found: tuple[int, ...]


State = tuple[Rank, ...]


class WrongError(AssertionError):
    """The protocol does what it must not."""


def _with(state: State, me: int, rank: Rank) -> State:
    return (*state[:me], rank, *state[me + 1 :])


def each_of(names: Names) -> tuple[int, ...]:
    return names if isinstance(names, tuple) else (names,)


def device_steps(state: State, me: int, mistake: str) -> Iterator[State]:
    rank = state[me]
    call, plan = rank.run + 1, rank.plans[rank.run]
    peers = [peer for peer in range(len(state)) if peer != me]
    if rank.step == STARTS:
        held = list(rank.held)
        for name in each_of(plan.memory):
            if name != PRIVATE:
                held[name] = call
        yield _with(state, me, rank._replace(step=READS, held=tuple(held), found=(0,) * len(state)))
    elif rank.step == READS:
        if all(_is_behind(state[peer], call, STARTS) for peer in peers):
            found = list(rank.found)
            for peer in peers:
                read = [_read(state, me, peer, call, name) for name in each_of(plan.sources[peer])]
                found[peer] = call if all(each == call for each in read) else -1
            yield _with(state, me, rank._replace(step=WRITES, found=tuple(found)))
    elif rank.step == WRITES:
        early = mistake == BEGINS_EARLY or (mistake == WRITES_EARLY and plan.late)
        if early or all(_is_behind(state[peer], call, READS) for peer in peers):
            for reader, output in plan.late:
                other = state[reader]
                if other.run != call - 1 or other.step == STARTS or output != call:
                    raise WrongError(f"rank {me} writes to output {output} of rank {reader} in call {call}: {state}")
                found = list(other.found)
                found[me] = call
                state = _with(state, reader, other._replace(found=tuple(found)))
            yield _with(state, me, rank._replace(step=ENDS))
    elif mistake == TRUSTS or all(_has_confirmed(state[peer], me, call, mistake) for peer in peers):
        wrong = [peer for peer in peers if rank.found[peer] != call]
        if wrong:
            raise WrongError(f"rank {me} ends call {call} with other bytes of ranks {wrong}: {state}")
        retired = frozenset(each for each in rank.retired if each[2] > call)
        yield _with(state, me, rank._replace(run=call, step=STARTS, found=(), retired=retired))


def _is_behind(rank: Rank, call: int, step: int) -> bool:
    return (rank.run + 1, rank.step) > (call, step)


def _has_confirmed(owner: Rank, reader: int, call: int, mistake: str) -> bool:
    if owner.run >= call:
        return True
    if owner.run < call - 1 or owner.step == STARTS:
        return False
    late = any(reader == each for each, _ in owner.plans[call - 1].late)
    return not late or mistake == CONFIRMS_EARLY or owner.step > WRITES


def _read(state: State, me: int, owner: int, call: int, name: int) -> int:
    """The call whose bytes a device reads."""
    if name in (STAGED, LEFT_OUT):
        return call if name == STAGED else -1
    rank = state[me]
    if (owner, name) not in rank.open and not any(each[:2] == (owner, name) for each in rank.retired):
        raise WrongError(f"rank {me} reads memory {name} of rank {owner}, which it has not mapped: {state}")
    return state[owner].held[name]
