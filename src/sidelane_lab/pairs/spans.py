"""When operations of a run began and ended, and how much of them was at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Span = tuple[float, float]
"""When something began and ended, in microseconds of one clock."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """When every operation of a run began and ended."""

    gemms: tuple[Span, ...]
    collectives: tuple[Span, ...]

    @property
    def time_us(self) -> float:
        """From the first begin to the last end."""
        spans = (*self.gemms, *self.collectives)
        return max(end for _, end in spans) - min(begin for begin, _ in spans)

    @property
    def overlap_rate(self) -> float:
        """See :func:`shared_share`."""
        return shared_share(self.collectives, self.gemms)


def shared_share(collectives: Sequence[Span], gemms: Sequence[Span]) -> float:
    """Share of the collectives' time during which a GEMM ran (overlap paper, 4.2.1).

    >>> shared_share([(0.0, 10.0), (10.0, 20.0)], [(5.0, 12.0), (8.0, 14.0)])
    0.45
    """
    shared = 0.0
    for begin, end in collectives:
        reached = begin
        for first, last in sorted(gemms):
            shared += max(0.0, min(end, last) - max(reached, first))
            reached = max(reached, last)
    return shared / sum(end - begin for begin, end in collectives)


def timed(operation: Callable[[], object]) -> Span:
    """Run an operation, by the host's clock."""
    begin = time.perf_counter()
    operation()
    return 1e6 * begin, 1e6 * time.perf_counter()


def stamped(stream: torch.cuda.Stream, operation: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Queue an operation, which goes to a stream, between two events of that stream."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record(stream)
    operation()
    after.record(stream)
    return before, after


Moment = Callable[[], float]
"""Reads, once the device has come by, when that was: microseconds of one clock."""


RELEASED = "released"


class ComputePart(Protocol):
    """The part that computes."""

    def run(self) -> None: ...


class Beginning(Protocol):
    """The part that communicates."""

    def start(self) -> Callable[[], None]: ...


class Traced:
    """Stands for the GEMM and the collective of a pair, and remembers their last run.

    Args:
        gemm: that runs.
        collective: likewise.
        on_cpu: there are no events.
    """

    def __init__(self, gemm: ComputePart, collective: Beginning, *, on_cpu: bool) -> None:
        self._gemm, self._collective, self._on_cpu = gemm, collective, on_cpu
        self._moments: dict[str, Moment] = {}
        self._released: torch.cuda.Event | None = None

    def launched(self, launch: Callable[[], None]) -> Callable[[], None]:
        """The launch of both, with a stamp of the caller's stream in front that the others count from."""

        def run() -> None:
            self._stamp(RELEASED)
            launch()

        return run

    def run(self) -> None:
        """Compute."""
        self._stamp("gemm begins")
        self._gemm.run()
        self._stamp("gemm ends")

    def start(self) -> Callable[[], None]:
        """Communicate."""
        self._stamp("collective begins")
        wait = self._collective.start()
        self._stamp("collective ends")

        def ended() -> None:
            wait()
            if self._on_cpu:
                self._stamp("collective ends")

        return ended

    def read(self) -> Trace:
        """Return what was remembered, from the release on; the device must have come by."""
        began, *times = (
            self._moments[name]()
            for name in (RELEASED, "gemm begins", "gemm ends", "collective begins", "collective ends")
        )
        first, second, third, fourth = (moment - began for moment in times)
        return Trace(((first, second),), ((third, fourth),))

    def _stamp(self, name: str) -> None:
        if self._on_cpu:
            now = 1e6 * time.perf_counter()
            self._moments[name] = lambda: now
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream())
        released = self._released if name != RELEASED and self._released is not None else event
        self._released = released
        self._moments[name] = lambda: 0.0 if event is released else 1e3 * float(released.elapsed_time(event))
