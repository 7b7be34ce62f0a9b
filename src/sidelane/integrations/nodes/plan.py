"""Plans of collectives among several nodes, in pieces: the far steps of one run beside the near steps of others.

Near steps are collectives of the ranks of one node, far ones of the ranks of one rail. A far step is begun, and joined
later: between the two comes the near part of another piece. All ranks of a node have the same near steps, all of a
rail the same far ones, in one order; so no two of them can wait for each other.

An all-gather of two pieces::

    far    [gather 0      ][gather 1      ]
    near   [own 0]          [own 1][others 0][others 1]
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from sidelane.integrations.nodes.steps import (
    ARRIVED,
    INPUT,
    MIDDLE,
    OUTPUT,
    PACKED,
    Copies,
    ElementSpan,
    Far,
    Join,
    Near,
    NodeBroadcast,
    NodePlan,
    Step,
    StepGroup,
    whole,
)
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind

Pairs = list[tuple[ElementSpan, ElementSpan]]


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Elements ``begin`` to ``end`` of each part of a tensor, whose parts have ``count``."""

    tensor: int
    count: int
    begin: int
    end: int


Cuts = Sequence[Cut]


@dataclasses.dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank and its place in its node."""

    nodes: Nodes
    rank: int
    node: int
    place: int

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.nodes.members[self.node]

    @property
    def others(self) -> tuple[int, ...]:
        """The other nodes, from the next one on: so all nodes do the same, but for where they are."""
        return (*range(self.node + 1, len(self.nodes.members)), *range(self.node))

    @property
    def is_on_rail(self) -> bool:
        """True if it takes far steps."""
        return self.place < self.nodes.rails

    @property
    def most(self) -> int:
        """Number of ranks of the largest node."""
        return max(map(len, self.nodes.members))


class ScratchParts:
    """Allocator of parts of the scratch tensors. Two pieces are under way at once, so each tensor exists twice."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._turn = 0

    def turn(self, number: int) -> None:
        """Free the parts of the piece before the last."""
        self._turn = number % 2
        self._taken.clear()

    def take(self, buffer: str, count: int) -> ElementSpan:
        name = f"{buffer}{self._turn}"
        span = ElementSpan(name, self._taken.get(name, 0), count)
        self._taken[name] = span.offset + count
        self.counts[name] = max(self.counts.get(name, 0), span.offset + count)
        return span


def size_of(cuts: Cuts) -> int:
    """Return the number of elements of a run."""
    return sum(cut.end - cut.begin for cut in cuts)


def run(
    buffer: str, part: int, cuts: Cuts, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, ElementSpan]]:
    """Yield elements ``begin`` to ``end`` of a part's run: the offset of each span in the run, and the span."""
    at = 0
    for cut in cuts:
        first, last = max(begin, at), min(end if end is not None else size_of(cuts), at + cut.end - cut.begin)
        if first < last:
            yield first, ElementSpan(buffer, part * cut.count + cut.begin + first - at, last - first, cut.tensor)
        at += cut.end - cut.begin


def packing(to: ElementSpan, buffer: str, part: int, cuts: Cuts, begin: int = 0, end: int | None = None) -> Pairs:
    """Return copies of some of a part's run into a row of scratch."""
    return [(to.part(at - begin, span.count), span) for at, span in run(buffer, part, cuts, begin, end)]


def unpacking(part: int, cuts: Cuts, given: ElementSpan, begin: int = 0, end: int | None = None) -> Pairs:
    """Return copies from a row of scratch into the result."""
    return [(span, given.part(at - begin, span.count)) for at, span in run(OUTPUT, part, cuts, begin, end)]


def gathered(seat: RankPlace, scratch: ScratchParts, cuts: Cuts) -> StepGroup:
    """Plan an all-gather: rail ``l`` carries the parts of ranks ``l, l + L, ...`` of each node, one of each a round."""
    nodes, size = seat.nodes, size_of(cuts)
    own = NodeBroadcast(
        tuple((place, span) for place, rank in enumerate(seat.own) for _, span in run(OUTPUT, rank, cuts))
    )
    far: list[Far] = []
    sent: Pairs = []
    copies: Pairs = []
    for place in range(seat.place, seat.most, nodes.rails) if seat.is_on_rail else ():
        arrived = scratch.take(ARRIVED, len(nodes.members) * size)
        # A node without a rank for this round sends elements that are never read.
        giver = seat.own[place] if place < len(seat.own) else seat.rank
        (_, given), *more = run(OUTPUT, giver, cuts)
        if more:
            given = scratch.take(MIDDLE, size)
            sent += packing(given, OUTPUT, giver, cuts)
        far.append(Far(Kind.ALL_GATHER, arrived, given))
        for node in seat.others:
            if place < len(nodes.members[node]):
                copies += unpacking(nodes.members[node][place], cuts, arrived.part(node * size, size))
    others = NodeBroadcast(
        tuple(
            (place % nodes.rails, span)
            for node in seat.others
            for place, rank in enumerate(nodes.members[node])
            for _, span in run(OUTPUT, rank, cuts)
        )
    )
    # With one round every rank sends its own part: the near part may run beside.
    before, beside = ((), (own,)) if seat.most == nodes.rails else ((own,), ())
    return StepGroup((*before, Copies(tuple(sent))), tuple(far), beside, (Copies(tuple(copies)), others))


def reduced(seat: RankPlace, scratch: ScratchParts, cuts: Cuts) -> StepGroup:
    """Plan an all-reduce: rail ``l`` adds slice ``l`` of the nodes' sums; further ranks reduce unused elements."""
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
    return StepGroup(before, far, (), (*own, NodeBroadcast(tuple(spans))))


def scattered(seat: RankPlace, scratch: ScratchParts, cuts: Cuts) -> StepGroup:
    """Plan a reduce-scatter among nodes of one size: rank ``l`` of a node has its sums for the ranks ``l`` of all
    nodes, and its rail adds them up.
    """
    nodes, size = seat.nodes, size_of(cuts)
    packed = scratch.take(PACKED, len(nodes.of) * size)
    middle, arrived = scratch.take(MIDDLE, len(nodes.members) * size), scratch.take(ARRIVED, size)
    before = (_pack(seat, packed, cuts), Near(Kind.REDUCE_SCATTER, middle, packed))
    return StepGroup(
        before, (Far(Kind.REDUCE_SCATTER, arrived, middle),), (), (Copies(tuple(unpacking(0, cuts, arrived))),)
    )


def exchanged(seat: RankPlace, scratch: ScratchParts, cuts: Cuts) -> StepGroup:
    """Plan an all-to-all among nodes of one size: rank ``l`` of a node collects the parts for all ranks ``l``, and its
    rail delivers them.
    """
    nodes, size = seat.nodes, size_of(cuts)
    near, far = len(seat.own), len(nodes.members)
    packed, collected = scratch.take(PACKED, near * far * size), scratch.take(PACKED, near * far * size)
    middle, arrived = scratch.take(MIDDLE, near * far * size), scratch.take(ARRIVED, near * far * size)
    # [from][to node] becomes [to node][from]
    turned = Copies(
        tuple(
            (middle.part((node * near + place) * size, size), collected.part((place * far + node) * size, size))
            for place in (*range(seat.place, near), *range(seat.place))
            for node in (seat.node, *seat.others)
        )
    )
    before = (_pack(seat, packed, cuts), Near(Kind.ALL_TO_ALL, collected, packed), turned)
    rows: Pairs = []
    for node, ranks in enumerate(nodes.members):
        for place, rank in enumerate(ranks):
            rows += unpacking(rank, cuts, arrived.part((node * near + place) * size, size))
    return StepGroup(before, (Far(Kind.ALL_TO_ALL, arrived, middle),), (), (Copies(tuple(rows)),))


def _pack(seat: RankPlace, packed: ElementSpan, cuts: Cuts) -> Copies:
    """Return copies of the parts for ``[place][node]`` next to each other."""
    far, size = len(seat.nodes.members), size_of(cuts)
    pairs: Pairs = []
    for node, ranks in enumerate(seat.nodes.members):
        for place, rank in enumerate(ranks):
            pairs += packing(packed.part((place * far + node) * size, size), INPUT, rank, cuts)
    return Copies(tuple(pairs))


def scattered_unevenly(seat: RankPlace, scratch: ScratchParts, cuts: Cuts) -> StepGroup:
    """Plan a reduce-scatter: rail ``l`` adds slice ``l`` of every part; then the ranks of a node exchange the slices.

    Rows are ``[node][place]`` with room for ``M`` places; those of places that a node lacks are never read.
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
    return StepGroup(before, far, (), after)


def exchanged_unevenly(seat: RankPlace, scratch: ScratchParts, cuts: Cuts) -> StepGroup:
    """Plan an all-to-all: rail ``l`` carries slice ``l`` of every part, collected in the own node and handed on in the
    other.

    To a node of ``t`` ranks it carries ``[to < t][from < s]``, and from there ``[to < s][from < t]``.
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
    return StepGroup(before, far, (), (Copies(tuple(rows)), hand_on, Copies(tuple(results))))


def _pack_slices(seat: RankPlace, packed: ElementSpan, cuts: Cuts, each: int) -> Copies:
    """Return copies of the slices of parts as ``[rail][node][place]``."""
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


def told(seat: RankPlace, scratch: ScratchParts, root: int, cuts: Cuts) -> StepGroup:
    """Plan a broadcast among nodes of one size: the root scatters slices, rail ``l`` carries slice ``l``, and each node
    exchanges what has come. So no port has to send more than two times the bytes, the root's included.

    What equal slices leave over goes to all of the root's node, and with the last slice.
    """
    ((_, whole),) = run(OUTPUT, 0, cuts)  # of one tensor
    node, place = seat.nodes.seat(root)
    many = len(seat.own)
    each = whole.count // many
    if not each or many == 1:
        return told_whole(seat, root, cuts)
    even, rest = whole.part(0, each * many), whole.part(each * many, whole.count - each * many)
    slices = [whole.part(at * each, each if at < many - 1 else each + rest.count) for at in range(many)]
    before: tuple[Step, ...] = ()
    if seat.node == node:
        # The root's own slice lies where it belongs, and a copy of it in scratch that nobody reads.
        slot = scratch.take(MIDDLE, each) if seat.place == place else whole.part(seat.place * each, each)
        before = (Near(Kind.SCATTER, slot, even, place),)
        if rest.count:
            before += (NodeBroadcast(((place, rest),)),)
    far = Far(Kind.BROADCAST, slices[seat.place], slices[seat.place], node)
    return StepGroup(before, (far,), (), (NodeBroadcast(tuple(enumerate(slices))),))


def told_whole(seat: RankPlace, root: int, cuts: Cuts) -> StepGroup:
    """Plan a broadcast: the root's node gets all of it first; rail ``l`` carries slice ``l``."""
    ((_, whole),) = run(OUTPUT, 0, cuts)
    node, place = seat.nodes.seat(root)
    slices = [whole.part(at, end - at) for at, end in _slices(whole.count, -(-whole.count // seat.nodes.rails))]
    far: tuple[Far, ...] = ()
    if seat.place < len(slices):
        far = (Far(Kind.BROADCAST, slices[seat.place], slices[seat.place], node),)
    if seat.node == node:
        return StepGroup((NodeBroadcast(((place, whole),)),), far, (), ())
    return StepGroup((), far, (), (NodeBroadcast(tuple(enumerate(slices))),))


_CUT_AT = 256
"""Alignment of large pieces in elements of a tensor: copies of whole vectors are fastest."""

_MOST_LOPSIDED = 2
"""Largest ratio of two nodes' ranks for a reduce-scatter or an all-to-all: the larger one moves so much more bytes."""


def make_plan(kind: Kind, nodes: Nodes, rank: int, counts: Sequence[int], pieces: int, root: int = 0) -> NodePlan:
    """Make the steps of a rank.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
        nodes: nodes of the group.
        rank: number of this rank in the group.
        counts: elements of one part of each tensor (all_gather, reduce_scatter, all_to_all), or of the tensor
            (all_reduce; broadcast, which has one tensor).
        pieces: largest number of pieces into which they are cut together; 1 and more.
        root: root of a broadcast.

    Raises:
        ValueError: there are no such steps (see :func:`objection`), or a number is out of range.
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
    seat = RankPlace(nodes, rank, *nodes.seat(rank))
    scratch = ScratchParts()
    found: list[StepGroup] = []
    for number, cuts in enumerate(_cut(counts, pieces)):
        scratch.turn(number)
        match kind:
            case Kind.ALL_GATHER:
                found.append(gathered(seat, scratch, cuts))
            case Kind.ALL_REDUCE:
                found.append(reduced(seat, scratch, cuts))
            case Kind.REDUCE_SCATTER:
                found.append((scattered if nodes.even else scattered_unevenly)(seat, scratch, cuts))
            case Kind.ALL_TO_ALL:
                found.append((exchanged if nodes.even else exchanged_unevenly)(seat, scratch, cuts))
            case Kind.BROADCAST:
                found.append(told(seat, scratch, root, cuts) if nodes.even else told_whole(seat, root, cuts))
    first: tuple[Step, ...] = ()
    if kind is Kind.ALL_GATHER:
        own = ((ElementSpan(OUTPUT, rank * n, n, t), ElementSpan(INPUT, 0, n, t)) for t, n in enumerate(counts) if n)
        first = (Copies(tuple(own)),)
    return NodePlan((*first, *_in_turn(found)), scratch.counts)


def objection(kind: Kind, nodes: Nodes) -> str:
    """Return the reason why there are no such steps; "" if there are."""
    if kind in (Kind.SCATTER, Kind.GATHER):
        return "no steps for it"
    largest = max(map(len, nodes.members))
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) and largest > _MOST_LOPSIDED * nodes.rails:
        return f"a node of more than {_MOST_LOPSIDED} times the ranks of another"
    return ""


def _cut(counts: Sequence[int], pieces: int) -> Iterator[tuple[Cut, ...]]:
    """Cut several tensors, one behind the other, into pieces of about the same size."""
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


def _in_turn(pieces: Sequence[StepGroup]) -> Iterator[Step]:
    """Yield the steps of all pieces: the far steps of a piece begin before the piece in front of it is finished, and
    behind the one before that.
    """
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
