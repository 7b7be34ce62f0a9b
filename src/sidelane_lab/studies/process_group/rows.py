"""Rows of programs that call ``torch.distributed``, by the process group that they have, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sidelane.cli.table import (
    MISSING,
    Line,
    Table,
    grouped,
    notes_of,
    number,
    verdict,
    without_empty_columns,
)
from sidelane.sizes import format_bytes
from sidelane_lab.harness.study import OF_LIBRARY, FlatRow

OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
FIRST_CALLS, FIRST_STEP = "first_calls", "first_fsdp_step"
EAGER, ASYNC, GRAPH, FIRST = "eager", "async", "graph", "first"
ORDINARY, LEARNED, POOLED = "ordinary", "learned", "pooled"


@dataclasses.dataclass(frozen=True, slots=True)
class GroupRow(FlatRow):
    """A call of ``torch.distributed``, or what the first use costs, by the process group.

    Attributes:
        operation: as ``torch.distributed`` calls it. ``first_calls``: from making the group to the end of one call of
            each operation at each size; ``first_fsdp_step``: from a sharded model to the end of its first step, for
            Sidelane with ``fsdp.enable``.
        bytes: gathered bytes of an all-gather, the whole buffer of the others; null of first uses.
        implementation: whose group: ``sidelane``, or the library: ``nccl``, on CPUs ``gloo``.
        tensors: ``ordinary``; ``learned``: ordinary ones with ``Config.map_memory="learn"``; ``pooled``: made in a
            ``sidelane.pool`` of the group's communicator.
        launch: ``eager``; ``async``: with ``async_op=True``, waited for at once; ``graph``: calls of one CUDA graph;
            ``first``.
        time_us: of a call; median over rounds of the slowest rank; p10_us and p90_us likewise. On GPUs the device's
            alone, and on CPUs until the call is done. Of first uses, of the slowest rank, from begin to end.
        host_us: on GPUs, until a repeated call has returned (asynchronous ones: and was waited for), median of the
            slowest rank; null in graphs, on CPUs and of first uses.
        made_by: what made the call, as ``sidelane.report()`` says: ``sidelane``, or the library behind it.
        variant: that Sidelane took.
        held_mb: of first uses, symmetric memory that Sidelane says it holds, in one call.
        correct: results are right, before the rounds and after them.
        note: why there is no time, or what to know about this one.
    """

    allowed = (
        ("operation", (*OPERATIONS, FIRST_CALLS, FIRST_STEP)),
        ("implementation", ("nccl", "gloo", "sidelane")),
        ("tensors", (ORDINARY, LEARNED, POOLED)),
        ("launch", (EAGER, ASYNC, GRAPH, FIRST)),
    )
    figures = ("time_us",)

    operation: str
    bytes: int | None
    dtype: str
    implementation: str
    tensors: str
    launch: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    host_us: float | None
    made_by: str
    variant: str
    held_mb: float | None
    correct: bool | None
    note: str = ""


CALL_COLUMNS: tuple[str, ...] = (
    *("bytes", "<launch", "<group", "<tensors", "<variant", "time\nus", "p10-p90\nus", "host\nus"),
    *("library\nover it", "<correct"),
)
FIRST_COLUMNS: tuple[str, ...] = ("<first use", "<group", "s", "more than\nthe library", "memory\nMB")


def group_tables(rows: Sequence[GroupRow]) -> list[Table]:
    """One table an operation, the fastest of each size and launch set off; and one of first uses."""
    tables = []
    first = [row for row in rows if row.launch == FIRST]
    for operation, alike in grouped([r for r in rows if r.launch != FIRST], lambda r: r.operation, ordered=False):
        lines = []
        for _, same in grouped(alike, lambda row: (row.bytes, row.launch), ordered=False):
            best = min((row.time_us for row in same if row.time_us is not None), default=None)
            lines += [
                Line(_cells(row, same), best=best is not None and row.time_us == best, rule=row is same[-1])
                for row in same
            ]
        notes = notes_of([(" ".join(_cells(row, alike)[:4]), row.note) for row in alike])
        tables.append(without_empty_columns(Table(operation, CALL_COLUMNS, tuple(lines), notes, keys=4)))
    if first:
        lines = [Line(_first_cells(row, first)) for row in first]
        tables.append(Table("First use, seconds from begin to end", FIRST_COLUMNS, tuple(lines)))
    return tables


def _cells(row: GroupRow, same: Sequence[GroupRow]) -> tuple[str, ...]:
    library = next((one.time_us for one in same if one.implementation in OF_LIBRARY), None)
    faster = (
        "" if row.implementation in OF_LIBRARY or not library or not row.time_us else f"{library / row.time_us:.2f}"
    )
    made_by = row.variant or ("" if row.made_by in ("", row.implementation) else row.made_by)
    return (
        *(format_bytes(row.bytes or 0), row.launch, row.implementation, row.tensors, made_by, number(row.time_us)),
        "" if row.p10_us is None else f"{number(row.p10_us)}-{number(row.p90_us)}",
        *(number(row.host_us) if row.host_us is not None else "", faster, verdict(row.correct)),
    )


def _first_cells(row: GroupRow, first: Sequence[GroupRow]) -> tuple[str, ...]:
    same = [one for one in first if one.operation == row.operation]
    library = next((one.time_us for one in same if one.implementation in OF_LIBRARY), None)
    more = "" if row.implementation in OF_LIBRARY or library is None or row.time_us is None else row.time_us - library
    return (
        *(row.operation, row.implementation, MISSING if row.time_us is None else f"{row.time_us / 1e6:.2f}"),
        more if isinstance(more, str) else f"{more / 1e6:+.2f}",
        "" if row.held_mb is None else f"{row.held_mb:.0f}",
    )
