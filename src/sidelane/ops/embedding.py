# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""embedding_all_to_all: pool the bags of all local tables, and store the results straight into the peers' outputs.

Equivalent: ``embedding_bag`` of each local table over the global batch, an all-to-all, and a copy into the layout
[local batch, tables x dim] (``unfused_bags``; the fused operators paper, section III.A, Figure 6).

Any block of two ranks, ``remote_first``::

    rank 0   first: ready | wait for 1 | bags for 1 -> 1 | wait for 0 | bags for 0 | last: done, wait for all
    rank 1   first: ready | wait for 0 | bags for 0 -> 0 | wait for 1 | bags for 1 | last: done, wait for all

``ready``: this rank's output is free, since all work in front of its launch has passed. The first running block
signals it, and the last one that ends waits for the others' ``done``: a block waits only for signals that a running
block is about to give, so that any grid will do, however many of its blocks fit on the GPU. No block waits for a bag of
another rank, so ranks may have different orders.

Example (Figure 6): 2 ranks, batch 4: samples 0 and 1 go to rank 0, 2 and 3 to rank 1. Of the bags for rank 1, number 3
is sample 1 there (3 in the batch) of table 1.

Legend: N ranks; B samples of all ranks, b of a rank (the first ones have more); T tables of this rank, A of all; D
elements of a row, in DP lanes, a power of two; L rows are loaded at a time. ``indices`` [all bags], ``offsets``
[T * B + 1], table by table; ``output`` [b, A * D].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn import functional

from sidelane.choice.fused import (
    FUSED,
    LINK_BYTES_PER_US,
    MEMORY_BYTES_PER_US,
    OBLIVIOUS,
    REMOTE_FIRST,
    UNFUSED,
)
from sidelane.choice.selection import Selection
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
from sidelane.device.language import real
from sidelane.device.stamps import COMPUTE, END, SEND, WAIT, stamp
from sidelane.device.triton_language import tl, triton
from sidelane.kernels.arithmetic import DTYPES
from sidelane.memory.storage import persistent
from sidelane.ops.embedding_tables import (
    MEAN,
    NAME,
    SUM,
    UNIT_WARPS,
    EmbeddingTables,
    check_call,
    sizes_of,
    threads_of,
    words_of_tables,
)
from sidelane.ops.handle import (
    KernelHandle,
    cached_object,
    power_of_two,
    programs_of,
)
from sidelane.ops.operator import AUTO, CachedLaunch, FusedOperator, OperatorCall, ProblemSizes
from sidelane.ops.timeline import stamps_of
from sidelane.program.collective import split_evenly
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch


def choose_order(world_size: int, sizes: ProblemSizes) -> Selection[str]:
    """Return the order for bags of so many rows each, with the reason.

    In the order of ranks all send to rank 0 at first, then all to rank 1, and so on: in one turn the bags of N - 1
    senders share the link of their receiver, while each loads the rows of its bags. Where that hides them, the order of
    ranks is faster, by 2 to 4% between two H200s; with slower links, the bags that peers wait for have to come first
    (docs/lab/measured.md, *Fused operators between two GPUs*). A bag is as large as a row.

    >>> [choose_order(2, (64, 64, pooling)).candidate for pooling in (1, 11, 12)]
    ['remote_first', 'remote_first', 'oblivious']
    """
    pooling = sizes[-1]
    rows = (world_size - 1) * MEMORY_BYTES_PER_US / LINK_BYTES_PER_US  # loaded in the time in which a turn is sent
    longer = "longer" if pooling < rows else "no longer"
    why = f"to send a turn takes {longer} than to load it, as much as {rows:.3g} rows a bag (here {pooling})"
    return Selection(REMOTE_FIRST if pooling < rows else OBLIVIOUS, f"rule of thumb: {why}")


OPERATOR = FusedOperator(NAME, ("batch", "tables", "pooling"), captured=(FUSED,), order=choose_order)
"""Means of the ranks. A graph has no method that needs the host, as bags of a table do."""

OBLIVIOUS_ORDER = tl.constexpr(2)
_ORDERS = {OBLIVIOUS: 2, REMOTE_FIRST: 3}
"""Codes of the orders. They are an argument, so that one binary serves both: two binaries differed by 8% on one rank,
where both orders are the same. The codes are not 0 and 1, because Triton makes constants of a 1."""

_ARGUMENT_INDICES = 3, 4, 5
"""Positions of indices, offsets and weights among the kernel's arguments behind the context."""


class EmbeddingAllToAll(KernelHandle):
    """Flags, counters and output of :func:`embedding_all_to_all` for some checked tables. Collective.

    Args:
        comm: communicator of the ranks.
        tables: tables of this rank, [rows, D] each.
        batch: number of samples of all ranks. Rank r gets ``batch // N`` of them, and one more if ``r < batch % N``.
        mode: ``sum`` or ``mean``.
        per_unit: number of programs on each compute unit; None takes as many as have room.
    """

    def __init__(
        self, comm: Communicator, tables: Sequence[torch.Tensor], batch: int, mode: str, per_unit: int | None = None
    ) -> None:
        self.comm, self.mode, self.tables = comm, mode, EmbeddingTables.cached(comm, tables, batch)
        self._warps, self._rows_at_a_time = threads_of(self.tables.dim, self.tables.dtype.itemsize)
        samples, per_unit = self.tables.samples, per_unit or max(1, UNIT_WARPS // self._warps)
        self._order: str | None = None
        self.programs = programs_of(comm, max(self.tables.counts) * batch, per_unit)
        self._counters = persistent(comm.device, lambda: torch.zeros(2, dtype=torch.int32, device=comm.device))
        whole = comm.empty(samples[0], self.tables.width, dtype=self.tables.dtype)
        self.output = whole[: samples[comm.rank]]
        self._addresses = comm.peers(self.output)  # now, as the first launch may be captured
        self.kernel = comm.load_kernel(_embedding_all_to_all, flags=2)

    def run(
        self,
        order: str,
        repeated: RepeatedLaunch | None,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the operator with checked arguments. ``repeated``: launch of calls with these layouts and this order."""
        comm, tables = self.comm, self.tables
        tensors = indices, offsets, indices if per_sample_weights is None else per_sample_weights
        if self._repeats(repeated, tensors):
            return self.output
        if self._order is None:
            sizes = sizes_of(tables.tables, tables.batch, indices, offsets)
            self._order = choose_order(comm.world_size, sizes).candidate
        stamps, stamped = stamps_of(comm, self.programs)
        self.kernel.launch(
            (self.programs,),
            self._addresses,
            self._counters,
            tables.addresses,
            *tensors,
            tables.batch,
            len(tables.tables),
            sum(tables.counts[: comm.rank]),
            tables.width,
            _ORDERS[self._order if order == AUTO else order],
            stamps,
            repeated=None if repeated is None or stamps is not None else (repeated, tensors),
            alike=f"batch {tables.batch}{stamped}",
            D=tables.dim,
            DP=power_of_two(tables.dim),
            L=self._rows_at_a_time,
            DTYPE=real(DTYPES[str(tables.dtype).removeprefix("torch.")]),
            ALIGNED=tables.are_aligned,
            MEAN=self.mode == MEAN,
            WEIGHTED=per_sample_weights is not None,
            num_warps=self._warps,
        )
        return self.output


def embedding_all_to_all(
    comm: Communicator,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = SUM,
    per_sample_weights: torch.Tensor | None = None,
    order: str = AUTO,
    method: str = AUTO,
) -> torch.Tensor:
    """Run ``embedding_bag`` of all local tables, all-to-all and layout copy in one kernel. A call of the communicator.

    Sums are float32, rounded once. The first call with some tables and a batch makes its resources, with all ranks;
    later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        tables: tables of this rank, [rows, D] each, contiguous, one dtype (float32, float16, bfloat16). Ranks may have
            different numbers of them; D and the dtype are the same on all. A new list of tables has resources of its
            own, which all ranks make together.
        indices: rows of the bags of all local tables, table by table, sample by sample of the global batch; int32 or
            int64. On the device they are checked only with ``Config(debug=True)``.
        offsets: begin of each bag, and end of the last one: [T * B + 1]; int32 or int64.
        mode: ``sum`` or ``mean``; an empty bag is 0.
        per_sample_weights: factor of each index, of the tables' dtype or float32, with ``sum`` only. On all ranks, or
            on none.
        order: ``remote_first``: bags for peers come first; ``oblivious``: bags in the order of ranks; ``auto``: by the
            pooling of this rank's first call (``ops.explain``). Ranks may have different orders.
        method: ``fused``, ``unfused``, or ``auto``: unfused if that was measured to be faster (``ops.explain``).

    Returns:
        Tensor [b, A * D]: this rank's samples, with the tables of all ranks in their order. The next call with the
        tables overwrites it.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def check() -> OperatorCall:
        batch, kind = check_call(comm, tables, indices, offsets, per_sample_weights, mode, order)
        key = (NAME, mode, *kind)

        def fused(pieces: int) -> CachedLaunch:
            handle = cached_object(comm, key, lambda: EmbeddingAllToAll(comm, tables, batch, mode))
            return functools.partial(handle.run, order, RepeatedLaunch(_ARGUMENT_INDICES))

        def unfused(pieces: int) -> CachedLaunch:
            counts, own = EmbeddingTables.cached(comm, tables, batch).counts, [*tables]
            return functools.partial(unfused_bags, comm, own, counts, mode)

        sizes, make = sizes_of(tables, batch, indices, offsets), {FUSED: fused, UNFUSED: unfused}
        return OperatorCall(key, sizes, tables[0].element_size(), make)

    words = words_of_tables(comm, (mode, order), tables, indices, offsets, per_sample_weights)
    launch = OPERATOR.launch(comm, words, (offsets,), check, method)
    found: torch.Tensor = launch(indices, offsets, per_sample_weights)
    return found


@torch.no_grad()  # as the kernel
def unfused_bags(
    comm: Communicator,
    tables: Sequence[torch.Tensor],
    counts: Sequence[int],
    mode: str,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Run one ``embedding_bag`` a table, an all-to-all, and a copy; see :func:`embedding_all_to_all`.

    ``counts`` is the number of tables of each rank.
    """
    batch, dim = (offsets.numel() - 1) // len(tables), tables[0].shape[1]
    samples = split_evenly(batch, comm.world_size)
    pooled = []
    for number, table in enumerate(tables):
        starts = offsets[number * batch : (number + 1) * batch + 1]
        first, stop = int(starts[0]), int(starts[-1])
        factors = None if per_sample_weights is None else per_sample_weights[first:stop].to(table.dtype)
        bags = functional.embedding_bag(
            indices[first:stop].long(),
            table,
            (starts - first).long(),
            mode=mode,
            per_sample_weights=factors,
            include_last_offset=True,
        )
        pooled.append(bags.split(samples))
    sent = torch.cat([bags[rank] for rank in range(comm.world_size) for bags in pooled])
    local = samples[comm.rank]
    output = sent.new_empty(sum(counts) * local, dim)
    comm.all_to_all(
        output,
        sent,
        output_split_sizes=[count * local for count in counts],
        input_split_sizes=[len(tables) * size for size in samples],
    )
    return output.view(sum(counts), local, dim).transpose(0, 1).reshape(local, sum(counts) * dim)


@triton.jit
def _pooled(
    tables, indices, offsets, weights, table, bag,
    D: tl.constexpr, DP: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Return a pooled bag, float32[DP]."""
    lane, line = tl.arange(0, DP), tl.arange(0, L)
    first = tl.load(offsets + bag).to(tl.int64)
    stop = tl.load(offsets + bag + 1).to(tl.int64)
    rows = tl.load(tables + table).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    result = tl.zeros([L, DP], tl.float32)  # summed once at the end, since that takes more than one thread
    at = first
    coming = tl.load(indices + at + line, mask=at + line < stop, other=0)  # loaded while the rows are
    while at < stop:
        there = at + line < stop
        index = coming.to(tl.int64)
        coming = tl.load(indices + at + L + line, mask=at + L + line < stop, other=0)
        values = tl.load(rows + index[:, None] * D + lane[None, :], mask=there[:, None] & (lane < D)[None, :], other=0)
        values = values.to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + at + line, mask=there, other=0).to(tl.float32)[:, None]
        result += values
        at += L
    pooled = tl.sum(result, axis=0)
    if MEAN:
        pooled = pooled / tl.maximum(stop - first, 1).to(tl.float32)
    return pooled


@triton.jit
def _embedding_all_to_all(
    context, outputs, counters, tables, indices, offsets, weights,
    batch, table_count, first_table, width, order, stamps,
    D: tl.constexpr, DP: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if first_relaxed(counters):
        signal_all_release(context, 0, generation)  # ready
    lane = tl.arange(0, DP)
    number = program  # number of a bag, among those for one rank
    for turn in range(ranks):
        peer = ((rank + 1) * (order - OBLIVIOUS_ORDER) + turn) % ranks
        samples = batch // ranks + (peer < batch % ranks).to(tl.int32)
        first_sample = peer * (batch // ranks) + tl.minimum(peer, batch % ranks)
        bags = samples * table_count
        if number < bags:
            stamp(stamps, WAIT, peer)
            wait_acquire(context, peer, 0, generation)
        while number < bags:
            table, sample = number // samples, number % samples
            bag = table.to(tl.int64) * batch + first_sample + sample
            stamp(stamps, COMPUTE, peer)
            values = _pooled(tables, indices, offsets, weights, table, bag,
                             D, DP, L, DTYPE, ALIGNED, MEAN, WEIGHTED)  # fmt: skip
            place = sample.to(tl.int64) * width + (first_table + table) * D
            stamp(stamps, SEND, peer)
            put_weak(outputs, peer, place + lane, values.to(DTYPE), lane < D, ALIGNED)
            number += programs
        number -= bags
    stamp(stamps, WAIT)
    if arrive_acq_rel(counters + 1, programs):
        tl.store(counters, 0)
        signal_all_release(context, 1, generation)  # done
        wait_all_acquire(context, 1, generation)
    stamp(stamps, END)
    end(context, generation)


KERNEL = _embedding_all_to_all
