"""Measuring on several ranks: warm-up, interleaved rounds, device events, the slowest rank's time.

One sample is: wait until the device is idle; line all ranks up on the device (a barrier on the stream, so that no
rank's host can be late); record an event; run; record an event. Jobs take turns round by round, each round starting
with another job, so that clocks, power and heat hit all alike. Nothing is exchanged between ranks in the timed rounds
but the barrier; one maximum over all ranks at the end gives the slowest rank's time of every round, and the fastest's.

Short jobs run many times in a sample (:class:`Job`). Their data then come from the caches, as they do in nccl-tests:
with 20 calls on the same 1 MB, every implementation finds its input in L2. That favours none of them, but a cold
collective of that size takes longer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from sidelane.errors import PeerTimeoutError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

SPIN_CYCLES_PER_US = 2000
"""Clock cycles of the spin that holds a stream back: GPUs here stay below 2 GHz, so it lasts at least as asked."""

POLLED_S = 1e-3
"""So long the host asks without a pause: it is slower for some calls after it has slept, and samples are short."""

MOST_HIDDEN_US = 8000.0
ERROR_BYTES = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The work of a sample.

    Attributes:
        run: does the work, or queues it on the current stream.
        repeats: times that a sample calls ``run``.
        calls: operations in all of them (a graph may hold several); the time is divided by it.
        ahead: times that a sample calls ``run`` and waits for it before all else. What ran last has the host's caches:
            without, every implementation would pay in its first calls for the one before it.
        hide_launch_us: hold the device back that long, so that the host has queued everything before the clock
            starts. 0: what the host takes is part of the time, as it is in an eager program.
        before: called ahead of all that, uncounted: what switches over from another job.
    """

    run: Callable[[], object]
    repeats: int = 1
    calls: int = 1
    ahead: int = 0
    hide_launch_us: float = 0.0
    before: Callable[[], object] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Rounds:
    """Times of one job, one a round, in microseconds a call; the slowest rank's.

    Attributes:
        times_us: in the order of the rounds.
        late: rounds in which some rank's host had not queued everything when the clock started.
        apart_us: by how much the ends of the ranks lie apart, each counted from the barrier that lines them up.
    """

    times_us: tuple[float, ...]
    late: int = 0
    apart_us: tuple[float, ...] = ()

    @property
    def median_us(self) -> float:
        return float(np.median(self.times_us))

    @property
    def skew_us(self) -> float | None:
        """Median of ``apart_us``."""
        return float(np.median(self.apart_us)) if self.apart_us else None

    @property
    def p10_us(self) -> float:
        return float(np.percentile(self.times_us, 10))

    @property
    def p90_us(self) -> float:
        return float(np.percentile(self.times_us, 90))


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Why something has no time. ``wrong``: it ran, and its output was wrong."""

    text: str
    wrong: bool = False


def outcome(rounds: Rounds | None, problem: Problem | None, said: str = "") -> dict[str, Any]:
    """Columns of a row: its times, unless there is a problem; whether it is right; and a note.

    Args:
        rounds: the times; None where there are none.
        problem: what is wrong; None: nothing.
        said: the note where nothing is.
    """
    usable = None if problem is not None else rounds
    return {
        "time_us": None if usable is None else usable.median_us,
        "p10_us": None if usable is None else usable.p10_us,
        "p90_us": None if usable is None else usable.p90_us,
        "correct": True if problem is None else False if problem.wrong else None,
        "note": said if problem is None else problem.text,
    }


class WayComparison(Generic[K, T]):
    """Ways to do one thing: each is prepared and checked, those that are right are timed, and checked once more.

    Attributes:
        ready: ways that are right, by their keys.
        problems: why others have no time, by their keys.
        rounds: times, by the keys of the ways.
    """

    def __init__(self) -> None:
        self.ready: dict[K, T] = {}
        self.problems: dict[K, Problem] = {}
        self.rounds: Mapping[K, Rounds] = {}

    def add(self, key: K, found: T | Problem | None) -> None:
        """Take a way in, or what is wrong with it."""
        if isinstance(found, Problem):
            self.problems[key] = found
        elif found is not None:
            self.ready[key] = found

    def check_again(self, check: Callable[[K, T], Problem | None]) -> None:
        """Check every way that was right once more: after hundreds of calls, what a first one does not show."""
        for key, way in self.ready.items():
            self.add(key, check(key, way))

    def __iter__(self) -> Iterator[tuple[K, T | None, Rounds | None, Problem | None]]:
        for key in dict.fromkeys((*self.ready, *self.problems)):
            yield key, self.ready.get(key), self.rounds.get(key), self.problems.get(key)


class Meter:
    """Measures on one rank, together with the meters of the other ranks: every rank makes the same calls.

    Args:
        device: where the work runs.
        device_barrier: queues a barrier of all ranks on the current stream; needed on accelerators.
        timeout_s: longest that the device may take for one sample, or a check.
        group: ranks that measure together; its backend for CPU tensors carries what the ranks tell each other.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        device_barrier: Callable[[], None] | None = None,
        timeout_s: float = 60.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if device.type != "cpu" and device_barrier is None:
            raise ValueError("Meter: device_barrier is needed on an accelerator (value=None)")
        self.device = device
        self.rank = dist.get_rank(group)
        self._device_barrier = device_barrier
        self._timeout_s = timeout_s
        self._group = group
        self._hidden_factor = 1.0
        # Never the legacy default stream: some collectives refuse it, and it waits for every other stream.
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        if device_barrier is not None:  # what loads a kernel or connects for the first time waits for armed calls
            with self.on_stream():
                torch.cuda._sleep(1)
                device_barrier()
                torch.cuda.current_stream().synchronize()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the meter's stream the current one (on a CPU: nothing). All work of a study is queued there."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def agree(self, error: str | None) -> str | None:
        """Tell all ranks what went wrong here, if anything, and hear of the first rank at which something did.

        One rank must not run into a collective that another has given up on: call it after every step that can fail.
        """
        mine = torch.zeros(ERROR_BYTES, dtype=torch.uint8)
        if error is not None:
            text = (" ".join(error.split()) or "unknown error").encode()[:ERROR_BYTES]
            mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        for rank, theirs in enumerate(everyone):
            text = bytes(theirs.tolist()).rstrip(b"\0")
            if text:
                return f"rank {rank}: {text.decode(errors='replace')}"
        return None

    def attempt(self, step: Callable[[], str | None] | Callable[[], None]) -> str | None:
        """Run ``step`` on all ranks and agree on the outcome. A step fails by raising or by returning what is wrong.

        An empty text says that nothing is.
        """
        try:
            error = step() or None
        except PeerTimeoutError:
            raise  # the device hangs, or a peer is gone: nothing can be measured after that
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        return self.agree(error)

    def run(self, what: str, step: Callable[[], object]) -> Problem | None:
        """Do something on all ranks and wait for the device. Returns what kept a rank from it; ``what`` is its name."""

        def work() -> None:
            step()
            self.finish(what)

        refused = self.attempt(work)
        return None if refused is None else Problem(refused)

    def check(self, what: str, step: Callable[[], object], compare: Callable[[], str | None]) -> Problem | None:
        """Run and compare on all ranks, in two steps: a rank that could not run has nothing to compare. Collective.

        Args:
            what: name, for errors.
            step: fills inputs, poisons outputs, and runs.
            compare: what is wrong with the outputs.
        """
        problem = self.run(what, step)
        if problem is not None:
            return problem
        wrong = self.attempt(compare)
        return None if wrong is None else Problem(wrong, wrong=True)

    def of_all_ranks(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank; all ranks have as many. Collective."""
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        return [theirs.tolist() for theirs in everyone]

    def within(
        self, items: Sequence[T], seconds: float, over: Callable[[Sequence[T]], None], fewest: int = 0
    ) -> Iterator[T]:
        """Yield items until time is over, by the clock of the first rank, which decides for all. Collective.

        Args:
            items: to go through.
            seconds: how long.
            over: gets those that are left.
            fewest: items that are yielded in any case.
        """
        began = time.monotonic()
        for number, item in enumerate(items):
            late = self.rank == 0 and number >= fewest and time.monotonic() - began > seconds
            if self.agree("late" if late else None) is not None:
                over(items[number:])
                return
            yield item

    def finish(self, what: str) -> None:
        """Wait until the device has done all that is queued on the current stream.

        Raises:
            PeerTimeoutError: it did not within the time-out; the text names ``what``.
        """
        if self._stream is None:
            return
        done = torch.cuda.Event()
        done.record()
        begin, pause = time.monotonic(), 0.0
        while not done.query():
            waited_s = time.monotonic() - begin
            if waited_s > self._timeout_s:
                raise PeerTimeoutError(
                    f"{what}: the device of rank {self.rank} did not finish within {self._timeout_s:g} s "
                    "(expected: idle; it waits for a peer, or hangs)",
                    ranks=[self.rank],
                )
            if waited_s > POLLED_S:
                time.sleep(pause)
                pause = min(pause + 2e-5, 1e-3)

    def line_up(self, what: str) -> None:
        """Return on all ranks at about the same time, once their devices have passed a barrier. Collective."""
        if self._device_barrier is None:
            dist.barrier(group=self._group)
            return
        self._device_barrier()
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + self._timeout_s
        while not done.query():  # without a pause, which would come between the barrier and what follows
            if time.monotonic() > deadline:
                self.finish(what)

    def rounds(
        self, jobs: Mapping[K, Job], *, warmup: int, repeats: int, on_round: Callable[[int], None] | None = None
    ) -> dict[K, Rounds]:
        """Time all jobs, interleaved. Every rank passes the same jobs in the same order.

        Args:
            jobs: by name.
            warmup: rounds before the measured ones.
            repeats: measured rounds.
            on_round: called before every round with its number, from 0.
        """
        names = list(jobs)
        samples = torch.zeros(3, len(names), repeats, dtype=torch.float64)
        with self.on_stream():
            for number in range(warmup + repeats):
                if on_round is not None:
                    on_round(number)
                # In another order each round, alike on all ranks: what a job leaves behind (heat, a GPU at its
                # power cap, one that has rested) then meets every other job, and not always the same.
                for index in random.Random(number).sample(range(len(names)), len(names)):
                    time_us, late = self._sample(jobs[names[index]], str(names[index]))
                    if number >= warmup:
                        samples[:, index, number - warmup] = torch.tensor([time_us, float(late), -time_us])
        dist.all_reduce(samples, op=dist.ReduceOp.MAX, group=self._group)
        times, late_rounds = samples[0].tolist(), samples[1].sum(dim=1).tolist()
        calls = torch.tensor([float(jobs[name].calls) for name in names], dtype=torch.float64)
        apart = ((samples[0] + samples[2]) * calls[:, None]).tolist()  # the largest, less the smallest
        return {name: Rounds(tuple(times[i]), int(late_rounds[i]), tuple(apart[i])) for i, name in enumerate(names)}

    def _sample(self, job: Job, label: str) -> tuple[float, bool]:
        if job.before is not None:
            job.before()
        if self._stream is None:
            dist.barrier(group=self._group)
            begin = time.perf_counter()
            for _ in range(job.repeats):
                job.run()
            return (time.perf_counter() - begin) * 1e6 / job.calls, False
        assert self._device_barrier is not None
        if job.ahead:
            for _ in range(job.ahead):
                job.run()
            self.finish(label)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if job.hide_launch_us:
            hidden_us = min(job.hide_launch_us * self._hidden_factor, MOST_HIDDEN_US)
            torch.cuda._sleep(int(hidden_us * SPIN_CYCLES_PER_US))
        # The barrier comes behind the spin: spins count cycles, and the clocks of the GPUs differ.
        self._device_barrier()
        start.record()
        for _ in range(job.repeats):
            job.run()
        end.record()
        late = bool(job.hide_launch_us) and start.query()
        if late:
            self._hidden_factor = min(2 * self._hidden_factor, MOST_HIDDEN_US / job.hide_launch_us)
        self.finish(label)
        return start.elapsed_time(end) * 1e3 / job.calls, late
