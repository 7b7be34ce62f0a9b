"""GEMMs before reductions and behind gathers, on CPU ranks and GPUs, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_ops import DTYPES, Draws, check_all, check_close, communicator, draws_of, fused
from marks import long
from on_ranks import on_ranks

from sidelane import ops
from sidelane.ops import pipelined_gemm
from sidelane.program import pieces


@on_ranks(long(2), 3, interpreted=True, calls=6)
@on_ranks(gpu=fused, timeout_s=240, calls=60)
def test_gemms_that_are_reduced_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    """Few rows and many, owners that have none; by copy engines and unfused, with a buffer and without."""
    with pytest.MonkeyPatch.context() as patch, communicator(group) as comm:
        patch.setattr(pipelined_gemm, "MOST_SHAPES", 2)
        patch.setattr(pieces, "TILE_ROWS", 8)
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = draws_of(comm)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(calls):
            dtype = draws.sizes.choice(DTYPES)
            gathers = number % 2 == 1
            rows = draws.sizes.choice((1, n + 1, 35)) if gathers else n * draws.sizes.choice((1, 7, 18))
            columns, depth = draws.sizes.choice((5, 20)), draws.sizes.choice((3, 16, 24))
            xs = [draws.normal(rows, depth).to(dtype) for _ in range(n)]
            weights = [draws.normal(columns, depth).to(dtype) for _ in range(n)]
            products = [x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True)]
            expected = torch.stack(products).sum(0)
            scale = max(float(product.abs().max()) for product in (*products, expected))  # parts are rounded, too
            if not gathers:
                expected = expected.chunk(n)[rank]
            x, weight = xs[rank].to(device), weights[rank].to(device)
            if number % 3 == 0:  # rows that lie apart
                weight = torch.cat([weight, weight], dim=1)[:, :depth]
            call = ops.gemm_all_reduce if gathers else ops.gemm_reduce_scatter
            draws.late()
            options: tuple[dict[str, Any], ...] = (
                {},
                {"method": "split", "pieces": 1 + number % 3},
                {"method": "unfused"},
            )
            found = [call(comm, x, weight, **given).clone() for given in options]
            kept += [(result / scale, expected / scale) for result in found]
        check_all(comm, kept, scale=1.0)


@on_ranks(3, interpreted=True)
def test_sums_are_passed_on_where_they_lie(group: dist.ProcessGroup) -> None:
    """Sums that lie in memory of the operator, as ``x`` of its next call of this shape, whole or some columns."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with communicator(group) as comm:
        n, rank, size = comm.world_size, comm.rank, 48
        draws = Draws(n, rank)
        first = draws.normal(size, size)
        for method, depth in (("split", size), ("split", size // n), ("unfused", size), ("unfused", size // n)):
            weights = draws.normal(n, size, size), draws.normal(n, size, depth)
            total = torch.einsum("rk,nhk->rh", first.double(), weights[0].double())
            parts = [total[:, peer * depth % size :][:, :depth] @ weights[1][peer].double().T for peer in range(n)]
            x, *own = (one.to(comm.device) for one in (first, weights[0][rank], weights[1][rank]))
            came = ops.gemm_all_reduce(comm, x, own[0], method=method)[:, rank * depth % size :][:, :depth]
            kept.append((ops.gemm_all_reduce(comm, came, own[1], method=method).clone(), torch.stack(parts).sum(0)))
        check_all(comm, kept)


@on_ranks(long(2), 4, interpreted=True, calls=6)
@on_ranks(gpu=fused, timeout_s=240, calls=60)
def test_gemms_of_what_is_gathered_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    """Few rows and many; by copy engines in pieces and unfused, with a buffer and without."""
    with pytest.MonkeyPatch.context() as patch, communicator(group) as comm:
        patch.setattr(pipelined_gemm, "MOST_SHAPES", 2)
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = draws_of(comm)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(calls):
            dtype, rows = draws.sizes.choice(DTYPES), draws.sizes.choice((1, 7, 18, 33))
            columns, depth = draws.sizes.choice((5, 20)), draws.sizes.choice((3, 16, 24))
            xs = [draws.normal(rows, depth).to(dtype) for _ in range(n)]
            weights = [draws.normal(columns, depth).to(dtype) for _ in range(n)]
            expected = torch.cat(xs).double() @ weights[rank].double().T
            x, weight = xs[rank].to(device), weights[rank].to(device)
            if number % 3 == 0:  # rows that lie apart
                x = torch.cat([x, x], dim=1)[:, :depth]
            draws.late()
            found = [ops.all_gather_gemm(comm, x, weight)]
            found.append(ops.all_gather_gemm(comm, x, weight, method="split", pieces=1 + number % 3))
            gathered = [x.new_empty(n * rows, depth) for _ in range(2)]
            found.append(ops.all_gather_gemm(comm, x, weight.T.contiguous().T, gathered=gathered[0]))
            found.append(ops.all_gather_gemm(comm, x, weight, method="unfused"))
            found.append(ops.all_gather_gemm(comm, x, weight, method="unfused", gathered=gathered[1]))
            for each in gathered:
                assert torch.equal(each.cpu(), torch.cat(xs).cpu())
            kept += [(result, expected) for result in found]
        check_all(comm, kept)


@on_ranks(gpu=fused)
def test_default_tiles(group: dist.ProcessGroup) -> None:
    """Every GEMM with the tiles that it takes where nobody says, in each dtype: does a GPU have room for them?"""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        for seed, dtype in enumerate(DTYPES):
            draws = Draws(seed, rank)
            rows, depth, columns = 130 * n, 72, 260
            xs = [draws.normal(rows, depth).to(dtype) for _ in range(n)]
            weights = [draws.normal(columns, depth).to(dtype) for _ in range(n)]
            products = [x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True)]
            scale = max(float(product.abs().max()) for product in products)
            total = torch.stack(products).sum(0) / scale
            x, weight = xs[rank].to(device), weights[rank].to(device)
            counts = torch.full((n, n), 130, device=device)
            sent = torch.cat([product.chunk(n)[rank] for product in products]) / scale
            two, halves = torch.stack([weight, -weight]), torch.full((n, n, 2), 65, device=device)
            sign = torch.tensor([1.0, -1.0], device="cpu").repeat_interleave(65).repeat(n)[:, None]
            came = torch.cat([part.chunk(n)[rank] for part in xs]).double()
            dispatched = came @ weights[rank].double().T / scale
            gathered = torch.cat(xs).double() @ weights[rank].double().T / scale
            for name, result, expected in (
                ("all_reduce", ops.gemm_all_reduce(comm, x, weight), total),
                ("reduce_scatter", ops.gemm_reduce_scatter(comm, x, weight), total.chunk(n)[rank]),
                ("all_to_all", ops.gemm_all_to_all(comm, x, weight, counts, most_rows=rows).clone(), sent),
                ("experts", ops.gemm_all_to_all(comm, x, two, halves, most_rows=rows), sent * sign),
                ("rows", ops.all_to_all_rows(comm, x, counts, most_rows=rows), came / scale),
                ("gather", ops.all_gather_gemm(comm, x, weight), gathered),
                ("dispatch", ops.all_to_all_gemm(comm, x, weight, counts, most_rows=rows), dispatched),
                ("to experts", ops.all_to_all_gemm(comm, x, two, halves, most_rows=rows), dispatched * sign),
            ):
                check_close(result / scale, expected, (name, dtype), scale=1.0)
