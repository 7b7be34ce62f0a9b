"""Rows that travel and are copied on by one kernel, against a reference that knows the rows of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fused_ops import Draws, communicator, draws_of, fused
from marks import long
from on_ranks import on_ranks
from torch import Tensor

from sidelane import Communicator
from sidelane.ops.token_rows import TokenRows

Drawn = tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Rows, those beside them, rows that leave and counts of a rank; and both kinds of rows that come."""


def drawn(comm: Communicator, draws: Draws, most: int, widths: tuple[int, int]) -> Drawn:
    """Ranks that get nothing, rows that are sent twice and not at all; all on the CPU."""
    n, choice = comm.world_size, draws.sizes.choice
    counts = torch.tensor([[choice((0, 1, most // 2, most)) for _ in range(n)] for _ in range(n)], device="cpu")
    tables = [draws.normal(most, sum(widths)).view(torch.int16)[:, 1::2] for _ in range(n)]
    sent = [torch.tensor([draws.sizes.randrange(most) for _ in range(n * most)], device="cpu") for _ in range(n)]
    parts = [numbers[: int(row.sum())].split(row.tolist()) for numbers, row in zip(sent, counts, strict=True)]
    came = torch.cat([table[part[comm.rank]] for table, part in zip(tables, parts, strict=True)])
    x, beside = (part.contiguous() for part in tables[comm.rank].split(widths, 1))
    return (x, beside, sent[comm.rank].int()[:, None], counts.int()), came


@on_ranks(1, 2, long(3), 4, interpreted=True, most=70, calls=5)
@on_ranks(long(8), interpreted=True, timeout_s=300, most=40, calls=3)
@on_ranks(gpu=fused, timeout_s=200, most=3000, calls=60)
def test_rows_of_any_numbers_back_to_back(group: dist.ProcessGroup, most: int, calls: int) -> None:
    """Several tiles, odd widths, with and without rows beside, ranks that are late."""
    with communicator(group) as comm:
        draws, kept, shapes = draws_of(comm), [], [(1200, 0), (33, 70), (520, 112), (8, 1024)]
        handles = [TokenRows(comm, most * comm.world_size, *shape, 2 + shape[0] % 7) for shape in shapes]
        for call in range(calls):
            handle = draws.sizes.choice(handles)
            given, came = drawn(comm, draws, most, (handle.columns, handle.beside))
            x, beside, *places = (part.to(comm.device) for part in given)
            draws.late()
            kept.append((handle.run(x, beside if handle.beside else None, *places, len(came)), came, call))
        comm.synchronize()
        for found, came, call in kept:
            assert torch.equal(torch.cat([part for part in found if part is not None], 1).cpu(), came), call
