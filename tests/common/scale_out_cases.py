"""What ranks on virtual nodes do with fused operators among nodes; see ``fused_ops``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from fused_embeddings import autograd, largest_sum, pool
from fused_ops import DTYPES, Draws, check_close

from sidelane import Config
from sidelane.integrations.nodes.scale_out import scale_out
from sidelane.ops.scale_out import ScaleOut, embedding_all_to_all, embedding_all_to_all_backward


@contextlib.contextmanager
def on_nodes(
    group: dist.ProcessGroup,
    layout: Sequence[int],
    *,
    transport: str = "sockets",
    capacity: int = 64,
    timeout_s: float = 60,
) -> Iterator[ScaleOut]:
    """Ranks of a group that stand where ``layout`` says."""
    world = [9] * dist.get_world_size()
    for rank, node in zip(dist.get_process_group_ranks(group), layout, strict=True):
        world[rank] = node
    config = Config(timeout_s=timeout_s, virtual_nodes=tuple(world))
    device = torch.get_default_device()
    with scale_out(group, device=device, config=config, transport=transport, capacity=capacity) as ranks:
        yield ranks


def forward_back_to_back(
    group: dist.ProcessGroup, layout: Sequence[int], calls: int, capacity: int = 64, transport: str = "sockets"
) -> int:
    """Uneven tables and batches, empty bags, all modes and dtypes; a small ring is full and wraps around."""
    with on_nodes(group, layout, capacity=capacity, transport=transport) as ranks:
        n, rank, device = ranks.world_size, ranks.rank, ranks.device
        draws = Draws(len(layout) + capacity, rank)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dtype in DTYPES:
            dim, batch = draws.sizes.choice((1, 5, 8)), draws.sizes.randrange(n, 3 * n)
            counts = [draws.sizes.randrange(1, 3) for _ in range(n)]
            tables = [[draws.normal(draws.sizes.randrange(1, 30), dim).to(dtype) for _ in range(k)] for k in counts]
            own = [table.to(device) for table in tables[rank]]
            samples = [batch // n + (peer < batch % n) for peer in range(n)]
            mine = slice(sum(samples[:rank]), sum(samples[: rank + 1]))
            for _ in range(calls):
                kind = draws.sizes.choice(("sum", "mean", "weighted"))
                index, cut = draws.sizes.choice((torch.int32, torch.int64)), draws.sizes.choice((None, 1, 2))
                of_all = [table for some in tables for table in some for _ in range(batch)]
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
                first, last = sum(counts[:rank]) * batch, sum(counts[: rank + 1]) * batch
                indices = torch.tensor([row for bag in bags[first:last] for row in bag], dtype=index)
                offsets = torch.tensor([0, *lengths[first:last]]).cumsum(0).to(index)
                weights = torch.cat(factors[first:last]).to(device) if kind == "weighted" else None
                draws.late()
                result = embedding_all_to_all(
                    *(ranks, own, indices.to(device), offsets.to(device)),
                    mode="mean" if kind == "mean" else "sum",
                    per_sample_weights=weights,
                    slice_bags=cut,
                )
                kept.append((result.clone(), wide[mine]))
        ranks.synchronize()
        for number, (result, expected) in enumerate(kept):
            assert result.shape == expected.shape, number
            check_close(result, expected, number)
    return len(kept)


def backward_back_to_back(group: dist.ProcessGroup, layout: Sequence[int], calls: int) -> int:
    """Against autograd in float64: dense gradients and those of rows, of tables and of weights."""
    with on_nodes(group, layout, capacity=4) as ranks, torch.device("cpu"):
        n, rank, device = ranks.world_size, ranks.rank, ranks.device
        draws = Draws(len(layout), rank)
        kept: list[tuple[torch.Tensor, torch.Tensor, float | None]] = []
        for dtype in DTYPES:
            dim, batch = draws.sizes.choice((1, 5, 8)), draws.sizes.randrange(n, 3 * n)
            counts = [draws.sizes.randrange(1, 3) for _ in range(n)]
            sizes = [[draws.sizes.randrange(1, 12) for _ in range(count)] for count in counts]
            tables = [[draws.normal(rows, dim).to(dtype) for rows in some] for some in sizes][rank]
            own = [table.to(device) for table in tables]
            samples = [batch // n + (peer < batch % n) for peer in range(n)]
            for number in range(calls):
                kind = draws.sizes.choice(("sum", "mean", "weighted"))
                mode, index = "mean" if kind == "mean" else "sum", draws.sizes.choice((torch.int32, torch.int64))
                lengths = torch.tensor([0, 1, 4, 11])[torch.arange(batch * len(tables)) * (n + number) % 7 % 4]
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
                found, of_weights = embedding_all_to_all_backward(
                    *(ranks, mine, own, indices.to(index).to(device), offsets.to(index).to(device)),
                    mode=mode,
                    per_sample_weights=None if factors is None else factors.to(device),
                    sparse=number % 2 == 1,
                )
                scales = [largest_sum(part) if part.is_sparse else None for part in found]
                results = [part.double().to_dense().to(dtype) if part.is_sparse else part for part in found]
                results += [] if of_weights is None else [of_weights]
                scales += [] if of_weights is None else [None]
                kept += zip(results, expected, scales, strict=True)
        ranks.synchronize()
        for number, (result, wanted, scale) in enumerate(kept):
            check_close(result, wanted, number, scale=scale)
    return len(kept)
