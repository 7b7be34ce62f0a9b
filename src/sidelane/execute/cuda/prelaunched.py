"""A program whose invocations are submitted ahead and fired by one word: the CUDA side of a prelaunched call.

Armed streams hold hardware channels until they are fired (``held.most_connections``, ``order``): whatever the trigger
depends on must get through on the others. They cannot be disarmed, only fired.
"""

from __future__ import annotations

import weakref

from sidelane.errors import SidelaneError
from sidelane.execute.base import Addresses, Place
from sidelane.execute.cuda.bind import BoundPlan, Frame, Resolver
from sidelane.execute.cuda.calls import Gate, HostWord, Route
from sidelane.execute.cuda.count import counts_of
from sidelane.execute.cuda.held import SharedValueOps, hold_back, require_free_channel
from sidelane.execute.cuda.loaded import destroy_events
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.site import CudaSite
from sidelane.execute.submitted import Submitted
from sidelane.program.ir import Program

_MOST_CALLERS = 64


class CudaPrelaunched:
    """A program on one rank that is armed and then fired. All of an executor share their words and their stream.

    Args:
        executor: of the rank. One of its programs may be armed at a time, and nothing else may start meanwhile.
        program: with epochs, without triggers of its own.
        addresses: used as they are: the caller keeps the memory until an armed invocation has ended.
        host_trigger: the word that fires it lies in pinned host memory, where :meth:`fire_from_host` reaches it,
            instead of in the device's, where the engines see a change sooner.

    Attributes:
        trigger_address: of that word. A kernel fires by storing the epoch there, as a 32-bit value, with release
            semantics at system scope.

    Raises:
        UnavailableError: armed, it would hold every hardware channel, so that no trigger came through.
    """

    def __init__(
        self, executor: CudaSite, program: Program, addresses: Addresses, *, host_trigger: bool = False
    ) -> None:
        executor.check_usable("prelaunch")
        self.program, self.host_trigger = program, host_trigger
        self._executor, self._addresses = executor, addresses
        self._epoch = 0
        self._events: list[int] = []
        plan = executor.plans.of(program)
        trigger = Gate.HOST_TRIGGER if host_trigger else Gate.TRIGGER
        plan = hold_back(plan, trigger)
        require_free_channel(str(program.collective), program.variant, plan.streams)
        driver = executor.driver
        with executor.lock, driver.current():
            self._home = executor.held_stream()
            self._events += [driver.create_event() for _ in range(plan.events + 1)]
            words = executor.host
            resolve = Resolver(program, executor.rank, addresses, executor.cells, words)
            frame = Frame(
                driver,
                plan,
                resolve,
                sides=executor.shared_sides(plan.streams - 1),
                events=self._events[1:],
                stamps={},
                captured=False,
                busy=0,
                reduce_blocks=executor.reduce_blocks,
            )
            self._bound = BoundPlan(frame, resolve)
            self.trigger_address, done = words[trigger], words[Gate.DONE]
            self._fire = SharedValueOps(driver, [self.trigger_address], [done])
            self._release = SharedValueOps(driver, [self.trigger_address], [])
            self._join = SharedValueOps(driver, [], [done])
            # A stream that waits for a trigger of its own time-outs like one whose peers do not come.
            self._begin_and_join = SharedValueOps(driver, [words[HostWord.STARTED]], [done])
        self._by_stream: dict[tuple[SharedValueOps, int], list[Bound]] = {}
        self._fire_on: dict[int, list[Bound]] = {}
        submitted = Submitted(
            str(program.collective), "dma", f"{program.variant}, prelaunched", False, counts_of(plan, Route.DIRECT)
        )
        self._entry = executor.ledger.entry(submitted)
        executor.rescue.register(program, executor.rank, addresses)
        weakref.finalize(self, destroy_events, driver, self._events).atexit = False

    def arm(self, epoch: int, after: int | None = None) -> None:
        """Submit invocation ``epoch``, which waits for its trigger. The ledger counts what this submits.

        Args:
            epoch: larger than that of any invocation before.
            after: a stream whose work so far comes before it, wherever the trigger comes from.

        Raises:
            PeerError, PeerTimeoutError: an earlier invocation failed; nothing was submitted.
            DriverError: the driver refused a call. The executor is of no use any more.
        """
        executor, driver = self._executor, self._executor.driver
        executor.check_usable("arm")
        with executor.lock, driver.current():
            self._bound.set_epoch(epoch)
            for batch in (self._fire, self._release, self._join, self._begin_and_join):
                batch.set(epoch)
            try:
                if after is not None and after != self._home:
                    event = self._events[0]
                    driver.submit([driver.bind_record(event, after), driver.bind_wait(event, self._home)])
                driver.submit(self._bound.steps(self._home))
            except BaseException as error:
                executor.watch.fail_submission(f"{self.program.collective} {self.program.variant}", error)
                raise
            self._epoch = executor.armed_epoch = epoch
            executor.watch.issued(epoch, (self.program, self._addresses, 0))
            executor.ledger.count(self._entry)

    def fire(self, place: Place) -> None:
        """Fire behind the work of a stream so far; its next work follows the end. One call to the driver.

        Raises:
            ValueError: the stream is being captured.
            PeerError, PeerTimeoutError: an invocation failed.
        """
        stream, capturing = place
        driver, watch = self._executor.driver, self._executor.watch
        if watch.failure is not None:
            watch.raise_failure()
        if capturing:
            _refuse_capture("trigger")
        calls = self._fire_on.get(stream)
        if calls is None:
            calls = self._fire_on[stream] = self._bind(self._fire, stream)
        try:
            if driver.is_current():
                driver.submit(calls)
            else:
                with driver.current():
                    driver.submit(calls)
        except BaseException as error:  # what is armed would never go
            watch.fail_submission(f"{self.program.collective} {self.program.variant}", error)
            raise

    def fire_from_host(self) -> None:
        """Fire at once by one store of this thread.

        Raises:
            ValueError: the trigger is not in host memory.
        """
        if not self.host_trigger:
            raise ValueError(
                "trigger_from_host: the trigger is in device memory (allowed=prepare with host_trigger=True)"
            )
        executor = self._executor
        if executor.watch.failure is not None or executor.closed:
            executor.check_usable("trigger_from_host")
        executor.gates.store(self._epoch)

    def join(self, place: Place, *, begun: bool) -> None:
        """Order the next work of a stream behind the end. ``begun``: it has been fired, else a kernel will.

        Raises:
            As :meth:`fire`.
        """
        stream, capturing = place
        self._executor.check_usable("wait")
        if capturing:
            _refuse_capture("wait")
        driver = self._executor.driver
        with driver.current():
            driver.submit(self._bind(self._join if begun else self._begin_and_join, stream))

    def finish(self, *, fire: bool) -> None:
        """Block the host until the last invocation has ended; ``fire`` it first. Where it fails, until all is drained.

        Raises:
            PeerError, PeerTimeoutError: it did not end as it should.
        """
        executor = self._executor
        try:
            executor.check_usable("close")
            if fire and self.host_trigger:
                self.fire_from_host()
            elif fire:
                with executor.driver.current():
                    executor.driver.submit([self._release.bind(executor.internal)])
            executor.watch.wait(self._epoch)
        except SidelaneError:
            executor.drain()
            raise

    @property
    def home(self) -> int:
        """The stream behind whose work the last invocation has ended."""
        return self._home

    def _bind(self, batch: SharedValueOps, stream: int) -> list[Bound]:
        """``batch`` on ``stream``, by way of the internal one where the driver has no memory operations."""
        calls = self._by_stream.get((batch, stream))
        if calls is None:
            if len(self._by_stream) >= _MOST_CALLERS:
                self._by_stream.clear()
                self._fire_on.clear()
            calls = self._executor.by_way_of_internal(stream, batch.bind)
            self._by_stream[batch, stream] = calls
        return calls


def _refuse_capture(method: str) -> None:
    raise ValueError(
        f"{method}: a graph is being captured, which would repeat the trigger of this one call (allowed=outside)"
    )
