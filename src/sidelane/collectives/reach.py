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
import itertools
import json
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingOf
from typing import Any

import torch

from sidelane.collectives.agreement import compare
from sidelane.collectives.arguments import Request
from sidelane.collectives.calls import Calls
from sidelane.collectives.heap import MAPPED, Region
from sidelane.collectives.offers import BUFFERS, Heard, Offer, Outcomes, TensorPlace, alike, outcomes_of, text_of
from sidelane.collectives.pool_tensors import ComparedStorages, PooledMemory
from sidelane.errors import UnavailableError
from sidelane.memory.ordinary import Allocation, Mapping
from sidelane.memory.posts import SPLITS
from sidelane.program.collective import REDUCING, Buffer

MOST_GONE = 16
"""Names that one offer looks at, and says are gone; others wait for the next."""

MOST_TEXTS = 1024
"""Of offers, remembered."""

MOST_REASON = 160
"""Characters of why a rank cannot map what its peers offer."""

ALIGNMENT = 256
"""In bytes, to which a place is said to be aligned or not. Allocations are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """How peers get at a tensor.

    Attributes:
        how: ``symmetric``, ``mapped`` (ordinary memory that peers map, where theirs can be as well) or ``staged``.
        why: for ``staged``, and for a tensor in a pool that is not symmetric.
    """

    how: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


class Reach:
    """Of one lane.

    Args:
        calls: of the lane.
        memory: what the device allows.
        compared: tensors in pools, of which the ranks know where they lie.
        captures_only: what lies in no pool is offered in calls that are captured, where hosts wait for each other.

    Attributes:
        drops: how often this rank has let go of what was mapped, or has heard of what cannot be: until then, the same
            offers of all ranks mean the same addresses.
    """

    def __init__(
        self, calls: Calls, memory: PooledMemory, compared: ComparedStorages, *, captures_only: bool = False
    ) -> None:
        self._captures_only = captures_only
        self._calls, self._memory, self._compared = calls, memory, compared
        self._rank = calls.control.rank
        # What all ranks know alike: it changes only with calls that all of them have offered memory for.
        self._known: dict[tuple[int, str], Mapping | None] = {}  # by rank and name; None for this rank's own
        self._refused: dict[tuple[int, str], str] = {}  # of these, what some rank cannot map, and why
        self._held: dict[str, Allocation] = {}  # this rank's, which peers have mapped; that used last is last
        self._looked_at: Iterator[str] = iter(())  # names of these
        self._texts: dict[tuple[Any, ...], str] = {}  # of offers, by places
        self.drops = 0

    def of(self, tensor: torch.Tensor) -> Reached:
        """How peers get at an ordinary tensor, as far as this rank knows."""
        if not tensor.nbytes:
            return Reached("mapped", "it has no bytes")
        if self._memory.holds(tensor):
            return Reached("mapped", self._compared.why_not(tensor))
        found = self._memory.allocation_of(tensor)
        reason = found if isinstance(found, str) else self._refused.get((self._rank, found.name))
        return Reached("mapped") if reason is None else Reached("staged", reason)

    def is_pooled(self, tensor: torch.Tensor) -> bool:
        """True for a tensor in a pool."""
        return self._memory.holds(tensor)

    def offer(
        self,
        requests: Sequence[Request],
        tensors: Sequence[torch.Tensor | None],
        most_text: int,
        captured: bool,
    ) -> Offer | None:
        """What this rank can offer for a call; None if nothing, or if there is no use in it.

        Args:
            requests: what it asks, for each tensor or pair of them.
            tensors: of the caller.
            most_text: characters; what takes more is staged.
            captured: the call is.
        """
        pools_only = self._captures_only and not captured
        if self._memory.has_no_pools if pools_only else self._memory.is_empty:
            return None
        by_address = _by_address(tensors)
        found: list[TensorPlace | int | None] = []
        storages: list[torch.UntypedStorage | None] = []
        for request in requests:
            # What is symmetric is so on all ranks, or they disagree anyway.
            mixed = request.output.symmetric or request.input.symmetric
            for buffer in BUFFERS:
                region = request.region(buffer)
                in_pool = self._to_compare(request, buffer, by_address)
                asks = in_pool or (not mixed and (not pools_only or not region.nbytes))
                place = self._place(region, by_address) if asks else None
                found.append(place)
                storages.append(by_address[region.address].untyped_storage() if in_pool else None)
        gone = self._some_gone()
        key = tuple((place[0].name, *place[1:]) if isinstance(place, TensorPlace) else place for place in found)
        allocations = {place.allocation.name: place.allocation for place in found if isinstance(place, TensorPlace)}
        if not allocations:
            return None
        text = None if gone else self._texts.get(key)
        if text is None:
            text = text_of(found, allocations, gone)
            if not gone:
                if len(self._texts) >= MOST_TEXTS:
                    del self._texts[next(iter(self._texts))]
                self._texts[key] = text
        if len(text) > most_text:
            return None
        # Of what is only offered nothing may be kept: memory that peers have not mapped goes when its owner frees it.
        return Offer(text, tuple(allocations.values()), tuple(gone), tuple(storages) if any(storages) else ())

    def compares(self, requests: Sequence[Request], tensors: Sequence[torch.Tensor | None]) -> bool:
        """True where an offer says where tensors in pools lie that are not symmetric, or not yet."""
        if self._memory.has_no_pools:
            return False
        by_address = _by_address(tensors)
        return any(self._to_compare(request, buffer, by_address) for request in requests for buffer in BUFFERS)

    def stand(self, allocations: Sequence[Allocation]) -> bool:
        """True while none of this rank's allocations has been freed."""
        return not any(self._memory.is_gone(allocation) for allocation in allocations)

    def settle(
        self, call: int, signature: str, offer: Offer, texts: Sequence[str], requests: Sequence[Request]
    ) -> tuple[int, list[Request] | None, Outcomes]:
        """Take what all ranks have offered for a call that they have agreed on, and map what is new. Collective.

        Args:
            call: its number.
            signature: what all ranks have alike.
            offer: of this rank.
            texts: of the offers of all ranks; empty of those that have none.
            requests: what it asks.

        Returns:
            The number that the call has from now on; and what is asked, with the memory that peers reach. None where
            there is none on all ranks. Last what :meth:`note` is to be told, in each call with the same posts.

        Raises:
            PeerError, PeerTimeoutError: see docs/internals/failure.md.
        """
        if not all(texts):
            return call, None, ()
        heard = [Heard.of(text) for text in texts]
        for rank, each in enumerate(heard):
            for name in each.gone:
                self._known.pop((rank, name), None)
                self._refused.pop((rank, name), None)
                self.drops += 1
        for name in offer.gone:
            self._held.pop(name, None)
        self.hold(offer)
        call = self._map_new(call, signature, heard)
        reached = [self._reached(request, number, heard) for number, request in enumerate(requests)]
        outcomes = outcomes_of(heard, len(requests))
        return call, reached if reached != list(requests) else None, outcomes

    def note(self, offer: Offer, outcomes: Outcomes) -> None:
        """Know from now on what was found out about the storages of an offer."""
        for storage, outcome in zip(offer.storages, outcomes, strict=False):
            if storage is not None and outcome is not None:
                self._compared.note(storage, outcome)

    def hold(self, offer: Offer) -> None:
        """Know that peers have mapped what this rank offers, and that it was used last."""
        for found in offer.allocations:
            self._held.pop(found.name, None)
            self._held[found.name] = found

    def close(self) -> None:
        """Let go of all that is mapped. Nothing may be under way."""
        self._known.clear()
        self._refused.clear()
        self._held.clear()
        self._texts.clear()

    def _some_gone(self) -> list[str]:
        """Names of allocations that peers let go of: freed ones among the next few, and what is too much."""
        if len(self._held) <= MOST_GONE:
            looked_at = list(self._held)
        else:
            looked_at = list(itertools.islice(self._looked_at, MOST_GONE))
            if len(looked_at) < MOST_GONE:
                self._looked_at = iter(list(self._held))
        gone = [name for name in looked_at if name in self._held and self._memory.is_gone(self._held[name])]
        if self._memory.most_held is not None and len(self._held) > self._memory.most_held:
            longest_ago = itertools.islice(self._held, len(self._held) - self._memory.most_held)
            gone += [name for name in longest_ago if name not in gone]
        return gone[:MOST_GONE]

    def _place(self, region: Region, by_address: MappingOf[int, torch.Tensor]) -> TensorPlace | int | None:
        """The allocation that holds a region, and where; 0 for one without bytes; None if peers cannot map it."""
        if not region.nbytes:
            return 0
        tensor = by_address.get(region.address)
        if tensor is None:
            return None
        found = self._memory.allocation_of(tensor)
        if isinstance(found, str):
            return None
        assert region.address + region.nbytes <= found.start + found.nbytes, "peers would write behind what they mapped"
        in_pool = self._memory.holds(tensor)
        storage = (tensor.untyped_storage().data_ptr() - found.start,) if in_pool else ()
        return TensorPlace(found, region.address - found.start, storage)

    def _to_compare(self, request: Request, buffer: Buffer, by_address: MappingOf[int, torch.Tensor]) -> bool:
        """True for a tensor in a pool that is not symmetric, if it matters to peers where it lies."""
        region = request.region(buffer)
        tensor = by_address.get(region.address)
        if tensor is None or region.symmetric or not self._memory.holds(tensor):
            return False
        return buffer is Buffer.OUTPUT or request.collective.kind in REDUCING or not request.output.symmetric

    def _map_new(self, call: int, signature: str, heard: Sequence[Heard]) -> int:
        """Map what is offered for the first time. All ranks know what that is, and hear of what cannot be mapped."""
        new = [
            (rank, name, handle)
            for rank, each in enumerate(heard)
            for name, handle in each.handles
            if (rank, name) not in self._known
        ]
        if not new:
            return call
        failed: list[tuple[int, str]] = []
        reason = ""
        with self._calls.making_ready():
            for rank, name, handle in new:
                self._known[rank, name] = None
                if rank != self._rank:
                    try:
                        self._known[rank, name] = self._memory.map(handle, name)
                    except UnavailableError as error:
                        failed.append((rank, name))
                        reason = str(error)[:MOST_REASON]
        ready = self._calls.number()
        with self._calls.failing_for_good():
            self._calls.control.post_call(ready, signature + SPLITS + json.dumps([failed, reason]))
        posts = self._calls.posts(ready)
        compare(self._calls.control, ready, posts)
        self.drops += 1
        for reader, post in enumerate(posts):
            refused, reason = json.loads(post.differing)
            for rank, name in refused:
                self._refused.setdefault((rank, name), f"rank {reader} cannot map it: {reason}")
        return ready

    def _reached(self, request: Request, number: int, heard: Sequence[Heard]) -> Request:
        """A request with the memory of which the addresses on all ranks are known."""
        if request.collective.in_place:  # one of the two is the whole, which is what was offered as both
            if request.whole is request.output:
                return dataclasses.replace(request, output=self._mapped(request.output, Buffer.OUTPUT, number, heard))
            return dataclasses.replace(request, input=self._mapped(request.input, Buffer.INPUT, number, heard))
        return dataclasses.replace(
            request,
            output=self._mapped(request.output, Buffer.OUTPUT, number, heard),
            input=self._mapped(request.input, Buffer.INPUT, number, heard),
        )

    def _mapped(self, region: Region, buffer: Buffer, number: int, heard: Sequence[Heard]) -> Region:
        """A region as peers reach it; as it was if that of one rank is where others cannot."""
        if region.nbytes and alike(heard, buffer, number) == "":
            first = heard[0].places[buffer][number][1]
            if all(each.places[buffer][number][1] == first for each in heard):
                return self._memory.symmetric(region)
        addresses: list[int] = []
        misaligned = False
        for rank, each in enumerate(heard):
            place = each.places[buffer][number]
            if place is None:
                return region
            if not place:
                addresses.append(0)
                continue
            name, offset = each.handles[place[0]][0], place[1]
            if (rank, name) in self._refused:
                return region
            mapping = self._known[rank, name]
            start = self._held[name].start if mapping is None else mapping.start
            addresses.append(start + offset)
            misaligned |= offset % ALIGNMENT != 0
        if not any(addresses):
            return region
        return dataclasses.replace(region, block=MAPPED, offset=int(misaligned), reached=tuple(addresses))


def _by_address(tensors: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Of several that begin at one address the longest: where a call is in place, a rank's part begins with the whole.

    A span of pieces is what holds a tensor; that of the part ends before the whole does.
    """
    given = [tensor for tensor in tensors if tensor is not None and tensor.nbytes]
    return {tensor.data_ptr(): tensor for tensor in sorted(given, key=lambda tensor: tensor.nbytes)}
