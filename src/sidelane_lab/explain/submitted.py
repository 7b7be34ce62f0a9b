"""Explanations of what a rank submits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sidelane.program.ir import Program
from sidelane.program.kernel import Protocol
from sidelane.program.kernel_list import AnyKernelProgram
from sidelane.sizes import format_bytes

CALLERS = "stream 0 (of the caller)"

HOW: Mapping[Protocol, str] = MappingProxyType(
    {
        Protocol.CELLS: "every 4 bytes with a flag of their own, into the peers' slots",
        Protocol.PARCELS: "as it is, into places of the peers that are for it alone",
        Protocol.RELAY: "a parcel for each peer, which passes it on to all others",
        Protocol.PUSH: "into the peers' outputs",
        Protocol.STAGE: "into the peers' staging, and from there into each output",
        Protocol.PULL: "out of the peers' staging",
        Protocol.REDUCE: "out of the peers' staging, and added up",
        Protocol.DIRECT: "out of the peers' inputs, and added up",
        Protocol.SEND: "into the staging of who adds them up",
    }
)
"""In few words what ``Protocol`` says."""

SECOND_SHOT: Mapping[Protocol, str] = MappingProxyType(
    {
        Protocol.REDUCE: "; the results the same way",
        Protocol.DIRECT: "; the results into their outputs",
        Protocol.SEND: "; the results into the outputs",
    }
)


def launch_lines(program: AnyKernelProgram) -> tuple[str, ...]:
    """Say what a kernel is, and how its bytes travel (docs/internals/protocols.md)."""
    how = HOW[program.protocol] + (SECOND_SHOT[program.protocol] if program.two_shot else "")
    staging = f", {format_bytes(program.staging_bytes)} of staging" if program.staging_bytes else ""
    return (
        f"launch the kernel {program.variant} on {program.blocks} thread blocks at most",
        f"protocol {program.protocol}: {how}",
        f"{format_bytes(program.part_bytes)} from rank to rank{staging}",
    )


def call_lines(program: Program, rank: int, captured: bool) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], str]:
    """List what the CUDA executor of a rank asks the driver for, by stream, and the same in numbers.

    Args:
        program: of the call.
        rank: whose.
        captured: into a graph.
    """
    from sidelane.execute.cuda.calls import Route
    from sidelane.execute.cuda.describe import counts_of, describe_call
    from sidelane.execute.cuda.plan import plan_calls

    plan = plan_calls(program, rank, captured=captured)
    streams = tuple(
        (
            f"stream {number}" if number else CALLERS,
            tuple(map(describe_call, plan.calls(number))),
        )
        for number in range(plan.streams)
    )
    return streams, str(counts_of(plan, Route.CAPTURE if captured else Route.DIRECT))
