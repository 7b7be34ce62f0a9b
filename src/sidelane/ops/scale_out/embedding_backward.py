# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The backward of embedding_all_to_all among several nodes: gradients travel to the tables' owners, which scatter them.

Equivalent: as of ``ops.embedding_backward``.

Block b of rank 0, on a node with rank 1; ranks 2 and 3 are on another node::

    ready b, first: open | bags of 2, 3 -> send buffer; last of a slice: descriptor -> ring | wait 1 | bags of 1 -> 1
    | sent b to 1 | scatter own | wait for sent b of 1 | scatter those of 1 | last: end -> ring, wait for 2 and 3
    then a second kernel: scatter those of 2 and 3

The scatter of what comes from other nodes is a kernel of its own: blocks that waited for it would occupy the GPU, which
the transport may need.

Legend: as in ``ops.embedding_backward``. ``sends`` [A, b, D], table by table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from sidelane.device.context import (
    arrive_acq_rel,
    begin,
    end,
    first_relaxed,
    put_weak,
    signal_all_release,
    signal_release,
    wait_acquire,
)
from sidelane.device.language import real
from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.kernels.arithmetic import DTYPES
from sidelane.memory.persistent import lasting
from sidelane.ops.embedding_backward import _scatter, as_sparse
from sidelane.ops.embedding_tables import (
    MEAN,
    NAME,
    SUM,
    UNIT_WARPS,
    EmbeddingTables,
    batch_of,
    check_bags,
    check_offsets,
    check_sizes,
    checked,
    refuse_atomics,
    threads_of,
)
from sidelane.ops.handle import check_tensor, kept, power_of_two, programs_of, telling_refusals
from sidelane.ops.scale_out.device import finish_acq_rel, near_of, open_release, send_release
from sidelane.ops.scale_out.embedding import slice_of
from sidelane.ops.scale_out.ranks import FarKernel, ScaleOut


class BackwardAcrossNodes:
    """Flags, buffers and workspace of :func:`embedding_all_to_all_backward` for some tables. Collective.

    Args:
        ranks: ranks of all nodes.
        tables: tables as in the forward.
        batch: number of samples of all ranks.

    Raises:
        PeerError, PeerTimeoutError: a rank failed, or did not come.
    """

    def __init__(self, ranks: ScaleOut, tables: Sequence[torch.Tensor], batch: int) -> None:
        comm: Any = ranks  # has what the tables take of a communicator
        self.ranks, self.tables = ranks, EmbeddingTables.kept(comm, tables, batch)
        counts, samples, dim, dtype = self.tables.counts, self.tables.samples, self.tables.dim, self.tables.dtype
        device, own = ranks.device, samples[ranks.rank]
        starts = list(itertools.accumulate(counts, initial=0))
        self._rows = rows = list(itertools.accumulate((table.shape[0] for table in tables), initial=0))
        with telling_refusals(comm, NAME):  # there may be no memory
            self._starts = lasting(device, lambda: torch.tensor(starts, dtype=torch.int32, device=device))
            self._first_rows = lasting(device, lambda: torch.tensor(rows, dtype=torch.int64, device=device))
            self._order = lasting(device, lambda: torch.tensor(ranks.order, dtype=torch.int32, device=device))
        self._warps, self._rows_at_a_time = threads_of(dim, dtype.itemsize)
        self._programs = programs_of(comm, max(counts) * max(samples), max(1, UNIT_WARPS // self._warps))
        self._slice_bags, self._slice_tables = slice_of(samples[0], max(counts), dim * dtype.itemsize)
        slices = -(-own // self._slice_bags)
        with telling_refusals(comm, NAME):
            self._counters = lasting(
                device, lambda: torch.zeros(2 + sum(counts) * slices, dtype=torch.int32, device=device)
            )
            self._sends = lasting(device, lambda: torch.empty(own * self.tables.width, dtype=dtype, device=device))
        with ranks.naming():
            self._places = ranks.near.empty(max(counts) * batch * dim, dtype=dtype)
        self._kernel = FarKernel(ranks, _embedding_backward, flags=2 * self._programs)
        with telling_refusals(comm, NAME):
            self._kernel.require_room(NAME, sum(-(-counts[far] // self._slice_tables) for far in ranks.fars) * slices)
            by_table = self._places.view(max(counts), batch * dim)
            ranks.transport.make_ready(by_table[: self._slice_tables, : self._slice_bags * dim])
        ranks.agree(f"{NAME} backward", (batch, dim, str(dtype)))

    def __call__(
        self,
        grad: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        *,
        mode: str = SUM,
        per_sample_weights: torch.Tensor | None = None,
        sparse: bool = False,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Run the operator. Arguments, result and errors are those of :func:`embedding_all_to_all_backward`."""
        ranks, tables, weights = self.ranks, self.tables, per_sample_weights
        comm: Any = ranks
        ranks.require_open()
        with telling_refusals(comm, NAME):
            if not sparse:
                refuse_atomics(comm, f"{NAME} backward")
            check_bags(comm, tables.tables, indices, offsets, weights, mode)
            check_offsets(tables, offsets)
            check_tensor(NAME, "grad", grad, ranks.device, (tables.dtype,), (2,))
            if grad.shape != tables.output_shape:
                allowed = tables.output_shape
                raise ValueError(f"{NAME}: shape of grad (value={tuple(grad.shape)}, allowed={allowed})")
        if sparse:
            found = grad.new_empty(indices.numel(), tables.dim)
        else:
            found = torch.zeros(self._rows[-1], tables.dim, dtype=torch.float32, device=grad.device)
        weight_grads = None if weights is None else torch.empty_like(weights)
        shared = (
            *(self._places, grad.contiguous(), indices, offsets, indices if weights is None else weights),
            *(tables.addresses, self._starts, self._first_rows, found, found if weight_grads is None else weight_grads),
            *(self._order, ranks.world_size, tables.batch, len(tables.tables), tables.width),
        )
        options: dict[str, Any] = {
            "D": tables.dim,
            "DP": power_of_two(tables.dim),
            "L": self._rows_at_a_time,
            "DTYPE": real(DTYPES[str(tables.dtype).removeprefix("torch.")]),
            "MEAN": mode == MEAN,
            "WEIGHTED": weights is not None,
            "SPARSE": sparse,
            "num_warps": self._warps,
        }
        self._kernel.launch(
            (self._programs,),
            ranks.near.peers(self._places),
            self._sends,
            self._counters,
            *shared,
            source=self._sends,
            landing=self._places,
            stride=tables.batch * tables.dim,
            alike=f"batch {tables.batch}",
            ALIGNED=tables.are_aligned,
            SLICE=self._slice_bags,
            TABLES=self._slice_tables,
            **options,
        )
        if ranks.fars:
            launch(_scatter_far, (self._programs,), (self._kernel.far, *shared), options)
        if sparse:
            return as_sparse(tables, found, indices, offsets), weight_grads
        parts = [found[first:stop].to(tables.dtype) for first, stop in itertools.pairwise(self._rows)]
        return parts, weight_grads


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
    """Return the gradients of :func:`embedding_all_to_all` among several nodes.

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
        sparse: return gradients of rows: a COO tensor a table, not coalesced. Waits for the device.

    Returns:
        A gradient for each local table; the gradient of the weights, if there are any.

    Raises:
        ValueError, TypeError: an argument is wrong; on the other ranks PeerError, and there are no more calls.
        UnavailableError: inside of a capture; a device that cannot run it.
        PeerError, PeerTimeoutError: a rank failed, or did not come.
    """
    comm: Any = ranks
    ranks.require_open()
    with telling_refusals(comm, NAME):
        kind = checked(comm, tables).key
        check_bags(comm, tables, indices, offsets, per_sample_weights, mode)
        batch = batch_of(tables, offsets)
        check_sizes(comm, tables, batch)
    handle = kept(comm, ("backward", batch, *kind), lambda: BackwardAcrossNodes(ranks, tables, batch))
    return handle(grad, indices, offsets, mode=mode, per_sample_weights=per_sample_weights, sparse=sparse)


@triton.jit
def _embedding_backward(
    context, far, places_of, sends, counters,
    places, grads, indices, offsets, weights, tables, starts, first_rows, table_grads, weight_grads,
    order, ranks, batch, table_count, width,
    D: tl.constexpr, DP: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SPARSE: tl.constexpr, ALIGNED: tl.constexpr, SLICE: tl.constexpr,
    TABLES: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, DP)
    mask = lane < D
    signal_all_release(context, program, generation)  # ready
    if first_relaxed(counters):
        open_release(far, generation)
    rank = tl.load(order + ranks - 1)
    own_samples = batch // ranks + (rank < batch % ranks).to(tl.int32)
    own_first = rank * (batch // ranks) + tl.minimum(rank, batch % ranks)
    slices = tl.cdiv(own_samples, SLICE)
    for turn in range(ranks - 1):
        peer = tl.load(order + turn)
        near = near_of(far, peer)
        first_table = tl.load(starts + peer)
        peer_tables = tl.load(starts + peer + 1) - first_table
        bags = own_samples * peer_tables
        if near >= 0:
            wait_acquire(context, near, program, generation)
        for number in range(program, bags, programs):
            table, sample = number // own_samples, number % own_samples
            column = (first_table + table) * D
            values = tl.load(grads + sample.to(tl.int64) * width + column + lane, mask=mask)
            if near >= 0:
                to = (table.to(tl.int64) * batch + own_first + sample) * D
                put_weak(places_of, near, to + lane, values, mask, ALIGNED)
            else:
                start = (first_table + table).to(tl.int64) * own_samples
                tl.store(sends + (start + sample) * D + lane, values, mask=mask)
                top = sample // SLICE * SLICE
                parts = tl.minimum(SLICE, own_samples - top)
                first = table // TABLES * TABLES  # of the slice; it has all samples if it has more than one table
                count = tl.minimum(TABLES, peer_tables - first)
                slice = (first_table + first) * slices + sample // SLICE
                if arrive_acq_rel(counters + 2 + slice, parts * count):
                    source = (first_table + first).to(tl.int64) * own_samples + top
                    to = (first.to(tl.int64) * batch + own_first + top) * D
                    send_release(far, generation, peer, -1, source * D, to, count, parts * D)
        if near >= 0:
            signal_release(context, near, programs + program, generation)  # sent
    for turn in range(ranks):
        sender = tl.load(order + ranks - 1 - turn)  # this rank first
        near = near_of(far, sender)
        if near >= 0:
            if turn > 0:
                wait_acquire(context, near, programs + program, generation)
            samples = batch // ranks + (sender < batch % ranks).to(tl.int32)
            first = sender * (batch // ranks) + tl.minimum(sender, batch % ranks)
            for number in range(program, samples * table_count, programs):
                table, sample = number // samples, number % samples
                bag = table.to(tl.int64) * batch + first + sample
                if turn == 0:
                    column = (tl.load(starts + sender) + table) * D
                    values = tl.load(grads + sample.to(tl.int64) * width + column + lane, mask=mask, other=0)
                else:
                    values = tl.load(places + bag * D + lane, mask=mask, other=0)
                _scatter(values.to(tl.float32), bag, tl.load(first_rows + table), tables, table, indices, offsets,
                         weights, table_grads, weight_grads, D, DP, L, DTYPE, MEAN, WEIGHTED, SPARSE)  # fmt: skip
    if arrive_acq_rel(counters + 1, programs):
        tl.store(counters, 0)
        finish_acq_rel(far, generation)
    end(context, generation)


@triton.jit
def _scatter_far(
    far, places, grads, indices, offsets, weights, tables, starts, first_rows, table_grads, weight_grads,
    order, ranks, batch, table_count, width,
    D: tl.constexpr, DP: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Scatter the gradients that ranks of other nodes have sent."""
    lane = tl.arange(0, DP)
    for turn in range(ranks):
        sender = tl.load(order + turn)
        if near_of(far, sender) < 0:
            samples = batch // ranks + (sender < batch % ranks).to(tl.int32)
            first = sender * (batch // ranks) + tl.minimum(sender, batch % ranks)
            for number in range(tl.program_id(0), samples * table_count, tl.num_programs(0)):
                table = number // samples
                bag = table.to(tl.int64) * batch + first + number % samples
                values = tl.load(places + bag * D + lane, mask=lane < D, other=0)
                _scatter(values.to(tl.float32), bag, tl.load(first_rows + table), tables, table, indices, offsets,
                         weights, table_grads, weight_grads, D, DP, L, DTYPE, MEAN, WEIGHTED, SPARSE)  # fmt: skip


KERNEL, SECOND_KERNEL = _embedding_backward, _scatter_far
