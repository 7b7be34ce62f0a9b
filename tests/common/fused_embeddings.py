"""What ranks do with embedding_all_to_all in tests; see ``fused_ops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_ops import DTYPES, Calls, Draws, check_all, check_close, communicator

from sidelane import Communicator, ops
from sidelane.ops import embedding, operator
from sidelane.ops.embedding import EmbeddingAllToAll


def forward_back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Uneven tables and batches, empty bags, all modes and dtypes; outputs that peers write while others are late."""
    with communicator(group) as comm:
        n, rank, device = comm.world_size, comm.rank, comm.device
        draws = Draws(seed, rank)
        kept: list[tuple[torch.Tensor, torch.Tensor, float | None]] = []
        for dtype in DTYPES:
            dim, batch = draws.sizes.choice((1, 5, 8)), draws.sizes.randrange(n, 3 * n)
            counts = [draws.sizes.randrange(1, 3) for _ in range(n)]
            tables = [
                [draws.normal(draws.sizes.randrange(1, 30), dim).to(dtype) for _ in range(count)] for count in counts
            ]
            own = [table.to(device) for table in tables[rank]]
            width = sum(counts) * dim
            samples = [batch // n + (peer < batch % n) for peer in range(n)]
            mine = slice(sum(samples[:rank]), sum(samples[: rank + 1]))
            for _ in range(calls):
                kind = draws.sizes.choice(("sum", "mean", "weighted"))
                index = draws.sizes.choice((torch.int32, torch.int64))
                first = draws.sizes.randrange(3)
                order = ("remote_first", "oblivious", "auto")[(first + rank) % 3]  # of its own on each rank
                bags = [
                    [[draws.sizes.randrange(len(table)) for _ in range(draws.sizes.choice((0, 1, 4, 11)))]]
                    for some in tables
                    for table in some
                    for _ in range(batch)
                ]
                factors = [draws.normal(len(bag)).to(dtype) for (bag,) in bags]
                pooled = [
                    pool(table, bag, factor if kind == "weighted" else None, mean=kind == "mean")
                    for table, (bag,), factor in zip(
                        [table for some in tables for table in some for _ in range(batch)], bags, factors, strict=True
                    )
                ]
                expected = torch.stack(pooled).view(sum(counts), batch, dim).transpose(0, 1).reshape(batch, width)[mine]
                first, last = sum(counts[:rank]) * batch, sum(counts[: rank + 1]) * batch
                lengths = [len(bag) for (bag,) in bags[first:last]]
                indices = torch.tensor([row for (bag,) in bags[first:last] for row in bag], dtype=index)
                offsets = torch.tensor([0, *lengths]).cumsum(0).to(index)
                weights = torch.cat(factors[first:last]) if kind == "weighted" else None
                draws.late()
                mode = "mean" if kind == "mean" else "sum"
                result = ops.embedding_all_to_all(
                    *(comm, own, indices.to(device), offsets.to(device)),
                    mode=mode,
                    per_sample_weights=None if weights is None else weights.to(device),
                    order=order,
                )
                kept.append((result.clone(), expected))
            factor = None if weights is None else weights.to(device)
            unfused = embedding.unfused_bags(comm, own, counts, mode, indices.to(device), offsets.to(device), factor)
            check_close(unfused, expected, "unfused")
        check_all(comm, kept)
    return len(kept)


def orders(group: dist.ProcessGroup) -> list[str]:
    """Return the orders of calls with ``auto``, with an order of the caller's, and as in a capture."""
    with communicator(group) as comm:
        told = [ordered(comm, *given) for given in (("auto", False), ("oblivious", False), ("auto", True))]
        comm.synchronize()
    return told


def ordered(comm: Communicator, asked: str, captured: bool) -> str:
    """Return the order of a call of bags that have 24 rows in the mean of the ranks, and the reason."""
    n, rank, pooling, table = comm.world_size, comm.rank, 24, torch.arange(20.0).view(5, 4)
    sizes = [2 * pooling - 1, 1, *[pooling] * n][:n]
    indices, offsets = torch.arange(n * sizes[rank]) % 5, torch.arange(n + 1) * sizes[rank]
    taken: list[int] = []
    handle = EmbeddingAllToAll(comm, [table], n, "sum")
    launch = handle._kernel.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle._kernel, "launch", lambda *a, **o: (taken.append(a[-2]), launch(*a, **o)))
        patch.setattr(operator, "is_captured", lambda _: captured)
        found = handle.run(asked, None, indices, offsets, None)
    pooled = [table[torch.arange(size * n) % 5].double().view(n, size, 4).sum(1) for size in sizes]
    check_close(found, torch.cat([bags[rank : rank + 1] for bags in pooled], 1), pooling)
    handle.close()
    why = ops.explain(comm, "embedding_all_to_all", n, 1, pooling)
    return f"{('oblivious', 'remote_first')[taken[-1] - 2]} | {why}"


def pool(table: torch.Tensor, bag: list[int], factors: torch.Tensor | None, *, mean: bool) -> torch.Tensor:
    """A bag in float64."""
    rows = table.double()[bag] if bag else table.new_zeros(0, table.shape[1]).double()
    if factors is not None:
        rows = rows * factors.double()[:, None]
    return rows.sum(0) / (max(1, len(bag)) if mean else 1)


def tables_that_move(group: dist.ProcessGroup) -> None:
    """Tables that have got other memory are other tables: the operator and its backward make other handles."""
    with communicator(group) as comm:
        n, table = comm.world_size, torch.ones(5, 4)
        indices, offsets, grad = torch.zeros(n).int(), torch.arange(n + 1), torch.ones(1, 4 * n)
        for value in (1, 2):
            table.data = torch.full((5, 4), float(value))
            assert (ops.embedding_all_to_all(comm, [table], indices, offsets, method="fused") == value).all()
            assert ops.embedding_all_to_all_backward(comm, grad, [table], indices, offsets)[0][0].sum() == 4 * n


def backward_back_to_back(group: dist.ProcessGroup, seed: int, calls: int) -> int:
    """Check gradients of tables on ranks of one node."""
    with communicator(group) as comm, torch.device("cpu"):
        return check_gradients(comm, ops.embedding_all_to_all_backward, Draws(seed, comm.rank), seed, 2, calls)


def check_gradients(
    ranks: Any, backward: Callable[..., Any], draws: Draws, first: int, most_tables: int, calls: int
) -> int:
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

    return len(kept)


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


def embedding_calls(comm: Communicator) -> Calls:
    tables, indices, offsets = [torch.ones(5, 4), torch.ones(6, 4)], torch.tensor([0, 4, 3, 5]), torch.arange(5)

    def call(some: Any = tables, rows: Any = indices, starts: Any = offsets, **options: Any) -> Callable[[], Any]:
        return lambda: ops.embedding_all_to_all(comm, some, rows, starts, **options)

    wrong = [
        call([]),
        call([torch.ones(5, 4), torch.ones(6, 3)]),
        call([torch.ones(5, 4), torch.ones(6, 4).half()]),
        call([torch.ones(4, 5).T, torch.ones(6, 4)]),
        call(rows=indices.float()),
        call(rows=torch.tensor([0, 5, 3, 5])),
        call(starts=torch.arange(4)),
        call(starts=torch.tensor([0, 2, 1, 3, 4])),
        call(starts=torch.tensor([0, 1, 2, 3, 5])),
        call(mode="max"),
        call(order="last"),
        call(rows=indices[:2], starts=torch.arange(3)),
        call(mode="mean", per_sample_weights=torch.ones(4)),
        call(per_sample_weights=torch.ones(3)),
    ]
    return wrong, call()
