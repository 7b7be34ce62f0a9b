"""What runs under compute-sanitizer: every kernel, by the calls that lead to it. No device in here.

A case is a call as a caller makes it (kind, variant, sizes, where the tensors lie); which kernel runs it, the project
itself decides, and a test sees to it that no kernel is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from sidelane.collectives.arguments import SHARD_ALIGNMENT, aligned_shards
from sidelane.program import collective as define
from sidelane.program.batch import Batch
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Collective, Kind, ReduceOp, Reduction
from sidelane.program.kernel import NARROW_BLOCKS, KernelProgram, kernel_program
from sidelane.program.kernel_chunks import TILE_BYTES
from sidelane.program.shape import NARROW, Variant

RANKS = (1, 2, 4, 8)
BLOCKS = {1: 64, 2: 48, 4: 25, 8: 12}
"""Thread blocks of a rank: those of all ranks have to fit on one GPU at once, or they would wait for ever for what has
no room. More than ``kernels.direct.FEW_BLOCKS`` where they can be, since fewer make it another kernel."""

MOST_BLOCKS = 128
"""Of all ranks together: an SM each."""

LOCAL_REDUCE = "reduce"
"""Kind of the cases of ``execute.cuda.reduce``: ranks are its sources."""

BYTES = "uint8"
DTYPES = tuple(ELEMENT_BYTES)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        kind: of the collective, or ``LOCAL_REDUCE``.
        variant: that asks for the kernel.
        ranks: on one GPU.
        counts: elements from rank to rank (all_reduce, broadcast: of the tensor), for each tensor.
        dtype: of elements; ``BYTES`` where they only move.
        op: of what reduces.
        symmetric: peers reach the tensors.
        in_place: input and output share memory.
        listed: a call with a list.
        odd: addresses are multiples of an element only.
        blocks: most thread blocks of a rank.
        through_host: arenas and staging stand for host memory.
    """

    kind: str
    variant: str
    ranks: int
    counts: tuple[int, ...]
    dtype: str = BYTES
    op: ReduceOp = ReduceOp.SUM
    symmetric: bool = False
    in_place: bool = False
    listed: bool = False
    odd: bool = False
    blocks: int = 0
    through_host: bool = False

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES.get(self.dtype, 1)

    @property
    def reduction(self) -> Reduction | None:
        return None if self.dtype == BYTES else Reduction(self.op, self.dtype)

    @property
    def root(self) -> int:
        """Of a broadcast: the last rank in odd cases."""
        return self.ranks - 1 if self.odd else 0

    def misalignment(self, number: int) -> int:
        """Bytes by which tensor ``number`` lies beyond a multiple of 16: in lists, every other one."""
        return self.element_bytes if self.odd or (self.listed and number % 2) else 0

    def collectives(self) -> tuple[Collective, ...]:
        """One for each tensor."""
        return tuple(self._collective(count * self.element_bytes) for count in self.counts)

    def program(self) -> KernelProgram:
        """What the project makes of it, on ``blocks`` thread blocks."""
        where = {"symmetric_input": self.symmetric, "symmetric_output": self.symmetric}
        parts = self.collectives()
        blocks = self.blocks or (NARROW_BLOCKS if Variant.of(self.variant).narrow else BLOCKS[self.ranks])
        moved = Batch(f"{self.kind} of a list", self.ranks, parts) if self.listed else parts[0]
        made = kernel_program(moved, self.variant, **where, through_host=self.through_host)
        return dataclasses.replace(made, blocks=blocks)

    @property
    def nbytes(self) -> int:
        """Of what all ranks have gathered; else of a whole local tensor."""
        if self.kind == LOCAL_REDUCE:
            return self.counts[0] * self.element_bytes
        return sum(part.largest_buffer for part in self.collectives())

    def words(self) -> str:
        """What tells it from others of its kernel."""
        said = [
            f"list of {len(self.counts)}" if self.listed else "",
            f"{self.op}" if self.reduction else "",
            "symmetric" if self.symmetric else "",
            "in place" if self.in_place and self.kind != Kind.BROADCAST else "",
            f"root {self.root}" if self.kind == Kind.BROADCAST else "",
            "odd addresses" if self.odd else "",
            "through host memory" if self.through_host else "",
        ]
        return ", ".join(word for word in said if word)

    def _collective(self, nbytes: int) -> Collective:
        n, in_place = self.ranks, self.in_place
        match Kind(self.kind):
            case Kind.ALL_GATHER:
                return define.all_gather([nbytes] * n, in_place=in_place)
            case Kind.ALL_TO_ALL:
                return define.all_to_all([[nbytes] * n] * n, in_place=in_place)
            case Kind.BROADCAST:
                return define.broadcast(nbytes, n, self.root, in_place=True)
        assert self.reduction is not None
        if self.kind == Kind.REDUCE_SCATTER:
            return define.reduce_scatter([nbytes] * n, self.reduction, in_place=in_place)
        return define.all_reduce(aligned_shards(nbytes, n, SHARD_ALIGNMENT), self.reduction, in_place=in_place)


def cases() -> tuple[Case, ...]:
    """All of them, in an order that stays: they are known by their numbers."""
    return (*_moving(), *_broadcasting(), *_reducing(), *_narrow_and_sent(), *_lists(), *_local(), *_through_host())


def _moving() -> Iterator[Case]:
    # Odd and even sizes of the LL protocol, of block flags, and of what is pushed or pulled.
    sizes = ((4099, 48_000, False), (300_001, 400_000, False), (600_001, 655_360, True), (600_001, 655_360, False))
    for kind, (odd, even, symmetric), n in itertools.product(("all_gather", "all_to_all"), sizes, RANKS):
        if n != 1:
            yield Case(kind, "one_shot", n, (odd,), symmetric=symmetric, odd=True)
        if n != 8:
            yield Case(kind, "one_shot", n, (even,), symmetric=symmetric, in_place=n == 4)


def _through_host() -> Iterator[Case]:
    # Words with flags, stored once for all peers from four ranks on; and chunks, of one tensor and of a list.
    for n, kind in itertools.product(RANKS, ("all_gather", "all_to_all", "broadcast")):
        place: dict[str, Any] = {"in_place": kind == "broadcast", "through_host": True}
        yield Case(kind, "one_shot", n, (4099,), odd=True, **place)
        yield Case(kind, "one_shot", n, (700_001,), odd=True, **place)
        yield Case(kind, "one_shot", n, (600_001, 4099, 96_000), listed=True, **place)
    draw = _draw()
    for n, kind, counts in itertools.product(RANKS, ("reduce_scatter", "all_reduce"), ((2503,), (300_001,))):
        dtype, op = next(draw)
        yield Case(kind, "one_shot", n, counts, dtype=dtype, op=op, odd=True, through_host=True)


def _broadcasting() -> Iterator[Case]:
    # The LL protocol; block flags; relayed ones; pushed or staged.
    sizes = {
        1: (4099, 300_001, 600_001),
        2: (4099, 300_001, 600_001),
        4: (4099, 300_001, 700_001, 1_600_001),
        8: (4099, 100_001, 700_001, 3_700_001),
    }
    for n in RANKS:
        for nbytes in sizes[n]:
            large = nbytes == sizes[n][-1]
            for symmetric in (True, False) if large else (False,):
                yield Case("broadcast", "one_shot", n, (nbytes,), symmetric=symmetric, in_place=True, odd=n != 4)
        even = sizes[n][-1] // 4096 * 4096
        yield Case("broadcast", "one_shot", n, (even,), symmetric=n != 4, in_place=True)


def _reducing() -> Iterator[Case]:
    draw = _draw()
    for n in RANKS:
        for kind, odd in itertools.product(("reduce_scatter", "all_reduce"), (True, False)):
            dtype, op = next(draw)
            element = ELEMENT_BYTES[dtype]
            shared: dict[str, Any] = {"dtype": dtype, "op": op, "odd": odd}
            yield Case(kind, "one_shot", n, (2503 if odd else 4096,), **shared, in_place=not odd)
            yield Case(kind, "one_shot", n, (300_000 // element + odd,), **shared, in_place=odd)
            yield Case(kind, "one_shot", n, (600_000 // element + odd,), **shared, in_place=not odd)
            if n != 8:  # on so few blocks it would be the narrow kernel
                yield Case(kind, "one_shot", n, (600_000 // element,), **shared, symmetric=True)
        for symmetric, odd in itertools.product((True, False), (True, False)):
            dtype, op = next(draw)
            # Direct, among eight ranks: no more tiles than there may be blocks, which may be many.
            whole = n * 45_056 if n == 8 else n * 200_000
            count = whole // ELEMENT_BYTES[dtype] - (33 if odd else 0)
            blocks = 64 if n == 8 and symmetric else 0
            shared = {"dtype": dtype, "op": op, "odd": odd, "symmetric": symmetric, "blocks": blocks}
            yield Case("all_reduce", "two_shot", n, (count,), **shared, in_place=odd)


def _narrow_and_sent() -> Iterator[Case]:
    draw = _draw()
    narrow = (("reduce_scatter", "one_shot"), ("all_reduce", "one_shot"), ("all_reduce", "two_shot"))
    for n, (kind, variant) in itertools.product(RANKS, narrow):
        dtype, op = next(draw)
        count = 600_000 // ELEMENT_BYTES[dtype] * (n if variant == "two_shot" else 1)
        for symmetric in (True, False) if n == 4 else (True,):
            yield Case(kind, variant + NARROW, n, (count,), dtype=dtype, op=op, symmetric=symmetric)
    for n in RANKS:
        # More chunks than slots, on one block; or a tile or two of each block.
        shards = ((82 * TILE_BYTES - 1600, 1, False, False), (300_000, 0, True, False), (299_992, 0, False, True))
        for shard_bytes, blocks, in_place, odd in shards:
            dtype, op = next(draw)
            shared: dict[str, Any] = {"dtype": dtype, "op": op, "in_place": in_place, "odd": odd, "blocks": blocks}
            if n != 8 or not blocks:
                count = n * shard_bytes // ELEMENT_BYTES[dtype] - odd
                yield Case("all_reduce", "two_shot_push", n, (count,), symmetric=True, **shared)


def _lists() -> Iterator[Case]:
    draw = _draw()
    small, large = (1, 48, 4100, 2051, 40_000), (7, 600_001, 48, 65_536)
    for n in RANKS:
        for kind in ("all_gather", "all_to_all"):
            yield Case(kind, "one_shot", n, small, listed=True, in_place=n == 4)
            yield Case(kind, "one_shot", n, large, listed=True, symmetric=True)
            yield Case(kind, "one_shot", n, large, listed=True, in_place=n != 4)
        for nbytes, symmetric in ((small, False), (large, True), (large, False)):
            yield Case("broadcast", "one_shot", n, nbytes, listed=True, symmetric=symmetric, in_place=True, odd=n != 2)
        for kind, variant in (("reduce_scatter", "one_shot"), ("all_reduce", "one_shot"), ("all_reduce", "two_shot")):
            dtype, op = next(draw)
            few, many = (1, 3, 700, 2503), (5, 600_000 // ELEMENT_BYTES[dtype] + 1, 4096)
            shared: dict[str, Any] = {"dtype": dtype, "op": op, "listed": True}
            yield Case(kind, variant, n, few, **shared, in_place=n == 2)
            yield Case(kind, variant, n, many, **shared, symmetric=True)
            yield Case(kind, variant, n, many, **shared, in_place=n != 2)


def _local() -> Iterator[Case]:
    draw = _draw()
    for sources, (count, odd) in itertools.product((1, 2, 4, 8, 16), ((100_003, True), (262_144, False))):
        dtype, op = next(draw)
        yield Case(LOCAL_REDUCE, "", sources, (count,), dtype=dtype, op=op, odd=odd, blocks=32)


def _draw() -> Iterator[tuple[str, ReduceOp]]:
    """Dtypes and operations in turn, so that all meet all."""
    return zip(itertools.cycle(DTYPES), itertools.cycle(ReduceOp), strict=False)


def moves(case: Case) -> bool:
    """True if it combines nothing."""
    return case.kind != LOCAL_REDUCE and Kind(case.kind) not in REDUCING
