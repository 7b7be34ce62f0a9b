"""Collectives among several nodes of one size: recipes of calls within a node, and along rails between nodes.

A rail has one rank of each node. A recipe describes one piece of a call. It begins a call along the rail, yields, and
waits for that call after the first part of the next piece, so that the two levels overlap. An all-gather of two
pieces::

    along   [gather 0      ][gather 1      ]
    within  [own 0]          [own 1][others 0][others 1]

All ranks of a node make the same calls within it, all of a rail the same calls along it, in one order; so no two ranks
can wait for each other. Between its begin and its end, a call along a rail may read its input and write its output at
any time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind

CUT_AT = 256
"""Alignment of large pieces in elements of a tensor: copies of whole vectors are fastest."""


class RailRow(Protocol):
    """Elements in a row: a tensor of one dimension."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: slice, /) -> Self: ...


T = TypeVar("T", bound=RailRow)


class Begun(Protocol):
    """A call along a rail that has begun."""

    def wait(self) -> object:
        """Return when it has ended; on streams, make the current one wait for it."""
        ...


class Steps(Protocol[T]):
    """The calls that recipes are made of, of one rank."""

    def scratch(self, name: str, count: int, /, *, is_sent: bool = False) -> T:
        """Return a row, for the whole call the same one by its name. All ranks of a node take those that are sent."""
        ...

    def rows(self, whole: T, parts: int, begin: int, end: int, /) -> Sequence[T]:
        """Return elements ``begin`` to ``end`` of each of so many equal parts of a row."""
        ...

    def copy(self, pairs: Iterable[tuple[T, T]], /) -> None:
        """Copy rows (to, from) in any order."""
        ...

    def broadcast(self, parts: Iterable[tuple[int, T]], /) -> None:
        """Broadcast rows within the node as one call, each from a rank that is given by its number there."""
        ...

    def within(self, kind: Kind, output: T, input: T, root: int = 0, /) -> None:
        """Make a reduce-scatter, an all-to-all or a scatter within the node; ``root`` is a number there."""
        ...

    def along(self, kind: Kind, output: T, input: T, root: int = 0, /) -> Begun:
        """Begin a call along the rail; ``root`` is a node. All-reduce and broadcast have one row."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Cut(Generic[T]):
    """Elements ``begin`` to ``end`` of each part of a pair of tensors."""

    output: T
    input: T
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class NodesPiece(Generic[T]):
    """Some elements of all parts, which move together, as one rank sees them.

    Attributes:
        steps: calls of the rank.
        nodes: nodes of the group, all of one size.
        node, place: node of the rank, and its number there.
        cuts: elements of each tensor.
        number: number of the piece. Two are under way at once, so scratch is used again by the one after the next.
        size: number of elements of one part.
        most: the same, of the largest piece, for which scratch is taken.
    """

    steps: Steps[T]
    nodes: Nodes
    node: int
    place: int
    cuts: tuple[Cut[T], ...]
    number: int
    size: int
    most: int

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks of this node."""
        return self.nodes.members[self.node]

    @property
    def others(self) -> tuple[int, ...]:
        """The other nodes from the next one on, so that all nodes do the same, each with those as far from it."""
        return (*range(self.node + 1, len(self.nodes.members)), *range(self.node))

    def outputs(self, parts: int) -> list[tuple[T, ...]]:
        """Return the elements of each part of the outputs, a row for each tensor."""
        rows = (self.steps.rows(cut.output, parts, cut.begin, cut.end) for cut in self.cuts)
        return list(zip(*rows, strict=True))

    def inputs(self, parts: int) -> list[tuple[T, ...]]:
        """Return the elements of each part of the inputs, a row for each tensor."""
        rows = (self.steps.rows(cut.input, parts, cut.begin, cut.end) for cut in self.cuts)
        return list(zip(*rows, strict=True))

    def packed(self, scratch: T, parts: int) -> list[tuple[T, ...]]:
        """Return the elements of each part in scratch, where those of all tensors follow each other."""
        ends = itertools.accumulate((cut.end - cut.begin for cut in self.cuts), initial=0)
        rows = (self.steps.rows(scratch, parts, begin, end) for begin, end in itertools.pairwise(ends))
        return list(zip(*rows, strict=True))

    def scratch(self, name: str, parts: int, *, slices: int = 1, is_sent: bool = False) -> T:
        """Return scratch for so many parts, or slices of parts."""
        each, most = -(-self.size // slices), -(-self.most // slices)
        return self.steps.scratch(f"{name}{self.number % 2}", parts * most, is_sent=is_sent)[: parts * each]

    def pack(self) -> T:
        """Copy the inputs' parts for ranks ``[place][node]`` next to each other into scratch; return it."""
        many, ranks, inputs = len(self.nodes.members), len(self.nodes.of), self.inputs(len(self.nodes.of))
        whole = self.scratch("packed", ranks, is_sent=True)
        rows = self.packed(whole, ranks)
        self.steps.copy(
            pair
            for node, members in enumerate(self.nodes.members)
            for place, rank in enumerate(members)
            for pair in zip(rows[place * many + node], inputs[rank], strict=True)
        )
        return whole


def all_gather(piece: NodesPiece[T]) -> Iterator[None]:
    """Gather own parts along the rail, while ranks of a node exchange theirs; then hand on within it what has come."""
    steps, members, outputs = piece.steps, piece.nodes.members, piece.outputs(len(piece.nodes.of))
    arrived, own = piece.scratch("arrived", len(members)), outputs[piece.own[piece.place]]
    given = own[0]
    if len(own) > 1:
        given = piece.scratch("middle", 1)
        steps.copy(zip(*piece.packed(given, 1), own, strict=True))
    gathering = steps.along(Kind.ALL_GATHER, arrived, given)
    steps.broadcast((place, row) for place, rank in enumerate(piece.own) for row in outputs[rank])
    yield
    gathering.wait()
    rows = piece.packed(arrived, len(members))
    steps.copy(
        pair for node in piece.others for pair in zip(outputs[members[node][piece.place]], rows[node], strict=True)
    )
    steps.broadcast(
        (place, row) for node in piece.others for place, rank in enumerate(members[node]) for row in outputs[rank]
    )


def all_reduce(piece: NodesPiece[T]) -> Iterator[None]:
    """Reduce slice ``i`` to rank ``i`` of the node and along its rail; then each rank hands on its slice."""
    steps, many = piece.steps, len(piece.own)
    packed = piece.scratch("packed", many, slices=many, is_sent=True)
    middle = piece.scratch("middle", 1, slices=many)
    steps.copy(zip(*piece.packed(packed[: piece.size], 1), *piece.inputs(1), strict=True))
    steps.within(Kind.REDUCE_SCATTER, middle, packed)
    reducing = steps.along(Kind.ALL_REDUCE, middle, middle)
    yield
    reducing.wait()
    (outputs,), each = piece.outputs(1), len(middle)
    slices = [list(_between(outputs, at * each, (at + 1) * each)) for at in range(many)]
    steps.copy((row, middle[at : at + len(row)]) for at, row in slices[piece.place])
    steps.broadcast((place, row) for place, rows in enumerate(slices) for _, row in rows)


def reduce_scatter(piece: NodesPiece[T]) -> Iterator[None]:
    """Reduce to each rank, within the node, the parts for all ranks of its rail; then reduce them along the rail."""
    steps, packed = piece.steps, piece.pack()
    middle, arrived = piece.scratch("middle", len(piece.nodes.members)), piece.scratch("arrived", 1)
    steps.within(Kind.REDUCE_SCATTER, middle, packed)
    reducing = steps.along(Kind.REDUCE_SCATTER, arrived, middle)
    yield
    reducing.wait()
    steps.copy(zip(*piece.outputs(1), *piece.packed(arrived, 1), strict=True))


def all_to_all(piece: NodesPiece[T]) -> Iterator[None]:
    """Collect within the node the parts for all ranks of a rail; then exchange them along the rail."""
    steps, packed = piece.steps, piece.pack()
    near, far, ranks = len(piece.own), len(piece.nodes.members), len(piece.nodes.of)
    collected, middle = piece.scratch("collected", ranks, is_sent=True), piece.scratch("middle", ranks)
    arrived = piece.scratch("arrived", ranks)
    steps.within(Kind.ALL_TO_ALL, collected, packed)
    to, given = (steps.rows(whole, ranks, 0, piece.size) for whole in (middle, collected))
    steps.copy(  # [from][to node] becomes [to node][from]
        (to[node * near + place], given[place * far + node])
        for place in (*range(piece.place, near), *range(piece.place))
        for node in (piece.node, *piece.others)
    )
    exchanging = steps.along(Kind.ALL_TO_ALL, arrived, middle)
    yield
    exchanging.wait()
    outputs, rows = piece.outputs(ranks), piece.packed(arrived, ranks)
    steps.copy(
        pair
        for node, members in enumerate(piece.nodes.members)
        for place, rank in enumerate(members)
        for pair in zip(outputs[rank], rows[node * near + place], strict=True)
    )


def broadcast(piece: NodesPiece[T], root: int) -> Iterator[None]:
    """Scatter slices within the root's node, and broadcast slice ``i`` along rail ``i``; then each rank hands its on.

    No port sends more than two times the bytes, the root's included. All of the root's node gets what equal slices
    leave over; it goes with the last slice.
    """
    steps, many = piece.steps, len(piece.own)
    node, place = piece.nodes.coordinates(root)
    ((whole,),) = piece.outputs(1)
    each = len(whole) // many
    slices = [whole[at * each : (at + 1) * each if at < many - 1 else len(whole)] for at in range(many)]
    if piece.node == node and many > 1:
        if each:
            # The root's own slice lies where it belongs, and a copy of it in scratch that nobody reads.
            own = slices[piece.place][:each] if piece.place != place else piece.scratch("middle", 1, slices=many)
            steps.within(Kind.SCATTER, own[:each], whole[: each * many], place)
        if each * many < len(whole):
            steps.broadcast([(place, whole[each * many :])])
    own = slices[piece.place]
    telling = steps.along(Kind.BROADCAST, own, own, node) if len(own) else None
    yield
    if telling is not None:
        telling.wait()
    steps.broadcast((at, row) for at, row in enumerate(slices) if len(row))


RECIPES: dict[Kind, Callable[..., Iterator[None]]] = {
    Kind.ALL_GATHER: all_gather,
    Kind.REDUCE_SCATTER: reduce_scatter,
    Kind.ALL_REDUCE: all_reduce,
    Kind.ALL_TO_ALL: all_to_all,
    Kind.BROADCAST: broadcast,
}


def run_recipe(
    steps: Steps[T],
    kind: Kind,
    nodes: Nodes,
    rank: int,
    pairs: Sequence[tuple[T, T]],
    counts: Sequence[int],
    pieces: int,
    *root: int,
) -> None:
    """Make a call of several nodes of one size.

    Args:
        steps: calls of this rank.
        kind: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
        nodes: nodes of the group.
        rank: number of this rank in the group.
        pairs: outputs and inputs.
        counts: elements of one part of each pair (all_gather, reduce_scatter, all_to_all), or of the tensor
            (all_reduce; broadcast, which has one).
        pieces: largest number of pieces into which they are cut together.
        root: root of a broadcast.
    """
    node, place = nodes.coordinates(rank)
    if kind is Kind.ALL_GATHER:
        each = [(pair, count) for pair, count in zip(pairs, counts, strict=True) if count]
        steps.copy((output[rank * n : (rank + 1) * n], input) for (output, input), n in each)
    cuts = list(_cut(pairs, counts, pieces))
    sizes = [sum(cut.end - cut.begin for cut in some) for some in cuts]
    before: Iterator[None] = iter(())
    for number, (some, size) in enumerate(zip(cuts, sizes, strict=True)):
        piece = RECIPES[kind](NodesPiece(steps, nodes, node, place, some, number, size, max(sizes)), *root)
        next(piece)
        next(before, None)
        before = piece
    next(before, None)


def _cut(pairs: Sequence[tuple[T, T]], counts: Sequence[int], pieces: int) -> Iterator[tuple[Cut[T], ...]]:
    """Cut several tensors, one behind the other, into pieces of about the same size."""
    starts = [0, *itertools.accumulate(counts)]
    total = starts[-1]
    bounds = [0]
    for number in range(1, pieces):
        at = -(-total * number // pieces)
        tensor = max(t for t, start in enumerate(starts) if start <= at)
        if tensor < len(counts) and counts[tensor] >= 64 * CUT_AT:
            at = starts[tensor] + min(counts[tensor], -(-(at - starts[tensor]) // CUT_AT) * CUT_AT)
        bounds.append(at)
    for begin, end in itertools.pairwise([*bounds, total]):
        found = tuple(
            Cut(output, input, max(begin - start, 0), min(end - start, count))
            for (output, input), count, start in zip(pairs, counts, starts, strict=False)
            if max(begin, start) < min(end, start + count)
        )
        if found:
            yield found


def _between(rows: Iterable[T], begin: int, end: int) -> Iterator[tuple[int, T]]:
    """Yield elements ``begin`` to ``end`` of rows that follow each other: where each is from ``begin`` on, and it."""
    at = 0
    for row in rows:
        first, last = max(begin, at), min(end, at + len(row))
        if first < last:
            yield first - begin, row[first - at : last - at]
        at += len(row)
