"""Assignment of a group's ranks to nodes, and the way of their calls: a value and a rule, the same on all ranks."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes

FLAT, HIERARCHICAL = "flat", "hierarchical"

LEAST_BYTES = 64 << 10
"""Bytes of a call below which the steps' own latency decides; the group's backend has fewer. A heuristic."""

PIECE_BYTES, MOST_PIECES = 4 << 20, 8


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes of a group's ranks. They are numbered by their first rank, and need not hold neighbours.

    >>> nodes = Nodes.named(["a", "b", "a", "a", "b"])
    >>> nodes.members, nodes.rails, nodes.coordinates(3)
    (((0, 2, 3), (1, 4)), 2, (0, 2))

    Attributes:
        of: number of the node of each rank.
    """

    of: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", tuple(map(operator.index, self.of)))
        if not self.of or list(dict.fromkeys(self.of)) != list(range(len(set(self.of)))):
            raise ValueError(
                f"Nodes: of must be a node for each rank, numbered from 0 by first ranks (value={self.of})"
            )

    @classmethod
    def named(cls, names: Sequence[str]) -> Nodes:
        """Return the nodes of ranks by name: ranks with the same name share a node."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.of):
            found.setdefault(node, []).append(rank)
        return tuple(tuple(found[node]) for node in range(len(found)))

    @cached_property
    def rails(self) -> int:
        """Number of ranks that every node has: below it, ranks ``i`` of all nodes talk to each other."""
        return min(map(len, self.members))

    @property
    def spans(self) -> bool:
        """True if there are several nodes."""
        return len(self.members) > 1

    @property
    def even(self) -> bool:
        """True if all nodes have the same number of ranks."""
        return len({len(ranks) for ranks in self.members}) == 1

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return the node of a rank, and its number there.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < len(self.of):
            raise ValueError(f"Nodes.coordinates: rank (value={rank}, allowed=0 to {len(self.of) - 1})")
        node = self.of[rank]
        return node, self.members[node].index(rank)

    def __str__(self) -> str:
        if self.even and len(self.members) > 4:
            return f"{len(self.members)} nodes of {self.rails} rank{'s' * (self.rails > 1)}"
        return f"{len(self.members)} nodes of {', '.join(str(len(ranks)) for ranks in self.members)} ranks"


class NodesChoice(NamedTuple):
    """Chosen way of a call, with the reason.

    Attributes:
        name: ``flat``, by the group's own backend, or ``hierarchical``.
        reason: reason of the choice, in words.
    """

    name: str
    reason: str


def choose_steps(
    kind: Kind | None, nbytes: int, nodes: Nodes, *, beside: bool = False, without: str = ""
) -> NodesChoice:
    """Choose the way of a call.

    A call that nothing hides is flat: on every machine that the laboratory describes steps are predicted to take longer
    up to 1 GiB, and to gain less than 3% above it. Beside a computation they move the bytes of a node by copy engines.

    Args:
        kind: kind of the collective; None if there are no steps for it.
        nbytes: bytes of the larger side.
        nodes: nodes of the group.
        beside: True if the call runs next to a computation: FSDP2's, or with ``Config.beside``.
        without: name of the operation in the text that there are no steps for it.
    """
    least = format_bytes(LEAST_BYTES)
    if kind is None:
        why = f"no steps for {without}"
    elif not nodes.even:
        why = "no steps for nodes of several sizes"
    elif nodes.rails == 1:
        why = "nothing to do within a node"
    elif not beside:
        why = "one call is predicted to be sooner where nothing hides it (SIDELANE_BESIDE=compute: in steps)"
    elif nbytes < LEAST_BYTES:
        why = f"less than {least}: one call is sooner there than three"
    else:
        pieces = f"{nodes.rails} rails, pieces: {count_pieces(nbytes)}"
        return NodesChoice(HIERARCHICAL, f"{nodes}, {pieces}; rather than flat, from {least} on")
    return NodesChoice(FLAT, f"{nodes}; {why}")


def count_pieces(nbytes: int) -> int:
    """Return the number of pieces of a hierarchical call."""
    return max(1, min(MOST_PIECES, nbytes // PIECE_BYTES))
