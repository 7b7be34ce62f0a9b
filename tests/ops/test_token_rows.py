"""Rows that travel and are copied on by one kernel, against a reference that knows the rows of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fused_ops import communicator, draws_of, fused
from marks import long
from on_ranks import on_ranks

from sidelane.ops.token_rows import TokenRows


@on_ranks(1, 2, long(3), 4, interpreted=True, most=70, calls=5)
@on_ranks(long(8), interpreted=True, timeout_s=300, most=40, calls=3)
@on_ranks(gpu=fused, timeout_s=200, most=3000, calls=60)
def test_rows_of_any_numbers_back_to_back(group: dist.ProcessGroup, most: int, calls: int) -> None:
    """Several tiles, rows sent twice and not at all, ranks that get nothing, odd widths, with and without others."""
    with communicator(group) as comm:
        n, rank, draws, device = comm.world_size, comm.rank, draws_of(comm), comm.device
        shapes = [(1200, 0), (33, 70), (520, 112), (8, 1024)]
        handles = [TokenRows(comm, most * n, *shape, 2 + number) for number, shape in enumerate(shapes)]
        kept = []
        for call in range(calls):
            choice, number = draws.sizes.choice, draws.sizes.randrange(len(shapes))
            counts = torch.tensor([[choice((0, 1, most // 2, most)) for _ in range(n)] for _ in range(n)], device="cpu")
            sizes = [int(row.sum()) for row in counts]
            tables = [draws.normal(most, sum(shapes[number])).view(torch.int16)[:, 1::2] for _ in range(n)]
            leaving = [torch.tensor([draws.sizes.randrange(most) for _ in range(size)], device="cpu") for size in sizes]
            width = shapes[number][0]
            own = tables[rank].to(device)
            x, beside = own[:, :width].contiguous(), own[:, width:]
            draws.late()
            found = handles[number].run(
                x,
                beside.contiguous() if beside.numel() else None,
                leaving[rank].int()[:, None].to(device),
                counts.int().to(device),
                int(counts[:, rank].sum()),
            )
            parts = [sent.split(row.tolist()) for sent, row in zip(leaving, counts, strict=True)]
            rows = torch.cat([table[sent[rank].long()] for table, sent in zip(tables, parts, strict=True)])
            kept.append((call, width, found, rows))
        comm.synchronize()
        for call, width, (rows, beside), expected in kept:
            assert torch.equal(rows.cpu(), expected[:, :width]), call
            assert beside is None if expected.shape[1] == width else torch.equal(beside.cpu(), expected[:, width:]), (
                call
            )


@on_ranks(gpu=True, replays=12)
def test_rows_in_a_graph(group: dist.ProcessGroup, replays: int) -> None:
    """Replays with other rows and other counts, and calls between them."""
    with communicator(group) as comm:
        n, rank, draws, most, width = comm.world_size, comm.rank, draws_of(comm), 500, 3584
        handle = TokenRows(comm, n * most, width, 112, 64)
        x, beside = (torch.zeros(most, size, dtype=torch.int16) for size in (width, 112))
        leaving, counts = torch.zeros(n * most, 1, dtype=torch.int32), torch.zeros(n, n, dtype=torch.int32)

        def run() -> tuple[torch.Tensor, torch.Tensor | None]:
            return handle.run(x, beside, leaving, counts, n * most)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = run()
        for replay in range(replays):
            tables = [draws.normal(most, width + 112).view(torch.int16)[:, 1::2] for _ in range(n)]
            table = [[draws.sizes.randrange(most) for _ in range(n)] for _ in range(n)]
            sent = [draws.sizes.randrange(most) for _ in range(n * most)]
            x.copy_(tables[rank][:, :width]), beside.copy_(tables[rank][:, width:])
            leaving.copy_(torch.tensor(sent, device="cpu")[:, None]), counts.copy_(torch.tensor(table, device="cpu"))
            if replay % 3 == 2:
                found = run()
            else:
                graph.replay()
                found = captured
            torch.cuda.synchronize()
            starts = [sum(row[:rank]) for row in table]
            rows = [
                one[torch.tensor(sent[start : start + row[rank]], device="cpu", dtype=torch.int64)]
                for one, start, row in zip(tables, starts, table, strict=True)
            ]
            expected = torch.cat(rows)
            assert found[1] is not None and torch.equal(found[0][: len(expected)].cpu(), expected[:, :width]), replay
            assert torch.equal(found[1][: len(expected)].cpu(), expected[:, width:]), replay
