"""The facts that all ranks of a lane know alike, since they follow from posts that all have read: which memory was
offered, what all of them have mapped, and what comes next in calls of a signature.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from sidelane.collectives.learning.mappings import Mappings, Name
from sidelane.memory.ordinary import Allocation
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Collective

Names = frozenset[Name]
"""Owners and names of allocations."""

Source = tuple[str, int] | None
"""Name of an allocation, and an offset in it; None for a rank that sends nothing."""

Inputs = tuple[Source, ...]
"""Places of a rank's inputs: one, or those of a list."""

Sources = tuple[Inputs, ...]
"""Places of the inputs of all ranks."""

Places = Mapping[Buffer, Source | str]
"""Places of the tensors of one pair: as ``Source``; "" for a tensor without bytes, None for one that is not offered."""

LONGEST = 128
"""Calls after which addresses are expected again at the latest: a model with so many layers of one size."""

LEAST_ALIKE = 3
"""Calls that were as the ones a period before, before that is relied upon."""

PATIENCE = 1024
"""Calls that bring nothing that comes again, before the ranks give up."""

CAUTION = 4
"""Factor by which more calls must have been alike after something else came than was expected."""

PATIENCE_WITH_NEW = 2 * LONGEST + 32
"""Calls in a row in which inputs lay where they had not lain before. A program that allocates elsewhere in its first
step than in all others, with the longest period there may be, has two steps of such calls."""

VAIN = 16
"""Calls that one for which some rank had nothing to offer counts as."""


class TrackedPost(NamedTuple):
    """A post as it is read.

    Attributes:
        call: digest of the call's signature.
        places: for each tensor or pair, where it lies. Empty if nothing is offered, since there was no room for it.
        handles: of allocations, by name.
        freed: names of allocations that are gone.
        failed: owners and names of what the rank cannot map, and why.
        pending: there is something that it has not mapped yet.
        is_async: the call is asynchronous.
    """

    call: str
    places: tuple[Places, ...]
    handles: dict[str, str]
    freed: list[str]
    failed: list[tuple[int, str, str]]
    pending: bool
    is_async: bool


class CallReport(NamedTuple):
    """The report of a call on one rank, which holds as long as the memory of its tensors is what it was.

    Attributes:
        allocations: in which they lie.
        post: as text.
        inputs: where the inputs lie, as ``TrackedSignature.inputs``.
        outputs: names of the outputs' allocations, once each; None if one is not offered.
        is_async: the call is asynchronous.
    """

    allocations: tuple[Allocation, ...]
    post: bytes
    inputs: Inputs
    outputs: tuple[str, ...] | None
    is_async: bool


class Knowledge:
    """The allocations that all ranks know of.

    Args:
        rank: of this process.
        mappings: of its lane.

    Attributes:
        known: by owner and name of an allocation, the window in which all have heard of it.
        usable: those that all ranks have mapped.
        refused: of those that some rank cannot map, why.
        drops: how often some were freed.
    """

    def __init__(self, rank: int, mappings: Mappings) -> None:
        self._rank, self._mappings = rank, mappings
        self.known: dict[Name, int] = {}
        self.usable: set[Name] = set()
        self.refused: dict[Name, str] = {}
        self.drops = 0

    def hear(self, window: int, posts: Sequence[TrackedPost]) -> Names:
        """Take the posts of all ranks of one call, in a window, and have mapped what is new. Returns what was freed."""
        freed = frozenset((rank, name) for rank, post in enumerate(posts) for name in post.freed)
        self.drops += bool(freed)
        for each in freed:
            self.known.pop(each, None)
            self.usable.discard(each)
            self.refused.pop(each, None)
            self._mappings.drop(each)
        for rank, post in enumerate(posts):
            for owner, name, why in post.failed:
                if (owner, name) in self.known:
                    self.refused.setdefault((owner, name), f"rank {rank} cannot map it: {why}")
        for rank, post in enumerate(posts):
            for name, handle in post.handles.items():
                if (rank, name) not in self.known:
                    self.known[rank, name] = window
                    if rank != self._rank:
                        self._mappings.map((rank, name), handle)
        return freed

    def note_mapped(self, until: int) -> None:
        """Know that all ranks have tried to map what they knew by a window, and have said what they could not."""
        self.usable |= {name for name, window in self.known.items() if window <= until} - self.refused.keys()

    def reaches(self, rank: int, outputs: Sequence[str] | None) -> bool:
        """Tell if all ranks have mapped the outputs of a rank; those without bytes have no name."""
        return outputs is not None and all(not name or (rank, name) in self.usable for name in outputs)


class PeriodFinder:
    """The calls of one signature in a lane, which are heard of later, whether they went ahead or not.

    Attributes:
        given_up: nothing came again for too long; no rank offers anything for such calls any more.
        period: what comes again, call by call; another object whenever it is another one.
        next: which of these comes behind the calls that were settled.
    """

    def __init__(self) -> None:
        self.given_up = False
        self.period: tuple[Sources, ...] = ()
        self.next = 0
        self._least = LEAST_ALIKE
        self._needs: Names = frozenset()  # of the period: inputs, and the outputs of its last calls
        self._restart()

    def settle(self, sources: Sources | None, names: Names = frozenset(), *, may_wait: bool = True) -> None:
        """Take where inputs lay in a call that all have heard of; None: some rank offered nothing.

        Args:
            sources: of all ranks.
            names: of what they have offered, outputs too.
            may_wait: a rank for which something else comes than its peers expect may wait for them.
        """
        if self.given_up:
            return
        if self.period:
            if self.period[self.next] == sources:
                self.next = (self.next + 1) % len(self.period)
                self._seen.appendleft((sources, names))
                if not names <= self._needs:
                    self._needs = self._needed()
                return
            self._least *= CAUTION
            self._restart()
            if not may_wait:
                self.given_up = True
                return
        if sources is None:
            self._restart(self._calls + VAIN)
        else:
            self._compare(sources, names)
        if not self.period and (self._calls >= PATIENCE or self._new >= PATIENCE_WITH_NEW):
            self._restart()
            self.given_up = True

    def forget(self) -> None:
        """Calls came in between of which not all have heard."""
        self._restart(self._calls)

    def is_known(self, usable: Set[Name]) -> bool:
        """Tell if what comes next is known, and all ranks have mapped it."""
        return bool(self.period) and self._needs <= usable

    def drop(self, freed: Names) -> None:
        """Forget what lies in allocations that were freed, which counts as nothing unexpected."""
        if any(freed & names for _, names in self._seen):
            self._restart(0 if self.period else self._calls)

    def _restart(self, calls: int = 0) -> None:
        self.period, self._needs = (), frozenset()
        self._seen: collections.deque[tuple[Sources, Names]] = collections.deque(maxlen=LONGEST)  # the last one first
        self._alike: dict[int, int] = {}  # calls in a row that were as the one so many before, by that number
        self._calls, self._new = calls, 0

    def _needed(self) -> Names:
        return frozenset().union(*(names for _, names in itertools.islice(self._seen, len(self.period))))

    def _compare(self, sources: Sources, names: Names) -> None:
        self._calls += 1
        again = [period for period, (before, _) in enumerate(self._seen, 1) if before == sources]
        self._alike = {period: self._alike.get(period, 0) + 1 for period in again}
        self._new = 0 if again else self._new + 1
        self._seen.appendleft((sources, names))
        for period in again:
            if self._alike[period] >= max(period, self._least):
                self.period = tuple(reversed([each for each, _ in itertools.islice(self._seen, period)]))
                self.next = 0
                self._needs = self._needed()
                return


@dataclasses.dataclass(slots=True, eq=False)
class TrackedSignature:
    """The calls of one signature from which the ranks learn.

    Attributes:
        text: the signature.
        collective: what such calls do.
        parts: of a list, each of its collectives; else that one.
        call: what stands in posts for the text.
        senders: of each part, ranks whose inputs others read.
        alone: nothing is said to compute next to them.
        finder: finds out what comes again.
        now: the period by which the next call goes ahead; None if it is staged, False if there is no use in learning
            from it any more. It changes with the first tracked call of a window only.
        turn: of the period, that of the next call.
    """

    text: str
    collective: Collective | Batch
    parts: tuple[Collective, ...]
    call: str
    senders: tuple[frozenset[int], ...]
    alone: bool
    finder: PeriodFinder = dataclasses.field(default_factory=PeriodFinder)
    now: tuple[Sources, ...] | bool | None = None
    turn: int = 0

    def inputs(self, places: Sequence[Places], rank: int) -> Inputs:
        """Return where a rank's inputs lie, None for one that others do not read, or that is not offered."""
        if not places:
            return (None,) * len(self.parts)
        found: list[Source] = []
        for part, senders, row in zip(self.parts, self.senders, places, strict=True):
            place = row[source_buffer(part)] if rank in senders else None
            found.append(place if isinstance(place, tuple) else None)
        return tuple(found)

    def sources(self, posts: Sequence[TrackedPost]) -> Sources | None:
        """Return where the inputs of all ranks lie; None if one of them does not offer all of its tensors."""
        for rank, post in enumerate(posts):
            rows = zip(self.parts, self.senders, post.places, strict=False)
            lacks = any(rank in senders and row[source_buffer(part)] is None for part, senders, row in rows)
            if lacks or outputs_of(post.places) is None:
                return None
        return tuple(self.inputs(post.places, rank) for rank, post in enumerate(posts))


def source_buffer(collective: Collective) -> Buffer:
    """Return the buffer in which a rank's input lies."""
    return Buffer.OUTPUT if collective.in_place else Buffer.INPUT


def outputs_of(places: Sequence[Places]) -> tuple[str, ...] | None:
    """Return the allocations of a rank's outputs, by what it has said; None if one of them is not offered."""
    found = [row[Buffer.OUTPUT] for row in places]
    if not found or None in found:
        return None
    return tuple(dict.fromkeys(place[0] for place in found if isinstance(place, tuple)))
