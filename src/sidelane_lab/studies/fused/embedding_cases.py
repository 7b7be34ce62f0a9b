"""Cases of embedding bags before an all-to-all.

Dimension and pooling are those of the fused operators paper (section IV). Rows come from memory: all tables together
are many times the cache, and calls take turns with lists of indices of their own, so that none finds what the one
before has read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from sidelane import ops
from sidelane.choice.fused import FUSED, ORDERS, UNFUSED
from sidelane.ops.embedding import EmbeddingAllToAll
from sidelane.ops.embedding_tables import SUM, UNIT_WARPS, threads_of
from sidelane.session import Communicator
from sidelane_lab.studies.fused import case
from sidelane_lab.studies.fused.rows import OWN, OWN_METHOD, with_programs
from sidelane_lab.studies.fused.single_rank import BagKernel

DIM, TABLE_ROWS = 256, 1 << 17
"""64 MiB a table in bfloat16: 64 of them are 80 times the cache of an H200."""

CPU_DIM, CPU_TABLE_ROWS = 8, 50

COLD_BYTES, MOST_LISTS = 512 << 20, 8
"""Bytes of rows that are read until a list of indices comes again, and most lists: the calls of a sample."""

OURS = "our kernel alone"

SWEPT = ((1024, 64, 32), (4, 2, 2))
"""Shapes at which programs on a unit are swept, on GPUs and on CPUs."""


def programs_swept(dim: int, dtype: torch.dtype, *, on_cpu: bool) -> tuple[int, ...]:
    """Return programs on each unit: eighths of what a call takes at the most; on CPUs, which have no units, two.

    >>> programs_swept(256, torch.bfloat16, on_cpu=False)
    (2, 4, 6, 8, 10, 12, 14, 16)
    """
    most = max(1, UNIT_WARPS // threads_of(dim, dtype.itemsize)[0])
    return (1, 2) if on_cpu else tuple(sorted({max(1, most * eighths // 8) for eighths in range(1, 9)}))


def lists_of(call_bytes: int, *, on_cpu: bool) -> int:
    """Return how many lists of indices take turns, where a call reads so many bytes of rows.

    >>> lists_of(33 << 20, on_cpu=False), lists_of(100 << 20, on_cpu=False), lists_of(2 << 30, on_cpu=False)
    (8, 6, 2)
    """
    return 2 if on_cpu else min(MOST_LISTS, max(2, math.ceil(COLD_BYTES / call_bytes)))


class BagsOfTables:
    """Tables of a rank, indices of all bags in the two orders in which they are taken, and ways to sum bags.

    Some lists of indices take turns.

    Args:
        comm: the ranks.
        batch: samples of all ranks.
        tables: tables of each.
        pooling: rows of a bag.
    """

    def __init__(self, comm: Any, batch: int, tables: int, pooling: int) -> None:
        dtype, on_cpu = case.dtype_of(comm), comm.device.type == "cpu"
        self.dim, self._rows = (CPU_DIM, CPU_TABLE_ROWS) if on_cpu else (DIM, TABLE_ROWS)
        n, part = self.ranks, self.part = comm.world_size, batch // comm.world_size
        self.whole = case.ordinary(comm, tables * self._rows, self.dim).normal_()
        self.tables = list(self.whole.view(tables, self._rows, self.dim))
        self.read_bytes = batch * tables * pooling * self.dim * dtype.itemsize
        self.offsets = torch.arange(tables * batch + 1, device=comm.device) * pooling
        count = lists_of(self.read_bytes, on_cpu=on_cpu)
        options = {"dtype": torch.int64, "device": comm.device}
        self._of_tables = torch.zeros(count, tables, n, part, pooling, **options)
        self._of_all = torch.zeros(count, n, tables, part, pooling, **options)
        self._turn, self._rank, self._pool = 0, comm.rank, BagKernel(comm, self.tables, batch)

    def refill(self, seed: int) -> None:
        """Put new indices into all lists."""
        device = self.whole.device
        generator = torch.Generator(device).manual_seed(1000 * seed + self._rank)
        self._of_tables.random_(0, self._rows, generator=generator)
        first_rows = torch.arange(self._of_tables.shape[1], device=device)[:, None, None, None] * self._rows
        for by_table, of_all in zip(self._of_tables, self._of_all, strict=True):
            of_all.copy_((by_table + first_rows).transpose(0, 1))

    def by_table(self) -> torch.Tensor:
        """Return the next list, of each table: [tables, ranks, samples, pooling]."""
        self._turn = (self._turn + 1) % len(self._of_tables)
        return self.latest

    def of_one_table(self) -> torch.Tensor:
        """Return the next list, as if all tables were one: [ranks, tables, samples, pooling]."""
        self._turn = (self._turn + 1) % len(self._of_tables)
        found: torch.Tensor = self._of_all[self._turn]
        return found

    @property
    def latest(self) -> torch.Tensor:
        """The list that was taken last, by table."""
        found: torch.Tensor = self._of_tables[self._turn]
        return found

    def at_once(self) -> torch.Tensor:
        """Return sums by one kernel of PyTorch, [ranks, tables, samples, dim]."""
        indices = self.of_one_table().view(-1)
        pooled = functional.embedding_bag(indices, self.whole, self.offsets, mode="sum", include_last_offset=True)
        return pooled.view(self.ranks, len(self.tables), self.part, self.dim)

    def by_ours(self, output: torch.Tensor) -> torch.Tensor:
        """Store sums by our kernel, [ranks, samples, tables, dim]."""
        output = output.view(self.ranks, self.part, len(self.tables), self.dim)
        return self._pool(self.by_table().view(-1), self.offsets, output)

    def expected(self) -> torch.Tensor:
        """Return the exchanged sums of the list that was taken last in float64, [samples, ranks * tables * dim]."""
        shape = self.ranks, len(self.tables), self.part, self.dim
        wide = torch.empty(shape, dtype=torch.float64, device=self.whole.device)
        for number, (own, table) in enumerate(zip(self.latest, self.tables, strict=True)):
            wide[:, number] = table[own].sum(-2, dtype=torch.float64)
        came = torch.empty_like(wide)
        dist.all_to_all_single(came, wide)
        return came.flatten(0, 1).transpose(0, 1).reshape(self.part, -1)


def embedding(comm: Communicator, batch: int, tables: int, pooling: int) -> case.OperatorCase:
    """Make a case; ``batch`` samples of all ranks, ``tables`` on each."""
    bags = BagsOfTables(comm, batch, tables, pooling)
    n, part, dim, offsets, some = bags.ranks, bags.part, bags.dim, bags.offsets, bags.tables
    of_table = offsets[: batch + 1].clone()
    sent, received = case.ordinary(comm, n, tables, part, dim), case.ordinary(comm, n, tables, part, dim)
    own_sent, own_received = (case.symmetric(comm, n, tables, part, dim) for _ in range(2))
    out = case.ordinary(comm, part, n * tables, dim)
    at_once, by_ours = bags.at_once, bags.by_ours

    def table_by_table(output: torch.Tensor) -> torch.Tensor:
        pooled = [
            functional.embedding_bag(own.view(-1), table, of_table, mode="sum", include_last_offset=True)
            for own, table in zip(bags.by_table(), some, strict=True)
        ]
        return torch.stack([one.view(n, part, dim) for one in pooled], dim=1, out=output)

    def laid_out(bags: torch.Tensor) -> torch.Tensor:
        out.copy_(bags.view(n * tables, part, dim).transpose(0, 1))
        return out.view(part, -1)

    def sample_by_sample(bags: torch.Tensor) -> torch.Tensor:
        out.view(part, n, tables * dim).copy_(bags.view(n, part, tables * dim).transpose(0, 1))
        return out.view(part, -1)

    def through_group(make: Callable[[], torch.Tensor], lay_out: Callable[[torch.Tensor], torch.Tensor]) -> case.Run:
        def run() -> torch.Tensor:
            dist.all_to_all_single(received.view(n, -1), make().view(n, -1))
            return lay_out(received)

        return run

    def through_ours() -> torch.Tensor:
        own_sent.copy_(at_once())  # symmetric memory, where embedding_bag does not write
        comm.all_to_all(own_received, own_sent)
        return laid_out(own_received)

    def through_ours_staged() -> torch.Tensor:
        comm.all_to_all(own_received, at_once())
        return laid_out(own_received)

    def ours_through_ours() -> torch.Tensor:
        by_ours(own_sent)
        comm.all_to_all(own_received, own_sent)
        return sample_by_sample(own_received)

    def call(method: str, **options: str) -> torch.Tensor:
        indices = bags.by_table().view(-1)
        return ops.embedding_all_to_all(comm, some, indices, offsets, method=method, **options)  # type: ignore[arg-type]

    by_programs: dict[str, case.Run] = {}
    if (batch, tables, pooling) in SWEPT:
        for count in programs_swept(dim, case.dtype_of(comm), on_cpu=comm.device.type == "cpu"):
            handle = EmbeddingAllToAll(comm, some, batch, SUM, count)
            by_programs[with_programs(ORDERS[0], count)] = lambda run=handle.run: run(  # type: ignore[misc]
                ORDERS[0], None, bags.by_table().view(-1), offsets, None
            )

    return case.OperatorCase(
        "embedding_all_to_all",
        f"batch {batch}, {tables} tables a rank, pooling {pooling}, dim {dim}",
        bags.refill,
        bags.expected,
        {"a kernel a table": lambda: table_by_table(sent), "one kernel": at_once, OURS: lambda: by_ours(sent)},
        {
            "process group": lambda: dist.all_to_all_single(received, sent),
            "sidelane": lambda: comm.all_to_all(own_received, own_sent),
        },
        {
            (case.NCCL, "a kernel a table, process group, copy"): through_group(lambda: table_by_table(sent), laid_out),
            (case.NCCL, "one kernel, process group, copy"): through_group(at_once, laid_out),
            (case.NCCL, "our kernel, process group, copy"): through_group(lambda: by_ours(sent), sample_by_sample),
            (OWN, "one kernel, copy, sidelane, copy"): through_ours,
            (OWN, "one kernel, sidelane, copy"): through_ours_staged,
            (OWN, "our kernel, sidelane, copy"): ours_through_ours,
            (OWN, OWN_METHOD): lambda: call(UNFUSED),
        },
        {order: functools.partial(call, FUSED, order=order) for order in ORDERS} | by_programs,
        {case.AS_CALLED: case.AutoCall(lambda: call("auto"), (batch, tables, pooling))},
        bags.read_bytes,
    )
