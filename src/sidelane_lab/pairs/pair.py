"""A pair on this rank: a computation and a collective, launched together under a strategy, and checked.

How both start together on a GPU. The host queues everything while the device is held back: a spin on the caller's
stream, then a barrier of all ranks, then the event that starts the clock. Both streams wait for it::

    caller   spin  barrier  start ─┬───────────────────────────────┬─ end
    first                          └─ begun, operation ────────────┤
    second                               └─ operation ─────────────┘

The second stream waits for an event that the first one records just before its operation. That hop between streams,
about 2 us, is what keeps the order; the host's launch latency plays no part. A strategy with a priority has the
collective on a stream that the device serves first, one with a partition has streams of its own (``c3.partitions``).
On a CPU the collective's threads (or Gloo's) work while a thread of ours computes, and the order is that of the calls;
priority means a thread that yields (``YIELDING``).

A third kernel, a GEMM of a quarter of the pair's, is launched with both in every order (ConCCL paper, VII-B1). On a GPU
each has a stream of its own. On a CPU a GEMM is a call: the collective begins in its turn, and goes on beside those
after it.

Checks: before a launch may be timed it runs once with fresh random inputs and poisoned outputs, and the bytes of the
collective and the result of the GEMM are compared. (The GEMM keeps its random inputs for all checks of a pair.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.nn import functional

from sidelane.c3.partitions import DevicePartitions, PairStreams, why_none
from sidelane.c3.strategies import Order, Strategy
from sidelane.execute.cuda.partition import spared
from sidelane_lab.harness.ways import Problem, Way
from sidelane_lab.pairs.spans import Beginning, ComputePart
from sidelane_lab.pairs.workload import BAG_READS, ComputeKind, Gemm, Workload

YIELDING = 10
"""Steps of niceness of the thread that computes next to an urgent collective on CPUs: with one core for two threads it
then gets about a tenth of it."""

HIDE_LAUNCH_US = 500.0
"""The host queues a GEMM, a collective and a dozen events in less; the meter notices if not, and waits longer."""

RELATIVE_ERROR = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-4}
ABSOLUTE_ERROR = {"bfloat16": 1e-3, "float16": 1e-3, "float32": 1e-5}
"""Allowed deviation of a GEMM from the same GEMM alone: two roundings of the result, and an absolute term in units of
its standard deviation, sqrt(k) for normal inputs. A library may pick another kernel on another stream."""

GEMM, SMALL = "gemm", "small gemm"
"""Names of a pair's GEMM and of the third kernel, among times and in orders of launches."""

Orders = Mapping[tuple[str, ...], float]
"""Microseconds by names, in the order of launches."""


class Configuration(Protocol):
    """One way to call a collective implementation. ``label`` is unique in a pair."""

    @property
    def implementation(self) -> str: ...

    @property
    def in_place(self) -> bool: ...

    @property
    def label(self) -> str: ...


class CollectiveRun(Configuration, Protocol):
    """One way to run the pair's collective, with its buffers."""

    def start(self) -> Callable[[], None]:
        """Begin on the current stream; what comes back waits for the end on a CPU."""
        ...

    def fill(self, seed: int) -> None:
        """Put in fresh random input, and poison the output."""
        ...

    def error(self, seed: int) -> str | None:
        """Say what is wrong with the output for the input of ``seed``."""
        ...


class Pair:
    """Turns (strategy, collective) into a launch of both."""

    def __init__(
        self,
        gemm: ComputePart,
        streams: PairStreams | None,
        workers: Workers,
        partitions: DevicePartitions | None = None,
    ) -> None:
        self._gemm, self._streams, self._workers, self._partitions = gemm, streams, workers, partitions

    def launch(self, strategy: Strategy, run: Beginning, units: int = 0) -> Callable[[], None]:
        """Return what launches both; ``units``: that the GEMM does without."""
        if not strategy.concurrent:
            return lambda: self._serial(run)
        if self._streams is None:
            return lambda: self._on_threads(strategy, run)
        streams, compute = self._streams, self._gemm.run
        if units and strategy.partition is not None and strategy.partition.requested:
            compute = spared(units)(compute)
        elif units and strategy.partition is not None:
            assert self._partitions is not None, "without them the strategy is refused"
            streams = self._partitions.streams(units, streams, confine=strategy.mover.takes_units)
        return lambda: self._on_streams(strategy, run, streams, compute)

    def _serial(self, run: Beginning) -> None:
        self._gemm.run()
        run.start()()

    def _on_streams(
        self, strategy: Strategy, run: Beginning, streams: PairStreams, compute: Callable[[], object]
    ) -> None:
        operations: list[tuple[torch.cuda.Stream, Callable[[], object]]] = [
            (streams.gemm, compute),
            (streams.urgent if strategy.priority else streams.collective, run.start),
        ]
        if strategy.order is Order.COLLECTIVE_FIRST:
            operations.reverse()
        in_turn(operations)

    def _on_threads(self, strategy: Strategy, run: Beginning) -> None:
        if strategy.order is Order.COLLECTIVE_FIRST and not strategy.priority:
            wait = run.start()
            self._gemm.run()
            wait()
            return
        begun = threading.Event()

        def compute() -> None:
            begun.set()
            self._gemm.run()

        worker = self._workers.of(strategy)
        if strategy.order is Order.COLLECTIVE_FIRST:
            wait = run.start()
            product = worker.submit(compute)
        else:
            product = worker.submit(compute)
            begun.wait()
            wait = run.start()
        wait()
        product.result()


def in_turn(operations: Sequence[tuple[torch.cuda.Stream, Callable[[], object]]]) -> None:
    """Begin operations one after another, each on its stream; the caller's stream waits for the ends of all."""
    caller = torch.cuda.current_stream()
    begun = torch.cuda.Event()
    begun.record(caller)
    for stream, operation in operations:
        stream.wait_event(begun)
        begun = torch.cuda.Event()  # for the next stream: this one has come to its operation
        begun.record(stream)
        with torch.cuda.stream(stream):
            operation()
    for stream, _ in operations:
        caller.wait_stream(stream)


def run_alone(run: Beginning) -> None:
    """Run a collective from beginning to end."""
    run.start()()


class Workers(contextlib.ExitStack):
    """Threads that compute on a CPU while collectives run: one like any other, and one that yields to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.yielding = (
            self.enter_context(ThreadPoolExecutor(1, initializer=_begin_thread, initargs=(steps,)))
            for steps in (0, YIELDING)
        )

    def of(self, strategy: Strategy) -> ThreadPoolExecutor:
        """Return where the GEMM runs under a strategy."""
        return self.yielding if strategy.priority else self.usual


def _begin_thread(yields: int) -> None:
    torch.set_num_threads(1)
    if yields and sys.platform == "linux":  # where niceness is a thread's, not the process's
        os.nice(yields)


def pair_streams(device: torch.device) -> PairStreams | None:
    """Return streams for pairs on a device; None on a CPU."""
    if device.type == "cpu":
        return None
    return PairStreams(torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1))


def refusal(strategy: Strategy, partitions: DevicePartitions | None, no_partitions: str, instruments: Any) -> str:
    """Say why a strategy cannot take its units here; empty if it takes none or can. Collective."""
    if strategy.partition is None:
        return ""
    if partitions is None:
        return no_partitions
    return instruments.attempt(functools.partial(why_none, strategy.partition, partitions, no_partitions)) or ""


class GemmRun:
    """A GEMM, or another computation, with its operands, a reference and a check."""

    def __init__(self, gemm: Gemm, device: torch.device) -> None:
        dtype = getattr(torch, gemm.dtype)
        self.gemm = gemm
        rows = max(1, gemm.m * gemm.k // BAG_READS)
        shapes = {
            ComputeKind.PRODUCT: ((gemm.m, gemm.k), (gemm.k, gemm.n)),
            ComputeKind.ADD: ((gemm.m, gemm.n), (gemm.m, gemm.n)),
            ComputeKind.BAG: ((gemm.m, gemm.k), (rows, gemm.n)),
            ComputeKind.ATTEND: ((gemm.m, 1, 1, gemm.n), (2, gemm.m, 1, gemm.k, gemm.n)),
        }
        of_a, of_b = shapes[gemm.operation]
        indices = gemm.operation is ComputeKind.BAG
        self.a = torch.zeros(of_a, dtype=torch.int64 if indices else dtype, device=device)
        self.b = torch.empty(of_b, dtype=dtype, device=device)
        self.c = torch.empty(gemm.m, gemm.n, dtype=dtype, device=device)
        self._expected = torch.empty_like(self.c)

    def run(self) -> None:
        """Compute, on the current stream."""
        match self.gemm.operation:
            case ComputeKind.PRODUCT:
                torch.mm(self.a, self.b, out=self.c)
            case ComputeKind.ADD:
                torch.add(self.a, self.b, out=self.c)
            case ComputeKind.BAG:
                self.c = functional.embedding_bag(self.a, self.b, mode="sum")
            case ComputeKind.ATTEND:
                self.c = functional.scaled_dot_product_attention(self.a, *self.b).view(self.c.shape)

    def fill(self, seed: int) -> None:
        """Put in fresh normal inputs, their product with nothing else running, and a poisoned result."""
        generator = torch.Generator(device=self.a.device).manual_seed(seed)
        if self.a.is_floating_point():
            self.a.normal_(generator=generator)
        else:
            self.a.random_(len(self.b), generator=generator)
        self.b.normal_(generator=generator)
        self.run()
        self._expected.copy_(self.c)
        self.poison()

    def poison(self) -> None:
        """Overwrite the result, so that one that nobody computes again is noticed."""
        self.c.fill_(math.nan)

    def error(self) -> str | None:
        """Say what is wrong with the result; None if nothing is."""
        rtol, atol = RELATIVE_ERROR[self.gemm.dtype], ABSOLUTE_ERROR[self.gemm.dtype] * math.sqrt(self.gemm.k)
        if torch.allclose(self.c, self._expected, rtol=rtol, atol=atol):
            return None
        return f"the GEMM's result differs from that of the GEMM alone (rtol={rtol:.2g}, atol={atol:.2g})"


class PairLaunch(Way):
    """A launch of a collective, of GEMMs or of both, with a check of their results.

    Args:
        label: name in errors.
        launch: function that launches it.
        call: the collective; None without one.
        gemms: GEMMs, which keep their inputs.
    """

    def __init__(
        self,
        label: str,
        launch: Callable[[], object],
        call: CollectiveRun | None = None,
        gemms: Iterable[GemmRun] = (),
    ) -> None:
        self.label, self.call, self._launch, self._gemms = label, call, launch, tuple(gemms)

    def fill(self, seed: int) -> None:
        if self.call is not None:
            self.call.fill(seed)
        for gemm in self._gemms:
            gemm.poison()

    def run(self) -> None:
        self._launch()

    def error(self, seed: int) -> str | None:
        wrong = None if self.call is None else self.call.error(seed)
        return wrong or next(filter(None, (gemm.error() for gemm in self._gemms)), None)


def check_launch(instruments: Any, way: Way, seed: int) -> Problem | None:
    """Launch once on fresh input and poisoned outputs, and compare the results. Collective."""

    def execute() -> None:
        way.fill(seed)
        way.run()
        instruments.finish(way.label)

    # Two steps: a rank that could not run has nothing to compare, and the two are told apart in the result.
    refused = instruments.attempt(execute)
    if refused is not None:
        return Problem(refused)
    wrong = instruments.attempt(lambda: way.error(seed))
    return None if wrong is None else Problem(wrong, wrong=True)


def small_of(gemm: Gemm) -> Gemm:
    """Return the third kernel: half of the rows and half of the columns."""
    return dataclasses.replace(gemm, m=max(1, gemm.m // 2), n=max(1, gemm.n // 2), tag="", divisor=1)


def orders_of(
    workload: Workload, run: CollectiveRun, instruments: Any, device: torch.device, seeds: Iterator[int]
) -> Orders:
    """Measure all six. Collective: all ranks make the same call.

    Args:
        workload: the pair.
        run: its collective.
        instruments: as in ``studies.c3.comparison.run_workload``.
        device: of this rank.
        seeds: of the inputs.

    Returns:
        Medians; of an order whose results were wrong on some rank, none.
    """
    with instruments.on_stream():
        gemms = {GEMM: GemmRun(workload.gemm, device), SMALL: GemmRun(small_of(workload.gemm), device)}
        for gemm in gemms.values():
            gemm.fill(next(seeds))
        instruments.finish("the GEMMs' inputs")
        operations: dict[str, Callable[[], Any]] = {name: gemm.run for name, gemm in gemms.items()}
        operations[str(workload.collective)] = run.start
        streams = {name: torch.cuda.Stream(device) for name in operations} if device.type == "cuda" else {}
        launches: dict[str, Callable[[], None]] = {}
        for order in itertools.permutations(operations):
            if streams:
                launch = functools.partial(in_turn, [(streams[name], operations[name]) for name in order])
            else:
                launch = functools.partial(_on_cpu, [operations[name] for name in order])
            label = " > ".join(order)
            if check_launch(instruments, PairLaunch(label, launch, run, gemms.values()), next(seeds)) is None:
                launches[label] = launch
        times = instruments.time(launches) if launches else {}
    return {tuple(label.split(" > ")): statistics.median(series) for label, series in times.items()}


def _on_cpu(operations: Sequence[Callable[[], Callable[[], None] | None]]) -> None:
    for wait in [operation() for operation in operations]:
        if wait is not None:
            wait()
