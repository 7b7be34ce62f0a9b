"""Whether a call among several nodes takes steps within and between them: a rule, alike on all ranks."""

from __future__ import annotations

import dataclasses

from sidelane.integrations.nodes.plan import objection
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes

FLAT, HIERARCHICAL = "flat", "hierarchical"

LEAST_BYTES = 64 << 10
"""Below it the steps' own time decides, and one call of the group's own backend has fewer. A rule of thumb."""

PIECE_BYTES, MOST_PIECES = 4 << 20, 8


@dataclasses.dataclass(frozen=True, slots=True)
class NodesChoice:
    """What a call takes, and why.

    Attributes:
        name: ``flat``, by the group's own backend, or ``hierarchical``.
        reason: in words.
        legal: what there was to choose from.
        pieces: into which a hierarchical call is cut.
    """

    name: str
    reason: str
    legal: tuple[str, ...]
    pieces: int = 1


def choose(kind: Kind | None, nbytes: int, nodes: Nodes, *, without: str = "") -> NodesChoice:
    """Choose for a call.

    Args:
        kind: of the collective; None where there are no steps for it.
        nbytes: of the larger side.
        nodes: of the group.
        without: why there are none, in words.
    """
    why_not = f"no steps for {without}" if kind is None else objection(kind, nodes)
    if why_not:
        return NodesChoice(FLAT, f"{nodes}; {why_not}", (FLAT,))
    both = (FLAT, HIERARCHICAL)
    if len(nodes.members) == len(nodes.of):
        return NodesChoice(FLAT, f"{nodes}; nothing to do within a node", both)
    if nbytes < LEAST_BYTES:
        return NodesChoice(
            FLAT, f"{nodes}; less than {format_bytes(LEAST_BYTES)}: one call is sooner there than three", both
        )
    pieces = max(1, min(MOST_PIECES, nbytes // PIECE_BYTES))
    reason = f"{nodes}, {nodes.rails} rails, pieces: {pieces}; rather than flat, from {format_bytes(LEAST_BYTES)} on"
    return NodesChoice(HIERARCHICAL, reason, both, pieces)
