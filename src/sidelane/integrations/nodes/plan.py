"""The plans of collectives among several nodes: pieces, whose far steps run beside the near ones of others.

Near steps are collectives of the ranks of one node, far ones of the ranks of one rail. A far step is begun, and joined
later: between the two stands the near part of another piece. All ranks of a node have the same near steps, all of a
rail the same far ones, in one order; so no two of them can wait for each other.

An all-gather of two pieces::

    far    [gather 0      ][gather 1      ]
    near   [own 0]          [own 1][others 0][others 1]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from sidelane.integrations.nodes import pieces as made
from sidelane.integrations.nodes.pieces import Cut, Seat
from sidelane.integrations.nodes.steps import INPUT, OUTPUT, Copies, Join, Piece, Plan, Span, Step, whole
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind

_CUT_AT = 256
"""Large pieces begin at multiples of it, in elements of a tensor: copies of whole vectors are fastest."""

_MOST_LOPSIDED = 2
"""A scatter and an exchange move that many times as much within the largest node, at most, as they would flat."""


def make_plan(kind: Kind, nodes: Nodes, rank: int, counts: Sequence[int], pieces: int, root: int = 0) -> Plan:
    """Make the steps of a rank.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
        nodes: of the group.
        rank: in the group.
        counts: of each tensor, the elements of one part (all_gather, reduce_scatter, all_to_all) or of it (all_reduce,
            broadcast, which has one tensor).
        pieces: into which they are cut together, at most; 1 and more.
        root: rank of a broadcast.

    Raises:
        ValueError: there are none (see :func:`objection`), or a number is none of those.
    """
    kind = Kind(kind)
    rank, root = (whole(f"make_plan: {what}", n, 0, len(nodes.of) - 1) for what, n in (("rank", rank), ("root", root)))
    counts = tuple(whole(f"make_plan: counts of {kind}", count) for count in counts)
    pieces = whole("make_plan: pieces", pieces, 1)
    if kind is Kind.BROADCAST and len(counts) != 1:
        raise ValueError(f"make_plan: counts of {kind} (value={counts}, allowed=one tensor)")
    why = objection(kind, nodes)
    if why:
        raise ValueError(f"make_plan: {kind} (value={nodes}, allowed=otherwise than {why})")
    seat = Seat(nodes, rank, *nodes.seat(rank))
    scratch = made.Scratch()
    found: list[Piece] = []
    for number, cuts in enumerate(_cut(counts, pieces)):
        scratch.turn(number)
        match kind:
            case Kind.ALL_GATHER:
                found.append(made.gathered(seat, scratch, cuts))
            case Kind.ALL_REDUCE:
                found.append(made.reduced(seat, scratch, cuts))
            case Kind.REDUCE_SCATTER:
                found.append((made.scattered if nodes.even else made.scattered_unevenly)(seat, scratch, cuts))
            case Kind.ALL_TO_ALL:
                found.append((made.exchanged if nodes.even else made.exchanged_unevenly)(seat, scratch, cuts))
            case Kind.BROADCAST:
                found.append(made.told(seat, root, cuts))
    first: tuple[Step, ...] = ()
    if kind is Kind.ALL_GATHER:
        own = ((Span(OUTPUT, rank * n, n, t), Span(INPUT, 0, n, t)) for t, n in enumerate(counts) if n)
        first = (Copies(tuple(own)),)
    return Plan((*first, *_in_turn(found)), scratch.counts)


def objection(kind: Kind, nodes: Nodes) -> str:
    """Why there are no such steps; "" if there are."""
    if kind in (Kind.SCATTER, Kind.GATHER):
        return "no steps for it"
    largest = max(map(len, nodes.members))
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) and largest > _MOST_LOPSIDED * nodes.rails:
        return f"a node of more than {_MOST_LOPSIDED} times the ranks of another"
    return ""


def _cut(counts: Sequence[int], pieces: int) -> Iterator[tuple[Cut, ...]]:
    """Several tensors, one behind the other, in pieces of about the same size."""
    starts = [0, *itertools.accumulate(counts)]
    total = starts[-1]
    bounds = [0]
    for number in range(1, pieces):
        at = -(-total * number // pieces)
        tensor = max(t for t, start in enumerate(starts) if start <= at)
        if tensor < len(counts) and counts[tensor] >= 64 * _CUT_AT:
            at = starts[tensor] + min(counts[tensor], -(-(at - starts[tensor]) // _CUT_AT) * _CUT_AT)
        bounds.append(at)
    for begin, end in itertools.pairwise([*bounds, total]):
        cuts = (
            Cut(t, counts[t], max(begin - starts[t], 0), min(end - starts[t], counts[t])) for t in range(len(counts))
        )
        found = tuple(cut for cut in cuts if cut.begin < cut.end)
        if found:
            yield found


def _in_turn(pieces: Sequence[Piece]) -> Iterator[Step]:
    """Each piece's far steps begin before the piece in front of it is finished, and behind the one before that."""
    begun = 0
    waiting: tuple[Step, ...] = ()
    for piece in pieces:
        yield from piece.before
        yield from piece.far
        joins = tuple(Join(begun + number) for number in range(len(piece.far)))
        begun += len(piece.far)
        yield from piece.beside
        yield from waiting
        waiting = (*joins, *piece.after)
    yield from waiting
