# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Kernels of a single rank for comparison with fused operators: the same computation, without sending.
``BagKernel`` is the loop of :mod:`sidelane.ops.embedding` over the bags of all tables, results in the order in which an
all-to-all takes them. ``add_norm`` is a residual and an RMS norm in one kernel.

Legend: N ranks; b samples of a rank; T tables; D elements of a row, in DP lanes; H elements of a norm, in HP lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidelane.device.language import real
from sidelane.device.triton_interpreter import launch
from sidelane.device.triton_language import tl, triton
from sidelane.kernels.arithmetic import DTYPES
from sidelane.ops.embedding import _pooled
from sidelane.ops.embedding_tables import UNIT_WARPS, threads_of
from sidelane.ops.handle import power_of_two, programs_of
from sidelane.session import Communicator


class BagKernel:
    """Bags of all local tables in one kernel, cut as :func:`sidelane.ops.embedding_all_to_all` cuts them.

    Args:
        comm: communicator of the ranks that share the batch.
        tables: tables [rows, D] each, contiguous, one dtype.
        batch: number of samples of all ranks, a multiple of them.
    """

    def __init__(self, comm: Communicator, tables: Sequence[torch.Tensor], batch: int) -> None:
        self._tables, self._samples, self._ranks = tuple(tables), batch // comm.world_size, comm.world_size
        self._addresses = torch.tensor([table.data_ptr() for table in tables], dtype=torch.int64).to(comm.device)
        dim, element_bytes = tables[0].shape[1], tables[0].element_size()
        self._warps, self._rows_at_a_time = threads_of(dim, element_bytes)
        self._programs = programs_of(comm, len(tables) * batch, max(1, UNIT_WARPS // self._warps))
        is_aligned = dim * element_bytes % 16 == 0 and all(table.data_ptr() % 16 == 0 for table in tables)
        self._constants = {
            "D": dim,
            "DP": power_of_two(dim),
            "L": self._rows_at_a_time,
            "DTYPE": real(DTYPES[str(tables[0].dtype).removeprefix("torch.")]),
            "ALIGNED": is_aligned,
        }

    def __call__(self, indices: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Store sums of bags, table by table over the samples of all ranks, into ``out`` [N, b, T, D]."""
        arguments = (self._addresses, indices, offsets, out, self._samples, self._ranks, len(self._tables))
        launch(_pool, (self._programs,), arguments, {**self._constants, "num_warps": self._warps})
        return out


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute ``total = x + residual; out = rms_norm(total, weight, eps)`` of rows [T, H]; contiguous, one dtype."""
    tokens, hidden = x.shape
    warps = 4 if hidden <= 2048 else 8 if hidden <= 8192 else 16
    options = {"HP": power_of_two(hidden), "num_warps": warps}
    launch(_add_norm, (tokens,), (x, residual, weight, total, out, hidden, eps), options)
    return out


@triton.jit
def _pool(
    tables, indices, offsets, out, samples, ranks, table_count,
    D: tl.constexpr, DP: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, DP)
    bags = samples * table_count  # for one rank
    for number in range(tl.program_id(0), ranks * bags, tl.num_programs(0)):
        peer, rest = number // bags, number % bags
        table, sample = rest // samples, rest % samples
        bag = table.to(tl.int64) * (samples * ranks) + peer * samples + sample
        values = _pooled(tables, indices, offsets, indices, table, bag,
                         D, DP, L, DTYPE, ALIGNED, False, False)  # fmt: skip
        place = ((peer * samples + sample).to(tl.int64) * table_count + table) * D
        tl.store(out + place + lane, values.to(DTYPE), mask=lane < D)


@triton.jit
def _add_norm(x, residual, weight, total, out, hidden, eps, HP: tl.constexpr):
    lane = tl.arange(0, HP)
    mask = lane < hidden
    place = tl.program_id(0).to(tl.int64) * hidden + lane
    added = tl.load(x + place, mask=mask, other=0).to(tl.float32)
    added += tl.load(residual + place, mask=mask, other=0).to(tl.float32)
    tl.store(total + place, added.to(total.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(added * added, axis=0) / hidden + eps)
    factor = tl.load(weight + lane, mask=mask, other=0).to(tl.float32)
    tl.store(out + place, (added * scale * factor).to(out.dtype.element_ty), mask=mask)


KERNELS = _pool, _add_norm
