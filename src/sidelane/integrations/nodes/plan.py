"""What a rank does in a collective among several nodes: steps as frozen data, made by pure functions.

Shapes: ``W`` ranks on ``K`` nodes, ``s`` on this one, ``L`` rails (ranks that every node has). Near steps are
collectives of the ranks of one node, far ones of the ranks of one rail. A far step is begun, and joined later: between
the two stands the near part of another piece. All ranks of a node have the same near steps, all of a rail the same far
ones, in one order; so no two of them can wait for each other.

An all-gather of two pieces::

    far    [gather 0      ][gather 1      ]
    near   [own 0]          [own 1][others 0][others 1]
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind

INPUT, OUTPUT, PACKED, MIDDLE, ARRIVED = "input", "output", "packed", "middle", "arrived"
"""Tensors of a call: the caller's, and three of scratch.

Near steps read ``packed``, far ones ``middle``; ``arrived`` is what far ones bring."""

_CUT_AT = 256
"""Large pieces begin at multiples of it, in elements: copies of whole vectors are fastest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """``count`` elements of a tensor."""

    buffer: str
    offset: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Elements move within this rank: (to, from)."""

    pairs: tuple[tuple[Span, Span], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Broadcasts in one node, as one call: the root's number there, and what is replaced by the root's."""

    parts: tuple[tuple[int, Span], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Near:
    """A reduce-scatter or an all-to-all in one node."""

    kind: Kind
    output: Span
    input: Span


@dataclasses.dataclass(frozen=True, slots=True)
class Far:
    """A collective of this rank's rail is begun.

    Attributes:
        kind: which; for an all-reduce and a broadcast ``input`` is ``output``.
        root: node of a broadcast.
    """

    kind: Kind
    output: Span
    input: Span
    root: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """The ``number``-th far step of this rank, from 0, has ended before the next step begins."""

    number: int


Step = Copies | Spread | Near | Far | Join


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does.

    Attributes:
        steps: in their order.
        scratch: elements of each tensor of scratch.
    """

    steps: tuple[Step, ...]
    scratch: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What is under way at once: before the far steps, these themselves, and after them."""

    before: tuple[Step, ...]
    far: tuple[Far, ...]
    beside: tuple[Step, ...]
    after: tuple[Step, ...]


def make_plan(kind: Kind, nodes: Nodes, rank: int, count: int, pieces: int, root: int = 0) -> Plan:
    """Make the steps of a rank.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
        nodes: of the group.
        rank: in the group.
        count: elements of one part (all_gather, reduce_scatter, all_to_all) or of the tensor (the others).
        pieces: into which it is cut, at most.
        root: rank of a broadcast.

    Raises:
        ValueError: not for nodes of several sizes (see :func:`objection`).
    """
    why = objection(kind, nodes)
    if why:
        raise ValueError(f"make_plan: {kind} (value={nodes}, allowed=otherwise than {why})")
    seat = _Seat(nodes, rank, *nodes.seat(rank))
    bounds = [min(count, _aligned(-(-count * number // pieces), count)) for number in range(pieces + 1)]
    cuts = [(begin, end) for begin, end in itertools.pairwise(bounds) if end > begin]
    scratch = _Scratch()
    first: tuple[Step, ...] = ()
    if kind is Kind.ALL_GATHER:
        first = (Copies(((Span(OUTPUT, rank * count, count), Span(INPUT, 0, count)),)),)
    make: Callable[[int, int], Piece] = {
        Kind.ALL_GATHER: lambda begin, end: _gathered(seat, scratch, count, begin, end),
        Kind.ALL_REDUCE: lambda begin, end: _reduced(seat, scratch, begin, end),
        Kind.REDUCE_SCATTER: lambda begin, end: _scattered(seat, scratch, count, begin, end),
        Kind.ALL_TO_ALL: lambda begin, end: _exchanged(seat, scratch, count, begin, end),
        Kind.BROADCAST: lambda begin, end: _told(seat, root, begin, end),
    }[kind]
    return Plan((*first, *_in_turn([make(*cut) for cut in cuts])), scratch.counts)


def objection(kind: Kind, nodes: Nodes) -> str:
    """Why there are no such steps; "" if there are."""
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) and not nodes.even:
        return "nodes of several sizes"
    return "" if kind not in (Kind.SCATTER, Kind.GATHER) else "no steps for it"


def _aligned(at: int, count: int) -> int:
    return at if count < 64 * _CUT_AT else -(-at // _CUT_AT) * _CUT_AT


@dataclasses.dataclass(frozen=True, slots=True)
class _Seat:
    nodes: Nodes
    rank: int
    node: int
    place: int

    @property
    def own(self) -> tuple[int, ...]:
        return self.nodes.members[self.node]

    @property
    def is_on_rail(self) -> bool:
        return self.place < self.nodes.rails


class _Scratch:
    """Gives out parts of the tensors of scratch; pieces have parts of their own, since several are under way."""

    def __init__(self) -> None:
        self.counts = {PACKED: 0, MIDDLE: 0, ARRIVED: 0}

    def take(self, buffer: str, count: int) -> Span:
        span = Span(buffer, self.counts[buffer], count)
        self.counts[buffer] += count
        return span


def _in_turn(pieces: Sequence[Piece]) -> Iterator[Step]:
    """Each piece's far steps begin before the piece in front of it is finished."""
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


def _part(span: Span, offset: int, count: int) -> Span:
    assert offset + count <= span.count
    return Span(span.buffer, span.offset + offset, count)


def _gathered(seat: _Seat, scratch: _Scratch, count: int, begin: int, end: int) -> Piece:
    """Rail ``l`` carries the parts of the ranks ``l, l + L, ...`` of each node, one of each a round."""
    nodes, size = seat.nodes, end - begin

    def row(rank: int) -> Span:
        return Span(OUTPUT, rank * count + begin, size)

    own = Spread(tuple((place, row(rank)) for place, rank in enumerate(seat.own)))
    far: list[Far] = []
    sent: list[tuple[Span, Span]] = []
    copies: list[tuple[Span, Span]] = []
    rounds = -(-max(map(len, nodes.members)) // nodes.rails)
    for turn in range(rounds if seat.is_on_rail else 0):
        place = seat.place + turn * nodes.rails
        arrived, middle = scratch.take(ARRIVED, len(nodes.members) * size), scratch.take(MIDDLE, size)
        # A node without a rank for this turn sends what nobody reads.
        sent.append((middle, row(seat.own[place] if place < len(seat.own) else seat.rank)))
        far.append(Far(Kind.ALL_GATHER, arrived, middle))
        for node, ranks in enumerate(nodes.members):
            if node != seat.node and place < len(ranks):
                copies.append((row(ranks[place]), _part(arrived, node * size, size)))
    others = Spread(
        tuple(
            (place % nodes.rails, row(rank))
            for node, ranks in enumerate(nodes.members)
            if node != seat.node
            for place, rank in enumerate(ranks)
        )
    )
    # With one round everybody sends what is its own: the near part may run beside.
    before, beside = ((), (own,)) if rounds == 1 else ((own,), ())
    return Piece((*before, Copies(tuple(sent))), tuple(far), beside, (Copies(tuple(copies)), others))


def _reduced(seat: _Seat, scratch: _Scratch, begin: int, end: int) -> Piece:
    """Rail ``l`` adds slice ``l`` of the nodes' sums; ranks beyond the rails reduce what nobody reads."""
    nodes, size = seat.nodes, end - begin
    each = -(-size // nodes.rails)
    packed = scratch.take(PACKED, len(seat.own) * each)
    middle = scratch.take(MIDDLE, each)
    before = (
        Copies(((_part(packed, 0, size), Span(INPUT, begin, size)),)),
        Near(Kind.REDUCE_SCATTER, middle, packed),
    )
    slices = [Span(OUTPUT, begin + at, min(each, size - at)) for at in range(0, size, each)]
    own: tuple[Step, ...] = ()
    if seat.place < len(slices):
        own = (Copies(((slices[seat.place], _part(middle, 0, slices[seat.place].count)),)),)
    far = (Far(Kind.ALL_REDUCE, middle, middle),) if seat.is_on_rail else ()
    return Piece(before, far, (), (*own, Spread(tuple(enumerate(slices)))))


def _scattered(seat: _Seat, scratch: _Scratch, count: int, begin: int, end: int) -> Piece:
    """The node's sums for the ranks ``l`` of all nodes are rank ``l``'s; its rail adds them up."""
    nodes, size = seat.nodes, end - begin
    packed = scratch.take(PACKED, len(nodes.of) * size)
    middle, arrived = scratch.take(MIDDLE, len(nodes.members) * size), scratch.take(ARRIVED, size)
    before = (_pack(seat, packed, count, begin, size), Near(Kind.REDUCE_SCATTER, middle, packed))
    after = Copies(((Span(OUTPUT, begin, size), arrived),))
    return Piece(before, (Far(Kind.REDUCE_SCATTER, arrived, middle),), (), (after,))


def _exchanged(seat: _Seat, scratch: _Scratch, count: int, begin: int, end: int) -> Piece:
    """What goes to the ranks ``l`` of all nodes is collected by the own node's rank ``l``, whose rail delivers it."""
    nodes, size = seat.nodes, end - begin
    near, far = len(seat.own), len(nodes.members)
    packed, gathered = scratch.take(PACKED, near * far * size), scratch.take(PACKED, near * far * size)
    middle, arrived = scratch.take(MIDDLE, near * far * size), scratch.take(ARRIVED, near * far * size)
    # [from][to node] becomes [to node][from]
    turned = Copies(
        tuple(
            (_part(middle, (node * near + place) * size, size), _part(gathered, (place * far + node) * size, size))
            for place in range(near)
            for node in range(far)
        )
    )
    before = (_pack(seat, packed, count, begin, size), Near(Kind.ALL_TO_ALL, gathered, packed), turned)
    rows = (
        (Span(OUTPUT, rank * count + begin, size), _part(arrived, (node * near + place) * size, size))
        for node, ranks in enumerate(nodes.members)
        for place, rank in enumerate(ranks)
    )
    return Piece(before, (Far(Kind.ALL_TO_ALL, arrived, middle),), (), (Copies(tuple(rows)),))


def _pack(seat: _Seat, packed: Span, count: int, begin: int, size: int) -> Copies:
    """Parts for ``[number in the node][node]``, next to each other."""
    far = len(seat.nodes.members)
    return Copies(
        tuple(
            (_part(packed, (place * far + node) * size, size), Span(INPUT, rank * count + begin, size))
            for node, ranks in enumerate(seat.nodes.members)
            for place, rank in enumerate(ranks)
        )
    )


def _told(seat: _Seat, root: int, begin: int, end: int) -> Piece:
    """The root's node knows it first; rail ``l`` carries slice ``l``."""
    nodes, size = seat.nodes, end - begin
    node, place = nodes.seat(root)
    each = -(-size // nodes.rails)
    slices = [Span(OUTPUT, begin + at, min(each, size - at)) for at in range(0, size, each)]
    far: tuple[Far, ...] = ()
    if seat.place < len(slices):
        far = (Far(Kind.BROADCAST, slices[seat.place], slices[seat.place], node),)
    if seat.node == node:
        return Piece((Spread(((place, Span(OUTPUT, begin, size)),)),), far, (), ())
    return Piece((), far, (), (Spread(tuple(enumerate(slices))),))
