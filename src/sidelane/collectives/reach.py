"""How peers reach ordinary memory: what each rank offers for a call, and where the others map it.

Rank r may write into ordinary memory of rank p only if p has offered it for this very call. So each rank that can posts
its allocations with the call, and waits for the posts of its peers, before anything is planned: where all have offered,
the call runs as if the memory were symmetric; else it is staged. What an offer names is the allocation and not its
address: memory that was freed and given out again at the same address has another name, and is never taken for the
old. What a rank has offered and freed since it says with its next offer, and the peers close it.
``docs/internals/reach.md`` has the reasons; ``tests/program/test_reach_model.py`` looks at all interleavings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from typing import Any

import torch

from sidelane.collectives.agree import compare
from sidelane.collectives.arguments import Request
from sidelane.collectives.calls import Calls
from sidelane.collectives.heap import MAPPED, Region
from sidelane.errors import UnavailableError
from sidelane.memory.control import SPLITS
from sidelane.memory.ordinary import Allocation, Mapping, OrdinaryMemory
from sidelane.program.collective import Buffer

MOST_HELD = 64
"""Allocations of a rank that its peers have mapped for a lane; the one that was offered longest ago goes first."""

MOST_TEXT = 700
"""Characters of an offer; what is longer is staged."""

ALIGNMENT = 256
"""In bytes, to which a place is said to be aligned or not. Allocations are."""

GONE = "gone"
"""Names of allocations that peers let go of, in the text of an offer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """How peers get at a tensor.

    Attributes:
        how: ``symmetric``, ``mapped`` (ordinary memory that peers map, where theirs can be as well) or ``staged``.
        why: for ``staged``.
    """

    how: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a rank offers for a call.

    Attributes:
        text: for its peers.
        allocations: that hold the tensors.
        gone: names of those that its peers let go of.
    """

    text: str
    allocations: tuple[Allocation, ...]
    gone: tuple[str, ...]


class Reach:
    """Of one lane.

    Args:
        calls: of the lane.
        memory: what the device allows.
    """

    def __init__(self, calls: Calls, memory: OrdinaryMemory) -> None:
        self._calls, self._memory = calls, memory
        self._rank = calls.control.rank
        # What all ranks know alike: it changes only with calls that all of them have offered memory for.
        self._known: dict[tuple[int, str], Mapping | None] = {}  # by rank and name; None for this rank's own
        self._refused: set[tuple[int, str]] = set()  # of these, what some rank cannot map
        self._held: dict[str, Allocation] = {}  # this rank's, which peers have mapped; that used last is last

    def of(self, tensor: torch.Tensor) -> Reached:
        """How peers get at an ordinary tensor, as far as this rank knows."""
        if not tensor.nbytes:
            return Reached("mapped", "it has no bytes")
        found = self._memory.allocation_of(tensor)
        return Reached("staged", found) if isinstance(found, str) else Reached("mapped")

    def offer(self, request: Request, tensors: Sequence[torch.Tensor | None]) -> Offer | None:
        """What this rank can offer for a call; None if nothing, or if there is no use in it.

        Args:
            request: what it asks.
            tensors: of the caller.
        """
        allocations: list[Allocation] = []
        places: dict[str, Any] = {}
        for buffer in (Buffer.OUTPUT, Buffer.INPUT):
            region = request.region(buffer)
            if region.symmetric:
                return None  # on all ranks, or they disagree anyway
            if not region.nbytes:
                places[buffer] = 0
            elif (found := self._allocation_at(region.address, tensors)) is not None:
                places[buffer] = found.name, found.handle, region.address - found.start
                allocations.append(found)
        if not allocations:
            return None
        gone = [name for name, held in self._held.items() if self._memory.is_gone(held)]
        left = [name for name in self._held if name not in gone]
        gone += left[: max(0, len(left) - MOST_HELD)]
        text = json.dumps({**places, GONE: gone}, separators=(",", ":"))
        return Offer(text, tuple(allocations), tuple(gone)) if len(text) <= MOST_TEXT else None

    def settle(self, call: int, signature: str, offer: Offer, request: Request) -> tuple[int, Request | None]:
        """Read what all ranks have offered for a call that this rank has posted, and map what is new. Collective.

        Args:
            call: its number.
            signature: what all ranks have alike.
            offer: of this rank.
            request: what it asks.

        Returns:
            The number that the call has from now on; and what is asked, with the memory that peers reach. None where
            there is none on all ranks.

        Raises:
            As ``Calls.agree``.
        """
        posts = self._calls.posts(call)
        compare(self._calls.control, call, posts)
        if not all(post.differing for post in posts):
            return call, None
        offers = [json.loads(post.differing) for post in posts]
        for rank, each in enumerate(offers):
            for name in each[GONE]:
                self._known.pop((rank, name), None)
                self._refused.discard((rank, name))
        for name in (*offer.gone, *(found.name for found in offer.allocations)):
            self._held.pop(name, None)
        self._held.update({found.name: found for found in offer.allocations})
        call = self._map_new(call, signature, offers)
        output, input = (self._addresses(buffer, offers) for buffer in (Buffer.OUTPUT, Buffer.INPUT))
        return call, _reached(request, output, input, offers) if output or input else None

    def close(self) -> None:
        """Let go of all that is mapped. Nothing may be under way."""
        self._known.clear()
        self._refused.clear()
        self._held.clear()

    def _allocation_at(self, address: int, tensors: Sequence[torch.Tensor | None]) -> Allocation | None:
        for tensor in tensors:
            if tensor is not None and tensor.data_ptr() == address:
                found = self._memory.allocation_of(tensor)
                return found if isinstance(found, Allocation) else None
        return None

    def _map_new(self, call: int, signature: str, offers: Sequence[MappingOf[str, Any]]) -> int:
        """Map what is offered for the first time. All ranks know what that is, and hear of what cannot be mapped."""
        buffers = (Buffer.OUTPUT, Buffer.INPUT)
        places = [(rank, each.get(buffer)) for rank, each in enumerate(offers) for buffer in buffers]
        new = {(rank, place[0]): place[1] for rank, place in places if place and (rank, place[0]) not in self._known}
        if not new:
            return call
        failed: list[tuple[int, str]] = []
        with self._calls.making_ready():
            for (rank, name), handle in new.items():
                self._known[rank, name] = None
                if rank != self._rank:
                    try:
                        self._known[rank, name] = self._memory.map(handle, name)
                    except UnavailableError:
                        failed.append((rank, name))
        ready = self._calls.number()
        with self._calls.failing_for_good():
            self._calls.control.post_call(ready, signature + SPLITS + json.dumps(failed))
        posts = self._calls.posts(ready)
        compare(self._calls.control, ready, posts)
        self._refused.update((rank, name) for post in posts for rank, name in json.loads(post.differing))
        return ready

    def _addresses(self, buffer: Buffer, offers: Sequence[MappingOf[str, Any]]) -> tuple[int, ...]:
        """Where this process reaches a buffer on each rank; () if one rank has it where others cannot."""
        found: list[int] = []
        for rank, each in enumerate(offers):
            place = each.get(buffer)
            if place is None or (place and (rank, place[0]) in self._refused):
                return ()
            if not place:
                found.append(0)
                continue
            name, _, offset = place
            mapping = self._known[rank, name]
            found.append((self._held[name].start if mapping is None else mapping.start) + offset)
        return tuple(found)


def _reached(
    request: Request, output: tuple[int, ...], input: tuple[int, ...], offers: Sequence[MappingOf[str, Any]]
) -> Request:
    """The request with memory of which the addresses on all ranks are known."""

    def mapped(region: Region, buffer: Buffer, addresses: tuple[int, ...]) -> Region:
        if not addresses:
            return region
        offsets = [place[2] for each in offers if (place := each[buffer])]
        misaligned = any(offset % ALIGNMENT for offset in offsets)
        return dataclasses.replace(region, block=MAPPED, offset=int(misaligned), reached=addresses)

    if request.collective.in_place:  # one of the two is the whole, which is what was offered as both
        if request.whole is request.output:
            return dataclasses.replace(request, output=mapped(request.output, Buffer.OUTPUT, output))
        return dataclasses.replace(request, input=mapped(request.input, Buffer.INPUT, input))
    return dataclasses.replace(
        request,
        output=mapped(request.output, Buffer.OUTPUT, output),
        input=mapped(request.input, Buffer.INPUT, input),
    )
