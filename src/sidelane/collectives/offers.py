"""Offers of ordinary memory for a call: written as text by their rank, and read by its peers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sidelane.memory.ordinary import Allocation
from sidelane.program.collective import Buffer

OFFER = " offer "
"""Separator in a post between what the call itself exchanges and the offer."""

BUFFERS = (Buffer.OUTPUT, Buffer.INPUT)

HANDLES, GONE = "handles", "gone"
"""Keys of an offer as text: allocations with their handles, and names of allocations that peers are to unmap."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """The memory that a rank offers its peers for a call.

    Attributes:
        text: the offer as its peers read it.
        allocations: the allocations that hold the tensors.
        gone: names of allocations that its peers are to unmap.
        storages: storages of the tensors that lie in pools, in the order of tensors or pairs and ``BUFFERS``.
    """

    text: str
    allocations: tuple[Allocation, ...]
    gone: tuple[str, ...]
    storages: tuple[torch.UntypedStorage | None, ...] = ()


class TensorPlace(NamedTuple):
    """The place of a tensor.

    Attributes:
        allocation: the allocation that holds it.
        offset: its first byte in the allocation.
        storage: for a tensor in a pool, the offset of its storage.
    """

    allocation: Allocation
    offset: int
    storage: tuple[int, ...] = ()


Outcomes = tuple[str | None, ...]
"""Results of the comparison of storages, in the order of ``Offer.storages``: empty if a storage lies at one place on
all ranks, else the reason why it is not symmetric; None if it is not in a pool on some rank."""


Shown = tuple[int, ...] | int | None
"""Place of a tensor in a post: number of its allocation, offset, and for pools the offset of its storage; 0 for one
without bytes; None for one that is not offered."""


def by_address(tensors: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Return tensors by address; the longest one of several that begin at the same address.

    In an in-place call a rank's part may begin where the whole does, and it is the whole that must be offered.
    """
    given = [tensor for tensor in tensors if tensor is not None and tensor.nbytes]
    return {tensor.data_ptr(): tensor for tensor in sorted(given, key=lambda tensor: tensor.nbytes)}


def numbered(found: Sequence[TensorPlace | int | None]) -> tuple[tuple[Shown, ...], dict[str, Allocation]]:
    """Replace allocations by their numbers in a post. Return the places, and the allocations by name in this order."""
    allocations = {place.allocation.name: place.allocation for place in found if isinstance(place, TensorPlace)}
    numbers = {name: number for number, name in enumerate(allocations)}
    shown = tuple(
        (numbers[place.allocation.name], place.offset, *place.storage) if isinstance(place, TensorPlace) else place
        for place in found
    )
    return shown, allocations


def text_of(shown: tuple[Shown, ...], handles: tuple[tuple[str, str], ...], gone: tuple[str, ...]) -> str:
    """Return an offer as text, which peers read by ``Heard.of``: places, names and handles, and what is gone."""
    places = {buffer: shown[number :: len(BUFFERS)] for number, buffer in enumerate(BUFFERS)}
    return json.dumps({**places, HANDLES: handles, GONE: gone}, separators=(",", ":"))


def outcomes_of(heard: Sequence[Heard], count: int) -> Outcomes:
    """Compare the storages of a call with ``count`` tensors or pairs."""
    return tuple(alike(heard, buffer, number) for number in range(count) for buffer in BUFFERS)


def alike(heard: Sequence[Heard], buffer: Buffer, number: int) -> str | None:
    """Compare the places of a tensor's storage in a pool on all ranks. See ``Outcomes`` for the result."""
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
    """The offer of a rank as its peers have read it.

    Attributes:
        handles: name and handle of each allocation.
        gone: names of allocations to unmap.
        places: for each buffer a list over tensors or pairs, as ``Shown``.
    """

    handles: list[tuple[str, str]]
    gone: list[str]
    places: dict[str, list[Any]]

    @staticmethod
    def of(text: str) -> Heard:
        said = json.loads(text)
        return Heard(said[HANDLES], said[GONE], {name: said[name] for name in BUFFERS})
