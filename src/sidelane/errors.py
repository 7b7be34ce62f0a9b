"""Errors beyond ``ValueError`` and ``TypeError``, which mean that the caller passed something wrong."""

from __future__ import annotations

from collections.abc import Sequence


class SidelaneError(RuntimeError):
    """Base of every error that is not the caller's argument."""


class ProgramError(SidelaneError):
    """``verify`` refused a program.

    ``violations`` lists every finding as one line each; a line names the ranks, the commands and the bytes.
    """

    def __init__(self, title: str, violations: Sequence[str]) -> None:
        self.title, self.violations = title, tuple(violations)
        shown = "\n".join(f"  - {line}" for line in self.violations[:12])
        more = len(self.violations) - 12
        super().__init__(f"{title}:\n{shown}" + (f"\n  ... and {more} more" if more > 0 else ""))

    def __reduce__(self) -> tuple[type[ProgramError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.title, self.violations)  # ranks of a study or a test hand errors to their parent


class UnavailableError(SidelaneError):
    """This machine or this installation lacks something that was asked for; the text says what and how to get it."""


class CommunicatorClosedError(SidelaneError):
    """The communicator was closed, or broken by an earlier failure whose text is repeated."""


class MismatchError(SidelaneError):
    """Ranks of one group made different calls; the text names both calls."""


class PeerError(SidelaneError):
    """A peer failed, died or refused the call. ``ranks`` are the ranks at fault (group ranks)."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class PeerTimeoutError(PeerError):
    """A peer did not come, or stopped, within the time-out."""
