"""Choose the strategy of ``overlap`` under ``auto``, with a reason, by rank 0's file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from sidelane.c3.expected_times import OF_CALLS, PairRequest, decide
from sidelane.c3.isolated_times import Isolated
from sidelane.c3.launch import objection
from sidelane.c3.measured_curves import isolated_file, isolated_text, parse_isolated
from sidelane.c3.strategies import strategies
from sidelane.c3.strategy import LaunchMode, Mover
from sidelane.c3.workload import GEMM_DTYPES, Gemm, Workload
from sidelane.choice import choose
from sidelane.choice.hidden import hidden_shares
from sidelane.choice.selection import Selection
from sidelane.config import BUILTIN, COMPUTE, NOTHING
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape, Computation
from sidelane.session import Communicator
from sidelane.session.answers import measured_by_rank_0, recall, remember

Moves = tuple[str, int] | Sequence[tuple[str, int]]
"""Type of a collective and its bytes, or several: ``("all_gather", 1 << 28)``. Bytes are the gathered size of an
all_gather, the local buffer of the others."""


def choose_overlap(comm: Communicator, beside: Computation, moves: Moves) -> Selection[LaunchMode]:
    """Return the strategy of ``overlap(..., strategy="auto")``; its ``reason`` explains it.

    It goes by rank 0's file of ``sidelane tune --study c3`` if there is one, else by shares that are constants and by
    the times of ``sidelane tune``; with ``Config(profile="builtin")`` always by these. A strategy that is expected
    to be slower than serial is never taken. Collective, the first time for a communicator.

    Args:
        comm: communicator that makes the collectives.
        beside: computation next to them, from ``Communicator.beside``. Units are taken only from GEMMs of known shape
            of whose bound (compute or memory) the file has a GEMM with fewer units.
        moves: collectives with their bytes.

    Raises:
        ValueError: there are no collectives, or a name or size is unknown; rank 0's file is invalid.
        UnavailableError: the file was not read yet, and a graph is being captured.
    """
    asked = _asked(beside, moves)
    found: Selection[LaunchMode] | None = recall(comm, asked)
    if found is None:
        found = _choose(comm, asked, measured_by_rank_0(comm, "overlap", lambda: _own_file(comm), _parse))
        remember(comm, asked, found)
    return found


def _choose(comm: Communicator, asked: PairRequest, known: Isolated | None) -> Selection[LaunchMode]:
    able = [one for one in strategies() if not objection(one, comm.device)]
    name = torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else ""
    collectives = {curve.collective for curve in known.collectives} if known is not None else set()
    times: dict[str, float] = {}
    if any(move.collective not in collectives for move in asked.moves):
        for mover, hint in ((Mover.LIBRARY, NOTHING), (Mover.DMA, COMPUTE)):
            time_us = sum(_profiled_us(comm, move, hint) for move in asked.moves)
            if math.isfinite(time_us):
                times[mover] = time_us
        if not times:
            first = min(able, key=lambda one: one.preference)
            reason = f"{first.name}: nothing was measured of these collectives (sidelane tune --study c3)"
            return Selection(LaunchMode(first), reason)
    return decide(asked, able, known, hidden_shares(name), times, OF_CALLS)


def _profiled_us(comm: Communicator, move: Workload, hint: str) -> float:
    """Return the expected time of a call alone for ``auto``, with ``hint`` as ``beside``; infinite if it is unknown."""
    call = CallShape(move.collective, comm.world_size, move.nbytes, move.gemm.dtype, in_place=True, beside=hint)
    time_us = choose(comm.profile.profile, call, comm.abilities).table[0][1]
    return math.inf if time_us is None else time_us


def _asked(beside: Computation, moves: Moves) -> PairRequest:
    if not isinstance(beside, Computation):
        raise ValueError(f"overlap: beside (value={beside!r}, allowed=what Communicator.beside returns)")
    pairs = [moves] if len(moves) == 2 and isinstance(moves[0], str) else list(moves)
    gemm = Gemm(*beside.gemm) if beside.gemm is not None and beside.gemm[3] in GEMM_DTYPES else None
    found = []
    for pair in pairs:
        match pair:
            case (str(name), int(nbytes)) if name in Kind._value2member_map_ and nbytes > 0:
                found.append(Workload(gemm or Gemm(1, 1, 1), Kind(name), nbytes))
            case _:
                raise ValueError(f"overlap: moves (value={pair!r}, allowed=(one of {', '.join(Kind)}, bytes above 0))")
    if not found:
        raise ValueError("overlap: moves (value=(), allowed=a collective and its bytes, or several)")
    return PairRequest(beside.us, gemm, tuple(found))


def _own_file(comm: Communicator) -> str:
    """Return the text of this machine's file, and its path; "" for no file."""
    path = None if comm.config.profile == BUILTIN else isolated_file(comm.device.type, comm.world_size)
    return json.dumps([isolated_text(path), str(path)])


def _parse(text: str) -> Isolated | None:
    content, path = json.loads(text)
    return parse_isolated(content, path) if content else None
