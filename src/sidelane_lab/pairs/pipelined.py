"""Pipelined iterations: the collective of one next to the GEMMs of the following ones (overlap paper, 3.2 and 3.3).

    compute 0 | G0 |    | G2 |    | ...      ``in_order``: all on one stream, each behind the one before
    compute 1 |    | G1 |    | G3 | ...
    comm           | C0 | C1 | C2 | C3 |

C(i) follows G(i) and C(i-1). Whether GEMMs follow each other is a choice (decision 79). Every operation has two time
stamps: on a GPU events on its stream, in front of it and behind it, so that a collective that waits for units counts as
begun; on a CPU the clock. There a thread computes, this one communicates, and priority is niceness.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from sidelane.c3.lanes import Lanes
from sidelane_lab.pairs.run import Workers
from sidelane_lab.pairs.spans import Span, Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """How iterations run.

    Attributes:
        iterations: 2 or more.
        priority: the collectives' stream goes before the GEMMs'.
        in_order: a GEMM waits for the one of the iteration before.

    Raises:
        ValueError: fewer iterations than 2.
    """

    iterations: int = 6
    priority: bool = False
    in_order: bool = False

    def __post_init__(self) -> None:
        if self.iterations < 2:
            raise ValueError(f"Schedule: iterations (value={self.iterations}, allowed=2 or more)")


class Pipelined:
    """Runs of iterations on one rank.

    Args:
        gemm: launches the GEMM of an iteration on the current stream; two may be under way at once.
        collective: begins the collective on the current stream; what comes back waits for its end on a CPU.
        lanes: streams, on an accelerator; None: on a CPU.
        second: a second stream for GEMMs.
        workers: threads that compute on a CPU.
    """

    def __init__(
        self,
        gemm: Callable[[int], None],
        collective: Callable[[], Callable[[], None]],
        lanes: Lanes | None,
        second: torch.cuda.Stream | None,
        workers: Workers,
    ) -> None:
        self._gemm, self._collective, self._workers = gemm, collective, workers
        self._lanes, self._second = lanes, second

    def sequential(self, iterations: int) -> None:
        """Every operation behind the one before, on the current stream."""
        for number in range(iterations):
            self._gemm(number)
            self._collective()()

    def overlapped(self, schedule: Schedule) -> Callable[[], Trace]:
        """Run the iterations; what comes back gives the time stamps, once the current stream has ended."""
        if self._lanes is None:
            return self._on_threads(schedule)
        return self._on_streams(schedule, self._lanes)

    def _on_streams(self, schedule: Schedule, lanes: Lanes) -> Callable[[], Trace]:
        caller = torch.cuda.current_stream()
        compute = [lanes.gemm] if schedule.in_order or self._second is None else [lanes.gemm, self._second]
        comm = lanes.urgent if schedule.priority else lanes.collective
        released = torch.cuda.Event(enable_timing=True)
        released.record(caller)
        for stream in (*compute, comm):
            stream.wait_event(released)
        gemms, collectives = [], []
        for number in range(schedule.iterations):
            stream = compute[number % len(compute)]
            with torch.cuda.stream(stream):
                gemms.append(_stamped(stream, functools.partial(self._gemm, number)))
            comm.wait_event(gemms[-1][1])
            with torch.cuda.stream(comm):
                collectives.append(_stamped(comm, self._collective))
        for stream in (*compute, comm):
            caller.wait_stream(stream)

        def read() -> Trace:
            def since(event: torch.cuda.Event) -> float:
                return 1e3 * float(released.elapsed_time(event))

            spans = [tuple((since(begin), since(end)) for begin, end in pairs) for pairs in (gemms, collectives)]
            return Trace(*spans)

        return read

    def _on_threads(self, schedule: Schedule) -> Callable[[], Trace]:
        worker = self._workers.yielding if schedule.priority else self._workers.usual
        computed: list[Future[Span]] = [
            worker.submit(_timed, functools.partial(self._gemm, number)) for number in range(schedule.iterations)
        ]
        gemms, collectives = [], []
        for product in computed:
            gemms.append(product.result())
            collectives.append(_timed(lambda: self._collective()()))
        trace = Trace(tuple(gemms), tuple(collectives))
        return lambda: trace


def _stamped(stream: torch.cuda.Stream, operation: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record(stream)
    operation()
    behind.record(stream)
    return before, behind


def _timed(operation: Callable[[], object]) -> Span:
    begin = time.perf_counter()
    operation()
    return 1e6 * begin, 1e6 * time.perf_counter()
