# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""The backward of embedding_all_to_all: gradients of pooled bags travel to the tables' owners, which scatter them.

Equivalent: a copy out of the layout [local batch, tables x dim], an all-to-all, and the backward of ``embedding_bag``
for each local table (autograd of ``embedding.unfused_bags``).

Block b of two ranks; it scatters the gradients of all blocks b, its own rank's first, while the others' travel::

    rank 0   ready b | wait 1 | bags of 1 -> 1 | sent b to 1 | scatter own | wait for sent b of 1 | scatter those of 1
    rank 1   ready b | wait 0 | bags of 0 -> 0 | sent b to 0 | scatter own | wait for sent b of 0 | scatter those of 0

``ready``: the workspace of this block is free, since the launch before has ended. A block waits only for blocks with
its own number; a grid has no more of them than fit on the GPU.

Legend: as in ``embedding``. ``grads`` [b, A * D] of this rank's samples; ``arrived`` [T, B, D], workspace into which
peers store; ``table_grads`` float32 [rows of all local tables, D], or with SPARSE [all indices, D] of the dtype of
tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from sidelane.device.context import (
    begin,
    end,
    put_weak,
    rank_of,
    signal_all_release,
    signal_release,
    wait_acquire,
    world_size_of,
)
from sidelane.device.language import real
from sidelane.device.stamps import ADD, END, SEND, WAIT, stamp
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
    refuse_atomics,
    threads_of,
    words_of_tables,
)
from sidelane.ops.handle import KernelHandle, cached_object, check_tensor, power_of_two, programs_of, reporting_refusals
from sidelane.ops.operator import CachedLaunch, cached
from sidelane.ops.timeline import stamps_of
from sidelane.session import Communicator


class EmbeddingBackward(KernelHandle):
    """Flags and workspace of :func:`embedding_all_to_all_backward` for some tables. Collective.

    Args:
        comm: communicator of the ranks.
        tables: tables as in the forward.
        batch: number of samples of all ranks.
    """

    def __init__(self, comm: Communicator, tables: Sequence[torch.Tensor], batch: int) -> None:
        self.comm, self.tables = comm, EmbeddingTables.cached(comm, tables, batch)
        counts, device = self.tables.counts, comm.device
        starts = list(itertools.accumulate(counts, initial=0))
        rows = list(itertools.accumulate((table.shape[0] for table in tables), initial=0))
        self._starts = persistent(device, lambda: torch.tensor(starts, dtype=torch.int32, device=device))
        self._first_rows = persistent(device, lambda: torch.tensor(rows, dtype=torch.int64, device=device))
        self._rows = rows
        self._warps, self._rows_at_a_time = threads_of(self.tables.dim, self.tables.dtype.itemsize)
        per_unit = max(1, UNIT_WARPS // self._warps)
        self.programs = programs_of(comm, max(counts) * max(self.tables.samples), per_unit)
        self.arrived = comm.empty(max(counts) * batch * self.tables.dim, dtype=self.tables.dtype)
        self._addresses = comm.peers(self.arrived)  # now, as the first launch may be captured
        self.kernel = comm.load_kernel(_embedding_backward, flags=2 * self.programs)

    def run(
        self,
        grad: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        mode: str,
        sparse: bool,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Run the operator with checked arguments."""
        comm, tables = self.comm, self.tables
        if sparse:
            found = grad.new_empty(indices.numel(), tables.dim)
        else:
            found = torch.zeros(self._rows[-1], tables.dim, dtype=torch.float32, device=grad.device)
        weight_grads = None if weights is None else torch.empty_like(weights)
        stamps, stamped = stamps_of(comm, self.programs)
        self.kernel.launch(
            (self.programs,),
            self._addresses,
            self.arrived,
            grad.contiguous(),
            indices,
            offsets,
            indices if weights is None else weights,
            tables.addresses,
            self._starts,
            self._first_rows,
            found,
            found if weight_grads is None else weight_grads,
            tables.batch,
            len(tables.tables),
            tables.width,
            stamps,
            alike=f"batch {tables.batch}{stamped}",
            D=tables.dim,
            DP=power_of_two(tables.dim),
            L=self._rows_at_a_time,
            DTYPE=real(DTYPES[str(tables.dtype).removeprefix("torch.")]),
            ALIGNED=tables.are_aligned,
            MEAN=mode == MEAN,
            WEIGHTED=weights is not None,
            SPARSE=sparse,
            num_warps=self._warps,
        )
        if sparse:
            return as_sparse(tables, found, indices, offsets), weight_grads
        parts = [found[first:stop].to(tables.dtype) for first, stop in itertools.pairwise(self._rows)]
        return parts, weight_grads


def as_sparse(
    tables: EmbeddingTables, values: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
) -> list[torch.Tensor]:
    """Return a COO tensor for each table, not coalesced. Waits for the device, to read where tables begin."""
    cuts = offsets[:: tables.batch].tolist()
    found = []
    for table, (first, stop) in zip(tables.tables, itertools.pairwise(cuts), strict=True):
        rows = indices[first:stop].long()[None]
        found.append(torch.sparse_coo_tensor(rows, values[first:stop], table.shape, check_invariants=False))
    return found


def embedding_all_to_all_backward(
    comm: Communicator,
    grad: torch.Tensor,
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = SUM,
    per_sample_weights: torch.Tensor | None = None,
    sparse: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return the gradients of :func:`sidelane.ops.embedding_all_to_all`, in one kernel. A call of the communicator.

    Dense gradients are added up in float32 by atomic additions, in an order that changes, and rounded once; gradients
    of rows (``sparse``) are the same bits each time.

    Args:
        comm: communicator of the ranks.
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
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: new tables inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def make() -> CachedLaunch:
        with reporting_refusals(comm, NAME):
            batch, kind = check_call(comm, tables, indices, offsets, per_sample_weights, mode)
            if not sparse:
                refuse_atomics(comm, f"{NAME} backward")
        handle = cached_object(comm, ("backward", *kind), lambda: EmbeddingBackward(comm, tables, batch))
        with reporting_refusals(comm, NAME):
            dtype, shape = handle.tables.dtype, handle.tables.output_shape
            check_tensor(NAME, "grad", grad, comm.device, (dtype,), (2,))
            if grad.shape != shape:
                raise ValueError(f"{NAME}: shape of grad (value={tuple(grad.shape)}, allowed={shape})")
        return functools.partial(handle.run, mode=mode, sparse=sparse)

    words = words_of_tables(comm, ("backward", mode, sparse), tables, indices, offsets, per_sample_weights)
    found: tuple[list[torch.Tensor], torch.Tensor | None]
    found = cached(comm, words, (grad, offsets), make)(grad, indices, offsets, per_sample_weights)
    return found


@triton.jit
def _scatter(
    values, bag, first_row, tables, table, indices, offsets, weights, table_grads, weight_grads,
    D: tl.constexpr, DP: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Add ``values``, float32[DP], to the rows of a bag."""
    lane, line = tl.arange(0, DP), tl.arange(0, L)
    first = tl.load(offsets + bag).to(tl.int64)
    stop = tl.load(offsets + bag + 1).to(tl.int64)
    rows = tl.load(tables + table).to(tl.pointer_type(DTYPE))
    if MEAN:
        values = values / tl.maximum(stop - first, 1).to(tl.float32)
    at = first
    while at < stop:
        there = at + line < stop
        mask = there[:, None] & (lane < D)[None, :]
        index = tl.load(indices + at + line, mask=there, other=0).to(tl.int64)
        parts = tl.zeros([L, DP], tl.float32) + values[None, :]
        if WEIGHTED:
            row = tl.load(rows + index[:, None] * D + lane[None, :], mask=mask, other=0).to(tl.float32)
            products = tl.sum(row * parts, axis=1)
            tl.store(weight_grads + at + line, products.to(weight_grads.dtype.element_ty), mask=there)
            parts *= tl.load(weights + at + line, mask=there, other=0).to(tl.float32)[:, None]
        if SPARSE:
            tl.store(table_grads + (at + line)[:, None] * D + lane[None, :], parts.to(DTYPE), mask=mask)
        else:
            pointers = table_grads + (first_row + index)[:, None] * D + lane[None, :]
            tl.atomic_add(pointers, parts, mask=mask, sem="relaxed", scope="gpu")
        at += L


@triton.jit
def _embedding_backward(
    context, arrived_of, arrived, grads, indices, offsets, weights, tables, starts, first_rows, table_grads,
    weight_grads, batch, table_count, width, stamps,
    D: tl.constexpr, DP: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    generation = begin(context)
    rank, ranks = rank_of(context), world_size_of(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, DP)
    mask = lane < D
    signal_all_release(context, program, generation)  # ready
    own_samples = batch // ranks + (rank < batch % ranks).to(tl.int32)
    own_first = rank * (batch // ranks) + tl.minimum(rank, batch % ranks)
    for turn in range(1, ranks):
        peer = (rank + turn) % ranks
        first_table = tl.load(starts + peer)
        bags = own_samples * (tl.load(starts + peer + 1) - first_table)
        stamp(stamps, WAIT, peer)
        wait_acquire(context, peer, program, generation)
        stamp(stamps, SEND, peer)
        for number in range(program, bags, programs):
            table, sample = number // own_samples, number % own_samples
            column = (first_table + table) * D
            values = tl.load(grads + sample.to(tl.int64) * width + column + lane, mask=mask)
            to = (table.to(tl.int64) * batch + own_first + sample) * D
            put_weak(arrived_of, peer, to + lane, values, mask, ALIGNED)
        signal_release(context, peer, programs + program, generation)  # sent
    for turn in range(ranks):
        sender = (rank + turn) % ranks
        samples = batch // ranks + (sender < batch % ranks).to(tl.int32)
        first = sender * (batch // ranks) + tl.minimum(sender, batch % ranks)
        if sender != rank:
            stamp(stamps, WAIT, sender)
            wait_acquire(context, sender, programs + program, generation)
        stamp(stamps, ADD)
        for number in range(program, samples * table_count, programs):
            table, sample = number // samples, number % samples
            bag = table.to(tl.int64) * batch + first + sample
            if sender == rank:
                column = (tl.load(starts + rank) + table) * D
                values = tl.load(grads + sample.to(tl.int64) * width + column + lane, mask=mask, other=0)
            else:
                values = tl.load(arrived + bag * D + lane, mask=mask, other=0)
            _scatter(values.to(tl.float32), bag, tl.load(first_rows + table), tables, table, indices, offsets, weights,
                     table_grads, weight_grads, D, DP, L, DTYPE, MEAN, WEIGHTED, SPARSE)  # fmt: skip
    stamp(stamps, END)
    end(context, generation)


KERNEL = _embedding_backward
