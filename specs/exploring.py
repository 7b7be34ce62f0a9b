"""Specifications of protocols, apart from the code: every state that a small model can reach is visited.

A specification imports nothing of Sidelane, so that no change of the code can break it: `make specs` runs all, when one
changes and every night.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


def explore(first: State, following: Callable[[State], Iterable[State]]) -> int:
    """Visit every state that can be reached, and return their number.

    Args:
        first: state to begin with.
        following: gives the states that can follow one; raises AssertionError for a state that must not be.
    """
    seen, waiting = {first}, [first]
    while waiting:
        for state in following(waiting.pop()):
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    return len(seen)
