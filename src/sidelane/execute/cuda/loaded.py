"""A loaded program on the streams of one rank, and the submission of its invocations from any caller's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sidelane import forks
from sidelane.execute.base import Addresses, CallerStream, Repetition
from sidelane.execute.cuda.bind import BoundPlan, Frame, Moving, Resolver
from sidelane.execute.cuda.calls import LaunchReduce, RecordStamp, Route, choose_route
from sidelane.execute.cuda.driver import Driver
from sidelane.execute.cuda.native import Bound, locate
from sidelane.execute.cuda.site import SIGNAL_WORDS, CudaSite
from sidelane.execute.cuda.watch import WatchedProgram
from sidelane.execute.submitted import Entry, Submitted
from sidelane.program.ir import Program

_MOST_CALLERS = 64  # of callers that are remembered; torch hands out 32 streams of each priority


class SubmittedCalls(NamedTuple):
    """The driver calls of an invocation from one caller.

    Attributes:
        set_epoch: sets the values of the calls for an invocation.
        calls: calls to the driver, in order.
        entry: counter of the calls.
        words: the words that ``set_epoch`` sets (see :class:`sidelane.execute.base.Repetition`); None if it does more.
    """

    set_epoch: Callable[[int], Any]
    calls: tuple[Bound, ...]
    entry: Entry
    words: Moving | None


class CudaProgram:
    """A program bound to addresses on one rank (see :class:`sidelane.execute.base.Runnable`).

    Attributes:
        program: the program.
        addresses: addresses to which it is bound.
        is_triggered: callers fire triggers of it while it is under way (``CudaTrigger``).
    """

    def __init__(self, executor: CudaSite, program: Program, addresses: Addresses, *, captured: bool = False) -> None:
        self.program = program
        self.addresses = addresses
        self.executor = executor
        self.is_triggered = False
        self._captured = captured
        self._events: list[int] = []
        self._stamps: dict[int, int] = {}
        self._ways: dict[CallerStream, SubmittedCalls] = {}
        self._entries: dict[Route, Entry] = {}
        self._like: CudaProgram | None = None  # owner of the events
        self._busy = executor.watch.next_busy_number() if captured else 0
        self._bound = self._bind()
        self._subject = (program, addresses)
        executor.rescue.register(program, executor.rank, addresses)
        forks.finalize(self, destroy_events, executor.driver, self._events)

    @property
    def _title(self) -> str:
        return f"{self.program.collective} {self.program.variant}"

    @property
    def moves(self) -> bool:
        """True if :meth:`at` works: no part of it belongs to one invocation, and only copies depend on addresses."""
        return not (self._captured or self._stamps)

    def at(self, addresses: Addresses) -> CudaProgram:
        """Return the same program at other addresses of its buffers, without calls to the driver.

        Invocations of both are ordered among each other. So they share events, and memory operations, which the driver
        copies at submission.
        """
        moved = CudaProgram.__new__(CudaProgram)
        moved.__dict__.update(self.__dict__)  # the subject, too: the watch reads only flags, which do not move
        moved.addresses, moved._bound, moved._ways, moved._like = addresses, self._bound.at(addresses), {}, self
        moved.is_triggered = False
        return moved

    def run(self, epoch: int, caller: CallerStream) -> None:
        """Submit this rank's queues (see :class:`sidelane.execute.base.Runnable`). Every eager call comes here.

        Raises:
            ValueError: a capture of a program that was not loaded for one; nothing was submitted.
            PeerError, PeerTimeoutError: an earlier invocation failed; nothing was submitted.
            DriverError: the driver refused a call. The executor is unusable from now on.
        """
        executor = self.executor
        if executor.watch.failure is not None or executor.closed:
            executor.check_usable("start")
        with executor.lock:
            if executor.driver.is_current():
                self._submit(epoch, caller)
            else:
                with executor.driver.current():
                    self._submit(epoch, caller)

    def repetition(self, caller: CallerStream, moving: Sequence[tuple[int, str]] | None = None) -> Repetition | None:
        """See :class:`sidelane.execute.base.Runnable`."""
        way = self._ways.get(caller)
        if way is None or way.words is None or (moving is not None and self.addresses.pieces):
            return None
        executor = self.executor
        notes = (*executor.watch.issue_notes(self._subject), *executor.ledger.notes(way.entry))
        if moving is None:
            return executor.repetition(way.calls, self.program, notes, way.words)
        calls = executor.bind_on(caller[0], self._bound.at(locate(self.addresses, moving)).steps)
        return executor.repetition(calls, self.program, notes, way.words, self.addresses)

    @property
    def marks(self) -> int:
        """Number of triggers that are marks of the caller's stream in a graph; each is marked before :meth:`run`."""
        return len(self._bound.plan.marks)

    @property
    def arrivals(self) -> int:
        """Number of arrivals of a graph, for which the caller's stream may wait after :meth:`run`."""
        return len(self._bound.plan.arrivals)

    def mark(self, number: int, stream: int) -> None:
        """Let the calls that wait for a trigger follow the work of ``stream`` so far, which is being captured.

        Raises:
            DriverError: the driver refused it.
        """
        frame, driver = self._bound.frame, self.executor.driver
        with self.executor.lock, driver.current():
            driver.submit([driver.bind_record(frame.events[event], stream) for event in frame.plan.marks[number]])

    def follow(self, number: int, stream: int) -> None:
        """Let the next work of ``stream``, which is being captured, follow an arrival. Raises as :meth:`mark`."""
        frame, driver = self._bound.frame, self.executor.driver
        with self.executor.lock, driver.current():
            driver.submit([driver.bind_wait(frame.events[event], stream) for event in frame.plan.arrivals[number]])

    @property
    def streams(self) -> int:
        """Number of streams, including the caller's, on which an invocation runs."""
        return self._bound.plan.streams

    def elapsed_us(self, first: int, last: int) -> float:
        """Return the microseconds between two stamp slots of the last invocation or replay, which must have ended."""
        return self.executor.driver.elapsed_us(self._stamps[first], self._stamps[last])

    def _submit(self, epoch: int, caller: CallerStream) -> None:
        executor = self.executor
        try:
            way = self._ways.get(caller)
            if way is None:
                way = self._find_way(caller)
            way.set_epoch(epoch)
            executor.driver.submit(way.calls)
            if caller[1]:
                executor.ledger.count(way.entry)
            else:
                self._note(epoch, way.entry)
        except ValueError:
            raise  # found before anything was submitted
        except BaseException as error:  # of the driver, or Ctrl-C
            executor.fail_submission(self._title, error, captured=caller[1])
            raise

    def _note(self, epoch: int, entry: Entry) -> None:
        if self.is_triggered:
            self.executor.armed_epoch = epoch
        self.executor.watch.issued(epoch, self._subject)
        self.executor.ledger.count(entry)

    def _find_way(self, caller: CallerStream) -> SubmittedCalls:
        """Prepare the driver calls of invocations from ``caller``; they are cached, since most calls repeat."""
        handle, capturing = caller
        route = choose_route(handle, capturing, self._captured)
        bound = self._bound
        calls = bound.steps(handle) if capturing else self.executor.bind_on(handle, bound.steps)
        words: Moving | None = None
        if capturing:
            set_epoch = _no_epoch
        else:
            set_epoch, words = bound.set_epoch, bound.words
        if len(self._ways) >= _MOST_CALLERS:
            self._ways.clear()
        way = self._ways[caller] = SubmittedCalls(set_epoch, tuple(calls), self._entry(route), words)
        return way

    def _entry(self, route: Route) -> Entry:
        entry = self._entries.get(route)
        if entry is None:
            program, captured = self.program, route is Route.CAPTURE
            counts = self.executor.plans.counts(self._bound.plan, route)
            submitted = Submitted(str(program.collective), "dma", program.variant, captured, counts)
            entry = self._entries[route] = self.executor.ledger.entry(submitted)
        return entry

    def _bind(self) -> BoundPlan:
        executor, driver, captured = self.executor, self.executor.driver, self._captured
        plan = executor.plans.of(self.program, captured)
        if plan.signal_words > SIGNAL_WORDS:
            raise ValueError(
                f"load: signals to peers in one program (value={plan.signal_words}, allowed=..{SIGNAL_WORDS})"
            )
        events = [driver.create_event() for _ in range(plan.events)]
        self._events += events
        for call in plan.calls():
            if isinstance(call, RecordStamp) and call.slot not in self._stamps:
                self._stamps[call.slot] = driver.create_event(timing=True)
                self._events.append(self._stamps[call.slot])
        resolve = Resolver(self.program, executor.rank, self.addresses, executor.signal_words, executor.words)
        resolve.require(plan.calls())
        self._load_kernels(plan.calls(), resolve)
        frame = Frame(
            driver,
            plan,
            resolve,
            sides=executor.shared_sides(plan.streams - 1),
            events=events,
            stamps=self._stamps,
            captured=captured,
            busy=self._busy,
        )
        bound = BoundPlan(frame, resolve)
        if captured:
            executor.watch.captured(WatchedProgram(0, self.program, self.addresses, captured=True))
        return bound

    def _load_kernels(self, calls: tuple[object, ...], resolve: Resolver) -> None:
        """Compile and load the kernels now: this is not possible in a capture, or behind a stream that waits."""
        executor = self.executor
        for call in calls:
            if isinstance(call, LaunchReduce):
                dst, srcs = resolve(call.dst), [resolve(src) for src in call.srcs]
                executor.driver.bind_reduce(dst, srcs, call.nbytes, call.reduction, executor.internal)


def _no_epoch(epoch: int) -> None:
    """Do nothing: a captured invocation has no epoch, since a graph would repeat it."""


def destroy_events(driver: Driver, events: list[int]) -> None:
    """Release ``events``, for finalizers; work that has recorded them still completes."""
    for event in events:
        driver.destroy_event(event)
