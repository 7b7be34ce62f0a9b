"""Interface between a communicator and a device type: memory, executor, and order of calls with the caller's work."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from sidelane.choice import Abilities
from sidelane.collectives.work import Work
from sidelane.errors import SidelaneError, UnavailableError
from sidelane.execute.base import Addresses, CallerStream, Executor, Questions, Repetition, Runnable
from sidelane.machine.peers import SHARED, PeerMemory
from sidelane.memory.heap import SymmetricBlock, SymmetricMemory
from sidelane.program.ir import Value
from sidelane.program.kernel import KernelCall, KernelProgram

if TYPE_CHECKING:
    from sidelane.execute.cuda.exported import ExportedMemory


class Trigger(Protocol):
    """Flags of this rank that its caller signals while a program is under way."""

    def fire(self, epoch: int, caller: CallerStream, *, follows: bool = False) -> None:
        """Signal behind the caller's work so far. ``follows``: the caller's next work follows the end of the call."""
        ...

    def fire_from_host(self, epoch: int) -> None:
        """Signal at once."""
        ...

    def follow(self, epoch: int, caller: CallerStream, *, fired: bool) -> None:
        """Let the caller's next work follow the end of the call.

        If it was not ``fired``, a kernel has signalled, or will, and time-outs count from the caller's work so far.

        Raises:
            RuntimeError: no kernel has signalled, and none will: on a device without streams.
        """
        ...


class Arrival(Protocol):
    """Flags of this rank that are signalled while a program is under way, as soon as its caller may read."""

    def follow(self, epoch: int, caller: CallerStream, work: Work | None) -> None:
        """Let the caller's next work follow the arrival, or the end of ``work``, the whole program."""
        ...


class KernelRunnable(Runnable, Protocol):
    """A launch of the caller's own kernel."""

    @property
    def is_prepared(self) -> bool:
        """True if the launch can be repeated with the same arguments, without keeping them alive."""
        ...

    def following(self, caller: CallerStream, arguments: Sequence[int]) -> tuple[Repetition, tuple[int, ...]] | None:
        """Return the acts of the last :meth:`run` from ``caller``, and those words that hold arguments' addresses.

        Args:
            caller: where it ran.
            arguments: numbers of the arguments, which are tensors or None.

        Returns:
            The repetition, whose steps no other code uses, and for each argument the address of its 64-bit word, 0 for
            None. None: more than the words may change with the tensors, or only Triton's launcher can launch it.
        """
        ...


class Backend(abc.ABC):
    """The device-specific part of a communicator. Its own methods are those of a device without streams.

    Attributes:
        memory: allocator of symmetric memory.
        executor: executor of programs.
        abilities: the implementations that ``auto`` may choose among; the same on all ranks.
        exported: the means by which peers map memory that others have allocated; None where there is none.
        peers: memory through which the ranks' devices reach each other.
        hosts_meet: every call waits for the hosts of its peers anyway.
    """

    memory: SymmetricMemory
    executor: Executor
    abilities: Abilities
    exported: ExportedMemory | None = None
    peers: PeerMemory = SHARED
    hosts_meet = False

    def load_kernel(self, program: KernelProgram, addresses: Addresses, frozen: bool) -> Runnable:
        """Bind a collective that one kernel runs. ``frozen``: it is being captured into a graph.

        Raises:
            UnavailableError: this device runs no such kernels (see ``abilities``).
        """
        raise UnavailableError(f"{program.collective}: variant {program.variant!r} runs on GPUs only")

    @property
    @abc.abstractmethod
    def status_words(self) -> int:
        """Address of the status words, which kernels and the host exchange (``device/layout.py``)."""

    @abc.abstractmethod
    def bind_kernel_call(self, call: KernelCall, *, compiles: bool) -> KernelRunnable:
        """Prepare the caller's own kernel for its launch. ``compiles``: compile it now, so that a failure shows here.

        Raises:
            UnavailableError: this device does not run it.
            Exception: it cannot be compiled.
        """

    @abc.abstractmethod
    def bind_trigger(self, words: Sequence[tuple[int, Value]], loaded: Runnable) -> Trigger:
        """Prepare signals of this rank's flags, (address, value) each, for which the commands of ``loaded`` wait.

        Raises:
            UnavailableError: a trigger could not be delivered while ``loaded`` runs: it holds all hardware channels.
        """

    @abc.abstractmethod
    def bind_arrival(self, words: Sequence[tuple[int, Value]], loaded: Runnable) -> Arrival:
        """Prepare waits for this rank's flags, (address, value) each, which ``loaded`` signals on its way."""

    @abc.abstractmethod
    def caller_stream(self) -> CallerStream:
        """Return the caller's current stream, and whether it is captured. Called once per call, since it takes time."""

    @property
    def ahead(self) -> CallerStream | None:
        """The stream of prelaunched calls, which wait for their trigger there; None if there are no streams."""
        return None

    def note_followed(self, caller: CallerStream) -> None:
        """Note that the caller's stream waits for the end of the last prelaunched call."""
        return

    def capture_of(self, caller: CallerStream) -> int:
        """Return the number of the capture that ``caller`` is in, which is never used twice; 0 outside of captures."""
        return 0

    @abc.abstractmethod
    def run(
        self, loaded: Runnable, epoch: int, async_op: bool, tensors: Sequence[torch.Tensor | None], caller: CallerStream
    ) -> Work | None:
        """Start a program behind the caller's work so far. Without ``async_op``, the caller's next work follows it.

        ``caller``: the caller's stream. If it is being captured, the program was made for a capture.
        """

    def questions(self) -> Questions | None:
        """Return the queries in front of a repeated call; None if their time does not matter on this device."""
        return None

    def follow_all(self) -> None:
        """Order the caller's next work after all calls, and after the work of streams that were noted."""
        return

    def note_stream(self) -> None:
        """Note that memory is allocated for the work of the caller's stream (see :meth:`follow_all`)."""
        return

    def engine_streams(self) -> Sequence[int]:
        """Return the handles of the streams that run copy engines beside the caller's stream."""
        return ()

    @abc.abstractmethod
    def set_timeout(self, timeout_s: float) -> None:
        """Set the time-out of the waits of calls, in seconds."""

    @abc.abstractmethod
    def synchronize(self, call: int | None = None) -> None:
        """Block the host until every call has finished. Raises the error of a call that failed.

        ``call``: only this one and those before it are waited for; others may be armed.
        """

    def forget_flags(self, bases: Sequence[int], memory: SymmetricBlock) -> None:
        """Touch flag memories of this rank no more, whose calls have ended: the caller drops the block around them."""
        return

    @abc.abstractmethod
    def wait_for_stores(self) -> None:
        """Return once all stores that torch has submitted so far are in memory."""

    @abc.abstractmethod
    def renew(self, call: int) -> None:
        """Set the backend's own flag words as if ``call`` had set them; return once all stores so far are in memory.

        No call may be under way.
        """

    @abc.abstractmethod
    def disown(self, error: SidelaneError) -> None:
        """Disable this backend in a forked copy of the process: waits raise ``error``, and no memory is touched."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release streams, threads and memory."""
