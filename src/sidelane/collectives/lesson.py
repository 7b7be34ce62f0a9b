"""What a rank says in a lesson (``learning``), as text for its peers, and as they read it."""

from __future__ import annotations

import json
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from typing import NamedTuple

from sidelane.collectives.course import Source
from sidelane.collectives.offers import BUFFERS, TensorPlace
from sidelane.memory.ordinary import Allocation
from sidelane.memory.posts import MOST_TEXT_BYTES
from sidelane.program.collective import Buffer

MOST_SAID = 4
"""Names that are said to be gone, or not to be mappable, in one lesson; others wait for the next."""

Places = MappingOf[Buffer, Source | str]
"""Where the tensors of one pair lie."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Said(NamedTuple):
    """What a rank has said.

    Attributes:
        call: what the call is, so far that different ones differ.
        places: for each tensor or pair, by buffer, name of the allocation and offset; "" for a tensor without bytes;
            None for what is not offered. Empty if nothing is, since it would take too much to say.
        handles: of allocations, by name.
        gone: names of allocations that peers let go of.
        failed: owners and names of what this rank cannot map, and why.
        pending: there is something that it has not mapped yet.
        aside: the call is asynchronous.
    """

    call: str
    places: tuple[Places, ...]
    handles: dict[str, str]
    gone: list[str]
    failed: list[tuple[int, str, str]]
    pending: bool
    aside: bool


def text_of(
    call: str,
    found: Sequence[MappingOf[Buffer, TensorPlace | int | None]],
    gone: Sequence[str],
    failed: Sequence[tuple[int, str, str]],
    pending: bool,
    aside: bool,
) -> tuple[bytes, tuple[Places, ...]]:
    """As :func:`heard` reads it, and what it says of places. What takes more than there is room for offers nothing."""
    allocations: dict[str, Allocation] = {}
    numbers: dict[str, int] = {}
    shown: list[tuple[int, int] | str | None] = []
    for place in (row.get(buffer) for row in found for buffer in BUFFERS):
        if isinstance(place, TensorPlace):
            allocations[place.allocation.name] = place.allocation
            shown.append((numbers.setdefault(place.allocation.name, len(numbers)), place.offset))
        else:
            shown.append("" if place == 0 else None)
    handles = [(name, allocation.handle) for name, allocation in allocations.items()]
    text = _ENCODER.encode((call, shown, handles, gone, failed, int(pending), int(aside))).encode()
    if len(text) > MOST_TEXT_BYTES and found:
        return text_of(call, (), gone, failed, pending, aside)
    return text, _places(shown, list(allocations))


def heard(payload: bytes) -> Said:
    """What a post says."""
    call, places, handles, gone, failed, pending, aside = json.loads(payload)
    refused = [(owner, name, why) for owner, name, why in failed]
    found = _places(places, [name for name, _ in handles])
    return Said(call, found, dict(handles), gone, refused, bool(pending), bool(aside))


def _places(shown: Sequence[Sequence[int] | str | None], names: Sequence[str]) -> tuple[Places, ...]:
    """From (number of the allocation, offset) to names, one pair behind the other."""
    found = [place if place is None or isinstance(place, str) else (names[place[0]], place[1]) for place in shown]
    return tuple(dict(zip(BUFFERS, row, strict=True)) for row in zip(*[iter(found)] * len(BUFFERS), strict=True))
