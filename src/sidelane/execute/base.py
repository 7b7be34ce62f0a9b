"""Interface of executors: they load a program once and run it many times.

An executor belongs to one rank and runs that rank's queues of a program. Only executors call a driver.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from sidelane.execute.submitted import SubmissionLedger
from sidelane.native import Note
from sidelane.program.ir import Flag, Move, Program
from sidelane.program.kernel import KernelCall, KernelProgram
from sidelane.program.wraparound import WORD_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """The commands that an executor supports; transforms lower programs to these (see ``program.transform``).

    Attributes:
        moves: supported move commands (``Copy`` always).
        device_type: torch's name of the device type whose tensors it moves.
    """

    moves: frozenset[type[Move]]
    device_type: str


ENDLESS = 1 << 62
"""Size in bytes that stands for a row or buffer of which only the program knows the end."""


class Stretch(NamedTuple):
    """The bytes of a buffer from some offset on, as far as they lie in rows at equal distances.

    Attributes:
        address: address of the first byte.
        in_row: bytes to the end of its row.
        width: size of a row in bytes.
        pitch: distance from row to row in bytes.
        nbytes: bytes to the end of the last row.
    """

    address: int
    in_row: int
    width: int
    pitch: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a virtual buffer (``program.batch``) that this process reaches, in their order.

    Attributes:
        starts: offset of each piece in the buffer.
        sizes: size of each piece in bytes, > 0.
        addresses: address of each piece.
        rows: size of a row in bytes and distance from row to row, for each piece; empty if all pieces are contiguous.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    addresses: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] = ()

    def find(self, offset: int) -> int | None:
        """Return the address of a byte; None if no piece holds it.

        >>> pieces = Pieces(starts=(0, 256), sizes=(100, 8), addresses=(9000, 5000))
        >>> pieces.find(260), pieces.find(100)
        (5004, None)
        """
        if self.rows:
            found = self.stretch(offset)
            return None if found is None else found.address
        index = bisect_right(self.starts, offset) - 1
        if index < 0 or offset >= self.starts[index] + self.sizes[index]:
            return None
        return self.addresses[index] + offset - self.starts[index]

    def stretch(self, offset: int) -> Stretch | None:
        """Return the bytes from an offset on; None if no piece holds the first.

        >>> Pieces(starts=(0,), sizes=(100,), addresses=(9000,), rows=((10, 64),)).stretch(23)
        Stretch(address=9131, in_row=7, width=10, pitch=64, nbytes=77)
        """
        index = bisect_right(self.starts, offset) - 1
        if index < 0 or offset >= self.starts[index] + self.sizes[index]:
            return None
        inside, nbytes = offset - self.starts[index], self.sizes[index]
        width, pitch = self.rows[index] if self.rows else (nbytes, nbytes)
        row, column = divmod(inside, width)
        return Stretch(self.addresses[index] + row * pitch + column, width - column, width, pitch, nbytes - inside)


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses in this process of the memory that a program names.

    Attributes:
        buffers: address of each (rank, buffer) that this rank's queues use.
        flags: address of each rank's flag memory (32-bit words).
        arenas: address of each rank's arena (``device/layout.py``); kernels only.
        pieces: pieces of each (rank, buffer) that is a virtual buffer; these are not among ``buffers``.
    """

    buffers: Mapping[tuple[int, str], int]
    flags: tuple[int, ...]
    arenas: tuple[int, ...] = ()
    pieces: Mapping[tuple[int, str], Pieces] = dataclasses.field(default_factory=dict)

    def flag(self, flag: Flag) -> int:
        """Return the address of a flag."""
        return self.flags[flag.rank] + WORD_BYTES * flag.index

    @property
    def has_rows(self) -> bool:
        """True if bytes that follow each other in some buffer do not lie so in memory."""
        return any(pieces.rows for pieces in self.pieces.values())

    def stretch(self, rank: int, buffer: str, offset: int) -> Stretch | None:
        """Return the bytes of a buffer from an offset on; None if this process does not reach the first."""
        pieces = self.pieces.get((rank, buffer))
        if pieces is not None:
            return pieces.stretch(offset)
        base = self.buffers.get((rank, buffer))
        return None if base is None else Stretch(base + offset, ENDLESS, ENDLESS, ENDLESS, ENDLESS)

    def find(self, rank: int, buffer: str, offset: int) -> int | None:
        """Return the address of a byte of a buffer; None if this process does not reach it."""
        pieces = self.pieces.get((rank, buffer))
        if pieces is not None:
            return pieces.find(offset)
        base = self.buffers.get((rank, buffer))
        return None if base is None else base + offset


CallerStream = tuple[int, bool]
"""The stream from which a call is made: its handle, and whether it is being captured."""

NO_STREAM: CallerStream = (0, False)
"""Stream of all calls on a device without streams."""


class Questions(NamedTuple):
    """Functions that find the stream of a caller on GPU ``device``, for compiled code.

    Attributes:
        stream_of: returns the handle of a device's current stream.
        capturing: returns whether the current device's current stream is captured; must not be called on the legacy
            default stream.
        current_device: returns the index of the current device.
        device: index of the executor's device.
        streams: object to keep, and the addresses of C functions that order streams: those that record an event, let a
            stream wait for one, query, create and destroy one, and query whether a stream is captured; () for none.
    """

    stream_of: Callable[[int], int]
    capturing: Callable[[], bool]
    current_device: Callable[[], int]
    device: int
    streams: tuple[object, ...] = ()


DriverCall = tuple[int | Callable[..., Any], tuple[Any, ...], object]
"""A prepared call: the address of a C function of integers, or a Python function; its arguments; an object that keeps
the memory to which they point. The function returns an int, 0 for success (a Python function may return None)."""

StridedWords = tuple[int, int, int]
"""The 32-bit words that hold one value: first address, distance in bytes, number."""


class Follower(NamedTuple):
    """A 64-bit value in the steps of a repetition that is the address of a buffer plus ``delta``.

    Attributes:
        buffer: rank and name of the buffer.
        delta: distance from the buffer's address in bytes.
        step: index of the step.
        argument: index of the argument of the step.
        address: address of a word in the memory to which the argument points; 0 for the argument itself.
    """

    buffer: tuple[int, str]
    delta: int
    step: int
    argument: int
    address: int


@dataclasses.dataclass(frozen=True, slots=True)
class Repetition:
    """The acts of :meth:`Runnable.run` from one stream, as data for compiled code that repeats them.

    Attributes:
        steps: calls to the driver, in order, all with the executor's lock held.
        words: words to store before the steps, which depend on the call number: (base, increment per call, addresses).
        notes: side effects on Python objects after the steps.
        failed: raises; called with the index of a step and the error that it returned or raised.
        followers: values that follow addresses of buffers that may move; no other code uses the steps then.
    """

    steps: tuple[DriverCall, ...]
    words: tuple[tuple[int, int, StridedWords], ...]
    notes: tuple[Note, ...]
    failed: Callable[[int, Any], NoReturn]
    followers: tuple[Follower, ...] = ()


class Runnable(Protocol):
    """A loaded program, which a communicator runs repeatedly."""

    @property
    def program(self) -> Program | KernelProgram | KernelCall: ...

    def run(self, epoch: int, caller: CallerStream) -> None:
        """Run this rank's queues once, after the earlier work of ``caller`` and before its later work.

        Devices with streams return at once, others when it has ended.

        Args:
            epoch: number of the invocation, from 1, the same on every rank, growing by any step.
            caller: the caller's stream, and whether it is captured; ``NO_STREAM`` on a device without streams.
        """
        ...

    def repetition(self, caller: CallerStream, moving: Sequence[tuple[int, str]] | None = None) -> Repetition | None:
        """Return the acts of the last :meth:`run` from ``caller``, if later runs repeat them; else None.

        Args:
            caller: the stream of that run.
            moving: buffers that may lie elsewhere in later runs, which have ``followers`` then; None: none may.
        """
        ...


class Executor(Protocol):
    """Runs one rank's part of programs on one kind of device."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def ledger(self) -> SubmissionLedger:
        """The record of submitted commands."""
        ...

    def load(self, program: Program, addresses: Addresses, *, captured: bool = False) -> Runnable:
        """Bind this rank's part of ``program``.

        Args:
            program: the program.
            addresses: addresses of its buffers and flags.
            captured: it is for a graph, and has no epochs (``transform.freeze``); else it is for eager calls.

        Raises:
            ValueError: the program has commands or buffers that this executor cannot run; the text names them.
        """
        ...

    def close(self) -> None:
        """Stop threads, release streams and events. Idempotent."""
        ...
