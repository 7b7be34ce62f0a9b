"""The bits of a row do not depend on its batch: sums, norms and GEMVs, by CPU ranks and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from expected import in_rank_order, numbers, same_bytes
from fused_ops import DTYPES, communicator
from marks import long
from on_ranks import on_ranks
from sweeps import variants

from sidelane import Communicator, ops
from sidelane.program.collective import Kind, ReduceOp


def rows_of_ranks(comm: Communicator, rows: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same random numbers of each rank on all ranks."""
    return [numbers(7, rank, rows * hidden, dtype).view(rows, hidden) for rank in range(comm.world_size)]


@on_ranks(3, long(4), interpreted=True, batches=(1, 2, 7, 33), hidden=264)
@on_ranks(gpu=True, batches=(1, 2, 7, 64, 512, 2048), hidden=264, timeout_s=150)
@on_ranks(gpu=True, batches=(1, 2, 7, 64, 512, 2048), hidden=4096, timeout_s=150)
def test_sums(group: dist.ProcessGroup, batches: Sequence[int], hidden: int) -> None:
    """Sums of batches by every variant, in symmetric memory and in ordinary, alone and in lists."""
    with communicator(group) as comm:
        n, rank = comm.world_size, comm.rank
        for dtype in DTYPES:
            inputs = rows_of_ranks(comm, max(batches), hidden, dtype)
            wanted, mine = in_rank_order(inputs, ReduceOp.SUM), inputs[rank]
            if n > 2 and dtype is torch.float32:  # few bits are lost of shorter ones, in any order
                assert not same_bytes(wanted, in_rank_order(inputs[::-1], ReduceOp.SUM)), "another order, other bits"
            for batch in batches:
                for variant in variants(comm, Kind.ALL_REDUCE):
                    there = comm.empty(batch, hidden, dtype=dtype).copy_(mine[:batch])
                    comm.all_reduce(there, variant=variant)
                    assert same_bytes(there, wanted[:batch]), (dtype, batch, variant)
                for variant in variants(comm, Kind.REDUCE_SCATTER):
                    parts, part = comm.empty(n, batch, hidden, dtype=dtype).copy_(mine[:batch]), mine[:batch].clone()
                    comm.reduce_scatter(part, parts, variant=variant)
                    assert same_bytes(part, wanted[:batch]), (dtype, batch, variant)
                alone, rows = mine[:batch].clone(), [row.clone() for row in mine[: min(batch, 5)]]
                comm.all_reduce(alone)
                comm.all_reduce(rows)
                assert same_bytes(alone, wanted[:batch]), (dtype, batch, "ordinary")
                assert same_bytes(torch.stack(rows), wanted[: len(rows)]), (dtype, batch, "a list")


@on_ranks(3, long(4), interpreted=True, batches=(1, 5), hidden=260)
@on_ranks(gpu=True, batches=(1, 2, 7, 16, 64, 200, 512), hidden=260, timeout_s=170)
@on_ranks(gpu=True, batches=(1, 2, 7, 16, 64, 200, 512), hidden=2048, timeout_s=170)
@on_ranks(gpu=True, batches=(1, 2, 7, 16, 64, 200, 512), hidden=4096, timeout_s=170)
@on_ranks(gpu=True, batches=(1, 2, 7, 16, 64, 200, 512), hidden=5120, timeout_s=170)
@on_ranks(gpu=True, batches=(1, 2, 7, 16, 64, 200, 512), hidden=8192, timeout_s=170)
def test_norms(group: dist.ProcessGroup, batches: Sequence[int], hidden: int) -> None:
    """Norms of batches by both schedules: those of the rows in the largest batch."""
    with communicator(group) as comm:
        for number, dtype in enumerate(DTYPES):
            most = max(batches)
            mine = rows_of_ranks(comm, most, hidden, dtype)[comm.rank] / 100
            residual, weight = numbers(8, 0, most * hidden, dtype).view(most, hidden), numbers(9, 0, hidden, dtype)
            every = (residual, None)
            for before in every if comm.device.type == "cuda" else every[number % 2 :][:1]:
                wanted = None
                for batch in sorted(batches, reverse=True):
                    for schedule in ("pushed", "cells", "auto"):
                        found = ops.all_reduce_rms_norm(
                            comm,
                            mine[:batch],
                            None if before is None else before[:batch],
                            weight,
                            schedule=schedule,
                            method="fused",
                        )
                        wanted = wanted or found
                        for name, one, other in zip(("y", "total"), found, wanted, strict=True):
                            assert same_bytes(one, other[:batch]), (dtype, batch, schedule, name)


@on_ranks(3, interpreted=True, rows=20, columns=48)
@on_ranks(gpu=True, rows=4096, columns=2048)
@on_ranks(gpu=True, rows=1001, columns=515)
def test_gemvs(group: dist.ProcessGroup, rows: int, columns: int) -> None:
    """Products of 2 to 16 tokens: those of the tokens among 16."""
    tokens = (16, 15, 8, 3, 2)
    with communicator(group) as comm:
        for dtype in DTYPES:
            weight = numbers(comm.rank, 1, rows * columns, dtype).view(rows, columns) / 100
            x = numbers(comm.rank, 2, 16 * columns, dtype).view(16, columns) / 100
            wanted = ops.gemv_all_reduce(comm, weight, x, method="fused")
            for count in tokens:
                found = ops.gemv_all_reduce(comm, weight, x[:count], method="fused")
                assert same_bytes(found, wanted[:count]), (dtype, count)
