"""What a rank says in a lesson (``learning``), as text for its peers, and as they read it."""

from __future__ import annotations

import json
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from typing import NamedTuple

from sidelane.collectives.offered import BUFFERS, Found
from sidelane.collectives.pattern import Source
from sidelane.memory.ordinary import Allocation
from sidelane.memory.posts import MOST_TEXT_BYTES
from sidelane.program.collective import Buffer

MOST_SAID = 4
"""Names that are said to be gone, or not to be mappable, in one lesson; others wait for the next."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Said(NamedTuple):
    """What a rank has said.

    Attributes:
        call: what the call is, so far that different ones differ.
        places: name of the allocation and offset, by buffer; "" for a tensor without bytes; None for what is not
            offered.
        handles: of allocations, by name.
        gone: names of allocations that peers let go of.
        failed: owners and names of what this rank cannot map, and why.
        pending: there is something that it has not mapped yet.
        aside: the call is asynchronous.
    """

    call: str
    places: dict[str, Source | str]
    handles: dict[str, str]
    gone: list[str]
    failed: list[tuple[int, str, str]]
    pending: bool
    aside: bool


def text_of(
    call: str,
    found: MappingOf[Buffer, Found | int | None],
    gone: Sequence[str],
    failed: Sequence[tuple[int, str, str]],
    pending: bool,
    aside: bool,
) -> tuple[bytes, dict[Buffer, Source | str]]:
    """As :func:`heard` reads it, and what it says of places. What takes more than there is room for offers nothing."""
    allocations: dict[str, Allocation] = {}
    places: dict[Buffer, Source | str] = {}
    for buffer in BUFFERS:
        place = found.get(buffer)
        if isinstance(place, Found):
            allocations[place.allocation.name] = place.allocation
            places[buffer] = place.allocation.name, place.offset
        else:
            places[buffer] = "" if place == 0 else None
    handles = {name: allocation.handle for name, allocation in allocations.items()}
    rest = gone, failed, int(pending), int(aside)
    text = _ENCODER.encode((call, list(places.values()), handles, *rest)).encode()
    if len(text) > MOST_TEXT_BYTES and found:
        return text_of(call, {}, gone, failed, pending, aside)
    return text, places


def heard(payload: bytes) -> Said:
    """What a post says."""
    call, places, handles, gone, failed, pending, aside = json.loads(payload)
    shown = [tuple(place) if isinstance(place, list) else place for place in places]
    refused = [(owner, name, why) for owner, name, why in failed]
    return Said(call, dict(zip(BUFFERS, shown, strict=True)), handles, gone, refused, bool(pending), bool(aside))
