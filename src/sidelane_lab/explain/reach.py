"""Explanations of ordinary tensors: how peers would reach them, by the rules that calls go by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from sidelane.choice import Choice
from sidelane.choice.key import CPU
from sidelane.collectives.learning.protocol import choice_of
from sidelane.collectives.list_calls import ListAgreement
from sidelane.collectives.plan import AnyAgreement
from sidelane.collectives.reach_rules import NOTHING_TRAVELS, as_mapped, chunks_of, copies_suit, why_not_learnt
from sidelane.config import LEARN
from sidelane.memory.posts import MOST_TEXT_BYTES
from sidelane.sizes import format_bytes

MapMemory = bool | Literal["learn"]
"""Values of ``Config.map_memory``."""

STAGED, MAPPED = "staged", "mapped"
SAID: Mapping[MapMemory, str] = MappingProxyType({False: "0", True: "1", "learn": "learn"})
"""Values of ``Config.map_memory`` as ``SIDELANE_MAP_MEMORY`` has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReachMode:
    """The way in which peers reach the ordinary tensors of a call.

    Attributes:
        setting: value of ``Config.map_memory``.
        how: ``staged``, or ``mapped`` if all ranks have memory that their peers can map.
        goes_ahead: once addresses come again, peers read each other's inputs and no host waits for another one.
        why: the reason in words.
    """

    setting: MapMemory
    how: str
    goes_ahead: bool
    why: str


def way_of(
    agreement: AnyAgreement, setting: MapMemory, copies: Callable[[AnyAgreement], bool], *, hosts_meet: bool
) -> ReachMode:
    """Decide how peers reach the ordinary tensors of a call that is not asynchronous.

    Args:
        agreement: the call on tensors that peers do not reach.
        setting: value of ``Config.map_memory``.
        copies: see :func:`why_not_learnt`.
        hosts_meet: every call waits for the hosts of its peers anyway, as between CPU ranks.
    """
    if setting is False:
        return ReachMode(setting, STAGED, False, "the setting lets peers map nothing")
    if not any(chunk.src_rank != chunk.dst_rank for chunk in chunks_of(agreement)):
        return ReachMode(setting, STAGED, False, NOTHING_TRAVELS)
    learns = setting == LEARN or not hosts_meet
    if learns and not agreement.frozen:
        why = why_not_learnt(agreement, copies)
        if why:
            return ReachMode(setting, STAGED, False, why)
        why = "once its addresses have come again, staged until then; no host waits while that is found out"
        return ReachMode(setting, MAPPED, True, why + _limit(agreement))
    if agreement.frozen and setting == LEARN:
        return ReachMode(setting, STAGED, False, "the setting maps nothing in captures")
    if agreement.frozen:
        return ReachMode(setting, MAPPED, False, "the ranks agree once, in the capture; replays use the same memory")
    limit = _limit(agreement)
    return ReachMode(setting, MAPPED, False, f"what is offered in each call, for which ranks meet anyway{limit}")


def _limit(agreement: AnyAgreement) -> str:
    if not isinstance(agreement, ListAgreement):
        return ""
    return f"; staged where the list's description takes more than {format_bytes(MOST_TEXT_BYTES)}"


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
    where = "in shared memory" if device_type == CPU else "from cudaMalloc or torch's allocator"
    return (f"peers can map tensors {where}, if those of all ranks are; Communicator.reach(tensor) says it of one",)
