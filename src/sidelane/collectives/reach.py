"""Offers of ordinary memory: each rank offers allocations for a call, and its peers map them.

Rank r may write into ordinary memory of rank p only if p has offered it for this very call. So each rank that can
offers its allocations with the call, and waits for the posts of its peers before the call is planned. If all ranks have
offered, the call runs as if the memory were symmetric; else it is staged. An offer names the allocation and not its
address: memory that was freed and allocated again at the same address has another name, and is never mistaken for the
old one. A rank announces allocations that it has freed with its next offer, and its peers unmap them.
``docs/internals/reach.md`` has the reasons; ``tests/collectives/test_reach_model.py`` checks all interleavings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingOf

import torch

from sidelane.collectives.arguments import Request
from sidelane.collectives.calls import Calls, compare
from sidelane.collectives.heap import MAPPED, POOL, ComparedStorages, Region, SymmetricHeap
from sidelane.collectives.offers import (
    BUFFERS,
    Heard,
    Offer,
    Outcomes,
    TensorPlace,
    alike,
    by_address,
    numbered,
    outcomes_of,
    text_of,
)
from sidelane.errors import UnavailableError
from sidelane.memory.ordinary import Allocation, Mapping, OrdinaryMemory
from sidelane.memory.posts import SPLITS
from sidelane.program.collective import REDUCING, Buffer

MAPPING_OFF = "Config.map_memory is not on"
"""Reason why a tensor is not mapped."""

MOST_GONE = 16
"""Largest number of allocations that one offer checks and announces as freed; others wait for the next offer."""

MOST_TEXTS = 1024
"""Largest number of cached texts of offers."""

MOST_REASON = 160
"""Largest number of characters of the reason why a rank cannot map an allocation."""

ALIGNMENT = 256
"""Bytes to which a mapped tensor counts as aligned. Allocations are aligned to it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """The way in which peers reach a tensor.

    Attributes:
        how: ``symmetric``, ``mapped`` (ordinary memory that peers map, if theirs can be mapped as well) or ``staged``.
        why: the reason, for ``staged`` and for a tensor in a pool that is not symmetric; else empty.
    """

    how: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


class Reach:
    """The offers of one lane: the memory that this rank offers, and the memory of peers that it has mapped.

    Args:
        calls: calls of the lane.
        memory: memory that peers can map.
        compared: tensors in pools whose places the ranks have compared.
        captures_only: offer memory outside of pools only in captured calls, in which hosts wait for each other.

    Attributes:
        drops: number of changes to the mappings: allocations that were unmapped, and rounds in which new ones were
            mapped or refused. While it stays the same, the same offers of all ranks mean the same addresses.
    """

    def __init__(
        self, calls: Calls, memory: PooledMemory, compared: ComparedStorages, *, captures_only: bool = False
    ) -> None:
        self._captures_only = captures_only
        self._calls, self._memory, self._compared = calls, memory, compared
        self._rank = calls.control.rank
        # State that is the same on all ranks: it changes only in calls for which all of them have offered memory.
        self._known: dict[tuple[int, str], Mapping | None] = {}  # by rank and name; None for this rank's own
        self._refused: dict[tuple[int, str], str] = {}  # those that some rank cannot map, with the reason
        self._held: dict[str, Allocation] = {}  # this rank's, which peers have mapped; the last used is last
        self._looked_at: Iterator[str] = iter(())  # names of these that are still to be checked
        self._text = functools.lru_cache(MOST_TEXTS)(text_of)
        self.drops = 0

    def of(self, tensor: torch.Tensor) -> Reached:
        """Return the way in which peers reach an ordinary tensor, as far as this rank knows."""
        if not tensor.nbytes:
            return Reached("mapped", "it has no bytes")
        if self._memory.holds(tensor):
            return Reached("mapped", self._compared.why_not(tensor))
        found = self._memory.allocation_of(tensor)
        reason = found if isinstance(found, str) else self._refused.get((self._rank, found.name))
        return Reached("mapped") if reason is None else Reached("staged", reason)

    def is_pooled(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor in a pool."""
        return self._memory.holds(tensor)

    def offer(
        self,
        requests: Sequence[Request],
        tensors: Sequence[torch.Tensor | None],
        most_text: int,
        captured: bool,
    ) -> Offer | None:
        """Return the offer of this rank for a call; None if it has nothing to offer, or if no peer would use it.

        Args:
            requests: the rank's request for each tensor or pair.
            tensors: the caller's tensors.
            most_text: largest number of characters of the offer; a call with a longer one is staged.
            captured: the call is being captured.
        """
        pools_only = self._captures_only and not captured
        if self._memory.has_no_pools if pools_only else self._memory.is_empty:
            return None
        there = by_address(tensors)
        found: list[TensorPlace | int | None] = []
        storages: list[torch.UntypedStorage | None] = []
        for request in requests:
            # A tensor is symmetric on all ranks alike; otherwise the comparison of the calls fails.
            mixed = request.output.symmetric or request.input.symmetric
            for buffer in BUFFERS:
                region = request.region(buffer)
                in_pool = self._to_compare(request, buffer, there)
                asks = in_pool or (not mixed and (not pools_only or not region.nbytes))
                found.append(self._place(region, there) if asks else None)
                storages.append(there[region.address].untyped_storage() if in_pool else None)
        gone = tuple(self._some_gone())
        shown, allocations = numbered(found)
        if not allocations:
            return None
        handles = tuple((name, allocation.handle) for name, allocation in allocations.items())
        text = text_of(shown, handles, gone) if gone else self._text(shown, handles, gone)
        if len(text) > most_text:
            return None
        # Keep no reference to memory that is only offered: until peers have mapped it, its owner may free it.
        return Offer(text, tuple(allocations.values()), gone, tuple(storages) if any(storages) else ())

    def compares(self, requests: Sequence[Request], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Return True if an offer for these tensors tells places in pools that the ranks must compare."""
        if self._memory.has_no_pools:
            return False
        there = by_address(tensors)
        return any(self._to_compare(request, buffer, there) for request in requests for buffer in BUFFERS)

    def stand(self, allocations: Sequence[Allocation]) -> bool:
        """Return True while none of these allocations of this rank has been freed."""
        return not any(self._memory.is_gone(allocation) for allocation in allocations)

    def settle(
        self, call: int, signature: str, offer: Offer, texts: Sequence[str], requests: Sequence[Request]
    ) -> tuple[int, list[Request] | None, Outcomes]:
        """Read the offers of all ranks for a call that they have agreed on, and map new allocations. Collective.

        Args:
            call: number of the call.
            signature: signature of the call, the same on all ranks.
            offer: offer of this rank.
            texts: texts of the offers of all ranks; empty for a rank without an offer.
            requests: requests of this rank.

        Returns:
            The number of the call from now on; the requests with the memory that peers reach, or None if that changes
            nothing; and the argument of :meth:`note`, which holds for each call with the same posts.

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
        """Remember the results of the comparison for the storages of an offer."""
        for storage, outcome in zip(offer.storages, outcomes, strict=False):
            if storage is not None and outcome is not None:
                self._compared.note(storage, outcome)

    def hold(self, offer: Offer) -> None:
        """Remember that peers have mapped the allocations of an offer, as those that were used last."""
        for found in offer.allocations:
            self._held.pop(found.name, None)
            self._held[found.name] = found

    def close(self) -> None:
        """Unmap everything. No call may be under way."""
        self._known.clear()
        self._refused.clear()
        self._held.clear()

    def _some_gone(self) -> list[str]:
        """Return names of allocations to unmap: freed ones among the next few, and the oldest uses over the limit."""
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

    def _place(self, region: Region, there: MappingOf[int, torch.Tensor]) -> TensorPlace | int | None:
        """Return the place of a region in its allocation; 0 for a region without bytes; None if peers cannot map it."""
        if not region.nbytes:
            return 0
        tensor = there.get(region.address)
        if tensor is None:
            return None
        found = self._memory.allocation_of(tensor)
        if isinstance(found, str):
            return None
        assert region.address + region.nbytes <= found.start + found.nbytes, "peers would write behind what they mapped"
        in_pool = self._memory.holds(tensor)
        storage = (tensor.untyped_storage().data_ptr() - found.start,) if in_pool else ()
        return TensorPlace(found, region.address - found.start, storage)

    def _to_compare(self, request: Request, buffer: Buffer, there: MappingOf[int, torch.Tensor]) -> bool:
        """Return True for a tensor in a pool that is not symmetric, if peers need its place."""
        region = request.region(buffer)
        tensor = there.get(region.address)
        if tensor is None or region.symmetric or not self._memory.holds(tensor):
            return False
        return buffer is Buffer.OUTPUT or request.collective.kind in REDUCING or not request.output.symmetric

    def _map_new(self, call: int, signature: str, heard: Sequence[Heard]) -> int:
        """Map allocations that are offered for the first time, and exchange failures. Return the number of the call."""
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
        """Return a request whose regions have the addresses on all ranks, where these are known."""
        if request.collective.in_place:  # one of the two is the whole region, which was offered as both
            if request.whole is request.output:
                return dataclasses.replace(request, output=self._mapped(request.output, Buffer.OUTPUT, number, heard))
            return dataclasses.replace(request, input=self._mapped(request.input, Buffer.INPUT, number, heard))
        return dataclasses.replace(
            request,
            output=self._mapped(request.output, Buffer.OUTPUT, number, heard),
            input=self._mapped(request.input, Buffer.INPUT, number, heard),
        )

    def _mapped(self, region: Region, buffer: Buffer, number: int, heard: Sequence[Heard]) -> Region:
        """Return a region with its addresses on all ranks; unchanged if some rank's region cannot be reached."""
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


class PoolMapping:
    """A mapping of a pool of another rank, which exists as long as the session does."""

    def __init__(self, start: int) -> None:
        self.start = start


class PooledMemory:
    """Memory that peers can map (:class:`sidelane.memory.ordinary.OrdinaryMemory`): pools and ordinary memory.

    Args:
        heap: heap with the pools.
        rank: rank of this process.
        ordinary: ordinary memory of the device; None if it is not to be mapped.
    """

    def __init__(self, heap: SymmetricHeap, rank: int, ordinary: OrdinaryMemory | None) -> None:
        self._heap, self._rank, self._ordinary = heap, rank, ordinary

    @property
    def most_held(self) -> int | None:
        return None if self._ordinary is None else self._ordinary.most_held

    @property
    def is_empty(self) -> bool:
        """True if there is no memory that peers could map."""
        return self._ordinary is None and not self._heap.pools

    @property
    def has_no_pools(self) -> bool:
        """True if there are no pools."""
        return not self._heap.pools

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor in a pool."""
        return self._heap.pool_at(tensor.data_ptr()) is not None

    def symmetric(self, region: Region) -> Region:
        """Return the symmetric region of a tensor that lies at one place of a pool on all ranks."""
        return self._heap.place(region)

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | str:
        pool = self._heap.pool_at(tensor.data_ptr())
        if pool is not None:
            return Allocation(pool.name, str(self._rank), pool.start, pool.nbytes)
        return MAPPING_OFF if self._ordinary is None else self._ordinary.allocation_of(tensor)

    def is_gone(self, allocation: Allocation) -> bool:
        if allocation.name.startswith(POOL):
            return allocation.name not in self._heap.pools
        return self._ordinary is None or self._ordinary.is_gone(allocation)

    def map(self, handle: str, name: str) -> Mapping:
        if name.startswith(POOL):
            pool = self._heap.pools.get(name)
            if pool is None:
                raise UnavailableError(f"{name} is no more on rank {self._rank}")
            return PoolMapping(pool.addresses[int(handle)])
        if self._ordinary is None:
            raise UnavailableError(MAPPING_OFF)
        return self._ordinary.map(handle, name)
