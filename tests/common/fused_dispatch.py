"""What ranks do with all_to_all_gemm in tests; see ``fused_ops``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fused_ops import DTYPES, Calls, Draws, check_close, communicator

from sidelane import Communicator, ops
from sidelane.ops import reference
from sidelane.ops.gemm import TileSizes

TILES = TileSizes(16, 16, 16, 1, 1, group=2)
METHODS = ("auto", "fused", "split", "unfused")


def back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Even and skewed routing, nothing at all for some, rows that stay; one expert and several; every way."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = Draws(seed, rank)
        kept: list[tuple[object, torch.Tensor, torch.Tensor]] = []
        for number in range(calls):
            dtype = draws.sizes.choice(DTYPES)
            columns, depth = draws.sizes.choice((5, 16, 20)), draws.sizes.choice((3, 16, 40))
            counts = [[draws.sizes.choice((0, 1, 7, 18, 40)) for _ in range(n)] for _ in range(n)]
            if number == 2:
                counts = [[17] * n] * n
            xs = [draws.normal(sum(row) + number % 2, depth).to(dtype) for row in counts]
            weight = [draws.normal(columns, depth).to(dtype) for _ in range(n)][rank]
            parts = [x[sum(row[:rank]) : sum(row[: rank + 1])] for x, row in zip(xs, counts, strict=True)]
            expected = torch.cat(parts).double() @ weight.double().T
            x, weight = xs[rank].to(device), weight.to(device)
            table = torch.tensor(counts, dtype=draws.sizes.choice((torch.int32, torch.int64)), device=device)
            if number % 3 == 0:  # rows that lie apart
                x, weight = (torch.cat([part, part], dim=1)[:, :depth] for part in (x, weight))
            draws.late()

            def keep(name: str, result: torch.Tensor, wanted: torch.Tensor = expected, number: int = number) -> None:
                kept.append(((number, name), result[: len(wanted)].clone(), wanted))

            options: dict[str, Any] = {"most_rows": 40 * n, "tiles": TILES}
            keep("fused", ops.all_to_all_gemm(comm, x, weight, table, **options))
            pieces = 1 + number % 3
            keep("split", ops.split_all_to_all_gemm(comm, x, weight, counts, most_rows=40 * n, pieces=pieces))
            if number < 2:
                for method in METHODS:
                    keep(method, ops.all_to_all_gemm(comm, x, weight, counts, method=method, **options))
                keep("unfused", ops.all_to_all_gemm(comm, x, weight, table, method="unfused", **options))
                keep("reference", reference.all_to_all_gemm(comm, x, weight, counts))
            keep("experts", *experts(comm, draws, dtype, columns, depth))
            keep("left out", *left_out(comm, x, weight, counts, expected))
        comm.synchronize()
        for where, result, wanted in kept:
            assert len(result) == len(wanted), where
            check_close(result, wanted, where)
    return len(kept)


def experts(
    comm: Communicator, draws: Draws, dtype: torch.dtype, columns: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles that a tile of an expert needs may be one or two, of rows of other experts as well."""
    n, rank, device, each = comm.world_size, comm.rank, comm.device, draws.sizes.choice((1, 2, 3))
    sizes = (0, 1, 5, 13, 16, 21)
    counts = [[[draws.sizes.choice(sizes) for _ in range(each)] for _ in range(n)] for _ in range(n)]
    xs = [draws.normal(sum(map(sum, row)), depth).to(dtype) for row in counts]
    weights = draws.normal(n, each, columns, depth).to(dtype)
    wanted = [torch.empty(0, columns, dtype=torch.float64, device="cpu")]
    for x, row in zip(xs, counts, strict=True):
        ends = itertools.accumulate(row[rank], initial=sum(map(sum, row[:rank])))
        for expert, (first, stop) in enumerate(itertools.pairwise(ends)):
            wanted.append(x[first:stop].double() @ weights[rank, expert].double().T)
    given = xs[rank].to(device), weights[rank].to(device), torch.tensor(counts, device=device)
    draws.late()
    return ops.all_to_all_gemm(comm, *given, most_rows=21 * n * each, tiles=TILES), torch.cat(wanted)


def left_out(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, counts: list[list[int]], expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What there is no room for stays away, and what there is room for is right."""
    table = torch.tensor(counts, device=comm.device)
    most = 1 + max(sum(row) for row in zip(*counts, strict=True)) // 2
    return ops.all_to_all_gemm(comm, x, weight, table, most_rows=most, tiles=TILES), expected[:most]


def wrong_calls(comm: Communicator) -> Calls:
    n = comm.world_size
    x, weight, counts = torch.ones(2 * n, 8), torch.ones(4, 8), torch.full((n, n), 2)

    def call(x: Any = x, weight: Any = weight, counts: Any = counts, **options: Any) -> Callable[[], Any]:
        chosen = {"most_rows": 2 * n, "tiles": TILES, **options}
        return lambda: ops.all_to_all_gemm(comm, x, weight, counts, **chosen)

    wrong = [
        call(x=torch.ones(2 * n, 7)),
        call(x=x.half()),
        call(x=torch.ones(8, 2 * n).T),
        call(weight=torch.ones(4)),
        call(weight=torch.ones(4, 8, dtype=torch.int32)),
        call(counts=[[2] * n] * (n - 1) + [[2]]),
        call(counts=[[3] * n] * n),
        call(counts=[[-1] * n] * n),
        call(counts=[2] * n),
        call(counts=None),
        call(counts=torch.full((n, n + 1), 2)),
        call(counts=torch.full((n, n), 2.0)),
        call(counts=torch.full((n, n), 3)),
        call(method="split"),
        call(method="best"),
        call(weight=torch.ones(2, 4, 8)),
        call(weight=torch.ones(2, 4, 8), counts=[[[1, 1]] * n] * n, method="split"),
        call(weight=torch.ones(65, 4, 8), counts=torch.zeros(n, n, 65).long()),
        call(most_rows=0),
    ]
    return wrong, call()


def wrong_splits(comm: Communicator) -> Calls:
    n = comm.world_size
    x, weight, counts = torch.ones(2 * n, 8), torch.ones(4, 8), [[2] * n] * n

    def call(x: Any = x, weight: Any = weight, counts: Any = counts, **options: Any) -> Callable[[], Any]:
        chosen = {"most_rows": 2 * n, **options}
        return lambda: ops.split_all_to_all_gemm(comm, x, weight, counts, **chosen)

    wrong = [
        call(x=torch.ones(2 * n, 7)),
        call(weight=torch.ones(4, 8, dtype=torch.int32)),
        call(counts=[[2] * n] * (n + 1)),
        call(counts=[[3] * n] * n),
        call(most_rows=0),
        *(call(pieces=pieces) for pieces in (0, 65)),
    ]
    return wrong, call()
