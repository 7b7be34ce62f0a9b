"""Bags of embedding tables and their gradients among ranks of one node and of several, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fused_ops import DTYPES, Draws, check_all, check_close


def check_bags(
    ranks: Any,
    forward: Callable[..., torch.Tensor],
    draws: Draws,
    most_tables: int,
    calls: int,
    options: Callable[[], dict[str, Any]],
    *,
    begin: Callable[[int, int, torch.dtype], None] | None = None,
    last: dict[str, Any] | None = None,
) -> None:
    """Uneven tables and batches, empty bags, all modes and dtypes; outputs that peers write while others are late.

    Args:
        options: those of a call.
        begin: called with batch, dim and dtype of the calls that follow.
        last: options with which the last call of a dtype is made once more.
    """
    n, rank, device = ranks.world_size, ranks.rank, ranks.device
    compared: list[tuple[torch.Tensor, torch.Tensor]] = []
    for dtype in DTYPES:
        dim, batch = draws.sizes.choice((1, 5, 8)), draws.sizes.randrange(n, 3 * n)
        counts = [draws.sizes.randrange(1, 1 + most_tables) for _ in range(n)]
        if begin is not None:
            begin(batch, dim, dtype)
        tables = [[draws.normal(draws.sizes.randrange(1, 30), dim).to(dtype) for _ in range(k)] for k in counts]
        own = [table.to(device) for table in tables[rank]]
        samples = [batch // n + (peer < batch % n) for peer in range(n)]
        mine = slice(sum(samples[:rank]), sum(samples[: rank + 1]))
        of_all = [table for some in tables for table in some for _ in range(batch)]
        for number in range(calls):
            kind = draws.sizes.choice(("sum", "mean", "weighted"))
            index, given = draws.sizes.choice((torch.int32, torch.int64)), options()
            lengths = [draws.sizes.choice((0, 1, 4, 11)) for _ in of_all]
            bags = [
                [draws.sizes.randrange(len(table)) for _ in range(length)]
                for table, length in zip(of_all, lengths, strict=True)
            ]
            factors = [draws.normal(len(bag)).to(dtype) for bag in bags]
            pooled = [
                pool(table, bag, factor if kind == "weighted" else None, mean=kind == "mean")
                for table, bag, factor in zip(of_all, bags, factors, strict=True)
            ]
            wide = torch.stack(pooled).view(sum(counts), batch, dim).transpose(0, 1).reshape(batch, -1)
            first, end = sum(counts[:rank]) * batch, sum(counts[: rank + 1]) * batch
            indices = torch.tensor([row for bag in bags[first:end] for row in bag], dtype=index, device=device)
            offsets = torch.tensor([0, *lengths[first:end]]).cumsum(0).to(device, index)
            weights = torch.cat(factors[first:end]).to(device) if kind == "weighted" else None
            mode = "mean" if kind == "mean" else "sum"
            draws.late()
            for how in (given, *([last] if last is not None and number == calls - 1 else [])):
                result = forward(ranks, own, indices, offsets, mode=mode, per_sample_weights=weights, **how)
                compared.append((result.clone(), wide[mine]))
    check_all(ranks, compared)


def pool(table: torch.Tensor, bag: list[int], factors: torch.Tensor | None, *, mean: bool) -> torch.Tensor:
    """A bag in float64."""
    rows = table.double()[bag] if bag else table.new_zeros(0, table.shape[1]).double()
    if factors is not None:
        rows = rows * factors.double()[:, None]
    return rows.sum(0) / (max(1, len(bag)) if mean else 1)


def check_gradients(
    ranks: Any, backward: Callable[..., Any], draws: Draws, first: int, most_tables: int, calls: int
) -> None:
    """Against autograd in float64: dense gradients and those of rows, of tables and of weights."""
    n, rank, device = ranks.world_size, ranks.rank, ranks.device
    kept: list[tuple[torch.Tensor, torch.Tensor, float | None]] = []
    for dtype in DTYPES:
        dim, batch = draws.sizes.choice((1, 5, 8)), draws.sizes.randrange(n, 3 * n)
        counts = [draws.sizes.randrange(1, 1 + most_tables) for _ in range(n)]
        sizes = [[draws.sizes.randrange(1, 12) for _ in range(count)] for count in counts]
        tables = [[draws.normal(rows, dim).to(dtype) for rows in some] for some in sizes][rank]
        own = [table.to(device) for table in tables]
        samples = [batch // n + (peer < batch % n) for peer in range(n)]
        for number in range(calls):
            kind = draws.sizes.choice(("sum", "mean", "weighted"))
            mode, index = "mean" if kind == "mean" else "sum", draws.sizes.choice((torch.int32, torch.int64))
            lengths = torch.tensor([0, 1, 4, 11])[torch.arange(batch * len(tables)) * (first + number) % 7 % 4]
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            rows = [len(table) for table in tables for _ in range(batch)]
            indices = torch.cat(
                [torch.arange(length) * 7 % row for length, row in zip(lengths.tolist(), rows, strict=True)]
            )
            factors = torch.arange(len(indices)).sin().to(dtype) if kind == "weighted" else None
            grad = draws.normal(batch, sum(counts) * dim).to(dtype)
            mine = grad[sum(samples[:rank]) : sum(samples[: rank + 1])].to(device)
            column = sum(counts[:rank]) * dim
            expected = autograd(tables, indices, offsets, mode, factors, grad[:, column:].double())
            draws.late()
            found, of_weights = backward(
                *(ranks, mine, own, indices.to(index).to(device), offsets.to(index).to(device)),
                mode=mode,
                per_sample_weights=None if factors is None else factors.to(device),
                sparse=number % 2 == 1,
            )
            # Of a sparse one each value was rounded before they are added, so the error is that of the values.
            scales = [largest_sum(part) if part.is_sparse else None for part in found]
            results = [part.double().to_dense().to(dtype) if part.is_sparse else part for part in found]
            results += [] if of_weights is None else [of_weights]
            scales += [] if of_weights is None else [None]
            kept += zip(results, expected, scales, strict=True)
    ranks.synchronize()
    for number, (result, wanted, scale) in enumerate(kept):
        check_close(result, wanted, number, scale=scale)


def largest_sum(part: torch.Tensor) -> float:
    """Of the magnitudes of a sparse gradient's values, by row. (``abs`` of the tensor would add them first.)"""
    magnitudes = torch.sparse_coo_tensor(part._indices(), part._values().double().abs(), part.shape)
    return max(1e-3, float(magnitudes.to_dense().max()))


def autograd(
    tables: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    mode: str,
    factors: torch.Tensor | None,
    grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Gradients of the tables, and of the factors, by PyTorch in float64; ``grad`` begins with that of table 0."""
    leaves = [table.double().requires_grad_() for table in tables]
    of_factors = None if factors is None else factors.double().requires_grad_()
    batch, dim = (len(offsets) - 1) // len(tables), tables[0].shape[1]
    for number, table in enumerate(leaves):
        starts = offsets[number * batch : (number + 1) * batch + 1]
        bag = slice(int(starts[0]), int(starts[-1]))
        pooled = torch.nn.functional.embedding_bag(
            indices[bag],
            table,
            starts - starts[0],
            mode=mode,
            per_sample_weights=None if of_factors is None else of_factors[bag],
            include_last_offset=True,
        )
        pooled.backward(grad[:, number * dim : (number + 1) * dim])
    found = [leaf.grad for leaf in (*leaves, *([] if of_factors is None else [of_factors]))]
    assert all(part is not None for part in found)
    return [part for part in found if part is not None]
