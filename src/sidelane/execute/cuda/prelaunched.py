"""The CUDA side of a prelaunched call: a loaded program with one trigger, which its handle arms and fires."""

from __future__ import annotations

import dataclasses

from sidelane.errors import SidelaneError
from sidelane.execute.base import Addresses, Place
from sidelane.execute.cuda.held import require_free_channel
from sidelane.execute.cuda.loaded import CudaProgram
from sidelane.execute.cuda.site import CudaSite
from sidelane.execute.cuda.trigger import CudaTrigger
from sidelane.program.ir import EPOCH, Program
from sidelane.program.transform.prelaunch import held_by


class CudaPrelaunched:
    """A program on one rank that is armed and then fired. All of an executor share their words and their stream.

    Args:
        executor: of the rank. One of its programs may be armed at a time, and nothing else may start meanwhile.
        program: made by ``transform.hold``.
        addresses: used as they are: the caller keeps the memory until an armed invocation has ended.
        host_trigger: the trigger lies in pinned host memory, where :meth:`fire_from_host` reaches it, instead of in the
            device's, where the engines see a change sooner.

    Attributes:
        trigger: of the program.
        trigger_address: where it lies. A kernel fires by storing the epoch there, as a 32-bit value, with release
            semantics at system scope.

    Raises:
        UnavailableError: armed, it would hold every hardware channel, so that no trigger came through.
    """

    def __init__(
        self, executor: CudaSite, program: Program, addresses: Addresses, *, host_trigger: bool = False
    ) -> None:
        executor.check_usable("prelaunch")
        flag = held_by(program, executor.rank)
        if flag is None:
            raise ValueError(f"prelaunch: {program.variant!r} has no trigger of all queues (allowed=transform.hold)")
        self.program, self.host_trigger = program, host_trigger
        self._executor = executor
        self.trigger_address = executor.host_trigger.address if host_trigger else executor.trigger_word
        addresses = dataclasses.replace(addresses, triggers={flag: self.trigger_address})
        require_free_channel(str(program.collective), program.variant, executor.plans.of(program).held_streams)
        with executor.lock, executor.driver.current():
            self._loaded = CudaProgram(executor, program, addresses)
        host = executor.host_trigger.array.data if host_trigger else None  # to store there takes a third of the time
        title = f"{program.collective} {program.variant}"
        self.trigger = CudaTrigger(executor, [(self.trigger_address, EPOCH)], title, host=host, ends=True)
        self._epoch = 0

    @property
    def home(self) -> int:
        """The stream behind whose work the last invocation has ended."""
        return self._loaded.home

    def arm(self, epoch: int, after: int | None = None) -> None:
        """Submit invocation ``epoch``, which waits for its trigger (see :meth:`CudaProgram.arm`)."""
        self._loaded.arm(epoch, after)
        self.trigger.set(epoch)
        self._epoch = epoch

    def fire(self, place: Place) -> None:
        """Fire behind the work of a stream so far; its next work follows the end. One call to the driver.

        Raises:
            ValueError: the stream is being captured.
            PeerError, PeerTimeoutError: an invocation failed.
        """
        self.trigger.fire(self._epoch, place)

    def fire_from_host(self) -> None:
        """Fire at once by one store of this thread.

        Raises:
            ValueError: the trigger is not in host memory.
        """
        if not self.host_trigger:
            raise ValueError(
                "trigger_from_host: the trigger is in device memory (allowed=prepare with host_trigger=True)"
            )
        self.trigger.fire_from_host(self._epoch)

    def join(self, place: Place, *, begun: bool) -> None:
        """Order the next work of a stream behind the end (see :meth:`CudaTrigger.join`)."""
        self.trigger.join(self._epoch, place, begun=begun)

    def finish(self, *, fire: bool) -> None:
        """Block the host until the last invocation has ended; ``fire`` it first. Where it fails, until all is drained.

        Raises:
            PeerError, PeerTimeoutError: it did not end as it should.
        """
        executor = self._executor
        try:
            executor.check_usable("close")
            if fire:
                self.trigger.fire_from_host(self._epoch)
            executor.watch.wait(self._epoch)
        except SidelaneError:
            executor.drain()
            raise
