"""The ways in which an episode can end, and what every rank must then see (docs/internals/failure.md promises it)."""

from __future__ import annotations

import dataclasses
import signal

START_S = 60.0
"""Seconds for a rank to come to the others."""

SLACK_S = 15.0
"""Seconds to hear of a fault beyond the time-out, or without one: ranks may share a core with seven others."""

EXIT_CODE = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """One way to end.

    Attributes:
        weight: share of the episodes that end so.
        others: types of errors, one of which every other rank must get; empty if nothing is wrong.
        culprits: types of errors, one of which the culprit must get itself; empty if it gets none.
        exit_codes: allowed exit codes of the culprit's process.
        times_out: the others wait for the time-out.
        within: it may hit in the middle of a call.
        kind: the one kind of episodes that ends so; None: any.
    """

    weight: float
    others: tuple[str, ...] = ("PeerError",)
    culprits: tuple[str, ...] = ()
    exit_codes: tuple[int, ...] = (0,)
    times_out: bool = False
    within: bool = False
    kind: str | None = None


GOOD, KILLED, STOPPED, CONTINUED, EXITS = "good", "killed", "stopped", "continued", "exits"
RAISES, UNCAUGHT, INTERRUPTED, CLOSES = "raises", "uncaught", "interrupted", "closes early"
NEVER_COMES, REFUSED = "never comes", "driver refuses"

_LATE = ("PeerError", "PeerTimeoutError")

ENDINGS: dict[str, Ending] = {
    GOOD: Ending(60.0, others=()),
    KILLED: Ending(8.0, exit_codes=(-signal.SIGKILL,), within=True),
    STOPPED: Ending(2.0, others=("PeerTimeoutError",), exit_codes=(-signal.SIGKILL,), times_out=True, within=True),
    CONTINUED: Ending(2.0, others=("PeerTimeoutError",), culprits=_LATE, times_out=True, within=True),
    EXITS: Ending(5.0, exit_codes=(EXIT_CODE,), within=True),
    RAISES: Ending(4.0),
    UNCAUGHT: Ending(3.0, exit_codes=(1,)),
    INTERRUPTED: Ending(6.0, culprits=("KeyboardInterrupt",), within=True),
    CLOSES: Ending(4.0),
    NEVER_COMES: Ending(2.0, others=("PeerTimeoutError",), culprits=_LATE, times_out=True),
    REFUSED: Ending(1.0, culprits=("DriverError",), within=True, kind="made-up driver"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """The error that ended a rank's calls.

    Attributes:
        name: its type.
        ranks: the ranks that it names.
        text: its message.
        at_s: when it was caught, on the clock that all processes share.
    """

    name: str
    ranks: tuple[int, ...]
    text: str
    at_s: float


def objections(
    name: str, rank: int, culprit: int, seen: Seen | None, faulted_at_s: float, timeout_s: float
) -> list[str]:
    """Return what is wrong with what a rank saw of an ending, which was the ``culprit``'s at ``faulted_at_s``."""
    ending = ENDINGS[name]
    allowed = ending.culprits if rank == culprit else ending.others
    if seen is None:
        return [f"{name} of rank {culprit}: no error was raised (allowed={' or '.join(allowed)})"] if allowed else []
    shown = f"{seen.name} naming {seen.ranks}: {seen.text}"
    if seen.name not in allowed:
        return [f"{name} of rank {culprit}: {shown} (allowed={' or '.join(allowed) or 'no error'})"]
    found = []
    if seen.name not in ("KeyboardInterrupt", "DriverError") and seen.ranks != (culprit,):
        found.append(f"{name}: rank {culprit} is not the one that is named: {shown}")
    took_s = seen.at_s - faulted_at_s
    if rank != culprit and took_s > (timeout_s if ending.times_out else 0.0) + SLACK_S:
        found.append(f"{name} of rank {culprit}: heard of after {took_s:.1f} s (timeout={timeout_s:g} s): {shown}")
    return found
