"""Measuring on several ranks: warm-up, interleaved rounds, device events, the slowest rank's time.

One sample is: wait until the device is idle; line all ranks up on the device (a barrier on the stream, so that no
rank's host can be late); record an event; run; record an event. Jobs take turns round by round, each round starting
with another job, so that clocks, power and heat hit all alike. Nothing is exchanged between ranks in the timed rounds
but the barrier; one maximum over all ranks at the end gives the slowest rank's time of every round, and the fastest's.

Short jobs run many times in a sample (``ways.Job``). Their data then come from the caches, as they do in nccl-tests:
with 20 calls on the same 1 MB, every implementation finds its input in L2. That favours none of them, but a cold
collective of that size takes longer.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sidelane.errors import PeerTimeoutError
from sidelane_lab.harness.ways import Job, K, Problem, Rounds, W, Way, WayOutcome

T = TypeVar("T")

SPIN_CYCLES_PER_US = 2000
"""Clock cycles of the spin that holds a stream back: GPUs here stay below 2 GHz, so it lasts at least as asked."""

POLLED_S = 1e-3
"""So long the host asks without a pause: it is slower for some calls after it has slept, and samples are short."""

MOST_HIDDEN_US = 8000.0
ERROR_BYTES = 512


class AgreedError(Exception):
    """A failure that every rank has heard of: the text names the first rank that failed.

    Attributes:
        level: number of steps around the one that failed.
    """

    def __init__(self, text: str, level: int) -> None:
        super().__init__(text)
        self.level = level


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
        self._level = 0
        # Never the legacy default stream: some collectives refuse it, and it waits for every other stream.
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        if self._stream is not None and device_barrier is not None:
            # Kernels that are loaded and groups that connect for the first time wait for calls that are armed.
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

        Raises:
            AgreedError: inside of a step, if another rank has failed in that step and left it; :meth:`attempt` returns
                its text.
        """
        mine = torch.zeros(1 + ERROR_BYTES, dtype=torch.uint8)
        if error is not None:
            text = (" ".join(error.split()) or "unknown error").encode()[:ERROR_BYTES]
            mine[0] = self._level
            mine[1 : 1 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        found = []
        for rank, (level, *theirs) in enumerate(one.tolist() for one in everyone):
            text = bytes(theirs).rstrip(b"\0")
            if text:
                found.append((level, rank, text.decode(errors="replace")))
        if not found:
            return None
        level, rank, words = min(found)
        if level < self._level:
            raise AgreedError(f"rank {rank}: {words}", level)
        return f"rank {rank}: {words}"

    def attempt(self, step: Callable[[], str | None] | Callable[[], None]) -> str | None:
        """Run ``step`` on all ranks and agree on the outcome. A step fails by raising or by returning what is wrong.

        An empty text says that nothing is. A step may contain others, and :meth:`of_all_ranks`: a rank that fails
        before them leaves no other waiting there.
        """
        self._level += 1
        try:
            error = step() or None
        except PeerTimeoutError:
            raise  # the device hangs, or a peer is gone: nothing can be measured after that
        except AgreedError as problem:
            if problem.level < self._level - 1:
                raise
            return str(problem)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        finally:
            self._level -= 1
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

    def compare(
        self,
        makers: Mapping[K, Callable[[], W]],
        seeds: Iterator[int],
        time: Callable[[dict[K, W]], Mapping[Any, Rounds]],
    ) -> list[WayOutcome[K, W]]:
        """Make and check all ways, time those that are right, and check these once more. Collective.

            make | fill, run, capture | fill, run, error | times in turns | fill, run again, error | close
                 only what is to be a graph

        Every rank compares the same ways in the same order, and all agree on a step before the next one: a rank at
        which something fails leaves no other waiting. What else is raised, a time-out above all, ends the comparison:
        the ways are dropped then, so that none outlives the communicator whose memory it uses.

        Args:
            makers: functions that make the ways, by what the study calls them by.
            seeds: gives seeds, the same on every rank.
            time: times the ways that are right, by their keys.

        Returns:
            The ways in their order, closed.
        """
        ways: dict[K, W] = {}
        problems: dict[K, Problem] = {}
        try:
            with self.on_stream():
                for key, make in makers.items():
                    refused = self.attempt(lambda key=key, make=make: ways.update({key: make()}))
                    problem = self._begun(ways[key], next(seeds)) if refused is None else Problem(refused)
                    if problem is not None:
                        problems[key] = problem
                        way = ways[key] if refused is None else ways.pop(key, None)  # made here, and not elsewhere
                        if way is not None:
                            way.close()
                ready = {key: way for key, way in ways.items() if key not in problems}
                rounds = time(ready)
                for key, way in ready.items():
                    # After hundreds of runs: what a first one does not show.
                    problem = self._checked(way, way.run_again, next(seeds))
                    if problem is not None:
                        problems[key] = problem
                    elif not way.as_graph:  # a replay is no call: the library's last one was another way's
                        way.settle()
                    way.close()
        except BaseException:
            for way in ways.values():
                with contextlib.suppress(RuntimeError):  # of a device that hangs
                    way.drop()
            raise
        return [WayOutcome(key, ways.get(key), rounds.get(key), problems.get(key)) for key in makers]

    def in_turns(self, jobs: Mapping[K, Job], options: Any) -> dict[K, Rounds]:
        """Time jobs in as many rounds as the options of a study say (``warmup`` and ``repeats``). Collective."""
        return self.rounds(jobs, warmup=options.warmup, repeats=options.repeats) if jobs else {}

    def _begun(self, way: Way, seed: int) -> Problem | None:
        """Check a way for the first time, as a graph if it is to be one. Collective."""
        if way.as_graph:
            # A first run outside of a capture: libraries connect and allocate in it.
            problem = self.run(way.label, functools.partial(_run, way, way.run, seed))
            if problem is not None:
                return problem
            refused = self.attempt(way.capture)
            if refused is not None:
                return Problem(f"capture: {refused}")
        problem = self._checked(way, way.run, seed)
        if problem is None:
            way.settle()
        return problem

    def _checked(self, way: Way, run: Callable[[], None], seed: int) -> Problem | None:
        return self.check(way.label, functools.partial(_run, way, run, seed), lambda: way.error(seed))

    def of_all_ranks(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank; all ranks have as many. Collective.

        Raises:
            AgreedError: inside of a step (:meth:`attempt`), if another rank has failed in it.
        """
        if self._level:
            self.agree(None)
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


def _run(way: Way, run: Callable[[], None], seed: int) -> None:
    way.fill(seed)
    run()
