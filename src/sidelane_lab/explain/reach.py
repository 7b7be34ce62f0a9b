"""Explanations of ordinary tensors: how peers would reach them, by the rules that calls go by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from sidelane.choice import Choice
from sidelane.choice.key import CPU
from sidelane.collectives.learning.protocol import choice_of
from sidelane.collectives.plan import AnyAgreement
from sidelane.collectives.reach_rules import MAPPED, MapMemory, ReachMode, as_mapped, copies_suit, way_of

SAID: Mapping[MapMemory, str] = MappingProxyType({False: "0", True: "1", "learn": "learn"})
"""Values of ``Config.map_memory`` as ``SIDELANE_MAP_MEMORY`` has them."""


def ways_of(
    agreement: AnyAgreement, chooses: Callable[[AnyAgreement], Choice], *, hosts_meet: bool
) -> tuple[tuple[ReachMode, Choice], ...]:
    """How peers reach the ordinary tensors of a call, and what then runs, for each setting."""
    found = []
    settings: tuple[MapMemory, ...] = (False, True, "learn") if hosts_meet else (False, True)
    for setting in settings:
        way = way_of(agreement, setting, lambda call: copies_suit(call, chooses), hosts_meet=hosts_meet)
        choice = chooses(as_mapped(agreement) if way.how == MAPPED else agreement)
        if way.goes_ahead:
            ahead = choice_of(misses=False)
            choice = dataclasses.replace(ahead, table=choice.table)
        found.append((way, choice))
    return tuple(found)


def mappable(device_type: str) -> tuple[str, ...]:
    """Which ordinary tensors peers can map."""
    if not device_type:  # a machine that nobody has run on
        return ()
    which = "those in shared memory" if device_type == CPU else "those of cudaMalloc and torch's allocator"
    return (f"mapped are {which}, if they are so on all ranks: Communicator.reach says it of a tensor",)
