"""Implementations of movers in studies: the vendor's library is a baseline there, and Sidelane one of several."""

from __future__ import annotations

from collections.abc import Collection

from sidelane.c3.strategies import Mover, Strategy

LIBRARY = ("nccl", "gloo")
"""Names of the vendor library's own kernels: whichever of these exists on the device."""


def implementations_of(mover: Mover) -> tuple[str, ...]:
    """Return the names of implementations of a mover, in order of preference."""
    return LIBRARY if mover is Mover.LIBRARY else (str(mover),)


def implementation_of(strategy: Strategy, available: Collection[str]) -> str | None:
    """Return the implementation that a strategy uses here, or None if there is none."""
    return next((name for name in implementations_of(strategy.mover) if name in available), None)
