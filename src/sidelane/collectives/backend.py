"""What a device adds to a communicator: its memory, its executor, and how a call is ordered with the caller's work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from sidelane.choice import Abilities
from sidelane.collectives.work import Work
from sidelane.errors import SidelaneError
from sidelane.execute.base import Addresses, Executor, LoadedProgram, Place, Questions, Runnable
from sidelane.memory.base import SymmetricBlock, SymmetricMemory
from sidelane.memory.ordinary import OrdinaryMemory
from sidelane.program.ir import Program, Value
from sidelane.program.kernel_call import KernelCall
from sidelane.program.kernel_list import AnyKernelProgram


class SubmittedAhead(Protocol):
    """A program whose invocations are submitted ahead and fired later (``Communicator.prepare_all_gather``)."""

    @property
    def trigger_address(self) -> int:
        """Where a kernel of this rank fires by storing the epoch."""
        ...

    def arm(self, epoch: int) -> None:
        """Submit an invocation, to follow all calls so far and to wait for its trigger."""
        ...

    def fire(self) -> None:
        """Fire behind the caller's work so far; the caller's next work follows the end."""
        ...

    def fire_from_host(self) -> None:
        """Fire at once."""
        ...

    def wait(self, *, begun: bool) -> None:
        """Order the caller behind the end. ``begun``: it was fired from here; else a kernel fires it."""
        ...

    def finish(self) -> None:
        """Block the host until what was fired from here has ended."""
        ...

    def give_up(self) -> None:
        """End what is armed and was not fired: cancel it, or else fire it and block until it has ended."""
        ...

    def drain(self) -> None:
        """After a failure, block until nothing of this rank can touch the tensors any more. Raises nothing."""
        ...


class Trigger(Protocol):
    """Flags of this rank that its caller signals while a program is under way."""

    def fire(self, epoch: int, place: Place) -> None:
        """Signal behind the caller's work so far."""
        ...

    def fire_from_host(self, epoch: int) -> None:
        """Signal at once."""
        ...


class Arrival(Protocol):
    """Flags of this rank that are signalled while a program is under way, when its caller may read."""

    def follow(self, epoch: int, place: Place, work: Work | None) -> None:
        """Let the caller's next work follow the arrival; ``work`` of the program may be waited for in its place."""
        ...


class Marked(Protocol):
    """A program with triggers or arrivals on its way into a graph, where these are dependencies."""

    def mark(self, number: int, place: Place) -> None:
        """Let what waits for a trigger follow the caller's work so far."""
        ...

    def follow(self, number: int, place: Place) -> None:
        """Let the caller's next work follow an arrival."""
        ...


class SecondMapping(Protocol):
    """A second mapping of a symmetric block. It goes with its last reference."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where this process reaches each rank's part, equally far apart."""
        ...


class KernelRunnable(Runnable, Protocol):
    """A launch of a kernel of the caller's own."""

    @property
    def is_prepared(self) -> bool:
        """True if it can be run again, with the same arguments, and does not keep them."""
        ...


class HostPath(NamedTuple):
    """What a call that is not asynchronous asks before it runs.

    Attributes:
        questions: where the caller stands.
        last: object and attribute that hold the stream of the last call, None before the first: on another one a call
            must be ordered behind that.
        lock: of the executor, held while commands are submitted.
        guards: (object, attribute, what it is while nothing stands in the way of a call).
    """

    questions: Questions
    last: tuple[object, str]
    lock: threading.Lock
    guards: tuple[tuple[object, str, object], ...]


class Backend(Protocol):
    """One device type's part of a communicator."""

    @property
    def memory(self) -> SymmetricMemory: ...

    @property
    def ordinary(self) -> OrdinaryMemory | None:
        """How peers reach other memory; None where they do not."""
        ...

    @property
    def hosts_meet(self) -> bool:
        """True where a call waits for its peers' hosts anyway."""
        ...

    @property
    def executor(self) -> Executor: ...

    @property
    def abilities(self) -> Abilities:
        """What ``auto`` may choose among; the same on all ranks."""
        ...

    def spread(self, block: SymmetricBlock) -> SecondMapping | None:
        """Map a block of all ranks once more, at equal distances; None if the device cannot."""
        ...

    def load_kernel(self, program: AnyKernelProgram, addresses: Addresses, frozen: bool) -> LoadedProgram:
        """Bind a collective that one kernel runs. ``frozen``: for a graph under capture.

        Raises:
            UnavailableError: this device runs none (``abilities`` says so).
        """
        ...

    @property
    def board(self) -> int:
        """Address of what kernels and the host tell each other (``device/layout.py``)."""
        ...

    def bind_kernel_call(self, call: KernelCall, *, compiles: bool) -> KernelRunnable:
        """Make a kernel of the caller's own ready to be launched. ``compiles``: see to it that it can be.

        Raises:
            UnavailableError: this device does not run it.
            Exception: it cannot be compiled.
        """
        ...

    def bind_trigger(self, words: Sequence[tuple[int, Value]], loaded: Runnable) -> Trigger:
        """Make flags of this rank, (address, value) of each, ready to be signalled while ``loaded`` waits for them.

        Raises:
            UnavailableError: no trigger could get through to it.
        """
        ...

    def bind_arrival(self, words: Sequence[tuple[int, Value]], loaded: Runnable) -> Arrival:
        """Make flags of this rank, (address, value) of each, ready to be waited for while ``loaded`` is under way."""
        ...

    def hold(self, program: Program, addresses: Addresses, host_trigger: bool) -> SubmittedAhead:
        """Bind a program with one trigger on each rank (``transform.hold``). ``host_trigger``: the host fires it, too.

        Raises:
            UnavailableError: no trigger could get through to it.
        """
        ...

    def place(self) -> Place:
        """Where the caller stands. Asked once a call, since to ask takes time."""
        ...

    def capture_of(self, place: Place) -> int:
        """Number of the capture that ``place`` is in, which no other capture has or had; 0 outside of captures."""
        ...

    def run(
        self, loaded: Runnable, epoch: int, async_op: bool, tensors: Sequence[torch.Tensor | None], place: Place
    ) -> Work | None:
        """Start a program behind the caller's work so far. Without ``async_op``, the caller's next work follows it.

        ``place``: where the caller stands. If it is being captured, the program was made for that.
        """
        ...

    def guard_captured(self, what: str, is_gone: Callable[[], bool]) -> None:
        """The call that was captured just now uses memory that may be freed: say so, and that it is replayed then.

        Args:
            what: the call and its tensors, for people.
            is_gone: whether some of that was freed. Called by another thread.
        """
        ...

    def host_path(self) -> HostPath | None:
        """What repeated calls ask on their way; None if they cost no time that matters."""
        ...

    def follow_all(self) -> None:
        """Order the caller's next work behind all calls, and behind the work of streams that were noted."""
        ...

    def note_stream(self) -> None:
        """Memory is allocated for the work of the caller's stream."""
        ...

    def set_timeout(self, timeout_s: float) -> None:
        """Let waits of calls take so long from now on."""
        ...

    def synchronize(self) -> None:
        """Block the host until every call has finished. Raises what went wrong."""
        ...

    def settle(self) -> None:
        """Return when what torch was told to store so far is there."""
        ...

    def renew(self, call: int) -> None:
        """Let words of its own that follow calls count as set by ``call``; return when what was stored so far is there.

        Nothing may be under way.
        """
        ...

    def disown(self, error: SidelaneError) -> None:
        """This process is a forked copy: whoever waits for anything here gets ``error``, and nothing is touched."""
        ...

    def close(self) -> None: ...
