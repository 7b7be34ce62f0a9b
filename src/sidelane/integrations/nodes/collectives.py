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

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidelane import forks
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError
from sidelane.integrations.calls import copy_bits
from sidelane.integrations.nodes.status import NodesStatus
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.works import OtherWork
from sidelane.program.collective import Kind, ReduceOp
from sidelane.program.shape import Beside
from sidelane.session import Communicator

TensorPair = tuple[torch.Tensor, torch.Tensor]
TensorRow = tuple[torch.Tensor, ...]

CUT_AT = 256
"""Alignment of large pieces in elements of a tensor: copies of whole vectors are fastest."""

RAIL_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

_FEW = 4  # largest number of copies made one by one, by the GPU's copy engines


class TensorSteps:
    """The calls that recipes are made of, of one rank, on tensors of one dimension.

    Args:
        own: communicator of the rank's node.
        rail: group of the rank's rail.
        status: status of the communicator of all nodes.
        nodes: nodes of the group.
        rank: number of the rank in the group.
        on_streams: streams wait for the rail's calls, and no host does.

    Attributes:
        cached: symmetric memory that is kept for later calls.
    """

    def __init__(
        self, own: Communicator, rail: dist.ProcessGroup, status: NodesStatus, nodes: Nodes, rank: int, on_streams: bool
    ) -> None:
        self._own, self._status, self._nodes, self._rank, self._on_streams = own, status, nodes, rank, on_streams
        self._rail: Any = rail  # None once it is closed
        self.cached: dict[str, torch.Tensor] = {}
        self._rows: dict[str, torch.Tensor] = {}
        self._begun: list[OtherWork] = []

    @contextlib.contextmanager
    def call(self, dtype: torch.dtype, op: str, beside: Beside | None) -> Iterator[None]:
        """Make a call in a ``with`` block. If it fails, the works begun along the rail are held until the end.

        Args:
            dtype: dtype of the elements.
            op: operation of a reduction. A node's average is weighted before the nodes add theirs: the sum of all might
                not be a number of the dtype.
            beside: computation next to the calls within nodes; None for ``Config.beside``.
        """
        self._dtype, self._op, self._beside = dtype, op, beside
        try:
            yield
            self._begun.clear()  # they have tensors of the caller
        finally:
            self._rows.clear()

    def abort(self) -> None:
        """Let no call along the rail go on."""
        if self._rail is not None:
            self._rail.abort()

    def close(self) -> None:
        """Release the rail's group. Idempotent."""
        self.abort()
        rail, self._rail = self._rail, None
        if not self._on_streams and not all(work.is_completed() for work in self._begun):
            forks.never_finalize(rail)  # Gloo aborts nothing, and its end would wait for peers that may never come

    def scratch(self, name: str, count: int, *, is_sent: bool = False) -> torch.Tensor:
        """Return so many elements, for the whole call the same ones by their name.

        Those that are sent are symmetric memory, kept for later calls: calls have one order, and all ranks of a node
        take the same. If the node has no symmetric memory left, and within a capture, it is ordinary memory, too, and
        calls within the node stage it.
        """
        if name not in self._rows:
            own, nbytes = self._own, count * self._dtype.itemsize
            captured = own.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            held = self._symmetric(name, nbytes) if is_sent and not captured else None
            made = torch.empty(count, dtype=self._dtype, device=own.device) if held is None else held[:nbytes]
            self._rows[name] = made.view(self._dtype)
        return self._rows[name]

    def _symmetric(self, name: str, nbytes: int) -> torch.Tensor | None:
        """Return symmetric bytes for all calls; None if there are none."""
        own, cached = self._own, self.cached
        if own.world_size == 1:
            return None
        if name not in cached or cached[name].nbytes < nbytes:
            with self._in_the_node(), contextlib.suppress(UnavailableError):
                if name in cached:
                    own.synchronize()  # calls under way use it
                    del cached[name]
                cached[name] = own.empty(nbytes, dtype=torch.uint8)
        return cached.get(name)

    def copy(self, pairs: Iterable[TensorPair]) -> None:
        """Copy tensors (to, from) in any order."""
        found = [(to, given) for to, given in pairs if to.data_ptr() != given.data_ptr()]
        if len(found) > _FEW:
            copy_bits([to for to, _ in found], [given for _, given in found])
        else:
            for to, given in found:
                to.copy_(given)

    def broadcast(self, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Broadcast tensors within the node as one call, each from a rank that is given by its number there."""
        if self._own.world_size > 1:
            with self._in_the_node(), self._own.batch(beside=self._beside) as batch:
                for root, row in parts:
                    batch.broadcast(row, root=root)

    def within(self, kind: Kind, output: torch.Tensor, input: torch.Tensor, root: int = 0) -> None:
        """Make a reduce-scatter, an all-to-all or a scatter within the node; ``root`` is a number there."""
        own, beside = self._own, self._beside
        with self._in_the_node():
            if kind is Kind.ALL_TO_ALL:
                own.all_to_all(output, input, beside=beside)
            elif kind is Kind.SCATTER:
                own.scatter(output, input if own.rank == root else None, root=root, beside=beside)
            else:
                own.reduce_scatter(output, input, op=self._op, beside=beside)
                if self._op == ReduceOp.AVG:
                    output.mul_(own.world_size / len(self._nodes.of))

    def along(self, kind: Kind, output: torch.Tensor, input: torch.Tensor, root: int = 0) -> OtherWork:
        """Begin a call along the rail; ``root`` is a node. All-reduce and broadcast have one tensor."""
        rail, op = self._rail, RAIL_OPS[self._op]
        try:
            if kind is Kind.ALL_GATHER:
                work = rail._allgather_base(output, input)
            elif kind is Kind.ALL_TO_ALL:
                work = rail.alltoall_base(output, input, [], [])
            elif kind is Kind.BROADCAST:
                work = rail.broadcast(output, root)
            elif kind is Kind.ALL_REDUCE:
                work = rail.allreduce([output], op)
            else:
                opts = dist.ReduceScatterOptions()
                opts.reduceOp = op  # type: ignore[assignment]  # torch takes both
                work = rail._reduce_scatter_base(output, input, opts)
        except RuntimeError as error:
            self._status.explain(error, ())
        self._begun.append(OtherWork(work, self._status, (), looks=not self._on_streams))
        return self._begun[-1]

    @contextlib.contextmanager
    def _in_the_node(self) -> Iterator[None]:
        """Agree with all ranks on an error of a call within the node, which names ranks by their numbers there."""
        try:
            yield
        except (PeerError, CommunicatorClosedError) as error:
            members = self._nodes.members[self._nodes.of[self._rank]]
            self._status.explain(error, [members[rank] for rank in getattr(error, "ranks", ())])


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Elements ``begin`` to ``end`` of each part of a pair of tensors."""

    output: torch.Tensor
    input: torch.Tensor
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class NodesPiece:
    """Some elements of all parts, which move together, as one rank sees them.

    Attributes:
        steps: calls of the rank.
        nodes: nodes of the group, all of one size.
        node, local_rank: node of the rank, and its number there.
        cuts: elements of each tensor.
        number: number of the piece. Two are under way at once, so scratch is used again by the one after the next.
        size: number of elements of one part.
        most: the same, of the largest piece, for which scratch is taken.
        root: root of a broadcast.
    """

    steps: TensorSteps
    nodes: Nodes
    node: int
    local_rank: int
    cuts: tuple[Cut, ...]
    number: int
    size: int
    most: int
    root: int

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks of this node."""
        return self.nodes.members[self.node]

    @property
    def others(self) -> tuple[int, ...]:
        """The other nodes from the next one on, so that all nodes do the same, each with those as far from it."""
        return (*range(self.node + 1, len(self.nodes.members)), *range(self.node))

    def outputs(self, parts: int) -> list[TensorRow]:
        """Return the elements of each part of the outputs, a row for each tensor."""
        return _rows(parts, ((cut.output, cut.begin, cut.end) for cut in self.cuts))

    def inputs(self, parts: int) -> list[TensorRow]:
        """Return the elements of each part of the inputs, a row for each tensor."""
        return _rows(parts, ((cut.input, cut.begin, cut.end) for cut in self.cuts))

    def packed(self, scratch: torch.Tensor, parts: int) -> list[TensorRow]:
        """Return the elements of each part in scratch, where those of all tensors follow each other."""
        ends = itertools.accumulate((cut.end - cut.begin for cut in self.cuts), initial=0)
        return _rows(parts, ((scratch, begin, end) for begin, end in itertools.pairwise(ends)))

    def scratch(self, name: str, parts: int, *, slices: int = 1, is_sent: bool = False) -> torch.Tensor:
        """Return scratch for so many parts, or slices of parts."""
        each, most = -(-self.size // slices), -(-self.most // slices)
        return self.steps.scratch(f"{name}{self.number % 2}", parts * most, is_sent=is_sent)[: parts * each]

    def pack(self) -> torch.Tensor:
        """Copy the inputs' parts for ranks ``[local_rank][node]`` next to each other into scratch; return it."""
        many, ranks, inputs = len(self.nodes.members), len(self.nodes.of), self.inputs(len(self.nodes.of))
        whole = self.scratch("packed", ranks, is_sent=True)
        rows = self.packed(whole, ranks)
        self.steps.copy(
            pair
            for node, members in enumerate(self.nodes.members)
            for local_rank, rank in enumerate(members)
            for pair in zip(rows[local_rank * many + node], inputs[rank], strict=True)
        )
        return whole


def all_gather(piece: NodesPiece) -> Iterator[None]:
    """Gather own parts along the rail, while ranks of a node exchange theirs; then hand on within it what has come."""
    steps, members, outputs = piece.steps, piece.nodes.members, piece.outputs(len(piece.nodes.of))
    arrived, own = piece.scratch("arrived", len(members)), outputs[piece.own[piece.local_rank]]
    given = own[0]
    if len(own) > 1:
        given = piece.scratch("middle", 1)
        steps.copy(zip(*piece.packed(given, 1), own, strict=True))
    gathering = steps.along(Kind.ALL_GATHER, arrived, given)
    steps.broadcast((local_rank, row) for local_rank, rank in enumerate(piece.own) for row in outputs[rank])
    yield
    gathering.wait()
    rows = piece.packed(arrived, len(members))
    steps.copy(
        pair for node in piece.others for pair in zip(outputs[members[node][piece.local_rank]], rows[node], strict=True)
    )
    steps.broadcast(
        (local_rank, row)
        for node in piece.others
        for local_rank, rank in enumerate(members[node])
        for row in outputs[rank]
    )


def all_reduce(piece: NodesPiece) -> Iterator[None]:
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
    steps.copy((row, middle[at : at + len(row)]) for at, row in slices[piece.local_rank])
    steps.broadcast((local_rank, row) for local_rank, rows in enumerate(slices) for _, row in rows)


def reduce_scatter(piece: NodesPiece) -> Iterator[None]:
    """Reduce to each rank, within the node, the parts for all ranks of its rail; then reduce them along the rail."""
    steps, packed = piece.steps, piece.pack()
    middle, arrived = piece.scratch("middle", len(piece.nodes.members)), piece.scratch("arrived", 1)
    steps.within(Kind.REDUCE_SCATTER, middle, packed)
    reducing = steps.along(Kind.REDUCE_SCATTER, arrived, middle)
    yield
    reducing.wait()
    steps.copy(zip(*piece.outputs(1), *piece.packed(arrived, 1), strict=True))


def all_to_all(piece: NodesPiece) -> Iterator[None]:
    """Collect within the node the parts for all ranks of a rail; then exchange them along the rail."""
    steps, packed = piece.steps, piece.pack()
    per_node, node_count, ranks = len(piece.own), len(piece.nodes.members), len(piece.nodes.of)
    collected, middle = piece.scratch("collected", ranks, is_sent=True), piece.scratch("middle", ranks)
    arrived = piece.scratch("arrived", ranks)
    steps.within(Kind.ALL_TO_ALL, collected, packed)
    to, given = (whole.view(ranks, -1).unbind() for whole in (middle, collected))
    steps.copy(  # [from][to node] becomes [to node][from]
        (to[node * per_node + local_rank], given[local_rank * node_count + node])
        for local_rank in (*range(piece.local_rank, per_node), *range(piece.local_rank))
        for node in (piece.node, *piece.others)
    )
    exchanging = steps.along(Kind.ALL_TO_ALL, arrived, middle)
    yield
    exchanging.wait()
    outputs, rows = piece.outputs(ranks), piece.packed(arrived, ranks)
    steps.copy(
        pair
        for node, members in enumerate(piece.nodes.members)
        for local_rank, rank in enumerate(members)
        for pair in zip(outputs[rank], rows[node * per_node + local_rank], strict=True)
    )


def broadcast(piece: NodesPiece) -> Iterator[None]:
    """Scatter slices within the root's node, and broadcast slice ``i`` along rail ``i``; then each rank hands its on.

    No port sends more than two times the bytes, the root's included. All of the root's node gets what equal slices
    leave over; it goes with the last slice.
    """
    steps, many = piece.steps, len(piece.own)
    node, local_rank = piece.nodes.coordinates(piece.root)
    ((whole,),) = piece.outputs(1)
    each = len(whole) // many
    slices = [whole[at * each : (at + 1) * each if at < many - 1 else len(whole)] for at in range(many)]
    if piece.node == node and many > 1:
        if each:
            # The root's own slice lies where it belongs, and a copy of it in scratch that nobody reads.
            own = (
                slices[piece.local_rank][:each]
                if piece.local_rank != local_rank
                else piece.scratch("middle", 1, slices=many)
            )
            steps.within(Kind.SCATTER, own[:each], whole[: each * many], local_rank)
        if each * many < len(whole):
            steps.broadcast([(local_rank, whole[each * many :])])
    own = slices[piece.local_rank]
    telling = steps.along(Kind.BROADCAST, own, own, node) if len(own) else None
    yield
    if telling is not None:
        telling.wait()
    steps.broadcast((at, row) for at, row in enumerate(slices) if len(row))


RECIPES: dict[Kind, Callable[[NodesPiece], Iterator[None]]] = {
    Kind.ALL_GATHER: all_gather,
    Kind.REDUCE_SCATTER: reduce_scatter,
    Kind.ALL_REDUCE: all_reduce,
    Kind.ALL_TO_ALL: all_to_all,
    Kind.BROADCAST: broadcast,
}


def run_recipe(
    steps: TensorSteps,
    kind: Kind,
    nodes: Nodes,
    rank: int,
    pairs: Sequence[TensorPair],
    counts: Sequence[int],
    pieces: int,
    root: int,
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
    node, local_rank = nodes.coordinates(rank)
    if kind is Kind.ALL_GATHER:
        each = [(pair, count) for pair, count in zip(pairs, counts, strict=True) if count]
        steps.copy((output[rank * n : (rank + 1) * n], input) for (output, input), n in each)
    cuts = list(_cut(pairs, counts, pieces))
    sizes = [sum(cut.end - cut.begin for cut in some) for some in cuts]
    before: Iterator[None] = iter(())
    for number, (some, size) in enumerate(zip(cuts, sizes, strict=True)):
        piece = RECIPES[kind](NodesPiece(steps, nodes, node, local_rank, some, number, size, max(sizes), root))
        next(piece)
        next(before, None)
        before = piece
    next(before, None)


def _cut(pairs: Sequence[TensorPair], counts: Sequence[int], pieces: int) -> Iterator[tuple[Cut, ...]]:
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


def _rows(parts: int, cuts: Iterable[tuple[torch.Tensor, int, int]]) -> list[TensorRow]:
    """Return elements ``begin`` to ``end`` of each of so many equal parts: of each part those of all tensors."""
    return list(zip(*(whole.view(parts, -1)[:, begin:end].unbind() for whole, begin, end in cuts), strict=True))


def _between(rows: TensorRow, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield elements ``begin`` to ``end`` of rows that follow each other: where each is from ``begin`` on, and it."""
    at = 0
    for row in rows:
        first, last = max(begin, at), min(end, at + len(row))
        if first < last:
            yield first - begin, row[first - at : last - at]
        at += len(row)
