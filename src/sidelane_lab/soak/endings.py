"""How an episode can end, and what every rank must then see (docs/internals/failure.md promises it)."""

from __future__ import annotations

import dataclasses
import signal

START_S = 60.0
"""For a rank to come to the others."""

SLACK_S = 15.0
"""What hearing of a fault may take beyond the time-out, or without one: ranks may share a core with seven others."""

EXIT_CODE = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """One way to end.

    Attributes:
        weight: how often it is drawn, among the others.
        told: types of errors, one of which every other rank must get; empty if nothing is wrong.
        culprits: types of errors, one of which the culprit must get itself; empty if it gets none.
        exit_codes: of its process.
        times_out: the others wait for the time-out.
        within: it may hit in the middle of a call.
        names: the errors of the others name the culprit, and nobody else.
    """

    weight: float
    told: tuple[str, ...] = ("PeerError",)
    culprits: tuple[str, ...] = ()
    exit_codes: tuple[int, ...] = (0,)
    times_out: bool = False
    within: bool = False
    names: bool = True


GOOD, KILLED, STOPPED, CONTINUED, EXITS = "good", "killed", "stopped", "continued", "exits"
RAISES, UNCAUGHT, INTERRUPTED, CLOSES = "raises", "uncaught", "interrupted", "closes early"
ANOTHER_CALL, NEVER_COMES, NEVER_MAKES, TWO_THREADS = "another call", "never comes", "never makes one", "two threads"

_LATE = ("PeerError", "PeerTimeoutError")

ENDINGS: dict[str, Ending] = {
    GOOD: Ending(60.0, told=()),
    KILLED: Ending(8.0, exit_codes=(-signal.SIGKILL,), within=True),
    STOPPED: Ending(2.0, told=("PeerTimeoutError",), exit_codes=(-signal.SIGKILL,), times_out=True, within=True),
    CONTINUED: Ending(2.0, told=("PeerTimeoutError",), culprits=_LATE, times_out=True, within=True),
    EXITS: Ending(5.0, exit_codes=(EXIT_CODE,), within=True),
    RAISES: Ending(4.0),
    UNCAUGHT: Ending(3.0, exit_codes=(1,)),
    INTERRUPTED: Ending(6.0, culprits=("KeyboardInterrupt",), within=True),
    CLOSES: Ending(4.0),
    ANOTHER_CALL: Ending(
        2.0,
        told=("PeerError", "PeerTimeoutError", "MismatchError"),
        culprits=("MismatchError", *_LATE),
        times_out=True,
        names=False,
    ),
    NEVER_COMES: Ending(2.0, told=("PeerTimeoutError",), culprits=_LATE, times_out=True),
    NEVER_MAKES: Ending(2.0, told=("PeerTimeoutError",), times_out=True),
    TWO_THREADS: Ending(3.0, culprits=(*_LATE, "CommunicatorClosedError")),
}

ON_CPUS_ONLY = (ANOTHER_CALL,)
"""On GPUs the host does not wait for the end of a call: two known calls that differ may pass for one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """The error that ended a rank's calls.

    Attributes:
        name: its type.
        ranks: that it names.
        text: what it says.
        at_s: when it was caught, on the clock that all processes share.
    """

    name: str
    ranks: tuple[int, ...]
    text: str
    at_s: float


def objections(
    name: str, rank: int, culprit: int, told: Told | None, faulted_at_s: float, timeout_s: float
) -> list[str]:
    """What is wrong with what a rank saw of the end.

    Args:
        name: of the ending.
        rank: who saw it; the culprit itself or another one.
        culprit: who was at fault.
        told: the error that it got.
        faulted_at_s: when the culprit did what it did.
        timeout_s: of the communicator.
    """
    ending = ENDINGS[name]
    allowed = ending.culprits if rank == culprit else ending.told
    if told is None:
        return [f"{name} of rank {culprit}: no error was raised (allowed={' or '.join(allowed)})"] if allowed else []
    shown = f"{told.name} naming {told.ranks}: {told.text}"
    if told.name not in allowed:
        return [f"{name} of rank {culprit}: {shown} (allowed={' or '.join(allowed) or 'no error'})"]
    found = []
    if ending.names and told.name != "KeyboardInterrupt" and told.ranks != (culprit,):
        found.append(f"{name}: rank {culprit} is not the one that is named: {shown}")
    took_s = told.at_s - faulted_at_s
    if rank != culprit and took_s > (timeout_s if ending.times_out else 0.0) + SLACK_S:
        found.append(f"{name} of rank {culprit}: heard of after {took_s:.1f} s (timeout={timeout_s:g} s): {shown}")
    return found
