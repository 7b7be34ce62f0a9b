"""Which rank moves a chunk."""

from __future__ import annotations

from enum import StrEnum


class Transport(StrEnum):
    """Which rank moves a chunk, and so which buffers must be in symmetric memory.

    ``push``: the source writes into its peer's output (output symmetric). ``pull``: the destination reads its peer's
    input (input symmetric). ``staged``: the source copies its input to staging and its peers pull from there; nothing
    of the caller's needs to be symmetric, for one more copy of the bytes that a rank sends.
    """

    PUSH = "push"
    PULL = "pull"
    STAGED = "staged"
