"""What a rank offers of its memory for a call, as text for its peers, and as they read it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sidelane.memory.ordinary import Allocation
from sidelane.program.collective import Buffer

BUFFERS = (Buffer.OUTPUT, Buffer.INPUT)

HANDLES, GONE = "handles", "gone"
"""Keys of an offer as text: allocations with their handles, and names of those that peers let go of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a rank offers for a call.

    Attributes:
        text: for its peers.
        allocations: that hold the tensors.
        gone: names of those that its peers let go of.
        storages: of the tensors that lie in pools, by number of the tensor or pair, and buffer.
    """

    text: str
    allocations: tuple[Allocation, ...]
    gone: tuple[str, ...]
    storages: tuple[torch.UntypedStorage | None, ...] = ()


class TensorPlace(NamedTuple):
    """Where a tensor lies.

    Attributes:
        allocation: that holds it.
        offset: in that.
        storage: of a tensor in a pool, offset of its storage.
    """

    allocation: Allocation
    offset: int
    storage: tuple[int, ...] = ()


Outcomes = tuple[str | None, ...]
"""What was found out about storages, as ``Offer.storages`` has them: empty for those at one place on all ranks, else
why they are not symmetric; None for those that some rank has not in a pool."""


def text_of(
    found: Sequence[TensorPlace | int | None], allocations: MappingOf[str, Allocation], gone: Sequence[str]
) -> str:
    """An offer for the peers: see ``Heard``."""
    numbers = {name: number for number, name in enumerate(allocations)}
    shown = [
        (numbers[place.allocation.name], place.offset, *place.storage) if isinstance(place, TensorPlace) else place
        for place in found
    ]
    places = {buffer: shown[number :: len(BUFFERS)] for number, buffer in enumerate(BUFFERS)}
    handles = [(name, allocation.handle) for name, allocation in allocations.items()]
    return json.dumps({**places, HANDLES: handles, GONE: gone}, separators=(",", ":"))


def outcomes_of(heard: Sequence[Heard], count: int) -> Outcomes:
    """Of a call with so many tensors, or pairs."""
    return tuple(alike(heard, buffer, number) for number in range(count) for buffer in BUFFERS)


def alike(heard: Sequence[Heard], buffer: Buffer, number: int) -> str | None:
    """Whether the storages of a tensor lie at one place of one pool on all ranks. See ``Outcomes``."""
    places = [each.places[buffer][number] for each in heard]
    if any(not place or len(place) < 3 for place in places):
        return None
    shown = [(each.handles[place[0]][0], place[2]) for each, place in zip(heard, places, strict=True)]
    for rank, other in enumerate(shown):
        if other != shown[0]:
            return f"it lies at {_words(shown[0])} on rank 0 and at {_words(other)} on rank {rank}"
    return ""


def _words(place: tuple[str, int]) -> str:
    return f"byte {place[1]} of {place[0]}"


class Heard(NamedTuple):
    """The offer of a rank, as its peers read it.

    Attributes:
        handles: name and handle of each allocation.
        gone: names.
        places: by buffer and number of the tensor, or pair: (number of the allocation, offset); 0 without bytes; None
            where it is not offered.
    """

    handles: list[tuple[str, str]]
    gone: list[str]
    places: dict[str, list[Any]]

    @staticmethod
    def of(text: str) -> Heard:
        said = json.loads(text)
        return Heard(said[HANDLES], said[GONE], {name: said[name] for name in BUFFERS})
