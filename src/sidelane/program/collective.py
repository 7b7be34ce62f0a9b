"""Meaning of each collective: where its bytes start, where they must end, and how they are combined.

Every collective is a set of chunks: the bytes of rank ``i``'s input that belong in rank ``j``'s output. Builders turn
chunks into commands; ``verify`` checks the outcome against this file only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate

from sidelane.fields import an, one_of, optional, plain_text, put, several, switch, validate, whole

MAX_WORLD_SIZE = 4096
"""Largest number of ranks of a description: it may be simulated, verified, or spread over several nodes."""

MAX_NODE_RANKS = 16
"""Largest number of ranks of one communicator, which flags, posts and kernels have room for."""

SLOT_ALIGNMENT = 256
"""Alignment of staging slots in bytes: copy engines and reducing kernels are fastest on whole vectors."""


class Buffer(StrEnum):
    """A symbolic buffer that every rank has. ``staging`` is scratch that belongs to the communicator."""

    INPUT = "input"
    OUTPUT = "output"
    STAGING = "staging"

    __hash__ = str.__hash__  # the hash of an enumeration runs in Python, and buffers are looked up by the million


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Span:
    """Bytes ``[offset, offset + nbytes)`` of ``buffer`` on ``rank``: a ``Buffer``, or one that a contract names."""

    rank: int
    buffer: str
    offset: int
    nbytes: int

    def __init__(self, rank: int, buffer: str, offset: int, nbytes: int) -> None:
        put(self, "rank", rank)
        put(self, "buffer", buffer)
        put(self, "offset", offset)
        put(self, "nbytes", nbytes)
        kind = type(buffer)
        plain = kind is Buffer or (kind is str and buffer not in _BUFFERS)
        if not (plain and type(rank) is type(offset) is type(nbytes) is int):
            validate(self, rank=whole, buffer=_buffer, offset=whole, nbytes=whole)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def __str__(self) -> str:
        return f"{self.buffer}@{self.rank}[{self.offset}:{self.end}]"


_BUFFERS = {str(buffer): buffer for buffer in Buffer}


def _buffer(name: str, value: object) -> str:
    """Check the name of a buffer; the names that every rank has become members of the enumeration."""
    plain = plain_text(name, value)
    return _BUFFERS.get(plain, plain)


class Kind(StrEnum):
    """Collectives, by the names that torch.distributed gives them."""

    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


REDUCING = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
ROOTED = (Kind.BROADCAST, Kind.SCATTER, Kind.GATHER)


class ReduceOp(StrEnum):
    """Operation that combines the elements of the ranks."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"


_REDUCE_OP = one_of(ReduceOp)

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
INTEGERS = ("int32", "int64")


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """An operation on a dtype: floats accumulate in float32 and round once; an integer ``avg`` truncates towards 0."""

    op: ReduceOp
    dtype: str

    def __post_init__(self) -> None:
        validate(self, op=_REDUCE_OP, dtype=plain_text)
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"Reduction: dtype (value={self.dtype!r}, allowed={', '.join(ELEMENT_BYTES)})")

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.op} {self.dtype}"


_SIZES, _INTS = several(whole, int), frozenset({int})
_COUNTS = several(_SIZES)
_KIND = one_of(Kind)
_ROOT = optional(whole)
_REDUCTION = optional(an(Reduction))


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """``nbytes`` of rank ``src_rank``'s input at ``src_offset``, due in ``dst_rank``'s output at ``dst_offset``."""

    src_rank: int
    src_offset: int
    dst_rank: int
    dst_offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one size in one group. The functions below make it from sizes of shards.

    Attributes:
        kind: kind of the collective.
        world_size: ranks in the group.
        counts: ``counts[i][j]`` bytes of rank i's input belong in rank j's output.
        in_place: input and output share memory, as torch.distributed defines it for each kind (see ``input_span``).
        root: root of broadcast, scatter and gather.
        reduction: reduction of reduce_scatter and all_reduce.
        copies_own: False: bytes of a rank's input that belong in its own output stay where they are, and their place
            in the output is left as it was. All_to_all only.

    Raises:
        TypeError, ValueError: a field is not of its kind, or the fields are no collective together.
    """

    kind: Kind
    world_size: int
    counts: tuple[tuple[int, ...], ...]
    in_place: bool = False
    root: int | None = None
    reduction: Reduction | None = None
    copies_own: bool = True

    def __post_init__(self) -> None:
        validate(
            self, kind=_KIND, world_size=whole, in_place=switch, copies_own=switch, root=_ROOT, reduction=_REDUCTION
        )
        rows = self.counts if type(self.counts) is tuple else ()
        distinct = {id(row): row for row in rows}.values()  # of reductions there is one
        if not (rows and all(type(row) is tuple and _INTS.issuperset(map(type, row)) for row in distinct)):
            validate(self, counts=_COUNTS)
        if problem := self._problem():
            raise ValueError(f"{self.kind}: {problem}")

    def _problem(self) -> str:
        """Describe the first conflict between the fields; empty if there is none."""
        kind, n, counts = self.kind, self.world_size, self.counts
        if not 1 <= n <= MAX_WORLD_SIZE:
            return f"world_size (value={n}, allowed=1..{MAX_WORLD_SIZE})"
        if len(counts) != n or any(len(row) != n for row in counts):
            return f"counts must be square, a row for each rank (value={[*map(len, counts)]} columns, ranks={n})"
        if min(map(min, counts)) < 0:
            return f"counts must not be negative (value={counts})"
        if self.in_place and kind in (Kind.SCATTER, Kind.GATHER):
            return "in_place (value=True, allowed=False)"
        if not self.copies_own and (kind is not Kind.ALL_TO_ALL or self.in_place):
            return "copies_own is True except for an all_to_all out of place (value=False)"
        if (self.root is None) is (kind in ROOTED) or (self.root is not None and not 0 <= self.root < n):
            return f"root (value={self.root}, allowed={f'0..{n - 1}' if kind in ROOTED else None})"
        if (self.reduction is None) is (kind in REDUCING):
            return f"reduction (value={self.reduction}, allowed={'a Reduction' if kind in REDUCING else None})"
        return self._problem_of_counts()

    def _problem_of_shards(self, reduction: Reduction) -> str:
        """Describe an error in the counts of a reduction; empty if there is none."""
        first = self.counts[0]
        if any(row is not first and row != first for row in self.counts):
            return "all rows of counts must be the same"
        fits = not any(nbytes % reduction.element_bytes for nbytes in first)
        return "" if fits else f"shards must hold whole {reduction.dtype} elements (value={first} bytes)"

    def _problem_of_counts(self) -> str:
        """Describe an error in the counts for this kind; empty if there is none."""
        kind, n, counts = self.kind, self.world_size, self.counts
        if kind is Kind.ALL_TO_ALL:
            fits = not self.in_place or all(counts[i][j] == counts[j][i] for i in range(n) for j in range(i))
            return "" if fits else "in place needs counts[i][j] == counts[j][i] for all ranks"
        if kind is Kind.ALL_GATHER:
            return "" if all(row.count(row[0]) == n for row in counts) else "each row of counts must be one size"
        if self.reduction is not None:
            return self._problem_of_shards(self.reduction)
        if kind is Kind.GATHER:
            fits = not any(nbytes for row in counts for rank, nbytes in enumerate(row) if rank != self.root)
            return "" if fits else "counts must be 0 but for those of the root"
        if any(any(row) for rank, row in enumerate(counts) if rank != self.root):
            return "counts must be 0 but for those of the root"
        if kind is Kind.BROADCAST and len({*counts[self.root or 0]}) > 1:
            return "the root must have one size for all ranks"
        return ""

    def chunks(self) -> Iterator[Chunk]:
        """Yield every chunk that has bytes, ordered by source, then destination.

        >>> [(c.src_rank, c.dst_rank, c.dst_offset) for c in all_gather((4, 2)).chunks()]
        [(0, 0, 0), (0, 1, 0), (1, 0, 4), (1, 1, 4)]
        """
        # A column of offsets per destination, kept while walking the sources; the offset in a source is its row's sum.
        dst_offsets, is_whole = [0] * self.world_size, self.kind is Kind.ALL_REDUCE
        for src_rank, row in enumerate(self.counts):
            src_offset = 0
            for dst_rank, nbytes in enumerate(row):
                if nbytes and (self.copies_own or src_rank != dst_rank):
                    yield Chunk(
                        src_rank,
                        src_offset if self._sends_distinct else 0,
                        dst_rank,
                        # Each rank reduces one shard; all_reduce puts it where it lies in the input, others at 0.
                        dst_offsets[dst_rank] if self._receives_distinct else is_whole * sum(self.counts[0][:dst_rank]),
                        nbytes,
                    )
                src_offset += nbytes
                dst_offsets[dst_rank] += nbytes

    @property
    def _sends_distinct(self) -> bool:
        return self.kind in (Kind.ALL_TO_ALL, Kind.SCATTER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)

    @property
    def _receives_distinct(self) -> bool:
        return self.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.GATHER)

    def input_bytes(self, rank: int) -> int:
        """Return the size of the input of ``rank`` in bytes."""
        row = self.counts[rank]
        return sum(row) if self._sends_distinct else max(row)

    def output_bytes(self, rank: int) -> int:
        """Return the size of the output of ``rank`` in bytes."""
        if self.kind is Kind.ALL_REDUCE:
            return sum(self.counts[0])
        column = [row[rank] for row in self.counts]
        return sum(column) if self._receives_distinct else max(column)

    @property
    def largest_buffer(self) -> int:
        """Size of the largest input or output of any rank in bytes."""
        return max(max(self.input_bytes(rank), self.output_bytes(rank)) for rank in range(self.world_size))

    names = (Buffer.INPUT, Buffer.OUTPUT)
    """Names of the callers' buffers."""

    def buffer_bytes(self, rank: int, buffer: str) -> int:
        """Return the size of a caller's buffer in bytes; 0 for one that does not exist or that is not used in place."""
        shared = Buffer.INPUT if self.kind is Kind.REDUCE_SCATTER else Buffer.OUTPUT
        if buffer not in self.names or (self.in_place and buffer != shared):
            return 0
        return self.input_bytes(rank) if buffer == Buffer.INPUT else self.output_bytes(rank)

    def input_span(self, rank: int, offset: int, nbytes: int) -> Span:
        """Return the span of bytes of a rank's input.

        In place, an all_gather's input is its own shard of the output; the input of all_to_all, all_reduce and
        broadcast is the output; a reduce_scatter's output is its own shard of the input.
        """
        if not self.in_place or self.kind is Kind.REDUCE_SCATTER:
            return Span(rank, Buffer.INPUT, offset, nbytes)
        if self.kind is Kind.ALL_GATHER:
            offset += sum(row[rank] for row in self.counts[:rank])
        return Span(rank, Buffer.OUTPUT, offset, nbytes)

    def output_span(self, rank: int, offset: int, nbytes: int) -> Span:
        """Return the span of bytes of a rank's output (see ``input_span`` for in-place calls)."""
        if self.in_place and self.kind is Kind.REDUCE_SCATTER:
            return Span(rank, Buffer.INPUT, sum(self.counts[rank][:rank]) + offset, nbytes)
        return Span(rank, Buffer.OUTPUT, offset, nbytes)

    def __str__(self) -> str:
        sizes = f"{max(self.output_bytes(0), self.input_bytes(0))} bytes"
        place = "in place" if self.in_place else "out of place"
        place += "" if self.copies_own else ", own parts stay"
        detail = f", {self.reduction}" if self.reduction else f", root {self.root}" if self.root is not None else ""
        return f"{self.kind}({self.world_size} ranks, {sizes}, {place}{detail})"


def all_gather(shard_bytes: Sequence[int], *, in_place: bool = False) -> Collective:
    """Describe an all_gather: every rank receives every rank's shard.
    ``shard_bytes[i]`` is the size of rank i's; they may differ.
    """
    shards = _sizes("all_gather", shard_bytes)
    counts = tuple((nbytes,) * len(shards) for nbytes in shards)
    return Collective(Kind.ALL_GATHER, len(shards), counts, in_place)


def all_to_all(counts: Sequence[Sequence[int]], *, in_place: bool = False, copies_own: bool = True) -> Collective:
    """Describe an all_to_all: rank i sends ``counts[i][j]`` bytes to rank j. In place needs ``counts[i][j] ==
    counts[j][i]``.

    ``copies_own``: see :class:`Collective`; in place they are never copied, so that it has no effect there.

    >>> [(c.src_rank, c.dst_rank, c.dst_offset) for c in all_to_all(((4, 4), (4, 4)), copies_own=False).chunks()]
    [(0, 1, 0), (1, 0, 4)]
    """
    matrix = tuple(_sizes("all_to_all", row) for row in counts)
    return Collective(Kind.ALL_TO_ALL, len(matrix), matrix, in_place, copies_own=copies_own or in_place)


def broadcast(nbytes: int, world_size: int, root: int, *, in_place: bool = False) -> Collective:
    """Describe a broadcast: every rank receives ``nbytes`` of the root."""
    return _rooted(Kind.BROADCAST, [nbytes] * _ranks("broadcast", world_size), root, in_place)


def scatter(shard_bytes: Sequence[int], root: int) -> Collective:
    """Describe a scatter: rank j receives shard j of the root's input."""
    return _rooted(Kind.SCATTER, shard_bytes, root, in_place=False)


def gather(shard_bytes: Sequence[int], root: int) -> Collective:
    """Describe a gather: the root receives every rank's shard."""
    return _rooted(Kind.GATHER, shard_bytes, root, in_place=False)


def reduce_scatter(shard_bytes: Sequence[int], reduction: Reduction, *, in_place: bool = False) -> Collective:
    """Describe a reduce_scatter: rank j receives the reduction of everyone's shard j."""
    return _reducing(Kind.REDUCE_SCATTER, shard_bytes, reduction, in_place)


def all_reduce(shard_bytes: Sequence[int], reduction: Reduction, *, in_place: bool = False) -> Collective:
    """Describe an all_reduce: every rank receives the reduction of all inputs; rank j reduces ``shard_bytes[j]``."""
    return _reducing(Kind.ALL_REDUCE, shard_bytes, reduction, in_place)


def split_evenly(total: int, world_size: int, granularity: int = 1) -> tuple[int, ...]:
    """Split ``total`` bytes into one part a rank, each a multiple of ``granularity``; the first parts are the larger.

    >>> split_evenly(20, 3, granularity=4)
    (8, 8, 4)
    """
    total, world_size, granularity = (whole("split_evenly", one) for one in (total, world_size, granularity))
    if total % granularity:
        raise ValueError(f"split_evenly: total must be a multiple of {granularity} (value={total})")
    quotient, rest = divmod(total // granularity, world_size)
    return tuple((quotient + (rank < rest)) * granularity for rank in range(world_size))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the offset of each of consecutive parts."""
    return tuple(accumulate(sizes[:-1], initial=0))


def _sizes(name: str, sizes: Iterable[int]) -> tuple[int, ...]:
    values: tuple[int, ...] = _SIZES(f"{name}: sizes", sizes)
    _ranks(name, len(values))
    if min(values) < 0:
        raise ValueError(f"{name}: sizes must not be negative (value={values})")
    return values


def _ranks(name: str, world_size: int) -> int:
    ranks = whole(f"{name}: number of ranks", world_size)
    if not 1 <= ranks <= MAX_WORLD_SIZE:
        raise ValueError(f"{name}: number of ranks (value={ranks}, allowed=1..{MAX_WORLD_SIZE})")
    return ranks


def _rooted(kind: Kind, shard_bytes: Sequence[int], root: int, in_place: bool) -> Collective:
    shards = _sizes(kind, shard_bytes)
    world_size = len(shards)
    try:
        root = whole("root", root)
    except TypeError:
        raise TypeError(f"{kind}: root (value={root!r}, allowed=0..{world_size - 1})") from None
    nothing = (0,) * world_size
    if kind is Kind.GATHER:
        counts = tuple(tuple(nbytes if dst == root else 0 for dst in range(world_size)) for nbytes in shards)
    else:
        counts = tuple(shards if rank == root else nothing for rank in range(world_size))
    return Collective(kind, world_size, counts, in_place, root=root)


def _reducing(kind: Kind, shard_bytes: Sequence[int], reduction: Reduction, in_place: bool) -> Collective:
    shards = _sizes(kind, shard_bytes)
    return Collective(kind, len(shards), (shards,) * len(shards), in_place, reduction=reduction)
