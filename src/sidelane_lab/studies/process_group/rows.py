"""Rows of programs that call ``torch.distributed``, by the process group that they have, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sidelane_lab.cli.process_group import OPERATIONS
from sidelane_lab.harness.report import Cell, spread, tables_by
from sidelane_lab.harness.study import OF_LIBRARY, FlatRow
from sidelane_lab.harness.table import MISSING, Table, number

FIRST_CALLS, FIRST_STEP = "first_calls", "first_fsdp_step"
EAGER, ASYNC, GRAPH, FIRST = "eager", "async", "graph", "first"
ORDINARY, POOLED = "ordinary", "pooled"
LEARNED = "learned"
"""Ordinary tensors whose addresses Sidelane learnt, in files of before 29 November 2026."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupRow(FlatRow):
    """A call of ``torch.distributed``, or what the first use costs, by the process group.

    Attributes:
        operation: name of the call in ``torch.distributed``. ``first_calls``: from making the group to the end of one
            call of each operation at each size; ``first_fsdp_step``: from a sharded model to the end of its first step,
            for Sidelane with ``fsdp.enable``.
        bytes: gathered bytes of an all-gather, the whole buffer of the others; null of first uses.
        implementation: process group: ``sidelane``, or the library's (``nccl``, on CPUs ``gloo``).
        tensors: ``ordinary``, or ``pooled``: made in a
            ``sidelane.pool`` of the group's communicator.
        launch: ``eager``; ``async``: with ``async_op=True``, waited for at once; ``graph``: calls of one CUDA graph;
            ``first``.
        time_us: time of a call, median over the rounds of the slowest rank. On GPUs it is the device's alone, and on
            CPUs it lasts until the call is done. For first uses it is the time of the slowest rank, from begin to end.
        host_us: on GPUs, until a repeated call has returned (asynchronous ones: and was waited for), median of the
            slowest rank; null in graphs, on CPUs and of first uses.
        made_by: maker of the call, as ``sidelane.report()`` says: ``sidelane``, or the library behind it.
        variant: variant that Sidelane took.
        held_mb: symmetric memory that Sidelane holds in one call, for first uses.
        correct: True if results are right, before the rounds and after them.
        note: reason why there is no time, or a remark.
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


def group_tables(rows: Sequence[GroupRow]) -> list[Table]:
    """Make one table an operation, the fastest of each size and launch set off; and one of first uses."""
    times = {_alike(row): row.time_us for row in rows if row.implementation in OF_LIBRARY}

    def library(row: GroupRow) -> float | None:
        """Return the time of the library's group, in rows of Sidelane's that have one, too."""
        return None if row.implementation in OF_LIBRARY or row.time_us is None else times.get(_alike(row))

    def over(row: GroupRow, _: object) -> str:
        theirs = library(row)
        return f"{theirs / row.time_us:.2f}" if theirs and row.time_us else ""

    def more(row: GroupRow, _: object) -> str:
        theirs = library(row)
        return "" if theirs is None or row.time_us is None else f"{(row.time_us - theirs) / 1e6:+.2f}"

    calls: Mapping[str, Cell] = {
        "bytes": "bytes",
        "<launch": "launch",
        "<group": "implementation",
        "<tensors": "tensors",
        "<variant": lambda row, _: row.variant or ("" if row.made_by in ("", row.implementation) else row.made_by),
        "time\nus": "time_us",
        "p10-p90\nus": spread,
        "host\nus": lambda row, _: "" if row.host_us is None else number(row.host_us),
        "library\nover it": over,
        "<correct": "correct",
    }
    first: Mapping[str, Cell] = {
        "<first use": "operation",
        "<group": "implementation",
        "s": lambda row, _: MISSING if row.time_us is None else f"{row.time_us / 1e6:.2f}",
        "more than\nthe library": more,
        "memory\nMB": lambda row, _: "" if row.held_mb is None else f"{row.held_mb:.0f}",
    }
    of_first = [row for row in rows if row.launch == FIRST]
    return [
        *tables_by(
            [row for row in rows if row.launch != FIRST],
            lambda row: row.operation,
            lambda row: row.operation,
            calls,
            keys=4,
            groups=_alike,
            least=lambda row: row.time_us,
        ),
        *tables_by(
            of_first,
            lambda row: FIRST,
            lambda row: "First use, seconds from begin to end",
            first,
            keys=2,
            groups=lambda row: row.operation,
        ),
    ]


def _alike(row: GroupRow) -> tuple[str, int | None, str]:
    return row.operation, row.bytes, row.launch
