"""Values derived from an object alone, such as a program: each is computed once, and goes with its object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Once(Generic[K, V]):
    """Cached function of objects that their owners keep, such as programs, by identity: hashing a program is slower.

    Args:
        make: function to cache; its exceptions are not remembered, and its results hold no reference to their object.
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._known: dict[int, tuple[weakref.ref[K], V]] = {}

    def __call__(self, of: K) -> V:
        known = self._known.get(id(of))
        if known is not None:
            return known[1]
        made, key, results = self._make(of), id(of), self._known
        results[key] = weakref.ref(of, lambda _: results.pop(key, None)), made
        return made
