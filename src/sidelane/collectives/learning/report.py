"""The posts of tracked calls: where a rank's tensors lie, as text for its peers and as they read it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidelane.collectives.call_cache import AnyRequest, CallEntry
from sidelane.collectives.heap import Region
from sidelane.collectives.learning.knowledge import (
    CallReport,
    Names,
    Places,
    Source,
    Sources,
    TrackedPost,
    TrackedSignature,
    outputs_of,
)
from sidelane.collectives.learning.mappings import Mappings
from sidelane.collectives.list_calls import ListRequest
from sidelane.collectives.offers import BUFFERS, Shown, TensorPlace, by_address, numbered
from sidelane.memory.ordinary import Allocation, OrdinaryMemory
from sidelane.memory.posts import MOST_TEXT_BYTES

MOST_SAID = 4
"""Names that are said to be freed, or not to be mappable, in one post; others wait for the next."""


_ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclasses.dataclass(slots=True, eq=False)
class Round:
    """The posts of all ranks of one tracked call: in a lane, one object for posts that are the same.

    Attributes:
        posts: by rank; empty if the ranks made different calls, or one posted nothing.
        names: owners and names of the allocations that are offered.
        is_plain: nothing is said but where tensors lie.
        may_wait: the call was not asynchronous on any rank.
        sources: where the inputs lie, once that was asked.
        known_at: ``Knowledge.drops`` at which everything offered here was known.
    """

    posts: tuple[TrackedPost, ...]
    names: Names
    is_plain: bool
    may_wait: bool
    sources: Sources | None = None
    known_at: int = -1


def read_post(payload: bytes) -> TrackedPost:
    """Read a post."""
    call, places, handles, freed, failed, pending, is_async = json.loads(payload)
    failed = [(owner, name, why) for owner, name, why in failed]
    placed = _places(places, [name for name, _ in handles])
    return TrackedPost(call, placed, dict(handles), freed, failed, bool(pending), bool(is_async))


def read_round(payloads: Sequence[bytes]) -> Round:
    """Read the posts of all ranks."""
    posts = tuple(map(read_post, payloads))
    if any(each.call != posts[0].call for each in posts):
        posts = ()
    names = frozenset((rank, name) for rank, each in enumerate(posts) for name in each.handles)
    is_plain = not any(each.freed or each.failed or each.pending for each in posts)
    return Round(posts, names, is_plain, not any(each.is_async for each in posts))


class Reporter:
    """Reports calls of one rank; ``is_pooled`` tells of a tensor if it lies in a pool, which is no ordinary memory."""

    def __init__(
        self, rank: int, memory: OrdinaryMemory, mappings: Mappings, is_pooled: Callable[[torch.Tensor], bool]
    ) -> None:
        self._rank, self._memory, self._mappings, self._is_pooled = rank, memory, mappings, is_pooled

    @property
    def has_news(self) -> bool:
        """There is something to say besides where tensors lie."""
        return bool(self._mappings.freed or self._mappings.failed or self._mappings.is_pending)

    def report(
        self,
        signature: TrackedSignature,
        entry: CallEntry,
        asked: Callable[[], AnyRequest],
        tensors: Sequence[torch.Tensor | None],
        is_async: bool,
    ) -> CallReport:
        """Report a call; see ``Learning.attend``."""
        report = entry.report
        fits = report is not None and report.is_async == is_async
        if report is not None and fits and not self.has_news and all(map(self._mappings.stands, report.allocations)):
            return report
        mappings = self._mappings
        pending = mappings.is_pending  # before what has failed is looked at
        freed, failed = mappings.freed[:MOST_SAID], mappings.failed[:MOST_SAID]
        pending = pending or len(mappings.failed) > len(failed)
        request, there = asked(), by_address(tensors)
        parts = request.parts if isinstance(request, ListRequest) else (request,)
        found = [self._place(part.region(buffer), there) for part in parts for buffer in BUFFERS]
        post, places, allocations = _post(signature.call, found, (freed, failed, int(pending), int(is_async)))
        inputs = signature.inputs(places, self._rank)
        report = CallReport(allocations, post, inputs, outputs_of(places), is_async)
        is_plain = report.allocations and not (freed or failed or pending)
        if is_plain and all(each.kept is None for each in report.allocations):
            entry.report = report
        return report

    def heard(self, post: TrackedPost) -> None:
        """Say no more what all have read in a post of this rank."""
        _strike(self._mappings.freed, post.freed)
        _strike(self._mappings.failed, post.failed)

    def _place(self, region: Region, there: dict[int, torch.Tensor]) -> TensorPlace | int | None:
        if not region.nbytes:
            return 0
        tensor = there.get(region.address)
        if tensor is None or region.symmetric or self._is_pooled(tensor):
            return None
        found = self._memory.allocation_of(tensor)
        if isinstance(found, str) or not self._mappings.offers(found):
            return None
        return TensorPlace(found, region.address - found.start)


def _strike(waiting: list[Any], said: Sequence[Any]) -> None:
    """Take what was said out of a list, to which another thread may append."""
    for each in said:
        if each in waiting:
            waiting.remove(each)


def _post(
    call: str, found: Sequence[TensorPlace | int | None], news: tuple[object, ...]
) -> tuple[bytes, tuple[Places, ...], tuple[Allocation, ...]]:
    """Write a post. Return it with the places and allocations in it: none if there is no room for these."""
    shown, allocations = numbered(found)
    handles = [(name, allocation.handle) for name, allocation in allocations.items()]
    text = _ENCODER.encode((call, shown, handles, *news)).encode()
    if len(text) > MOST_TEXT_BYTES and found:
        return _post(call, (), news)
    return text, _places(shown, list(allocations)), tuple(allocations.values())


def _places(shown: Sequence[Shown | list[int]], names: Sequence[str]) -> tuple[Places, ...]:
    """Turn (number of the allocation, offset) into names, one pair behind the other; "" if there are no bytes."""
    found: list[Source | str] = []
    for place in shown:
        if place is None or isinstance(place, int):
            found.append(None if place is None else "")
        else:
            found.append((names[place[0]], place[1]))
    return tuple(dict(zip(BUFFERS, row, strict=True)) for row in zip(*[iter(found)] * len(BUFFERS), strict=True))
