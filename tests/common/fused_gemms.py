"""What ranks do with gemm_all_to_all in tests; see ``fused_ops``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_ops import DTYPES, Calls, Draws, check_close, communicator

from sidelane import Communicator, ops
from sidelane.choice.fused import SPLIT, MethodChoice
from sidelane.errors import UnavailableError
from sidelane.ops import auto, dispatch_gemm, gemm, operands, reference, split_gemm
from sidelane.ops.gemm import TileSizes
from sidelane.ops.routings import DEFAULT_PIECES, suit_graphs
from sidelane.ops.split_gemm import SplitGemmAllToAll, handle_of

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
        *(call(counts=[[rows] * n] * n) for rows in (3, -1)),
        call(counts=None),
        call(method="split"),
        call(weight=torch.ones(2, 4, 8)),
        call(weight=torch.ones(2, 4, 8), counts=torch.ones(n, n, 3).long()),
        call(weight=torch.ones(2, 4, 8), counts=[[[1, 1]] * n] * n, method="split"),
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


def counts_in_captures(group: dist.ProcessGroup) -> list[str]:
    """As if a graph recorded: it takes counts of the host that came before, in parts where these are made, by the
    kernel where not, and no new ones; what it holds stays. By which way, in turn.
    """
    ways: list[str] = []
    with communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        n = comm.world_size
        patch.setattr(auto, "choose_method", lambda *_, **__: MethodChoice(SPLIT, "a test", 2))
        patch.setattr(comm, "refuse", lambda *_: None)  # each rank raises, and goes on
        for where in (gemm.GemmAllToAll, dispatch_gemm.AllToAllGemm):
            patch.setattr(where, "__call__", told(where.__call__, "fused", ways))
        for where in (split_gemm.SplitGemmAllToAll, split_gemm.SplitAllToAllGemm):
            patch.setattr(where, "__call__", told(where.__call__, "split", ways))
        for number, op in enumerate((ops.gemm_all_to_all, ops.all_to_all_gemm)):
            first, second, third = ([[rows + number, 1] + [2] * (n - 2)] * n for rows in (3, 4, 5))
            x, weight = torch.randn(8 * n, 8), torch.randn(5, 8)
            run = functools.partial(as_if_captured, comm, op, x, weight)
            expected = [run(counts, method="fused") for counts in (first, second)]
            for counts, wanted in zip((first, second), expected, strict=True):
                check_close(run(counts), wanted.double(), "eager")  # the first one is made for graphs
                check_close(run(counts, captured=True), wanted.double(), "captured")
            run(third, method="unfused")
            run(third, captured=True)
            with pytest.raises(UnavailableError, match="value=new ones"):
                run([[1] * n] * n, captured=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(operands, "MOST_KEPT", 16)
                for rows in range(18):  # which only the device copy makes room for
                    operands._from_host("a test", comm, [[rows, 0] + [0] * (n - 2)] * n)
            check_close(run(second, captured=True), expected[1].double(), "kept")
            with pytest.raises(UnavailableError, match="value=new ones"):
                operands_in_a_capture(comm, [[0, 0] + [0] * (n - 2)] * n)
            ways.append("|")
        comm.synchronize()
    return ways


def as_if_captured(
    comm: Communicator,
    op: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: list[list[int]],
    *,
    captured: bool = False,
    method: str = "auto",
) -> torch.Tensor:
    """What comes by a call that may believe that it is recorded."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (auto, gemm, dispatch_gemm, operands, split_gemm):
            patch.setattr(module, "is_captured", lambda _: captured)
        found = op(comm, x, weight, counts, most_rows=len(x), method=method)
    return found[: sum(row[comm.rank] for row in counts)].clone()


def operands_in_a_capture(comm: Communicator, counts: Any) -> None:
    """Counts that were there, and had to go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "is_captured", lambda _: True)
        operands._from_host("a test", comm, counts)


def told(call: Callable[..., Any], word: str, ways: list[str]) -> Callable[..., Any]:
    def telling(*arguments: Any, **options: Any) -> Any:
        ways.append(word)
        return call(*arguments, **options)

    return telling


def routings_that_are_kept(group: dist.ProcessGroup) -> tuple[bool, bool, int, bool, bool]:
    """Of new counts, and of counts that came once, whether a graph can hold them; then, with one that a graph holds,
    how many of twelve others are kept, whether that one is, and whether it still is right."""
    with communicator(group) as comm:
        n, x, weight = comm.world_size, torch.ones(40, 8, device=comm.device), torch.eye(8, device=comm.device)
        tables = [tuple((rows,) * n for _ in range(n)) for rows in range(1, 14)]
        first, most = tables[0], 16 * n
        handle, known = handle_of(SplitGemmAllToAll, comm, most, 8, x.dtype), []
        for _ in range(2):
            known.append(suit_graphs(comm, (SplitGemmAllToAll.name, most, 8, x.dtype), first, DEFAULT_PIECES))
            ops.split_gemm_all_to_all(comm, x, weight, first, most_rows=most)
        held = handle.routings.of(first, DEFAULT_PIECES)
        held.in_a_graph = True  # as a capture does
        for table in tables[1:]:
            ops.split_gemm_all_to_all(comm, x, weight, table, most_rows=most)
        handle._came.zero_()
        result = handle(x, weight, first, DEFAULT_PIECES)[: sum(row[comm.rank] for row in first)]
        comm.synchronize()
        left = len(handle.routings.known) - 1
        return known[0], known[1], left, (first, DEFAULT_PIECES) in handle.routings.known, bool((result == 1).all())
