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
from sidelane.version import VERSION as __version__  # noqa: F401

if TYPE_CHECKING:
    from sidelane import fsdp as fsdp
    from sidelane import ops as ops
    from sidelane.c3.nano_batches import begin_collective, nano_batches
    from sidelane.c3.overlap import Overlap, choose_overlap, overlap
    from sidelane.integrations.ledger import Report, report
    from sidelane.integrations.nodes.scale_out import scale_out
    from sidelane.integrations.process_group import SidelaneGroup
    from sidelane.integrations.registration import register, wrap
    from sidelane.session import Batched, BoundProgram, Communicator, Prelaunched, Work
    from sidelane.session.pools import SymmetricPool, pool
    from sidelane.session.tracing import trace

__all__ = [
    "Batched",
    "BoundProgram",
    "Communicator",
    "CommunicatorClosedError",
    "Config",
    "MismatchError",
    "Overlap",
    "PeerError",
    "PeerTimeoutError",
    "Prelaunched",
    "ProgramError",
    "Report",
    "SidelaneError",
    "SidelaneGroup",
    "SymmetricPool",
    "UnavailableError",
    "Work",
    "begin_collective",
    "choose_overlap",
    "nano_batches",
    "overlap",
    "pool",
    "register",
    "report",
    "scale_out",
    "trace",
    "wrap",
]

_ELSEWHERE = {
    "Overlap": "sidelane.c3.overlap",
    "Report": "sidelane.integrations.ledger",
    "SidelaneGroup": "sidelane.integrations.process_group",
    "SymmetricPool": "sidelane.session.pools",
    "begin_collective": "sidelane.c3.nano_batches",
    "choose_overlap": "sidelane.c3.overlap",
    "nano_batches": "sidelane.c3.nano_batches",
    "overlap": "sidelane.c3.overlap",
    "pool": "sidelane.session.pools",
    "register": "sidelane.integrations.registration",
    "report": "sidelane.integrations.ledger",
    "scale_out": "sidelane.integrations.nodes.scale_out",
    "trace": "sidelane.session.tracing",
    "wrap": "sidelane.integrations.registration",
}


if not TYPE_CHECKING:  # a type checker reads the imports above, and would take every other name for any type

    def __getattr__(name: str) -> Any:
        # Importing torch takes seconds; `sidelane --help` and the program tools do without.
        if name in ("Batched", "BoundProgram", "Communicator", "Prelaunched", "Work"):
            return getattr(import_module("sidelane.session"), name)
        if name in ("flight_recorder", "fsdp", "metrics", "ops"):
            return import_module(f"sidelane.{name}")
        if name in _ELSEWHERE:
            return getattr(import_module(_ELSEWHERE[name]), name)
        # Tracebacks then show the nearest of the names below.
        raise AttributeError(
            f"module 'sidelane' has no attribute {name!r} (what has changed: docs/guide/from-0.2.md)",
            name=name,
            obj=import_module("sidelane"),
        )


def __dir__() -> list[str]:
    public = (*__all__, "config", "errors", "flight_recorder", "fsdp", "metrics", "ops")
    return sorted({*public, *(name for name in globals() if name.startswith("__"))})
