"""A model of the tensors in pools that ranks remember (``collectives/heap.py``).

A program has two names for tensors. Before a call on one of them, the program may make a new tensor of that name, on
all ranks, and each rank places it wherever there is room. What a rank remembers changes only in calls for which it has
read the posts of all: so the order in which ranks take their steps does not matter, and all programs and places are
visited.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from exploring import explore

BY_ADDRESS = "remember a tensor by its address"
ANYWHERE = "take a tensor as symmetric once the ranks have compared it, wherever they found it"
ONE_FORGETS = "forget on one rank what it has compared, while the tensor lives"
PAIRS = "compare with the next rank only"
MISTAKES = (BY_ADDRESS, ANYWHERE, ONE_FORGETS, PAIRS)

PLACES = 3


class Tensor(NamedTuple):
    """A storage of a rank: its number, which no other one has, and its place in the pool."""

    number: int
    place: int


class Rank(NamedTuple):
    """What a rank has under each name, and which of it counts as symmetric."""

    tensors: tuple[Tensor | None, ...] = (None, None)
    known: frozenset[int] = frozenset()


class WrongError(AssertionError):
    """The protocol does what it must not."""


State = tuple[int, tuple[Rank, ...]]
"""Calls that were made, and the ranks behind them."""


def states(ranks: int, calls: int, mistake: str = "") -> int:
    """Make all programs of so many calls; how many states there are.

    Raises:
        WrongError: a rank writes to where its peer has something else; or a right program is refused.
    """

    def following(state: State) -> Iterator[State]:
        call, before = state
        if call < calls:
            for name, fresh in itertools.product((0, 1), (False, True)):
                for placed in _placed(before, call, name, fresh):
                    for after in _called(placed, name, mistake):
                        yield call + 1, after

    return explore((0, (Rank(),) * ranks), following)


def _placed(state: tuple[Rank, ...], call: int, name: int, fresh: bool) -> Iterator[tuple[Rank, ...]]:
    """The ranks with a new tensor of that name, if there is one, at all places; what it replaces is freed before."""
    if not fresh and state[0].tensors[name] is not None:
        yield state
        return
    for places in itertools.product(range(PLACES), repeat=len(state)):
        made = []
        for rank, place in zip(state, places, strict=True):
            other = rank.tensors[1 - name]
            if other is not None and other.place == place:
                break
            pair = (Tensor(call, place), other) if name == 0 else (other, Tensor(call, place))
            made.append(rank._replace(tensors=pair))
        else:
            yield tuple(made)


def _called(state: tuple[Rank, ...], name: int, mistake: str) -> Iterator[tuple[Rank, ...]]:
    tensors = [rank.tensors[name] for rank in state]
    assert all(tensors)
    keys = [tensor.place if mistake == BY_ADDRESS else tensor.number for tensor in tensors if tensor]
    places = [tensor.place for tensor in tensors if tensor]
    symmetric = [key in rank.known for key, rank in zip(keys, state, strict=True)]
    if all(symmetric):
        if len(set(places)) > 1:
            raise WrongError(f"written to another tensor's memory: {state}")
        yield state
    elif any(symmetric):
        raise WrongError(f"refused, though all ranks use the same tensor: {state}")
    else:
        n = len(state)
        learned = []
        for rank in range(n):
            alike = len(set(places)) == 1
            if mistake == ANYWHERE:
                alike = True
            elif mistake == PAIRS:
                alike = places[rank] == places[(rank + 1) % n]
            known = state[rank].known | {keys[rank]} if alike else state[rank].known
            learned.append(state[rank]._replace(known=frozenset(known)))
        yield tuple(learned)
        if mistake == ONE_FORGETS:
            yield (learned[0]._replace(known=frozenset()), *learned[1:])


@pytest.mark.parametrize(("ranks", "calls"), [(2, 5), (3, 4)])
def test_no_program_goes_wrong(ranks: int, calls: int) -> None:
    assert states(ranks, calls) > 1000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    with pytest.raises(WrongError):
        states(3, 4, mistake)
