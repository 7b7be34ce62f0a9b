"""The steps of one piece of a collective among several nodes, made by pure functions.

Shapes: ``W`` ranks on ``K`` nodes, ``s`` on this one and ``M`` on the largest, ``L`` rails (ranks that every node has).
A piece has ``size`` elements of each part, cut from one tensor or several: cuts one behind the other are its *run*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from sidelane.integrations.nodes.steps import (
    ARRIVED,
    INPUT,
    MIDDLE,
    OUTPUT,
    PACKED,
    Copies,
    Far,
    Near,
    Piece,
    Span,
    Spread,
)
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind

Pairs = list[tuple[Span, Span]]


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Elements ``begin`` to ``end`` of each part of a tensor, whose parts have ``count``."""

    tensor: int
    count: int
    begin: int
    end: int


Cuts = Sequence[Cut]


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """A rank, and where it is."""

    nodes: Nodes
    rank: int
    node: int
    place: int

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.nodes.members[self.node]

    @property
    def is_on_rail(self) -> bool:
        """It takes far steps."""
        return self.place < self.nodes.rails

    @property
    def most(self) -> int:
        """Ranks of the largest node."""
        return max(map(len, self.nodes.members))


class Scratch:
    """Gives out parts of the tensors of scratch. Two pieces are under way at once, so each tensor is there twice."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._turn = 0

    def turn(self, number: int) -> None:
        """What was given to the piece before the last is free again."""
        self._turn = number % 2
        self._taken.clear()

    def take(self, buffer: str, count: int) -> Span:
        name = f"{buffer}{self._turn}"
        span = Span(name, self._taken.get(name, 0), count)
        self._taken[name] = span.offset + count
        self.counts[name] = max(self.counts.get(name, 0), span.offset + count)
        return span


def size_of(cuts: Cuts) -> int:
    """Elements of a run."""
    return sum(cut.end - cut.begin for cut in cuts)


def run(buffer: str, part: int, cuts: Cuts, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Span]]:
    """Elements ``begin`` to ``end`` of a part's run: their spans, and where in the run each begins."""
    at = 0
    for cut in cuts:
        first, last = max(begin, at), min(end if end is not None else size_of(cuts), at + cut.end - cut.begin)
        if first < last:
            yield first, Span(buffer, part * cut.count + cut.begin + first - at, last - first, cut.tensor)
        at += cut.end - cut.begin


def packing(to: Span, buffer: str, part: int, cuts: Cuts, begin: int = 0, end: int | None = None) -> Pairs:
    """Copies of some of a part's run into a row of scratch."""
    return [(to.part(at - begin, span.count), span) for at, span in run(buffer, part, cuts, begin, end)]


def unpacking(part: int, cuts: Cuts, given: Span, begin: int = 0, end: int | None = None) -> Pairs:
    """Copies from a row of scratch into the result."""
    return [(span, given.part(at - begin, span.count)) for at, span in run(OUTPUT, part, cuts, begin, end)]


def gathered(seat: Seat, scratch: Scratch, cuts: Cuts) -> Piece:
    """Rail ``l`` carries the parts of the ranks ``l, l + L, ...`` of each node, one of each a round."""
    nodes, size = seat.nodes, size_of(cuts)
    own = Spread(tuple((place, span) for place, rank in enumerate(seat.own) for _, span in run(OUTPUT, rank, cuts)))
    far: list[Far] = []
    sent: Pairs = []
    copies: Pairs = []
    for place in range(seat.place, seat.most, nodes.rails) if seat.is_on_rail else ():
        arrived = scratch.take(ARRIVED, len(nodes.members) * size)
        # A node without a rank for this round sends what nobody reads.
        giver = seat.own[place] if place < len(seat.own) else seat.rank
        (_, given), *more = run(OUTPUT, giver, cuts)
        if more:
            given = scratch.take(MIDDLE, size)
            sent += packing(given, OUTPUT, giver, cuts)
        far.append(Far(Kind.ALL_GATHER, arrived, given))
        for node, ranks in enumerate(nodes.members):
            if node != seat.node and place < len(ranks):
                copies += unpacking(ranks[place], cuts, arrived.part(node * size, size))
    others = Spread(
        tuple(
            (place % nodes.rails, span)
            for node, ranks in enumerate(nodes.members)
            if node != seat.node
            for place, rank in enumerate(ranks)
            for _, span in run(OUTPUT, rank, cuts)
        )
    )
    # With one round everybody sends what is its own: the near part may run beside.
    before, beside = ((), (own,)) if seat.most == nodes.rails else ((own,), ())
    return Piece((*before, Copies(tuple(sent))), tuple(far), beside, (Copies(tuple(copies)), others))


def reduced(seat: Seat, scratch: Scratch, cuts: Cuts) -> Piece:
    """Rail ``l`` adds slice ``l`` of the nodes' sums; ranks beyond the rails reduce what nobody reads."""
    nodes, size = seat.nodes, size_of(cuts)
    each = -(-size // nodes.rails)
    packed = scratch.take(PACKED, len(seat.own) * each)
    middle = scratch.take(MIDDLE, each)
    before = (Copies(tuple(packing(packed, INPUT, 0, cuts))), Near(Kind.REDUCE_SCATTER, middle, packed))
    slices = [(at, min(at + each, size)) for at in range(0, size, each)]
    own: tuple[Copies, ...] = ()
    if seat.place < len(slices):
        own = (Copies(tuple(unpacking(0, cuts, middle, *slices[seat.place]))),)
    far = (Far(Kind.ALL_REDUCE, middle, middle),) if seat.is_on_rail else ()
    spans = ((place, span) for place, bounds in enumerate(slices) for _, span in run(OUTPUT, 0, cuts, *bounds))
    return Piece(before, far, (), (*own, Spread(tuple(spans))))


def scattered(seat: Seat, scratch: Scratch, cuts: Cuts) -> Piece:
    """Nodes of one size. A node's sums for the ranks ``l`` of all nodes are its rank ``l``'s; its rail adds them up."""
    nodes, size = seat.nodes, size_of(cuts)
    packed = scratch.take(PACKED, len(nodes.of) * size)
    middle, arrived = scratch.take(MIDDLE, len(nodes.members) * size), scratch.take(ARRIVED, size)
    before = (_pack(seat, packed, cuts), Near(Kind.REDUCE_SCATTER, middle, packed))
    return Piece(
        before, (Far(Kind.REDUCE_SCATTER, arrived, middle),), (), (Copies(tuple(unpacking(0, cuts, arrived))),)
    )


def exchanged(seat: Seat, scratch: Scratch, cuts: Cuts) -> Piece:
    """Nodes of one size. The own node's rank ``l`` collects what goes to ranks ``l``, and its rail delivers it."""
    nodes, size = seat.nodes, size_of(cuts)
    near, far = len(seat.own), len(nodes.members)
    packed, collected = scratch.take(PACKED, near * far * size), scratch.take(PACKED, near * far * size)
    middle, arrived = scratch.take(MIDDLE, near * far * size), scratch.take(ARRIVED, near * far * size)
    # [from][to node] becomes [to node][from]
    turned = Copies(
        tuple(
            (middle.part((node * near + place) * size, size), collected.part((place * far + node) * size, size))
            for place in range(near)
            for node in range(far)
        )
    )
    before = (_pack(seat, packed, cuts), Near(Kind.ALL_TO_ALL, collected, packed), turned)
    rows: Pairs = []
    for node, ranks in enumerate(nodes.members):
        for place, rank in enumerate(ranks):
            rows += unpacking(rank, cuts, arrived.part((node * near + place) * size, size))
    return Piece(before, (Far(Kind.ALL_TO_ALL, arrived, middle),), (), (Copies(tuple(rows)),))


def _pack(seat: Seat, packed: Span, cuts: Cuts) -> Copies:
    """Parts for ``[place][node]``, next to each other."""
    far, size = len(seat.nodes.members), size_of(cuts)
    pairs: Pairs = []
    for node, ranks in enumerate(seat.nodes.members):
        for place, rank in enumerate(ranks):
            pairs += packing(packed.part((place * far + node) * size, size), INPUT, rank, cuts)
    return Copies(tuple(pairs))


def scattered_unevenly(seat: Seat, scratch: Scratch, cuts: Cuts) -> Piece:
    """Rail ``l`` adds slice ``l`` of every part; then the ranks of a node hand each other the slices of their parts.

    Rows are ``[node][place]`` with room for ``M`` places; those of places that a node has not are never read.
    """
    nodes, size = seat.nodes, size_of(cuts)
    each = -(-size // nodes.rails)
    slots = len(nodes.members) * seat.most
    packed, handed = scratch.take(PACKED, len(seat.own) * slots * each), scratch.take(PACKED, len(seat.own) * each)
    middle, arrived = scratch.take(MIDDLE, slots * each), scratch.take(ARRIVED, seat.most * each)
    before = (_pack_slices(seat, packed, cuts, each), Near(Kind.REDUCE_SCATTER, middle, packed))
    far = (Far(Kind.REDUCE_SCATTER, arrived, middle),) if seat.is_on_rail else ()
    after = (
        Near(Kind.ALL_TO_ALL, handed, arrived.part(0, len(seat.own) * each)),  # from [to] to [slice]
        Copies(tuple(unpacking(0, cuts, handed))),
    )
    return Piece(before, far, (), after)


def exchanged_unevenly(seat: Seat, scratch: Scratch, cuts: Cuts) -> Piece:
    """Rail ``l`` carries slice ``l`` of every part: collected from the own node, and handed on in the other one.

    What it carries to a node of ``t`` ranks is ``[to < t][from < s]``, and from there ``[to < s][from < t]``.
    """
    nodes, own = seat.nodes, len(seat.own)
    each = -(-size_of(cuts) // nodes.rails)
    slots, ranks = len(nodes.members) * seat.most, len(nodes.of)
    packed, collected = scratch.take(PACKED, own * slots * each), scratch.take(PACKED, own * slots * each)
    sorted_, handed = scratch.take(PACKED, own * ranks * each), scratch.take(PACKED, own * ranks * each)
    middle, arrived = scratch.take(MIDDLE, own * ranks * each), scratch.take(ARRIVED, own * ranks * each)
    turned: Pairs = []
    rows: Pairs = []
    results: Pairs = []
    begin = 0  # of a node's ranks, one node behind the other
    for node, members in enumerate(nodes.members):
        there = len(members)
        for to in range(there):
            for giver in range(own):
                row = collected.part((giver * slots + node * seat.most + to) * each, each)
                turned.append((middle.part((begin * own + to * own + giver) * each, each), row))
        for to in range(own):  # [to][from of the node] becomes [to][from of all]
            row = arrived.part((begin * own + to * there) * each, there * each)
            rows.append((sorted_.part((to * ranks + begin) * each, there * each), row))
        for place, rank in enumerate(members):
            for rail, (at, end) in enumerate(_slices(size_of(cuts), each)):
                results += unpacking(rank, cuts, handed.part((rail * ranks + begin + place) * each, each), at, end)
        begin += there
    parts = tuple(own * len(members) * each for members in nodes.members)
    collect = Near(Kind.ALL_TO_ALL, collected, packed)
    before = (_pack_slices(seat, packed, cuts, each), collect, Copies(tuple(turned)))
    far = (Far(Kind.ALL_TO_ALL, arrived, middle, sent=parts, received=parts),) if seat.is_on_rail else ()
    hand_on = Near(Kind.ALL_TO_ALL, handed, sorted_)
    return Piece(before, far, (), (Copies(tuple(rows)), hand_on, Copies(tuple(results))))


def _pack_slices(seat: Seat, packed: Span, cuts: Cuts, each: int) -> Copies:
    """Slices of parts as ``[rail][node][place]``."""
    slots = len(seat.nodes.members) * seat.most
    pairs: Pairs = []
    for rail, (begin, end) in enumerate(_slices(size_of(cuts), each)):
        for node, ranks in enumerate(seat.nodes.members):
            for place, rank in enumerate(ranks):
                row = packed.part((rail * slots + node * seat.most + place) * each, each)
                pairs += packing(row, INPUT, rank, cuts, begin, end)
    return Copies(tuple(pairs))


def _slices(size: int, each: int) -> list[tuple[int, int]]:
    return [(at, min(at + each, size)) for at in range(0, size, each)]


def told(seat: Seat, root: int, cuts: Cuts) -> Piece:
    """The root's node knows it first; rail ``l`` carries slice ``l``."""
    ((_, whole),) = run(OUTPUT, 0, cuts)  # of one tensor
    node, place = seat.nodes.seat(root)
    slices = [whole.part(at, end - at) for at, end in _slices(whole.count, -(-whole.count // seat.nodes.rails))]
    far: tuple[Far, ...] = ()
    if seat.place < len(slices):
        far = (Far(Kind.BROADCAST, slices[seat.place], slices[seat.place], node),)
    if seat.node == node:
        return Piece((Spread(((place, whole),)),), far, (), ())
    return Piece((), far, (), (Spread(tuple(enumerate(slices))),))
