# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""all_to_all_gemm: the first GEMM of experts, which computes rows of tokens as they arrive from their ranks.

Equivalent: an all-to-all with split sizes, then ``y = came @ weight.T`` (the fused operators paper, section III, has
the other direction). The numbers of rows between ranks may be known on the device only, as in ``gemm``, whose
``counts`` describe the way back: the columns of these are its rows.

Any block of two ranks::

    rank 0   first: ready | unsent rows for 1, each tile with its flag | next tiles of 0 | wait: of 1
    rank 1   first: ready | unsent rows for 0, each tile with its flag | next tiles of 1 | wait: of 0

Blocks take tiles to send from a common counter, so that each tile of rows is sent once, and a block that computes
knows that everything is sent or in the hands of a running block: hence it may wait, and any grid will do. ``ready``
says that the last launch has ended, which read the buffer that is now written. A launch needs no common end: some tile
waits for every row that arrives.

Rows are sent by as many blocks as they have tiles, each for about as long as a tile takes to compute. So blocks take
tiles of the product from a counter, too: with equal shares, senders were last by their time of sending (decision 25).

Sent tiles are cut from a sender's rows for a rank, whatever their experts. Computed tiles are cut by expert, so that
each waits for one sent tile, or for two.

Example: 2 ranks, counts [[2, 3], [1, 0]]: of the five rows of rank 0 the first two stay, and the others become rows 0
to 2 of rank 1; the one row of rank 1 becomes row 2 of rank 0.

Legend: N ranks; K columns of ``x``; H columns of the result; C rows that a result has room for; a tile is ROWS rows and
COLS columns, of products over DEPTH columns of ``x`` at a time; E experts of a rank, in EP lanes. ``x`` [rows, K],
``weight`` [E, H, K], ``gathered`` [C, K] without the own part, ``output`` [C, H], ``counts`` [N, N, E].
"""

from __future__ import annotations

import functools

import torch

from sidelane.choice.fused import FUSED, PIECES, UNFUSED
from sidelane.device import layout
from sidelane.device.context import (
    arrive_acq_rel,
    begin,
    end,
    first_relaxed,
    put_weak,
    rank_of,
    signal_all_release,
    signal_release,
    wait_acquire,
    world_size_of,
)
from sidelane.device.stamps import COMPUTE, END, SEND, WAIT, stamp
from sidelane.device.triton_language import tl, triton
from sidelane.memory.storage import persistent
from sidelane.ops.gemm import ARGUMENT_INDICES, METHODS, TileSizes, rows_sender, tile_at, tile_product
from sidelane.ops.handle import (
    KernelHandle,
    buffer_lock,
    cached_object,
    check_tiles,
    power_of_two,
    programs_of,
    refusing_tiles,
)
from sidelane.ops.operands import RowCounts, check_routed, counts_in_words, experts_of, product
from sidelane.ops.operator import AUTO, CachedLaunch, FusedOperator, OperatorCall
from sidelane.ops.pipelined_gemm import routed_methods
from sidelane.ops.timeline import stamps_of
from sidelane.program.pieces import SPLIT_DISPATCH
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

NAME = "all_to_all_gemm"
OPERATOR = FusedOperator(NAME, ("most_rows", "columns of x", "columns of the result"), METHODS, METHODS, PIECES)
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
_ARGUMENT_INDICES = 3, 4, 5, 6
"""Positions of x, weight, counts and output among the kernel's arguments after the context."""


class AllToAllGemm(KernelHandle):
    """Flags, counters and workspace of :func:`all_to_all_gemm` for one shape. Collective: alike on all ranks.

    The handle takes ``most_rows * depth`` elements of symmetric memory.

    Args:
        comm: communicator of the ranks.
        most_rows: largest number of rows that any rank gets in a call.
        depth: K, number of columns of x.
        columns: H, number of columns of the result.
        dtype: dtype of x, weight and result: float32, float16 or bfloat16.
        tiles: tile sizes of the product.
    """

    def __init__(
        self,
        comm: Communicator,
        most_rows: int,
        depth: int,
        columns: int,
        dtype: torch.dtype,
        *,
        tiles: TileSizes | None = None,
    ) -> None:
        self.comm, self.most_rows, self.shape = comm, most_rows, (depth, columns, dtype)
        self._tiles = tiles = tiles or TileSizes.of(dtype)
        row_tiles = -(-most_rows // tiles.rows)
        needed = (comm.world_size - 1 + row_tiles) * -(-columns // tiles.columns)
        self.programs = programs_of(comm, needed, tiles.per_unit)
        self._counters = persistent(comm.device, lambda: torch.zeros(4, dtype=torch.int32, device=comm.device))
        self.gathered = comm.empty(most_rows, depth, dtype=dtype)
        self._addresses = comm.peers(self.gathered)  # now, as the first launch may be captured
        self.kernel = comm.load_kernel(_all_to_all_gemm, flags=1 + row_tiles)

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, repeated: RepeatedLaunch | None = None
    ) -> torch.Tensor:
        """Run the operator with checked arguments. ``repeated``: launch of calls with these layouts."""
        comm, tiles = self.comm, self._tiles
        (depth, columns, dtype), experts = self.shape, experts_of(weight)
        output = x.new_empty(self.most_rows, columns)
        tensors = x, weight, counts, output
        if self._repeats(repeated, tensors):
            return output
        stamps, stamped = stamps_of(comm, self.programs)
        with refusing_tiles(NAME, tiles):
            self.kernel.launch(
                (self.programs,),
                self._addresses,
                self.gathered,
                self._counters,
                x,
                weight,
                counts,
                output,
                x.shape[0],
                depth,
                columns,
                x.stride(0),
                weight.stride(-2),
                experts or 1,
                weight.stride(0) if experts else 0,
                self.most_rows,
                stamps,
                depth % tiles.depth == 0,  # WHOLE
                repeated=None if repeated is None or stamps is not None else (repeated, tensors),
                alike=f"{depth} columns of x, {columns} of the result, {experts or 1} experts{stamped}",
                EP=power_of_two(experts or 1),
                **tiles.constants(depth, dtype),
            )
        return output


def all_to_all_gemm(
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
    """Send rows to the ranks of ``counts``, and compute ``came @ weight.T`` there, in one kernel that computes rows as
    they arrive. A call of the communicator.

    Sums are float32, rounded once. The first call of a shape makes its resources, with all ranks; later ones may be
    captured into a graph, with counts that change between replays. ``gemm_all_to_all`` with
    ``counts.transpose(0, 1).contiguous()`` takes the results, in the order in which they lie here, back to the rows'
    ranks.

    Args:
        comm: communicator of the ranks.
        x: rows for rank 0, for rank 1, and so on, [rows, K]; neighbours in a row are neighbours in memory. Ranks may
            have different numbers of rows; rows beyond the counts stay.
        weight: matrix [H, K], of x's dtype: float32, float16 or bfloat16. Or matrices of up to 64 experts, [E, H, K],
            as many on each rank: rows for a rank are those for its first expert, then those for the next. These are
            always ``fused``. H and K are alike on all ranks.
        counts: number of rows from rank i to rank j in row i, column j, [N, N], or with several experts there,
            [N, N, E]; on the device or on the host, as for :func:`sidelane.ops.gemm_all_to_all`.
        most_rows: largest number of rows that any rank gets, the same on all ranks and in all calls of a shape. Rows
            beyond it are left out.
        tiles: tile sizes of the product.
        method: ``fused``; ``split``, which computes each part of the rows when it arrives, in a graph only with counts
            of an earlier call; ``unfused``, :func:`all_to_all_rows` and a product; or ``auto``: the fastest one
            (``ops.explain`` names it, with the reason), in a graph with other counts ``fused`` in place of ``split``.
        pieces: number of pieces of the rows for each peer with ``split``; see :func:`sidelane.ops.gemm_all_to_all`.

    Returns:
        Tensor [most_rows, H]: results of rows from rank 0, from rank 1, and so on, each ordered by expert; the rows
        behind them are undefined.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape, or new counts of the host, inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def check() -> OperatorCall:
        routed = check_routed(NAME, comm, x, weight, counts, most_rows, method)
        check_tiles(NAME, "tiles", tiles, TileSizes)
        columns, depth = weight.shape[-2:]
        dtype = weight.dtype
        key = (NAME, most_rows, depth, columns, dtype, tiles)

        def fused(pieces: int) -> CachedLaunch:
            handle = cached_object(comm, key, lambda: AllToAllGemm(comm, most_rows, depth, columns, dtype, tiles=tiles))
            repeated = routed.repeated_launch(_ARGUMENT_INDICES)
            return lambda x, weight, counts: handle.run(x, weight, routed.on_device(counts), repeated)

        def unfused(pieces: int) -> CachedLaunch:
            sender = rows_sender(comm, NAME, most_rows, depth, dtype)
            exchange = functools.partial(sender, repeated=routed.repeated_launch(ARGUMENT_INDICES))
            lock = cached_object(comm, (NAME, buffer_lock, most_rows, depth, dtype), lambda: buffer_lock(comm))

            def launch(x: torch.Tensor, weight: torch.Tensor, counts: object) -> torch.Tensor:
                with torch.no_grad(), lock:  # without gradients as the other methods; until rows have been multiplied
                    came = exchange(x, None, routed.on_device(counts))
                    if routed.table is None:
                        return product(came, weight)
                    output = x.new_empty(most_rows, columns)
                    rows = min(most_rows, sum(row[comm.rank] for row in routed.table))
                    torch.mm(came[:rows], weight.t(), out=output[:rows])
                    return output

            return launch

        make = {FUSED: fused, UNFUSED: unfused}
        make = routed_methods(comm, SPLIT_DISPATCH, routed, most_rows, depth, dtype, method, make)
        kinds = key, routed.without, routed.experts
        return OperatorCall(kinds, (most_rows, depth, columns), dtype.itemsize, make, routed.without)

    given, layout = counts_in_words(comm, counts)
    words = None if given is None else (given, most_rows, tiles)
    launch = OPERATOR.launch(comm, words, (x, weight, layout), check, method, pieces)
    found: torch.Tensor = launch(x, weight, counts)
    return found


@triton.jit
def _put_rows(gathered_of, peer, x, row, place, row_mask, depth, x_stride, DEPTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Store rows of ``x`` as rows ``place`` of a peer's gathered rows, DEPTH columns at a time. Weak stores."""
    lane = tl.arange(0, DEPTH)
    source, target = row.to(tl.int64)[:, None] * x_stride, place.to(tl.int64)[:, None] * depth
    for first in range(0, depth, DEPTH):
        column = first + lane[None, :]
        mask = row_mask[:, None] & (column < depth)
        put_weak(gathered_of, peer, target + column, tl.load(x + source + column, mask=mask), mask, ALIGNED)


@triton.jit
def _pair(counts, sender, receiver, ranks, experts, most_rows, EP: tl.constexpr):
    """Return for rows from one rank to another: the first one in ``x``, its place there, the number that fits."""
    lane, kind = tl.arange(0, MAX_RANKS)[:, None], tl.arange(0, EP)[None, :]
    known = (lane < ranks) & (kind < experts)
    leave = tl.maximum(tl.load(counts + (sender * ranks + lane) * experts + kind, mask=known, other=0), 0)
    come = tl.maximum(tl.load(counts + (lane * ranks + receiver) * experts + kind, mask=known, other=0), 0)
    first = tl.sum(tl.where(lane < receiver, leave, 0)).to(tl.int32)
    count = tl.sum(tl.where(lane == receiver, leave, 0)).to(tl.int32)
    to = tl.sum(tl.where(lane < sender, come, 0)).to(tl.int32)
    return first, to, tl.maximum(tl.minimum(count, most_rows - to), 0)


@triton.jit
def _all_to_all_gemm(
    context, gathered_of, gathered, counters, x, weight, counts, output, rows, depth, columns, x_stride, weight_stride,
    experts, expert_stride, most_rows, stamps, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    if first_relaxed(counters):
        signal_all_release(context, 0, generation)  # ready
    part = tl.atomic_add(counters + 2, 1, sem="relaxed", scope="gpu")
    before = 0  # parts for the peers in front
    for turn in range(ranks - 1):
        peer = (rank + 1 + turn) % ranks
        first, to, count = _pair(counts, rank, peer, ranks, experts, most_rows, EP)
        parts = before + tl.cdiv(count, ROWS)
        while part < parts:
            stamp(stamps, WAIT, peer)
            wait_acquire(context, peer, 0, generation)
            stamp(stamps, SEND, peer)
            row = (part - before) * ROWS + tl.arange(0, ROWS)
            there = (row < count) & (first + row < rows)
            _put_rows(gathered_of, peer, x, first + row, to + row, there, depth, x_stride, DEPTH, ALIGNED)
            signal_release(context, peer, 1 + part - before, generation)
            part = tl.atomic_add(counters + 2, 1, sem="relaxed", scope="gpu")
        before = parts

    across = tl.cdiv(columns, COLS)
    taken = tl.atomic_add(counters + 3, 1, sem="relaxed", scope="gpu")
    number = taken  # number of a tile, among those of one expert and one rank's rows
    for turn in range(ranks):
        source = (rank + ranks - turn) % ranks  # in the order of arrival
        first, to, count = _pair(counts, source, rank, ranks, experts, most_rows, EP)
        if turn == 0:
            count = tl.maximum(tl.minimum(count, rows - first), 0)  # no more exist
        own = counts + (source * ranks + rank) * experts
        before = 0  # rows of the experts in front
        for expert in range(experts):
            stop = tl.minimum(before + tl.maximum(tl.load(own + expert), 0).to(tl.int32), count)
            row_tiles = tl.cdiv(tl.maximum(stop - before, 0), ROWS)
            tiles = row_tiles * across
            while number < tiles:
                row_tile, column_tile = tile_at(number, row_tiles, across, GROUP)
                top = before + row_tile * ROWS
                row = top + tl.arange(0, ROWS)
                column = column_tile * COLS + tl.arange(0, COLS)
                rows_of, stride = x + first.to(tl.int64) * x_stride, x_stride
                if turn > 0:
                    rows_of, stride = gathered + to.to(tl.int64) * depth, depth
                    stamp(stamps, WAIT, source)
                    wait_acquire(context, source, 1 + top // ROWS, generation)
                    if EP > 1:  # otherwise tiles are the sent ones
                        wait_acquire(context, source, 1 + (tl.minimum(top + ROWS, stop) - 1) // ROWS, generation)
                stamp(stamps, COMPUTE, source)
                factor = weight + (rank.to(tl.int64) * 0 + expert) * expert_stride
                # One product for both: each in the text has shared memory of its own.
                values = tile_product(rows_of, factor, row, column, row < stop, depth, stride, weight_stride, columns,
                                      ROWS, COLS, DEPTH, WHOLE, WIDE)  # fmt: skip
                place = (to + row).to(tl.int64)[:, None] * columns + column[None, :]
                tl.store(output + place, values.to(DTYPE), mask=(row < stop)[:, None] & (column < columns)[None, :])
                following = tl.atomic_add(counters + 3, 1, sem="relaxed", scope="gpu")
                number += following - taken
                taken = following
            number -= tiles
            before = stop
    stamp(stamps, WAIT)
    if arrive_acq_rel(counters + 1, tl.num_programs(0)):
        tl.store(counters, 0)
        tl.store(counters + 2, 0)
        tl.store(counters + 3, 0)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _all_to_all_gemm
