# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""embedding_all_to_all among several nodes: bags for this node go straight to its ranks, others leave by slices.

Equivalent: as of ``ops.embedding`` (the fused operators paper, section III.A, Figure 6). The backward is not fused: one
all-to-all of the ranks, and PyTorch's sums.

Any block of rank 0, on a node with rank 1; ranks 2 and 3 are on another node::

    first: ready, open | bags for 2, 3 -> send buffer; last of a slice: its word | wait for 1 | bags for 1 -> 1 | bags
    for 0 | last: done, wait for the node, for the slices of 2 and 3, and for its own to leave

``ready`` and ``done``, flags 0 and 1, are those of ``ops.embedding``; ``open`` tells the proxy of this rank the same
about its output. No block waits for another node but the last one, once all others have ended: while it waits, the rest
of the GPU is free for the transport.

The send buffer is free when the kernel begins, since the last block of the launch before has waited for it to leave.

Example (Figure 6): 2 nodes of a rank, batch 4, slices of 2, two tables on rank 0: its send buffer has room for its own
samples (unused), then samples 2 and 3 of table 0, then those of table 1. Slice 1, of table 1, begins at element 6 * D
there, and at column D of row 0 on rank 1 (``slices_between``). With slices of both tables there is one: tables 0 and 1
of sample 2, then of sample 3, as they lie in the rows of rank 1.

The kernel has two contexts: that of ``sidelane.device.context`` for the ranks of its node, to which it stores, and an
*inter-node context* (``words``), a pointer to int64; ``generation`` is that of the first one. Words in host memory are
polled by plain loads. An atomic operation of a GPU there could undo a store of the host, so what acquires is one on a
word of the device's own memory after the polls: it makes this program's later accesses come after it, as the fence that
it contains orders all memory.

Legend: as in ``ops.embedding``. ``sends`` [bags of all ranks, D], for each rank by groups of TABLES tables, sample by
sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sidelane.device import context, flags, layout
from sidelane.device.context import (
    arrive_acq_rel,
    begin,
    end,
    first_relaxed,
    put_weak,
    signal_all_release,
    wait_acquire,
    wait_all_acquire,
)
from sidelane.device.language import real
from sidelane.device.triton_language import tl, triton
from sidelane.kernels.arithmetic import DTYPES
from sidelane.memory.storage import persistent
from sidelane.ops.embedding import _pooled
from sidelane.ops.embedding_tables import (
    MEAN,
    NAME,
    SUM,
    UNIT_WARPS,
    EmbeddingTables,
    check_call,
    refuse_atomics,
    threads_of,
)
from sidelane.ops.handle import cached_object, check_tensor, power_of_two, programs_of, reporting_refusals
from sidelane.ops.scale_out import words
from sidelane.ops.scale_out.proxy import InterNodeCall
from sidelane.ops.scale_out.ranks import ScaleOut
from sidelane.ops.scale_out.words import HandleWords, slice_of, slices_between
from sidelane.program.wraparound import WORD_MASK

POLLS = tl.constexpr(int(flags.POLLS))
MOST_AHEAD = tl.constexpr(int(context.MOST_AHEAD))
ABORT = tl.constexpr(layout.ABORT)
OPENED = tl.constexpr(words.OPENED)
READY = tl.constexpr(words.READY)
OVER = tl.constexpr(words.OVER)
STOP = tl.constexpr(words.STOP)
STATUS = tl.constexpr(words.STATUS)
LOCAL_RANKS = tl.constexpr(words.LOCAL_RANKS)
ACQUIRED = tl.constexpr(words.ACQUIRED)


class EmbeddingAcrossNodes:
    """Flags, buffers and output of :func:`embedding_all_to_all` for some checked tables. Collective.

    Args:
        ranks: ranks of all nodes.
        tables: tables of this rank, [rows, D] each.
        batch: number of samples of all ranks.
        mode: ``sum`` or ``mean``.
        slice_bags: number of samples of a slice of one table; None for the default.
    """

    def __init__(
        self, ranks: ScaleOut, tables: Sequence[torch.Tensor], batch: int, mode: str, slice_bags: int | None
    ) -> None:
        comm: Any = ranks  # has what these functions take of a communicator
        self.ranks, self.mode = ranks, mode
        self.tables = EmbeddingTables.cached(comm, tables, batch)
        counts, samples, dim, dtype = self.tables.counts, self.tables.samples, self.tables.dim, self.tables.dtype
        self._cut = slice_of(samples[0], max(counts), dim * dtype.itemsize, slice_bags)
        self._slices = -(-samples[0] // self._cut[0])  # of a table, for one rank
        device, own = ranks.device, len(tables)
        self._warps, self._rows_at_a_time = threads_of(dim, dtype.itemsize)
        self._programs = programs_of(comm, max(counts) * batch, max(1, UNIT_WARPS // self._warps))
        slices = slices_between(ranks.rank, ranks.remote_ranks, counts, samples, dim, self._cut)
        counters = 2 + len(slices.sent)
        with reporting_refusals(comm, NAME):  # there may be no memory
            self._counters = persistent(device, lambda: torch.zeros(counters, dtype=torch.int32, device=device))
            self._sends = persistent(device, lambda: torch.empty(own * batch * dim, dtype=dtype, device=device))
            self._order = persistent(device, lambda: torch.tensor(ranks.order, dtype=torch.int32, device=device))
        with ranks.naming():
            self._whole = ranks.intra_node.empty(samples[0], self.tables.width, dtype=dtype)
            self._kernel = ranks.intra_node.load_kernel(_embedding_all_to_all, flags=2)
        self._epoch, self._words = 0, HandleWords(slices, device)
        self._inter_node = ranks.inter_node_context(self._words)
        with reporting_refusals(comm, NAME):
            ranks.transport.make_ready(self._whole[: self._cut[0], : self._cut[1] * dim])
        ranks.agree(NAME, (mode, *self._cut, batch, dim, str(dtype)))

    def run(self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Run the operator with checked arguments."""
        ranks, tables = self.ranks, self.tables
        output = self._whole[: tables.samples[ranks.rank]]
        epoch = 2 if self._epoch == WORD_MASK else self._epoch + 1
        with ranks.calling(InterNodeCall(epoch, self._words, self._sends, output.view(-1))):
            self._epoch = epoch  # a call that is refused before its launch has none
            self._kernel.launch(
                (self._programs,),
                self._inter_node,
                ranks.intra_node.peers(self._whole),
                self._sends,
                self._counters,
                tables.addresses,
                indices,
                offsets,
                indices if weights is None else weights,
                self._order,
                ranks.world_size,
                tables.batch,
                len(tables.tables),
                sum(tables.counts[: ranks.rank]),
                tables.width,
                self._slices,
                alike=f"batch {tables.batch}",
                D=tables.dim,
                DP=power_of_two(tables.dim),
                L=self._rows_at_a_time,
                DTYPE=real(DTYPES[str(tables.dtype).removeprefix("torch.")]),
                ALIGNED=tables.are_aligned,
                MEAN=self.mode == MEAN,
                WEIGHTED=weights is not None,
                SLICE=self._cut[0],
                TABLES=self._cut[1],
                num_warps=self._warps,
            )
        return output


def embedding_all_to_all(
    ranks: ScaleOut,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = SUM,
    per_sample_weights: torch.Tensor | None = None,
    slice_bags: int | None = None,
) -> torch.Tensor:
    """Run ``embedding_bag`` of all local tables, all-to-all among nodes and layout copy, in one kernel.

    Sums are float32, rounded once. The first call with some tables and a batch makes its resources, with all ranks.

    Args:
        ranks: ranks of all nodes.
        tables: see ``ops.embedding_all_to_all``, as the following.
        indices: rows of the bags of all local tables.
        offsets: begin of each bag, and end of the last one, [T * B + 1].
        mode: ``sum`` or ``mean``; an empty bag is 0.
        per_sample_weights: factor of each index, with ``sum`` only. On all ranks, or on none.
        slice_bags: number of samples of a slice of one table; None for an eighth of what a rank gets, 1 to 8 MiB, of
            several tables where one has less.

    Returns:
        Tensor [b, A * D]: this rank's samples, with the tables of all ranks in their order. The next call with the
        tables overwrites it.

    Raises:
        ValueError, TypeError: an argument is wrong; on the other ranks PeerError, and there are no more calls.
        UnavailableError: inside of a capture; a device that cannot run it.
        PeerError, PeerTimeoutError: a rank failed, or did not come.
    """
    comm: Any = ranks
    ranks.require_open()
    with reporting_refusals(comm, NAME):
        batch, kind = check_call(comm, tables, indices, offsets, per_sample_weights, mode)
        if slice_bags is not None and slice_bags < 1:
            raise ValueError(f"{NAME}: slice_bags (value={slice_bags}, allowed=1 and more, or None)")
    key = (NAME, mode, slice_bags, *kind)
    handle = cached_object(comm, key, lambda: EmbeddingAcrossNodes(ranks, tables, batch, mode, slice_bags))
    return handle.run(indices, offsets, per_sample_weights)


def embedding_all_to_all_backward(
    ranks: ScaleOut,
    grad: torch.Tensor,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = SUM,
    per_sample_weights: torch.Tensor | None = None,
    sparse: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return the gradients of ``embedding_all_to_all`` among several nodes.

    Dense gradients are added up in float32 by atomic additions, in an order that changes, and rounded once; gradients
    of rows (``sparse``) are the same bits each time.

    Args:
        ranks: ranks of all nodes.
        grad: gradient of the output, [b, A * D], of the tables' dtype.
        tables: argument of the forward.
        indices: argument of the forward.
        offsets: argument of the forward.
        mode: argument of the forward.
        per_sample_weights: argument of the forward.
        sparse: return gradients of rows: a COO tensor a table, not coalesced.

    Returns:
        A gradient for each local table; the gradient of the weights, if there are any.

    Raises:
        ValueError, TypeError: an argument is wrong; on the other ranks PeerError, and there are no more calls.
        PeerError, PeerTimeoutError: a rank failed, or did not come.
    """
    comm: Any = ranks
    ranks.require_open()
    with reporting_refusals(comm, NAME):
        if not sparse:
            refuse_atomics(comm, f"{NAME} backward")
        batch, _ = check_call(comm, tables, indices, offsets, per_sample_weights, mode)
    known = EmbeddingTables.cached(comm, tables, batch)
    with reporting_refusals(comm, NAME):
        check_tensor(NAME, "grad", grad, ranks.device, (known.dtype,), (2,))
        if grad.shape != known.output_shape:
            raise ValueError(f"{NAME}: shape of grad (value={tuple(grad.shape)}, allowed={known.output_shape})")
    with torch.no_grad():
        of_bags = _of_bags(known, grad, ranks)
        found, of_weights = [], None if per_sample_weights is None else torch.zeros_like(per_sample_weights)
        cuts = offsets[::batch].tolist()
        for number, table in enumerate(tables):
            some, sizes = slice(*cuts[number : number + 2]), offsets[number * batch :][: batch + 1].diff()
            rows, values = indices[some].long(), of_bags[:, number].float()
            if mode == MEAN:
                values = values / sizes.clamp(min=1)[:, None]
            values = values.repeat_interleave(sizes, 0, output_size=len(rows))
            if per_sample_weights is not None and of_weights is not None:
                of_weights[some] = (table[rows].float() * values).sum(1).to(of_weights.dtype)
                values = values * per_sample_weights[some, None].float()
            if sparse:
                part = torch.sparse_coo_tensor(rows[None], values.to(table.dtype), table.shape, check_invariants=False)
            else:
                sums = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
                part = sums.index_add_(0, rows, values).to(table.dtype)
            found.append(part)
        return found, of_weights


def _of_bags(tables: EmbeddingTables, grad: torch.Tensor, ranks: ScaleOut) -> torch.Tensor:
    """Send the gradients of bags to the owners of their tables; return those of this rank's, [B, T, D]."""
    own, row = len(tables.tables), len(tables.tables) * tables.dim
    widths = [count * tables.dim for count in tables.counts]
    found = grad.new_empty(tables.batch, own, tables.dim)
    ranks.all_to_all(
        found.view(-1),
        torch.cat([part.reshape(-1) for part in grad.split(widths, 1)]),
        output_split_sizes=[size * row for size in tables.samples],
        input_split_sizes=[grad.shape[0] * width for width in widths],
    )
    return found


@triton.jit
def local_rank_of(inter_node, rank):
    """Return the number of a rank on this node, int32; -1 if it is on another one."""
    return tl.load(tl.load(inter_node + LOCAL_RANKS).to(tl.pointer_type(tl.int32)) + rank)


@triton.jit
def open_release(inter_node, generation):
    """Let ranks of other nodes write into this rank's output in this generation: all earlier work has ended.

    Releases at system scope. One program of a launch calls it.
    """
    tl.debug_barrier()
    word = tl.load(inter_node + OPENED).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(word, generation, sem="release", scope="sys")


@triton.jit
def send_release(inter_node, generation, number):
    """Hand a slice to the proxy, behind all accesses of this program and those that it has acquired.

    Releases at system scope. One program of a launch calls it for each slice.

    Args:
        inter_node: inter-node context of the kernel.
        generation: generation of this launch.
        number: number of the slice among those that this rank sends.
    """
    tl.debug_barrier()
    ready = tl.load(inter_node + READY).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(ready + number, generation, sem="release", scope="sys")


@triton.jit
def finish_acquire(inter_node, generation):
    """Wait until this rank's slices have left, and those for it are in place; ranks of one node wait for nothing.

    The last program of a launch calls it. Acquires at system scope: later work sees all slices of this generation that
    other nodes have sent.
    """
    over = tl.load(inter_node + OVER)
    if over != 0:
        word = over.to(tl.pointer_type(tl.int32))
        late = _is_late(word, generation)
        polls = 0
        while late:
            late = _is_late(word, generation)
            polls += 1
            if polls % POLLS == 0:
                late = late & _goes_on(inter_node)
        tl.debug_barrier()
        tl.atomic_add(inter_node + ACQUIRED, 0, sem="acq_rel", scope="sys")
        tl.debug_barrier()


@triton.jit
def _is_late(word, generation):
    """Return whether a word has not reached this generation, as ``context`` compares them."""
    found = tl.load(word, volatile=True)
    return (((found - generation) & -MOST_AHEAD) != 0) | (found == 0)


@triton.jit
def _goes_on(inter_node):
    """Return False once the host has told this rank's kernels to give up, by a status word or by the proxy."""
    status = tl.load(inter_node + STATUS).to(tl.pointer_type(tl.int32))
    stop = tl.load(inter_node + STOP).to(tl.pointer_type(tl.int32))
    return (tl.load(stop, volatile=True) == 0) & (tl.load(status + ABORT, volatile=True) == 0)


@triton.jit
def _embedding_all_to_all(
    context, inter_node, outputs, sends, counters, tables, indices, offsets, weights, order,
    ranks, batch, table_count, first_table, width, slices,
    D: tl.constexpr, DP: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SLICE: tl.constexpr, TABLES: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if first_relaxed(counters):
        signal_all_release(context, 0, generation)  # ready
        open_release(inter_node, generation)
    lane = tl.arange(0, DP)
    number = program  # number of a bag, among those for one rank
    for turn in range(ranks):
        peer = tl.load(order + turn)
        local_rank = local_rank_of(inter_node, peer)
        samples = batch // ranks + (peer < batch % ranks).to(tl.int32)
        first_sample = peer * (batch // ranks) + tl.minimum(peer, batch % ranks)
        bags = samples * table_count
        if (number < bags) & (local_rank >= 0):
            wait_acquire(context, local_rank, 0, generation)
        while number < bags:
            table, sample = number // samples, number % samples
            bag = table.to(tl.int64) * batch + first_sample + sample
            values = _pooled(tables, indices, offsets, weights, table, bag,
                             D, DP, L, DTYPE, ALIGNED, MEAN, WEIGHTED)  # fmt: skip
            if local_rank >= 0:
                place = sample.to(tl.int64) * width + (first_table + table) * D
                put_weak(outputs, local_rank, place + lane, values.to(DTYPE), lane < D, ALIGNED)
            else:
                first = table // TABLES * TABLES  # of the slice
                count = tl.minimum(TABLES, table_count - first)
                start = first_sample.to(tl.int64) * table_count + first * samples
                place = start + sample * count + table - first
                tl.store(sends + place * D + lane, values.to(DTYPE), mask=lane < D)
                parts = tl.minimum(SLICE, samples - sample // SLICE * SLICE)
                slice = (turn * tl.cdiv(table_count, TABLES) + table // TABLES) * slices + sample // SLICE
                if arrive_acq_rel(counters + 2 + slice, parts * count):
                    send_release(inter_node, generation, slice)
            number += programs
        number -= bags
    if arrive_acq_rel(counters + 1, programs):
        tl.store(counters, 0)
        signal_all_release(context, 1, generation)  # done
        wait_all_acquire(context, 1, generation)
        finish_acquire(inter_node, generation)
    end(context, generation)


KERNEL = _embedding_all_to_all
