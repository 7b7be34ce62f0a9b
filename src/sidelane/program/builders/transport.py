"""Transports: the rank whose engine moves a chunk."""

from __future__ import annotations

from enum import StrEnum


class Transport(StrEnum):
    """Rank that moves a chunk, and so the buffers that must be in symmetric memory.

    ``push``: the source writes into its peer's output (output symmetric). ``pull``: the destination reads its peer's
    input (input symmetric). ``staged``: the source copies its input to staging and its peers pull from there; none of
    the caller's buffers needs to be symmetric, for one more copy of the bytes that a rank sends.
    """

    PUSH = "push"
    PULL = "pull"
    STAGED = "staged"
