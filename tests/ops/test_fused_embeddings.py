"""Bags that travel as they are summed, by Triton's interpreter and on GPUs, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fused_embeddings import check_bags, check_gradients
from fused_ops import check_close, communicator, draws_of, fused
from marks import long
from on_ranks import on_ranks

from sidelane import Communicator, ops
from sidelane.ops import operator
from sidelane.ops.embedding import EmbeddingAllToAll


@on_ranks(long(2), long(3), interpreted=True, calls=3)
@on_ranks(3, interpreted=True, calls=2)
@on_ranks(gpu=fused, timeout_s=240, calls=10)
def test_embedding_all_to_all_back_to_back(group: dist.ProcessGroup, calls: int) -> None:
    """In an order of its own on each rank."""
    orders = "remote_first", "oblivious", "auto"
    with communicator(group) as comm:
        draws = draws_of(comm)
        check_bags(
            *(comm, ops.embedding_all_to_all, draws, 2, calls),
            lambda: {"order": orders[(draws.sizes.randrange(3) + comm.rank) % 3]},
            last={"method": "unfused"},
        )


@on_ranks(3, interpreted=True)
def test_orders_of_embeddings_are_chosen(group: dist.ProcessGroup) -> None:
    """By the bags of each rank, of which rank 1 has few rows; as a caller asks; and in a capture."""
    early, own = "oblivious", ("oblivious", "remote_first", "oblivious")
    with communicator(group) as comm:
        for asked, captured, order in (
            ("auto", False, own[comm.rank]),
            (early, False, early),
            ("auto", True, own[comm.rank]),
        ):
            assert ordered(comm, asked, captured) == order
        why = ops.explain(comm, "embedding_all_to_all", 3, 1, 24)
        assert "embedding_all_to_all: fused: rule of thumb" in why
        assert "; order oblivious: rule of thumb" in why and "takes no longer than" in why
        comm.synchronize()


def ordered(comm: Communicator, asked: str, captured: bool) -> str:
    """Return the order of a call of bags that have 24 rows in the mean of the ranks."""
    n, rank, pooling, table = comm.world_size, comm.rank, 24, torch.arange(20.0).view(5, 4)
    sizes = [2 * pooling - 1, 1, *[pooling] * n][:n]
    indices, offsets = torch.arange(n * sizes[rank]) % 5, torch.arange(n + 1) * sizes[rank]
    taken: list[int] = []
    handle = EmbeddingAllToAll(comm, [table], n, "sum")
    launch = handle.kernel.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle.kernel, "launch", lambda *a, **o: (taken.append(a[-2]), launch(*a, **o)))
        patch.setattr(operator, "is_captured", lambda _: captured)
        found = handle.run(asked, None, indices, offsets, None)
    pooled = [table[torch.arange(size * n) % 5].double().view(n, size, 4).sum(1) for size in sizes]
    check_close(found, torch.cat([bags[rank : rank + 1] for bags in pooled], 1), pooling)
    handle.close()
    return ("oblivious", "remote_first")[taken[-1] - 2]


@on_ranks(long(2), 3, interpreted=True, calls=2)
@on_ranks(gpu=fused, timeout_s=240, calls=10)
def test_gradients_of_embeddings(group: dist.ProcessGroup, calls: int) -> None:
    with communicator(group) as comm, torch.device("cpu"):
        draws = draws_of(comm)
        check_gradients(comm, ops.embedding_all_to_all_backward, draws, comm.world_size, 2, calls)


@on_ranks(2, interpreted=True)
def test_tables_that_have_moved_are_other_tables(group: dist.ProcessGroup) -> None:
    """Tables that have got other memory are other tables: the operator and its backward make other handles."""
    with communicator(group) as comm:
        n, table = comm.world_size, torch.ones(5, 4)
        indices, offsets, grad = torch.zeros(n).int(), torch.arange(n + 1), torch.ones(1, 4 * n)
        for value in (1, 2):
            table.data = torch.full((5, 4), float(value))
            assert (ops.embedding_all_to_all(comm, [table], indices, offsets, method="fused") == value).all()
            assert ops.embedding_all_to_all_backward(comm, grad, [table], indices, offsets)[0][0].sum() == 4 * n
