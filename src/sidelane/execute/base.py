"""What every executor offers: load a program once, run it many times.

An executor belongs to one rank: it runs that rank's queues of a program. It is the only code that calls a driver.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from sidelane.execute.submitted import SubmissionLedger
from sidelane.native import Note
from sidelane.program.ir import Flag, Move, Program
from sidelane.program.kernel_call import KernelCall
from sidelane.program.kernel_list import AnyKernelProgram
from sidelane.program.wraparound import WORD_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executor runs as it is; transforms rewrite the rest (see ``program.transform``).

    Attributes:
        moves: the move commands that it has (``Copy`` always).
        device_type: of the tensors that it moves, as torch names it.
    """

    moves: frozenset[type[Move]]
    device_type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A virtual buffer (``program.batch``): those of its pieces that this process reaches, in their order.

    Attributes:
        starts: offset of each in the buffer.
        sizes: bytes of each, none of them 0.
        addresses: of each.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    addresses: tuple[int, ...]

    def find(self, offset: int) -> int | None:
        """Address of a byte; None where there is none.

        >>> pieces = Pieces(starts=(0, 256), sizes=(100, 8), addresses=(9000, 5000))
        >>> pieces.find(260), pieces.find(100)
        (5004, None)
        """
        index = bisect_right(self.starts, offset) - 1
        if index < 0 or offset >= self.starts[index] + self.sizes[index]:
            return None
        return self.addresses[index] + offset - self.starts[index]


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """Where this process reaches the memory that a program names.

    Attributes:
        buffers: address of each (rank, buffer) that this rank's queues touch.
        flags: address of each rank's flag memory (32-bit words).
        arenas: address of each rank's arena (``device/layout.py``); kernels only.
        pieces: of each (rank, buffer) that consists of some; these are not among ``buffers``.
        spread: the staging of all ranks lies at equal distances in one mapping.
        triggers: address of flags that lie apart from the others: triggers of this rank, which no other touches.
    """

    buffers: Mapping[tuple[int, str], int]
    flags: tuple[int, ...]
    arenas: tuple[int, ...] = ()
    pieces: Mapping[tuple[int, str], Pieces] = dataclasses.field(default_factory=dict)
    spread: bool = False
    triggers: Mapping[Flag, int] = dataclasses.field(default_factory=dict)

    def flag(self, flag: Flag) -> int:
        """Address of a flag."""
        return self.triggers.get(flag) or self.flags[flag.rank] + WORD_BYTES * flag.index

    def find(self, rank: int, buffer: str, offset: int) -> int | None:
        """Address of a byte of a buffer; None where this process has none."""
        pieces = self.pieces.get((rank, buffer))
        if pieces is not None:
            return pieces.find(offset)
        base = self.buffers.get((rank, buffer))
        return None if base is None else base + offset


class Pending(Protocol):
    """One running invocation."""

    def done(self) -> bool:
        """True once every command of this rank has finished. Never blocks, never raises."""
        ...

    def wait(self) -> None:
        """Block until ``done``.

        Raises:
            PeerError: a peer died or refused the call.
            PeerTimeoutError: a peer did not come or stopped, within the communicator's time-out.
        """
        ...


Place = tuple[int, bool]
"""Where a call stands in the work of its caller: the handle of a stream, and whether it is being captured."""

NO_STREAM: Place = (0, False)
"""Where all calls stand on a device that has no streams."""


class Questions(NamedTuple):
    """How to find the place of a caller on GPU ``device``, for code that asks often.

    Attributes:
        stream_of: handle of the stream that is current on a device.
        capturing: whether the stream that is current on the current device is captured; not to be asked on the legacy
            default stream.
        current_device: which one that is.
        device: of the executor.
    """

    stream_of: Callable[[int], int]
    capturing: Callable[[], bool]
    current_device: Callable[[], int]
    device: int


DriverCall = tuple[int | Callable[..., Any], tuple[Any, ...], object]
"""A C function of integers by its address, or a Python one; its arguments; what keeps the memory that they point to. It
returns an int, 0 for success (Python: or None)."""

Places = tuple[int, int, int] | Callable[[int], Any]
"""Places of one 32-bit word (first address, distance in bytes, how many), or a function that puts it there."""


class Follower(NamedTuple):
    """What follows the address of a buffer in the steps of a repetition: it is that and ``delta``, in 64 bits.

    Attributes:
        buffer: rank and name.
        delta: bytes.
        step: index.
        argument: index of an argument of it.
        address: of a word in the memory that the argument points to; 0 for the argument itself.
    """

    buffer: tuple[int, str]
    delta: int
    step: int
    argument: int
    address: int


@dataclasses.dataclass(frozen=True, slots=True)
class Repetition:
    """What :meth:`Runnable.run` does each time from one place, for code that does it without calling that.

    Attributes:
        steps: calls to the driver, in order, all with the executor's lock held.
        words: before that, what depends on the number of the invocation: (base, increment for each number, where).
        notes: after that, what is noted down.
        failed: called with the index of a step and its error (what it returned or raised): raises.
        turn: (object, attribute, what it is when it is the turn of this, what it is next); None where every call does
            the same.
        followers: of :meth:`Runnable.movable`; nobody else uses its steps.
    """

    steps: tuple[DriverCall, ...]
    words: tuple[tuple[int, int, Places], ...]
    notes: tuple[Note, ...]
    failed: Callable[[int, Any], NoReturn]
    turn: tuple[object, str, object, object] | None = None
    followers: tuple[Follower, ...] = ()


class Runnable(Protocol):
    """What a communicator runs again and again: a loaded program, or several that take turns."""

    @property
    def program(self) -> Program | AnyKernelProgram | KernelCall: ...

    def run(self, epoch: int, place: Place) -> None:
        """Run this rank's queues once, behind the work of ``place`` and in front of what it gets next.

        Devices with streams return at once, others when it has ended. ``epoch`` as in :meth:`LoadedProgram.start`.
        """
        ...

    def repetition(self, place: Place) -> Repetition | None:
        """What the last :meth:`run`, from ``place``, did, where a later one will do the same; else None."""
        ...

    def movable(self, place: Place, buffers: Sequence[tuple[int, str]]) -> Repetition | None:
        """As :meth:`repetition`, with what follows the addresses of some buffers; None where more than these does."""
        ...


class LoadedProgram(Runnable, Protocol):
    """A program bound to addresses: everything that can be worked out before a call has been."""

    def start(self, epoch: int, stream: torch.Stream | None) -> Pending:
        """Run this rank's queues once.

        Args:
            epoch: number of the invocation, from 1, the same on every rank, growing by any step.
            stream: the work before and after is ordered by this stream; None where the device has no streams.
        """
        ...


class Executor(Protocol):
    """Runs one rank's part of programs on one kind of device."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def ledger(self) -> SubmissionLedger:
        """What was submitted so far."""
        ...

    def load(self, program: Program, addresses: Addresses, *, captured: bool = False) -> LoadedProgram:
        """Bind this rank's part of ``program``.

        Args:
            program: what to run.
            addresses: where.
            captured: it is for a graph of the caller's, and has no epochs (``transform.freeze``); else for eager calls.

        Raises:
            ValueError: the program has commands or buffers that this executor cannot run; the text names them.
        """
        ...

    def close(self) -> None:
        """Stop threads, release streams and events. Idempotent."""
        ...
