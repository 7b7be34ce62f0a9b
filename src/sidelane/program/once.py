"""Cache of values derived from an object alone, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST = 1024


class Once(Generic[K, V]):
    """Cached function of objects that their owners keep, such as programs, by identity: hashing a program is slower.

    Args:
        make: function to cache; its exceptions are not remembered.
        most: largest number of results kept, with their objects; the oldest goes first.
    """

    def __init__(self, make: Callable[[K], V], most: int = MOST) -> None:
        self._make, self._most = make, most
        self._known: dict[int, tuple[K, V]] = {}

    def __call__(self, of: K) -> V:
        known = self._known.get(id(of))
        if known is not None:
            return known[1]
        made = self._make(of)
        if len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[id(of)] = of, made
        return made
