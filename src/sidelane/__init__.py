"""Sidelane: collectives on the GPU's copy engines, next to computation instead of against it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sidelane.config import Config
from sidelane.errors import (
    CommunicatorClosedError,
    MismatchError,
    PeerError,
    PeerTimeoutError,
    ProgramError,
    SidelaneError,
    UnavailableError,
)

if TYPE_CHECKING:
    from sidelane.c3.overlap import Overlap, overlap
    from sidelane.collectives import Batched, BoundProgram, Communicator, Lane, Prelaunched, Session, Work

__version__ = "0.1.0"

__all__ = [
    "Batched",
    "BoundProgram",
    "Communicator",
    "CommunicatorClosedError",
    "Config",
    "Lane",
    "MismatchError",
    "Overlap",
    "PeerError",
    "PeerTimeoutError",
    "Prelaunched",
    "ProgramError",
    "Session",
    "SidelaneError",
    "UnavailableError",
    "Work",
    "overlap",
]


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds; `sidelane --help` and the program tools do without.
    if name in ("Batched", "BoundProgram", "Communicator", "Lane", "Prelaunched", "Session", "Work"):
        return getattr(import_module("sidelane.collectives"), name)
    if name in ("Overlap", "overlap"):
        return getattr(import_module("sidelane.c3.overlap"), name)
    raise AttributeError(f"module 'sidelane' has no attribute {name!r}")
