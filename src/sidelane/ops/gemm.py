# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""gemm_all_to_all: the last GEMM of experts, whose finished tiles go straight to the ranks of their tokens.

Equivalent: ``y = x @ weight.T``, then an all-to-all with split sizes (the fused operators paper, section III). The
numbers of rows between ranks may be known on the device only, so that routing may change without the host, and inside
of a graph. Without a weight rows go unchanged, or sums of rows (``rows``).

Any block of two ranks; tiles for the peers, which wait, come first::

    rank 0   first: ready | wait for 1 | tiles for 1 -> 1 | wait for 0 | tiles for 0 | last: done, wait for all
    rank 1   first: ready | wait for 0 | tiles for 0 -> 0 | wait for 1 | tiles for 1 | last: done, wait for all

``ready`` and ``done`` are those of ``embedding``, and so is the reason why any grid will do. Rows that are only copied
take no link where they stay: half of the programs begin with those.

Example: 2 ranks, counts [[2, 3], [1, 0]]: of the five rows of rank 0 the first two stay, and the others become rows 0
to 2 of rank 1; the one row of rank 1 becomes row 2 of rank 0.

Legend: N ranks; K columns of ``x``; H columns of the result; C rows that an output has room for; a tile is ROWS rows
and COLS columns, of products over DEPTH columns of ``x`` at a time; E experts of a rank. ``x`` [rows, K], ``weight``
[E, H, K], ``outputs`` [C, H], ``counts`` [N, N, E]: rows for a rank are those of its first expert, then the next.
A sent row may be the sum of TERMS rows of ``x``, with numbers ``terms`` and factors ``factors``, [rows, TERMS]; TERMS
is negative if ``NO_ROOM`` among these numbers is a row of zeros, which is sent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from sidelane.choice.fused import FUSED, PIECES, SPLIT, UNFUSED
from sidelane.device import layout
from sidelane.device.context import (
    arrive_acq_rel,
    begin,
    end,
    first_relaxed,
    put_weak,
    rank_of,
    signal_all_release,
    wait_acquire,
    wait_all_acquire,
    world_size_of,
)
from sidelane.device.stamps import COMPUTE, END, SEND, WAIT, stamp
from sidelane.device.triton_language import tl, triton
from sidelane.memory.storage import persistent
from sidelane.ops.handle import (
    INTERPRETED,
    KernelHandle,
    cached_object,
    check_tiles,
    power_of_two,
    programs_of,
    refusing_tiles,
)
from sidelane.ops.operands import RowCounts, apart_from, check_routed, counts_in_words, experts_of, product
from sidelane.ops.operator import AUTO, CachedLaunch, FusedOperator, OperatorCall
from sidelane.ops.pipelined_gemm import routed_methods
from sidelane.ops.timeline import stamps_of
from sidelane.program.pieces import SPLIT_GEMM
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

NAME = "gemm_all_to_all"
METHODS = FUSED, SPLIT, UNFUSED
OPERATOR = FusedOperator(NAME, ("most_rows", "columns of x", "columns of the result"), METHODS, METHODS, PIECES)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
ARGUMENT_INDICES = range(2, 7)
"""Positions of x, weight, counts, terms and factors among the kernel's arguments after the context."""

NO_ROOM = tl.constexpr(-2)
"""Number of a term that experts had no room for, where a call allows it: zeros, which are sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class TileSizes:
    """Tile sizes of a product: powers of two, 16 and more.

    Attributes:
        rows: number of rows of a tile.
        columns: number of columns of a tile.
        depth: number of columns of ``x`` that are multiplied at a time.
        warps: number of warps of a program.
        stages: number of products whose inputs are loaded ahead, and the one under way.
        per_unit: number of programs on each compute unit.
        group: rows of tiles that are computed column by column: inputs read at the same time stay in the cache.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    per_unit: int = 1
    group: int = 8

    @classmethod
    def of(cls, dtype: torch.dtype) -> TileSizes:
        """Return the default sizes: float32 takes twice the shared memory, and no tensor cores.

        Fewer stages fit in the 64 KiB of shared memory that a block has on AMD GPUs.
        """
        tiles = cls(columns=128, depth=32) if dtype == torch.float32 else cls()
        return tiles if torch.version.hip is None else dataclasses.replace(tiles, stages=2)

    def constants(self, sent: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return a kernel's compile-time constants for sent rows of ``sent`` elements, alike on all ranks."""
        return {
            "ROWS": self.rows,
            "COLS": self.columns,
            "DEPTH": self.depth,
            "GROUP": self.group,
            "ALIGNED": sent * dtype.itemsize % 16 == 0,
            "WIDE": INTERPRETED or dtype == torch.float32,
            "DTYPE": getattr(tl, str(dtype).removeprefix("torch.")),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }

    def __post_init__(self) -> None:
        for name, value, least in (
            *(("rows", self.rows, 16), ("columns", self.columns, 16), ("depth", self.depth, 16)),
            *(("warps", self.warps, 1), ("stages", self.stages, 1), ("per_unit", self.per_unit, 1)),
            ("group", self.group, 1),
        ):
            is_power = name not in ("stages", "per_unit", "group")
            if value < least or (is_power and value != power_of_two(value)):
                text = "a power of two from" if is_power else "from"
                raise ValueError(f"TileSizes: {name} (value={value}, allowed={text} {least})")


ROW_TILES = TileSizes(rows=32, columns=512, depth=16, warps=16, stages=1, per_unit=2)
"""Tile sizes for rows that are sent unchanged."""

SUM_TILES = dataclasses.replace(ROW_TILES, rows=16, columns=256, warps=8)
"""Tile sizes for sums of rows, whose terms are loaded at a time."""


class GemmAllToAll(KernelHandle):
    """Flags, counters and output of :func:`gemm_all_to_all` for one shape. Collective: alike on all ranks.

    Args:
        comm: communicator of the ranks.
        most_rows: largest number of rows that any rank gets in a call.
        columns: H, number of columns of the result.
        dtype: dtype of x, weight and result: float32, float16 or bfloat16.
        tiles: tile sizes of the product, or of the rows.
    """

    def __init__(
        self, comm: Communicator, most_rows: int, columns: int, dtype: torch.dtype, *, tiles: TileSizes | None = None
    ) -> None:
        self.comm, self.most_rows, self.columns, self.dtype = comm, most_rows, columns, dtype
        self._tiles = tiles or TileSizes.of(dtype)
        needed = (comm.world_size - 1 + -(-most_rows // self._tiles.rows)) * -(-columns // self._tiles.columns)
        self.programs = programs_of(comm, needed, self._tiles.per_unit)
        self._counters = persistent(comm.device, lambda: torch.zeros(2, dtype=torch.int32, device=comm.device))
        self.output = comm.empty(most_rows, columns, dtype=dtype)
        self._addresses = comm.peers(self.output)  # now, as the first launch may be captured
        self.kernel = comm.load_kernel(_gemm_all_to_all, flags=2)

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        counts: torch.Tensor,
        terms: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
        sends_zeros: bool = False,
        alike: str = "",
        repeated: RepeatedLaunch | None = None,
    ) -> torch.Tensor:
        """Run the operator with checked arguments. Rows without a weight may be sums of ``terms``, among which
        ``NO_ROOM`` is zeros if ``sends_zeros``, and else none.

        ``alike``: text that must be the same on every rank. ``repeated``: launch of calls with these layouts and
        options.
        """
        comm, experts = self.comm, experts_of(weight, counts)
        tensors = x, weight, counts, terms, factors
        if (other := apart_from(self.output, x)) is not x:
            x, repeated = other, None  # of another layout, maybe
        if self._repeats(repeated, tensors):
            return self.output
        summed = 0 if terms is None else terms.shape[1]
        tiles = SUM_TILES if summed > 1 else self._tiles
        stamps, stamped = stamps_of(comm, self.programs)
        with refusing_tiles(NAME, tiles):
            self.kernel.launch(
                (self.programs,),
                self._addresses,
                self._counters,
                x,
                weight,
                counts,
                terms,
                factors,
                x.shape[0] if terms is None else terms.shape[0],
                x.shape[1],
                self.columns,
                x.stride(0),
                0 if weight is None else weight.stride(-2),
                experts or 1,
                weight.stride(0) if weight is not None and experts else 0,
                self.most_rows,
                stamps,
                x.shape[1] % tiles.depth == 0,  # WHOLE, of this rank
                repeated=None if repeated is None or stamps is not None else (repeated, tensors),
                alike=f"{experts or 1} experts, {summed} terms{alike}{stamped}",
                EP=power_of_two(experts or 1),
                TERMS=-summed if sends_zeros else summed,
                **tiles.constants(self.columns, self.dtype),
            )
        return self.output


def gemm_all_to_all(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: RowCounts,
    *,
    most_rows: int,
    tiles: TileSizes | None = None,
    method: str = AUTO,
    pieces: int | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T`` and send its rows to the ranks of ``counts``, in one kernel. A call of the communicator.

    Sums are float32, rounded once. The first call of a shape makes its resources, with all ranks; later ones may be
    captured into a graph, with counts that change between replays.

    Args:
        comm: communicator of the ranks.
        x: rows for rank 0, for rank 1, and so on, [rows, K]; neighbours in a row are neighbours in memory. Ranks may
            have different numbers of rows; rows beyond the counts stay.
        weight: matrix [H, K], of x's dtype: float32, float16 or bfloat16. Or matrices of up to 64 experts, [E, H, K],
            as many on each rank: rows for a rank are those of the first expert, then those of the next. These are
            always ``fused``.
        counts: number of rows from rank i to rank j in row i, column j, [N, N], or with several experts, [N, N, E];
            int32 or int64, the same on all ranks. On the device only the kernel reads them, and they are checked only
            with ``Config(debug=True)``. Or on the host, as lists (on GPUs also a tensor of the CPU), on all ranks: then
            ``split`` is possible, too. A graph replays the counts of the host that it was captured with; an earlier
            call must have had them.
        most_rows: largest number of rows that any rank gets, the same on all ranks and in all calls of a shape. Rows
            beyond it are left out.
        tiles: tile sizes of the product.
        method: ``fused``; ``split``, which sends each part of the product as it is computed, in graphs only with counts
            of an earlier call; ``unfused``, a product and :func:`all_to_all_rows`; or ``auto``: the fastest one
            (``ops.explain`` names it, with the reason), in a graph with other counts ``fused`` in place of ``split``.
        pieces: number of pieces of the rows for each peer with ``split``, the same on all ranks: more of them begin to
            travel earlier, and are smaller to compute. None for the measured number, or a default.

    Returns:
        Tensor [most_rows, H]: rows from rank 0, from rank 1, and so on; the rows behind them are unchanged. The next
        call of this shape overwrites it.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape, or new counts of the host, inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def check() -> OperatorCall:
        routed = check_routed(NAME, comm, x, weight, counts, most_rows, method)
        check_tiles(NAME, "tiles", tiles, TileSizes)
        columns, dtype = weight.shape[-2], weight.dtype
        key = (NAME, most_rows, columns, dtype, tiles)

        def fused(pieces: int) -> CachedLaunch:
            handle = cached_object(comm, key, lambda: GemmAllToAll(comm, most_rows, columns, dtype, tiles=tiles))
            repeated = routed.repeated_launch(ARGUMENT_INDICES)
            return lambda x, weight, counts: handle.run(x, weight, routed.on_device(counts), repeated=repeated)

        def unfused(pieces: int) -> CachedLaunch:
            send = functools.partial(
                rows_sender(comm, NAME, most_rows, columns, dtype), repeated=routed.repeated_launch(ARGUMENT_INDICES)
            )

            def launch(x: torch.Tensor, weight: torch.Tensor, counts: object) -> torch.Tensor:
                with torch.no_grad():  # as the other methods
                    return send(product(x, weight), None, routed.on_device(counts))

            return launch

        make = {FUSED: fused, UNFUSED: unfused}
        make = routed_methods(comm, SPLIT_GEMM, routed, most_rows, columns, dtype, method, make)
        kinds = key, routed.without, routed.experts
        return OperatorCall(kinds, (most_rows, x.shape[1], columns), dtype.itemsize, make, routed.without)

    given, layout = counts_in_words(comm, counts)
    words = None if given is None else (given, most_rows, tiles)
    launch = OPERATOR.launch(comm, words, (x, weight, layout), check, method, pieces)
    found: torch.Tensor = launch(x, weight, counts)
    return found


def rows_sender(
    comm: Communicator, name: str, most_rows: int, columns: int, dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """Return the function that sends rows unchanged, for a shape of the operator with that name, whose calls alone
    overwrite its results; all ranks make its handle together if it is new.
    """
    key = (name, "rows", most_rows, columns, dtype)
    return cached_object(comm, key, lambda: GemmAllToAll(comm, most_rows, columns, dtype, tiles=ROW_TILES)).run


@triton.jit
def tile_product(
    x, weight, row, column, row_mask, depth, x_stride, weight_stride, columns,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return a tile, float32[ROWS, COLS]. Rows and columns out of range are computed from ones in range."""
    lane = tl.arange(0, DEPTH)
    result = tl.zeros([ROWS, COLS], tl.float32)
    xs = x + tl.where(row_mask, row, 0).to(tl.int64)[:, None] * x_stride + lane[None, :]
    ws = weight + tl.where(column < columns, column, 0).to(tl.int64)[None, :] * weight_stride + lane[:, None]
    for first in range(0, depth, DEPTH):
        if WHOLE:
            v, w = tl.load(xs), tl.load(ws)
        else:
            there = first + lane < depth
            v, w = tl.load(xs, mask=there[None, :], other=0), tl.load(ws, mask=there[:, None], other=0)
        if WIDE:  # also where kernels are interpreted, which takes bfloat16 for integers in a dot
            v, w = v.to(tl.float32), w.to(tl.float32)
        result = tl.dot(v, w, result, input_precision="ieee")
        xs += DEPTH
        ws += DEPTH
    return result


@triton.jit
def tile_at(number, row_tiles, across, GROUP: tl.constexpr):
    """Return row and column of a tile: GROUP rows of tiles, column by column, then the next GROUP."""
    first = number // (GROUP * across) * GROUP
    inside, high = number % (GROUP * across), tl.minimum(row_tiles - first, GROUP)
    return first + inside % high, inside // high


@triton.jit
def sum_of_terms(
    x, terms, factors, row, column, row_mask, columns, x_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Return sums of rows of ``x``, [ROWS, COLS], and a mask of those with a term. One term without a factor stays as
    it is, in its dtype; other sums are float32. With negative TERMS, ``NO_ROOM`` is a term, of zeros.
    """
    COUNT: tl.constexpr = TERMS if TERMS > 0 else -TERMS
    if COUNT == 1 and factors is None:
        source = tl.load(terms + row, mask=row_mask, other=-1).to(tl.int64)
        is_there = source >= 0
        inside = is_there[:, None] & (column < columns)[None, :]
        result = tl.load(x + source[:, None] * x_stride + column[None, :], mask=inside, other=0)
        if TERMS < 0:
            is_there = is_there | (source == NO_ROOM)
    else:
        result = tl.zeros([ROWS, COLS], tl.float32)
        is_there = row_mask & (row < 0)
        for term in tl.static_range(COUNT):
            place = row.to(tl.int64) * COUNT + term
            source = tl.load(terms + place, mask=row_mask, other=-1).to(tl.int64)
            has_term = source >= 0
            inside = has_term[:, None] & (column < columns)[None, :]
            values = tl.load(x + source[:, None] * x_stride + column[None, :], mask=inside, other=0).to(tl.float32)
            if factors is not None:
                values *= tl.load(factors + place, mask=has_term, other=0)[:, None]
            result += values
            is_there = is_there | has_term
            if TERMS < 0:
                is_there = is_there | (source == NO_ROOM)
    return result, is_there


@triton.jit
def _gemm_all_to_all(
    context, outputs, counters, x, weight, counts, terms, factors, rows, depth, columns, x_stride, weight_stride,
    experts, expert_stride, most_rows, stamps, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr, EP: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if first_relaxed(counters):
        signal_all_release(context, 0, generation)  # ready
    lane, kind = tl.arange(0, MAX_RANKS)[:, None], tl.arange(0, EP)[None, :]
    known = (lane < ranks) & (kind < experts)
    sent = tl.load(counts + (rank * ranks + lane) * experts + kind, mask=known, other=0).to(tl.int32)
    across = tl.cdiv(columns, COLS)
    number = program  # number of a tile, among those of one expert for one rank
    begins_here = 0
    if weight is None and EP == 1:
        # Copies of rows do not use the link: every second program makes its own first, while the others send.
        begins_here = program % 2
        if begins_here == 1:
            others = tl.sum(tl.where(lane == rank, 0, tl.cdiv(sent, ROWS))) * across
            number = (program + programs - others % programs) % programs
    for turn in range(ranks):
        peer = (rank + 1 - begins_here + turn) % ranks
        came = tl.load(counts + (lane * ranks + peer) * experts + kind, mask=known, other=0).to(tl.int32)
        for expert in range(experts):
            before = (lane == peer) & (kind < expert)
            count = tl.sum(tl.where((lane == peer) & (kind == expert), sent, 0))
            first = tl.sum(tl.where((lane < peer) | before, sent, 0))
            to = tl.sum(tl.where(lane < rank, came, 0)) + tl.sum(tl.where(before, sent, 0))
            row_tiles = tl.cdiv(count, ROWS)
            tiles = row_tiles * across
            if number < tiles:
                stamp(stamps, WAIT, peer)
                wait_acquire(context, peer, 0, generation)
            while number < tiles:
                row_tile, column_tile = tile_at(number, row_tiles, across, GROUP)
                row = row_tile * ROWS + tl.arange(0, ROWS)
                column = column_tile * COLS + tl.arange(0, COLS)
                row_mask = (row < count) & (first + row < rows) & (to + row < most_rows)
                stamp(stamps, COMPUTE, peer)
                if TERMS != 0:
                    values, row_mask = sum_of_terms(x, terms, factors, first + row, column, row_mask, columns, x_stride,
                                                    ROWS, COLS, TERMS)  # fmt: skip
                elif weight is None:
                    inside = row_mask[:, None] & (column < columns)[None, :]
                    values = tl.load(x + (first + row).to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside)
                else:
                    matrix = weight + (rank.to(tl.int64) * 0 + expert) * expert_stride
                    values = tile_product(x, matrix, first + row, column, row_mask, depth, x_stride, weight_stride,
                                          columns, ROWS, COLS, DEPTH, WHOLE, WIDE)  # fmt: skip
                place = (to + row).to(tl.int64)[:, None] * columns + column[None, :]
                stamp(stamps, SEND, peer)
                inside = row_mask[:, None] & (column < columns)[None, :]
                put_weak(outputs, peer, place, values.to(DTYPE), inside, ALIGNED)
                number += programs
            number -= tiles
        if begins_here == 1 and turn == 0:
            number = program
    stamp(stamps, WAIT)
    if arrive_acq_rel(counters + 1, programs):
        tl.store(counters, 0)
        signal_all_release(context, 1, generation)  # done
        wait_all_acquire(context, 1, generation)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _gemm_all_to_all
