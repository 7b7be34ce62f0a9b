"""Strategies that files of this folder have registered.

A new strategy is a new file here that calls :func:`register`. The studies, ``overlap``, the simulator and the commands
go by the value; what a machine cannot run of it is said by whoever would run it.
"""

from __future__ import annotations

from sidelane.c3.strategy import Mover, Order, Strategy

_registered: dict[str, Strategy] = {}


def register(strategy: Strategy) -> Strategy:
    """Make a strategy known.

    Raises:
        ValueError: there is another of that name.
    """
    if _registered.setdefault(strategy.name, strategy) != strategy:
        raise ValueError(f"register: name (value={strategy.name!r}, allowed=what no strategy has)")
    return strategy


def strategies() -> tuple[Strategy, ...]:
    """All, serial first, then by who moves the bytes, and what takes the fewest means first."""
    return tuple(sorted(_registered.values(), key=_place))


def named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in _registered:
        allowed = ", ".join(strategy.name for strategy in strategies())
        raise ValueError(f"strategy: name (value={name!r}, allowed={allowed})")
    return _registered[name]


def _place(strategy: Strategy) -> tuple[object, ...]:
    movers, orders = list(Mover), list(Order)
    means = (strategy.priority, strategy.partition is not None, orders.index(strategy.order))
    return strategy.concurrent, movers.index(strategy.mover), means, strategy.name
