"""What a rank says in lessons (``learning``): where its tensors lie, what has gone, and what it cannot map."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from sidelane.collectives.call_forms import AnyRequest
from sidelane.collectives.confirming import source_buffer
from sidelane.collectives.course import Course, Inputs, Source, Sources
from sidelane.collectives.heap import Region
from sidelane.collectives.lesson import MOST_SAID, Places, Said, text_of
from sidelane.collectives.list_calls import ListRequest
from sidelane.collectives.mappings import Mappings
from sidelane.collectives.offers import BUFFERS, TensorPlace
from sidelane.memory.ordinary import Allocation, OrdinaryMemory, Standing
from sidelane.native import Note
from sidelane.program.batch import Batch
from sidelane.program.collective import Buffer, Collective

Guard = tuple[object, str, object]
"""Object, attribute, and the very object that lets a call pass."""

Turn = tuple[object, str, int, int]
"""Object, attribute, what it is in the call's turn, and what it is next."""

LOOKS = 4
"""A look at whether something was freed, every so many lessons."""

MOST_REMEMBERED = 4096
"""Calls."""

MOST_WHY = 80
"""Characters of why a rank cannot map something."""


@dataclasses.dataclass(slots=True, eq=False)
class Subject:
    """Calls of one signature from which the ranks learn.

    Attributes:
        text: the signature.
        collective: what they do.
        parts: of a list, each of its collectives; else that one.
        call: what stands in posts for the text.
        senders: of each part, ranks whose inputs others read.
        alone: nothing is said to compute next to them.
        course: what comes again.
        now: the period by which the next call goes ahead; None if it is staged, False if there is no use in learning
            from it any more. It changes with the first lesson of a window only.
        turn: of the period, that of the next call.
    """

    text: str
    collective: Collective | Batch
    parts: tuple[Collective, ...]
    call: str
    senders: tuple[frozenset[int], ...]
    alone: bool
    course: Course
    now: tuple[Sources, ...] | bool | None = None
    turn: int = 0


class Taught(NamedTuple):
    """What a call has said of its tensors, which holds as long as their memory is what it was.

    Attributes:
        allocations: in which they lie.
        post: what was said.
        inputs: where the inputs lie; None for one that others do not read, or that is not offered.
        outputs: names of the outputs' allocations, once each; None if one is not offered.
    """

    allocations: tuple[Allocation, ...]
    post: bytes
    inputs: Inputs
    outputs: tuple[str, ...] | None


class LessonAgain(NamedTuple):
    """A lesson as compiled code makes it again: see ``native/replay.c``.

    Attributes:
        lesson: what must be as it was; the post; the subject; whether it goes ahead; its memory has not been freed.
        turn: of the period that it goes ahead by.
        notes: to take.
        holds: of one that goes ahead, whether nothing of it has been forgotten yet.
    """

    lesson: tuple[tuple[Guard, ...], bytes, Subject, bool, Standing]
    turn: Turn | None
    notes: tuple[Note, ...]
    holds: Callable[[], bool]


class Telling:
    """Of one rank.

    Args:
        rank: of this process.
        memory: ordinary memory of the device.
        mappings: of what others offer.
        is_pooled: whether a tensor lies in a pool, which is no ordinary memory.

    Attributes:
        has_news: there is something to say besides where tensors lie.
    """

    def __init__(
        self, rank: int, memory: OrdinaryMemory, mappings: Mappings, is_pooled: Callable[[torch.Tensor], bool]
    ) -> None:
        self._rank = rank
        self._memory, self._mappings, self._is_pooled = memory, mappings, is_pooled
        self.has_news = False
        self._looked = 0  # in which lesson
        self._held: dict[str, Allocation] = {}  # which peers may have mapped; that used last is last
        self._looked_at: Iterator[str] = iter(())
        self._gone: list[str] = []  # until all have heard it
        self._failed: list[tuple[int, str, str]] = []  # likewise
        self._taught: dict[Hashable, Taught] = {}

    def about(
        self,
        subject: Subject,
        lesson: int,
        key: Hashable,
        asked: Callable[[], AnyRequest],
        tensors: Sequence[torch.Tensor | None],
        aside: bool,
    ) -> Taught:
        """What to post in a lesson; see ``Learning.attend``."""
        self.look(lesson)
        taught = self._taught.get((key, aside))
        stands = taught is not None and all(map(self._stands, taught.allocations))
        if taught is None or not stands or self.note_news():
            gone, failed = self._gone[:MOST_SAID], self._failed[:MOST_SAID]
            pending = self._mappings.is_pending or len(failed) < len(self._failed)
            taught = self._teach(subject, self._found(asked(), tensors), gone, failed, pending, aside)
            if not self.note_news() and taught.allocations and all(each.kept is None for each in taught.allocations):
                if len(self._taught) >= MOST_REMEMBERED:
                    self._taught.clear()
                self._taught[key, aside] = taught
        elif self._memory.most_held is None:
            return taught  # they are held since they were found
        for allocation in taught.allocations:
            self._held.pop(allocation.name, None)
            self._held[allocation.name] = allocation
        return taught

    def look(self, lesson: int) -> None:
        """Find out what could not be mapped since, and now and then what was freed."""
        for name, why in self._mappings.look().items():
            self._failed.append((*name, why[:MOST_WHY]))
        while self._looked + LOOKS <= lesson:
            self._looked += LOOKS
            self._look_for_gone()

    def taught(self, key: Hashable) -> Taught | None:
        """What a call that is not asynchronous has said, if it will say the same again."""
        return self._taught.get((key, False))

    def note_news(self) -> bool:
        """Find out whether there is something to say besides where tensors lie; see ``has_news``."""
        self.has_news = bool(self._gone or self._failed or self._mappings.is_pending)
        return self.has_news

    def heard(self, said: Said) -> None:
        """All have heard what this rank has said."""
        self._gone = [name for name in self._gone if name not in said.gone]
        self._failed = [each for each in self._failed if each not in said.failed]

    def why(self, tensor: torch.Tensor) -> str | Allocation:
        """The allocation of a tensor, or why peers cannot map it."""
        return self._memory.allocation_of(tensor)

    def close(self) -> None:
        """Forget all of it."""
        self._held.clear()
        self._taught.clear()

    def _teach(
        self,
        subject: Subject,
        found: Sequence[dict[Buffer, TensorPlace | int | None]],
        gone: Sequence[str],
        failed: Sequence[tuple[int, str, str]],
        pending: bool,
        aside: bool,
    ) -> Taught:
        # Places that were said, not those that were found: that may have been too much to say.
        post, places = text_of(subject.call, found, gone, failed, pending, aside)
        allocations = {
            place.allocation.name: place.allocation
            for row in found
            for place in row.values()
            if isinstance(place, TensorPlace)
        }
        return Taught(tuple(allocations.values()), post, inputs_of(subject, places, self._rank), outputs_of(places))

    def _found(
        self, request: AnyRequest, tensors: Sequence[torch.Tensor | None]
    ) -> list[dict[Buffer, TensorPlace | int | None]]:
        given = [tensor for tensor in tensors if tensor is not None and tensor.nbytes]
        by_address = {tensor.data_ptr(): tensor for tensor in sorted(given, key=lambda tensor: tensor.nbytes)}
        parts = request.parts if isinstance(request, ListRequest) else (request,)
        return [{buffer: self._place(part.region(buffer), by_address) for buffer in BUFFERS} for part in parts]

    def _place(self, region: Region, by_address: dict[int, torch.Tensor]) -> TensorPlace | int | None:
        if not region.nbytes:
            return 0
        tensor = by_address.get(region.address)
        if tensor is None or region.symmetric or self._is_pooled(tensor):
            return None
        found = self._memory.allocation_of(tensor)
        if isinstance(found, str) or found.name in self._gone:
            return None
        return TensorPlace(found, region.address - found.start)

    def _stands(self, allocation: Allocation) -> bool:
        return allocation.name not in self._gone and not self._memory.is_gone(allocation)

    def _look_for_gone(self) -> None:
        """At one allocation, the next one each time; and at what is too much."""
        name = next(self._looked_at, None)
        if name is None:
            self._looked_at = iter(list(self._held))
        elif name in self._held and self._memory.is_gone(self._held[name]):
            self._gone.append(name)
            del self._held[name]
        most = self._memory.most_held
        if most is not None and len(self._held) > most:
            oldest = next(iter(self._held))
            self._gone.append(oldest)
            del self._held[oldest]


def inputs_of(subject: Subject, places: Sequence[Places], rank: int) -> Inputs:
    """Where the inputs of a rank lie, by what it has said; None for one that others do not read."""
    if not places:
        return (None,) * len(subject.parts)
    found: list[Source] = []
    for part, senders, row in zip(subject.parts, subject.senders, places, strict=True):
        place = row[source_buffer(part)] if rank in senders else None
        found.append(place if isinstance(place, tuple) else None)
    return tuple(found)


def outputs_of(places: Sequence[Places]) -> tuple[str, ...] | None:
    """The allocations of a rank's outputs, by what it has said; None if one of them is not offered."""
    found = [row[Buffer.OUTPUT] for row in places]
    if not found or None in found:
        return None
    return tuple(dict.fromkeys(place[0] for place in found if isinstance(place, tuple)))
