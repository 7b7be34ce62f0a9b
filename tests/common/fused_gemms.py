"""What ranks do with gemm_all_to_all in tests; see ``fused_ops``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fused_ops import DTYPES, Calls, Draws, check_close, communicator

from sidelane import Communicator, ops
from sidelane.ops import reference
from sidelane.ops.gemm import TileSizes
from sidelane.ops.split_gemm import DEFAULT_PIECES, handle_of, has_routing

TILES = TileSizes(16, 16, 16, 1, 1, group=2)


def back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Skewed routing, nothing at all for some, rows that stay; outputs that peers write while others are late."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = Draws(seed, rank)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(calls):
            dtype, order = draws.sizes.choice(DTYPES), draws.sizes.choice(("remote_first", "oblivious"))
            columns, depth = draws.sizes.choice((5, 16, 20)), draws.sizes.choice((3, 16, 40))
            counts = [[draws.sizes.choice((0, 1, 7, 18, 70)) for _ in range(n)] for _ in range(n)]
            xs = [draws.normal(sum(row) + number % 2, depth).to(dtype) for row in counts]
            weights = [draws.normal(columns, depth).to(dtype) for _ in range(n)]
            products = [x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True)]
            parts = [
                products[peer][sum(counts[peer][:rank]) : sum(counts[peer][: rank + 1])]  # what is for this rank
                for peer in range(n)
            ]
            expected = torch.cat(parts)
            x, weight = xs[rank].to(device), weights[rank].to(device)
            table = torch.tensor(counts, dtype=draws.sizes.choice((torch.int32, torch.int64)), device=device)
            draws.late()
            result = ops.gemm_all_to_all(comm, x, weight, table, most_rows=70 * n, order=order, tiles=TILES)
            kept.append((result[: len(expected)].clone(), expected))
            if number % 3:  # by columns, which the library takes; and every other column, which it does not
                x = x.T.contiguous().T if number % 3 == 1 else x.repeat_interleave(2, 1)[:, ::2]
            by_engines = ops.split_gemm_all_to_all(comm, x, weight, counts, most_rows=70 * n, pieces=1 + number % 3)
            kept.append((by_engines[: len(expected)].clone(), expected))
            handle, routed = handle_of(comm, 70 * n, columns, dtype), tuple(map(tuple, counts))
            by_engines = handle.part_by_part(x, weight, routed, handle.routing(routed, 1 + number % 3, in_graphs=True))
            kept.append((by_engines[: len(expected)].clone(), expected))
            if number < 2:  # as they are, and back
                x = xs[rank].to(device)
                rows = [part[sum(row[:rank]) : sum(row[: rank + 1])] for part, row in zip(xs, counts, strict=True)]
                came = ops.all_to_all_rows(comm, x, table, most_rows=70 * n)
                kept.append((came[: len(expected)].clone(), torch.cat(rows).double()))
                back = ops.all_to_all_rows(comm, came.clone(), table.T.contiguous(), most_rows=70 * n)
                sent = sum(counts[rank])
                kept.append((back[:sent].clone(), xs[rank][:sent].double()))
            if number == 1:
                for method in ("auto", "fused", "split", "unfused"):
                    given = table if method == "unfused" else counts
                    x = xs[rank].to(device)
                    result = ops.gemm_all_to_all(comm, x, weight, given, most_rows=70 * n, tiles=TILES, method=method)
                    kept.append((result[: len(expected)].clone(), expected))
            if number == 0:
                check_close(reference.gemm_all_to_all(comm, x, weight, counts), expected, "unfused")
        comm.synchronize()
        for number, (result, expected) in enumerate(kept):
            check_close(result, expected, number)
    return len(kept)


def wrong_calls(comm: Communicator) -> Calls:
    n = comm.world_size
    x, weight, counts = torch.ones(2 * n, 8), torch.ones(4, 8), torch.full((n, n), 2)

    def call(x: Any = x, weight: Any = weight, counts: Any = counts, **options: Any) -> Callable[[], Any]:
        chosen = {"most_rows": 2 * n, "tiles": TILES, **options}
        return lambda: ops.gemm_all_to_all(comm, x, weight, counts, **chosen)

    wrong = [
        call(x=torch.ones(2 * n, 7)),
        call(x=x.half()),
        call(x=torch.ones(8, 2 * n).T),
        call(weight=torch.ones(4)),
        call(weight=torch.ones(4, 8, dtype=torch.int32)),
        call(counts=[[2] * n] * (n - 1) + [[2]]),
        call(counts=None),
        call(method="split"),
        call(weight=torch.ones(2, 4, 8)),
        call(weight=torch.ones(2, 4, 8), counts=torch.ones(n, n, 3).long()),
        call(weight=torch.ones(2, 4, 8), counts=torch.ones(n, n, 2).long(), method="unfused"),
        call(weight=torch.ones(65, 4, 8), counts=torch.zeros(n, n, 65).long()),
        *(
            functools.partial(ops.all_to_all_rows, comm, other, counts, most_rows=2 * n)
            for other in (torch.ones(2 * n, 0), torch.ones(2 * n, 8).int(), torch.ones(8, 2 * n).T)
        ),
        call(counts=torch.full((n, n + 1), 2)),
        call(counts=torch.full((n, n), 2.0)),
        call(counts=torch.full((n, n), 3)),
        call(counts=torch.full((n, n), -1)),
        call(most_rows=0),
        call(order="last"),
    ]
    return wrong, call()


def wrong_splits(comm: Communicator) -> Calls:
    n = comm.world_size
    x, weight, counts = torch.ones(2 * n, 8), torch.ones(4, 8), [[2] * n] * n

    def call(x: Any = x, weight: Any = weight, counts: Any = counts, **options: Any) -> Callable[[], Any]:
        chosen = {"most_rows": 2 * n, **options}
        return lambda: ops.split_gemm_all_to_all(comm, x, weight, counts, **chosen)

    wrong = [
        call(x=torch.ones(2 * n, 7)),
        call(x=x.half()),
        call(weight=torch.ones(4, 8, dtype=torch.int32)),
        call(counts=[[2] * n] * (n + 1)),
        call(counts=[[2] * n] * (n - 1) + [[2] * (n - 1)]),
        call(counts=[[3] * n] * n),
        call(counts=[[-1] * n] * n),
        call(most_rows=0),
        call(pieces=0),
        call(pieces=65),
    ]
    return wrong, call()


def routings_that_are_kept(group: dist.ProcessGroup) -> tuple[bool, bool, int, bool, bool]:
    """Of counts that came once, and twice, whether a graph can hold them; then, with one that a graph holds, how many
    of twelve others are kept, whether that one is, and whether it still is right."""
    with communicator(group) as comm:
        n, x, weight = comm.world_size, torch.ones(40, 8, device=comm.device), torch.eye(8, device=comm.device)
        tables = [tuple((rows,) * n for _ in range(n)) for rows in range(1, 14)]
        first, most = tables[0], 16 * n
        handle, known = handle_of(comm, most, 8, x.dtype), []
        for _ in range(2):
            ops.split_gemm_all_to_all(comm, x, weight, first, most_rows=most)
            known.append(has_routing(comm, most, 8, x.dtype, first, DEFAULT_PIECES))
        held = handle.routing(first, DEFAULT_PIECES)
        held.in_a_graph = True  # as a capture does
        for table in tables[1:]:
            ops.split_gemm_all_to_all(comm, x, weight, table, most_rows=most)
        handle._output.zero_()
        result = handle.part_by_part(x, weight, first, held)[: sum(row[comm.rank] for row in first)]
        comm.synchronize()
        left = len(handle.routings) - 1
        return known[0], known[1], left, (first, DEFAULT_PIECES) in handle.routings, bool((result == 1).all())
