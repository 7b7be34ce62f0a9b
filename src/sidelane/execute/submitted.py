"""Counters of the commands that an executor has submitted, by class of engine.

The counts come from the submitted plan, not from the choice that led to it. Counting costs one addition per call.
"""

from __future__ import annotations

import dataclasses

from sidelane.native import Effect, Note


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Commands of one rank by the class of engine that executes them.

    Attributes:
        peer_copies: copies that cross a link; each copy of a batch counts. (A broadcast or a swap that an executor
            supports as one command counts once. If signals are 4-byte copies, those count too.)
        local_copies: copies inside the rank's own memory.
        writes: values stored by memory operations, for peers, the own rank and the host.
        waits: waits by memory operations.
        kernels: kernel launches. Zero means that no compute unit was used.
        events: events recorded or waited for.
        graph_launches: launches of graphs; the commands in them are counted under the other names.
        calls: calls to the driver for all of these; on CPUs, queues submitted to engine threads.
    """

    peer_copies: int = 0
    local_copies: int = 0
    writes: int = 0
    waits: int = 0
    kernels: int = 0
    events: int = 0
    graph_launches: int = 0
    calls: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self._numbers(), other._numbers(), strict=True)))

    def __mul__(self, times: int) -> Counts:
        return Counts(*(times * number for number in self._numbers()))

    def __str__(self) -> str:
        numbers = zip(dataclasses.fields(self), self._numbers(), strict=True)
        return ", ".join(f"{number} {_counted(field.name, number)}" for field, number in numbers if number)

    def _numbers(self) -> tuple[int, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def _counted(name: str, number: int) -> str:
    """Return a number with the name of its field.

    >>> _counted("peer_copies", 1), _counted("peer_copies", 2), _counted("writes", 1)
    ('peer copy', 'peer copies', 'write')
    """
    if number == 1:
        name = name.replace("copies", "copy").replace("launches", "launch").removesuffix("s")
    return name.replace("_", " ")


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    """One invocation of a program on one rank.

    Attributes:
        collective: description of the collective.
        implementation: ``dma`` or ``sm``.
        variant: variant of the program, with its transforms (``b2b``, ``b2b+frozen``).
        captured: it was captured into a graph instead of submitted to the device.
        counts: the submitted commands.
    """

    collective: str
    implementation: str
    variant: str
    captured: bool
    counts: Counts


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """The commands that a loaded program submits, with the counter of such submissions."""

    submitted: Submitted
    tally: list[int]


class SubmissionLedger:
    """Counters of all submissions of one executor. Loaded programs keep their entry and count on it."""

    def __init__(self) -> None:
        # By counts, of which there are few; there can be any number of collectives, for instance with uneven sizes.
        self._tallies: dict[tuple[bool, Counts], list[int]] = {}
        self._last: Entry | None = None

    @property
    def last(self) -> Submitted | None:
        """The last invocation; None before the first."""
        return None if self._last is None else self._last.submitted

    def entry(self, submitted: Submitted) -> Entry:
        """Return the entry that counts submissions of these commands."""
        return Entry(submitted, self._tallies.setdefault((submitted.captured, submitted.counts), [0]))

    def count(self, entry: Entry) -> None:
        """Count one invocation."""
        entry.tally[0] += 1
        self._last = entry

    def notes(self, entry: Entry) -> tuple[Note, ...]:
        """Return the side effects of :meth:`count`, for compiled code."""
        return (Effect.COUNT, entry.tally, "", None), (Effect.SET, self, "_last", entry)

    def total(self) -> Counts:
        """Return the commands submitted to the device, without captured ones: replays of graphs are not known."""
        tallies = list(self._tallies.items())  # another thread may add one
        return sum((counts * times for (captured, counts), (times,) in tallies if not captured), Counts())
