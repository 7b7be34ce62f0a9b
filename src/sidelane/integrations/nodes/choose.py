"""Choice of recipes within and between nodes for a call: a rule, alike on all ranks."""

from __future__ import annotations

import dataclasses

from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes

FLAT, HIERARCHICAL = "flat", "hierarchical"

LEAST_BYTES = 64 << 10
"""Bytes of a call below which the steps' own latency decides; the group's backend has fewer. A heuristic."""

PIECE_BYTES, MOST_PIECES = 4 << 20, 8


@dataclasses.dataclass(frozen=True, slots=True)
class NodesChoice:
    """Chosen way of a call, with the reason.

    Attributes:
        name: ``flat``, by the group's own backend, or ``hierarchical``.
        reason: reason of the choice, in words.
        legal: names of the legal choices.
        pieces: number of pieces of a hierarchical call.
    """

    name: str
    reason: str
    legal: tuple[str, ...]
    pieces: int = 1


def choose_steps(kind: Kind | None, nbytes: int, nodes: Nodes, *, without: str = "") -> NodesChoice:
    """Choose the way of a call.

    Args:
        kind: kind of the collective; None if there are no steps for it.
        nbytes: bytes of the larger side.
        nodes: nodes of the group.
        without: name of the operation in the text that there are no steps for it.
    """
    if kind is None:
        return NodesChoice(FLAT, f"{nodes}; no steps for {without}", (FLAT,))
    if not nodes.even:
        return NodesChoice(FLAT, f"{nodes}; no steps for nodes of several sizes", (FLAT,))
    both = (FLAT, HIERARCHICAL)
    if nodes.rails == 1:
        return NodesChoice(FLAT, f"{nodes}; nothing to do within a node", both)
    if nbytes < LEAST_BYTES:
        return NodesChoice(
            FLAT, f"{nodes}; less than {format_bytes(LEAST_BYTES)}: one call is sooner there than three", both
        )
    pieces = count_pieces(nbytes)
    reason = f"{nodes}, {nodes.rails} rails, pieces: {pieces}; rather than flat, from {format_bytes(LEAST_BYTES)} on"
    return NodesChoice(HIERARCHICAL, reason, both, pieces)


def count_pieces(nbytes: int) -> int:
    """Return the number of pieces of a hierarchical call."""
    return max(1, min(MOST_PIECES, nbytes // PIECE_BYTES))
