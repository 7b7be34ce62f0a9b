"""What the ranks of an episode do, step by step: frozen data, the same on every rank."""

from __future__ import annotations

import dataclasses

from sidelane_lab.soak.described import Call


@dataclasses.dataclass(frozen=True, slots=True)
class Open:
    """Make a communicator of the ranks in group ``group``, and memory for its calls.

    Attributes:
        block_bytes: of its first block of symmetric memory, and of its ordinary memory.
        first_call: number that its calls begin with; 0 leaves it as it is.
        is_lane: it is a lane of the first communicator's session, and shares its memory.
    """

    comm: int
    group: int
    block_bytes: int
    first_call: int = 0
    is_lane: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Shut:
    """Close a communicator, and see that it takes no call any more."""

    comm: int


@dataclasses.dataclass(frozen=True, slots=True)
class Once:
    """Make a call and check it.

    Attributes:
        key: says what its inputs are.
        in_turn: another thread does it, while this one waits.
    """

    comm: int
    call: Call
    key: int
    in_turn: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Start calls that are asynchronous, then wait for them in an order of each rank's own.

    Attributes:
        ends_blocking: the last one is not asynchronous.
    """

    comm: int
    calls: tuple[tuple[Call, int], ...]
    ends_blocking: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Barrier:
    """Meet; or, with ``synchronize``, wait on each host for its own calls."""

    comm: int
    synchronize: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Allocate:
    """Another block of symmetric memory."""

    comm: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prepare:
    """Make a handle of a prelaunched call."""

    comm: int
    handle: int
    call: Call
    host_trigger: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Fire:
    """Arm a handle, produce, trigger, check.

    Attributes:
        from_host: by a store of the host.
        early: the input is there before the handle is armed.
        misused: in between, try what an armed handle forbids.
        other: call of another communicator in between: (communicator, call, key).
    """

    comm: int
    handle: int
    call: Call
    key: int
    from_host: bool
    early: bool
    misused: bool
    other: tuple[int, Call, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """Close a handle; with ``armed`` one that was just armed."""

    comm: int
    handle: int
    call: Call
    key: int
    armed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """Make calls, then capture them into one graph."""

    comm: int
    graph: int
    calls: tuple[Call, ...]
    key: int


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """Replay a graph ``len(keys)`` times, with new inputs each time."""

    comm: int
    graph: int
    calls: tuple[Call, ...]
    keys: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """A call that ``culprit`` gets wrong, or all do if it is None: every rank hears of it, and nothing moves.

    Attributes:
        mistake: its name in ``mistakes.MISTAKES``.
        other: a communicator whose memory does not belong here.
    """

    comm: int
    mistake: str
    culprit: int | None
    call: Call
    key: int
    other: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Differ:
    """``culprit`` makes another call than the others: every rank gets a MismatchError, and nothing moves."""

    comm: int
    culprit: int
    call: Call
    another: Call
    key: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """A rank of the world is late, on its host or on its stream."""

    rank: int
    seconds: float
    on_stream: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Freeze:
    """All threads of a rank of the world stop for a while (SIGSTOP), shorter than the time-out."""

    rank: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Fork:
    """A rank of the world forks. The copy ends at once, closes its communicators first, or tries a call.

    Attributes:
        how: ``ends``, ``closes`` or ``calls``.
    """

    rank: int
    comm: int
    how: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """Go on on another stream."""

    number: int


Step = (
    Open | Shut | Once | Overlap | Barrier | Allocate | Prepare | Fire | Finish | Capture | Replay | Refuse | Differ
    | Pause | Freeze | Fork | Stream
)  # fmt: skip


def calls_in(step: Step) -> int:
    """Calls that a step makes and checks; those that are refused do not count."""
    match step:
        case Once() | Barrier(synchronize=False):
            return 1
        case Overlap():
            return len(step.calls)
        case Fire():
            return 1 if step.other is None else 2
        case Capture():
            return len(step.calls)
        case Replay():
            return len(step.calls) * len(step.keys)
        case _:
            return 0
