"""When the GEMM and the collective of a pair ran: time stamps of the device around both, or of the clock on a CPU.

The stamps are events on the lane of each operation, in front of it and behind it: one that waits for units has begun.
On a CPU a collective ends when its end was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from sidelane_lab.pairs.spans import Trace

Moment = Callable[[], float]
"""Reads, once the device has come by, when that was: microseconds of one clock."""


RELEASED = "released"


class Operation(Protocol):
    """What computes."""

    def run(self) -> None: ...


class Beginning(Protocol):
    """What communicates."""

    def start(self) -> Callable[[], None]: ...


class Traced:
    """Stands for the GEMM and the collective of a pair, and remembers their last run.

    Args:
        gemm: that runs.
        collective: likewise.
        on_cpu: there are no events.
    """

    def __init__(self, gemm: Operation, collective: Beginning, *, on_cpu: bool) -> None:
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
        """What was remembered, from the release on; the device must have come by."""
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
