"""Algorithms of the vendor's libraries, as commands of one rank: rings, direct exchanges, chains and trees.

A group is a row of ranks, its *order*; a rank's number there is its *position*. All of them are for any group: the
ranks of a rail, or all ranks in the order in which a ring goes through the nodes. Each rank first tells the ranks that
send to it that it has come, since they write straight into its memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from sidelane.program.collective import Reduction, Span
from sidelane.program.ir import EPOCH, Command, Copy, Flag, Reduce, Signal, Wait

Flags = Callable[[int, object], Flag]
"""Flag of a rank for a purpose, which is the same on all ranks that do the same."""

Block = Callable[[int, int], Span]
"""Bytes of a rank that a number stands for: a position, or a step."""


@dataclasses.dataclass(frozen=True, slots=True)
class RingPosition:
    """A group, and the position of one of its ranks."""

    order: Sequence[int]
    at: int
    flag: Flags

    @property
    def rank(self) -> int:
        return self.order[self.at]

    @property
    def right(self) -> int:
        """The rank to which this one passes on what it has."""
        return self.order[(self.at + 1) % len(self.order)]

    def begin(self) -> Iterator[Command]:
        """Tell the rank on the left that this one has come, and wait for the one on the right."""
        yield Signal(self.flag(self.order[self.at - 1], "right is here"), EPOCH)
        yield Wait(self.flag(self.rank, "right is here"), EPOCH)

    def send(self, step: object, dst: Span, src: Span) -> Iterator[Command]:
        """Send bytes to the right, and say so."""
        if src.nbytes:
            yield Copy(dst, src)
        yield Signal(self.flag(self.right, step), EPOCH)

    def wait(self, step: object) -> Wait:
        """Wait for what the rank on the left has sent in a step."""
        return Wait(self.flag(self.rank, step), EPOCH)


def ring_gather(ring: RingPosition, own: Span, block: Block, first: int = 0) -> Iterator[Command]:
    """Yield the passing on of blocks: each rank ends with those of all positions.

    Args:
        ring: group and position.
        own: own block, where it comes from.
        block: block of a position in the result of a rank.
        first: number of the first step, behind those that the flags already stand for.
    """
    many = len(ring.order)
    for step in range(many - 1):
        if step:
            yield ring.wait(first + step - 1)
        number = (ring.at - step) % many
        source = block(ring.rank, number) if step else own
        yield from ring.send(first + step, block(ring.right, number), source)
    yield ring.wait(first + many - 2)


def ring_reduce(ring: RingPosition, own: Block, slot: Block, result: Span, reduction: Reduction) -> Iterator[Command]:
    """Yield the passing on of sums: each rank ends with that of the block of its position.

    Args:
        ring: group and position.
        own: own block for a position.
        slot: bytes of a rank for what comes in a step; as many as the block that comes.
        result: sum of the rank's own block.
        reduction: reduction of the elements.
    """
    many = len(ring.order)
    for step in range(many - 1):
        number = (ring.at - 1 - step) % many
        source = own(ring.rank, number)
        if step:
            yield ring.wait(step - 1)
            came = _sized(slot(ring.rank, step - 1), source.nbytes)
            if source.nbytes:
                yield Reduce(came, (came, source), reduction)
            source = came
        yield from ring.send(step, _sized(slot(ring.right, step), source.nbytes), source)
    yield ring.wait(many - 2)
    if result.nbytes:
        last = _sized(slot(ring.rank, many - 2), result.nbytes)
        yield Reduce(result, (last, own(ring.rank, ring.at)), reduction)


def ring_all_reduce(ring: RingPosition, block: Block, slot: Block, reduction: Reduction) -> Iterator[Command]:
    """Yield both: sums of the blocks of all positions, in place."""
    own = block(ring.rank, ring.at)
    yield from ring_reduce(ring, block, slot, own, reduction)
    yield from ring_gather(ring, own, block, len(ring.order) - 1)


Round = tuple[object, int, int]
"""A round of an exchange: its name, the rank to which this one sends, and the rank from which it gets something."""


def exchange(
    rank: int, rounds: Sequence[Round], flag: Flags, given: Callable[[int], Span], came: Block
) -> Iterator[Command]:
    """Yield a direct exchange: in each round every rank sends to another one, and is sent something.

    Args:
        rank: whose commands they are.
        rounds: its rounds; those of one name go together.
        flag: flags of all ranks.
        given: what this rank has for another one.
        came: where a rank puts what comes from another one.
    """
    for name, _, source in rounds:
        yield Signal(flag(source, ("is here", name)), EPOCH)
    for name, to, _ in rounds:
        yield Wait(flag(rank, ("is here", name)), EPOCH)
        yield Copy(came(to, rank), given(to))
        yield Signal(flag(to, name), EPOCH)
    for name, _, _ in rounds:
        yield Wait(flag(rank, name), EPOCH)


def chain(ring: RingPosition, chunks: Sequence[tuple[int, int]], whole: Callable[[int], Span]) -> Iterator[Command]:
    """Yield the passing on of chunks (offset, bytes) of a whole, from the first of the order to the last."""
    is_last = ring.at == len(ring.order) - 1
    if ring.at:
        yield Signal(ring.flag(ring.order[ring.at - 1], "right is here"), EPOCH)
    if not is_last:
        yield Wait(ring.flag(ring.rank, "right is here"), EPOCH)
    for number, (offset, nbytes) in enumerate(chunks):
        if ring.at:
            yield ring.wait(number)
        if not is_last:
            to, given = (_part(whole(rank), offset, nbytes) for rank in (ring.right, ring.rank))
            yield from ring.send(number, to, given)


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """A tree of ranks: the parent of each but the root, and the children of each."""

    parents: Mapping[int, int]
    children: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, parents: Mapping[int, int]) -> Tree:
        """Make a tree of the parents."""
        children: dict[int, list[int]] = {}
        for rank, parent in parents.items():
            children.setdefault(parent, []).append(rank)
        return cls(parents, {parent: tuple(found) for parent, found in children.items()})


def tree_parent(many: int, number: int) -> int | None:
    """Return the parent of a number in a binary tree of ``many`` whose root is 0, as NCCL makes them.

    >>> [tree_parent(6, number) for number in range(6)]
    [None, 2, 4, 2, 0, 4]
    """
    if not number:
        return None
    bit = number & -number
    up = (number ^ bit) | bit << 1
    return up if up < many else number ^ bit


def tree_up(
    tree: Tree,
    rank: int,
    flag: Flags,
    chunks: Sequence[Span],
    slot: Callable[[int, int, int], Span],
    reduction: Reduction,
) -> Iterator[Command]:
    """Yield the way of sums to the root, chunk by chunk, in place.

    Args:
        tree: tree of all ranks.
        rank: whose commands they are.
        flag: flags of all ranks.
        chunks: chunks of the rank's tensor.
        slot: bytes of a rank for a chunk of its child of a number.
        reduction: reduction of the elements.
    """
    own = tree.children.get(rank, ())
    parent = tree.parents.get(rank)
    for child in own:
        yield Signal(flag(child, "parent is here"), EPOCH)
    if parent is not None:
        yield Wait(flag(rank, "parent is here"), EPOCH)
        number = tree.children[parent].index(rank)
    for at, chunk in enumerate(chunks):
        for child in range(len(own)):
            yield Wait(flag(rank, ("up", child, at)), EPOCH)
        if own:
            came = (_sized(slot(rank, child, at), chunk.nbytes) for child in range(len(own)))
            yield Reduce(chunk, (chunk, *came), reduction)
        if parent is not None:
            yield Copy(_sized(slot(parent, number, at), chunk.nbytes), chunk)
            yield Signal(flag(parent, ("up", number, at)), EPOCH)
        else:
            yield Signal(flag(rank, ("at root", at)), EPOCH)


def tree_down(
    tree: Tree, rank: int, flag: Flags, chunks: Sequence[Callable[[int], Span]], *, behind_up: bool
) -> Iterator[Command]:
    """Yield the way of chunks (of a rank) from the root to all others; ``behind_up``: the root waits for its sums."""
    own, parent = tree.children.get(rank, ()), tree.parents.get(rank)
    if not behind_up:  # a child that has sent its sums has come
        if parent is not None:
            yield Signal(flag(parent, ("child is here", tree.children[parent].index(rank))), EPOCH)
        for child in range(len(own)):
            yield Wait(flag(rank, ("child is here", child)), EPOCH)
    for at, chunk in enumerate(chunks):
        if parent is not None:
            yield Wait(flag(rank, ("down", at)), EPOCH)
        elif behind_up:
            yield Wait(flag(rank, ("at root", at)), EPOCH)
        for child in own:
            yield Copy(chunk(child), chunk(rank))
            yield Signal(flag(child, ("down", at)), EPOCH)


def _sized(span: Span, nbytes: int) -> Span:
    return span if span.nbytes == nbytes else Span(span.rank, span.buffer, span.offset, nbytes)


def _part(span: Span, offset: int, nbytes: int) -> Span:
    return Span(span.rank, span.buffer, span.offset + offset, nbytes)
