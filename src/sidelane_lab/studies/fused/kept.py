"""Rows of the study of fused operators as times to choose by: what ``method="auto"`` would take in each way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sidelane.choice.fused import FUSED, ORDERED, SPLIT, UNFUSED, FusedTime
from sidelane.choice.fused_heuristic import ROUTED, WITHOUT_KERNEL
from sidelane.choice.fused_order import ORDERS
from sidelane.choice.key import CPU, SOFTWARE, Key
from sidelane.cli.table import grouped
from sidelane_lab.harness.study import Results
from sidelane_lab.studies.fused.rows import FusedRow
from sidelane_lab.studies.fused.shapes import EVENLY, EXPERTS, MEANING

OWN, OWN_METHOD = "unfused_sidelane", "as the operator has it"
"""Implementation and schedule of what ``method="unfused"`` runs. Older files have only others that use the same
collectives."""

IN_PARTS = re.compile(r"mm in parts, (\d+) a peer")


def in_parts(pieces: int) -> str:
    """The schedule of a split operator.

    >>> in_parts(2), bool(IN_PARTS.fullmatch(in_parts(2)))
    ('mm in parts, 2 a peer', True)
    """
    return f"mm in parts, {pieces} a peer"


OF_EXPERTS = re.compile(rf"(\d+) {EXPERTS}")
"""The shape of a case with several experts a rank ends so."""


def with_programs(schedule: str, count: int) -> str:
    """The schedule of an operator with so many programs on each compute unit.

    >>> with_programs("cells", 4)
    'cells, 4 programs a unit'
    """
    return f"{schedule}, {count} programs a unit"


def times_of(rows: Sequence[FusedRow], world_size: int, element_bytes: int) -> Iterator[FusedTime]:
    """What to choose by, eager and in graphs, of shapes that have two ways and more.

    Args:
        rows: of any operators and shapes.
        world_size: ranks that measured them.
        element_bytes: of their dtype.
    """
    for (op, shape, launch), alike in grouped(rows, lambda row: (row.op, row.shape, row.launch), ordered=False):
        if shape.endswith(EVENLY):
            continue  # times are looked up by sizes and experts alone: those of the skewed routing count
        good = [row for row in alike if row.time_us is not None and row.correct]
        times: dict[str, float] = {}
        plain = [row for row in good if row.implementation == FUSED and not IN_PARTS.fullmatch(row.schedule)]
        if plain and op not in WITHOUT_KERNEL:
            times[FUSED] = plain[0].time_us or 0.0  # what a plain call takes
        for row in good:
            if row.implementation == FUSED and (found := IN_PARTS.fullmatch(row.schedule)):
                times[f"{SPLIT}/{found[1]}"] = row.time_us or 0.0
        orders: dict[str, float] = {}
        if op in ORDERED and world_size > 1:  # else both orders are one
            orders = {row.schedule: row.time_us or 0.0 for row in plain if row.schedule in ORDERS}
            times |= {FUSED: min(orders.values())} if orders else {}
        unfused = [row for row in good if row.implementation == OWN]
        unfused.sort(key=lambda row: row.schedule != OWN_METHOD)
        if op in ROUTED:  # whose others have the host wait
            unfused = [row for row in unfused if row.schedule == OWN_METHOD]
        if unfused:
            times[UNFUSED] = unfused[0].time_us or 0.0
        if len(times) > 1:
            sizes = tuple(map(int, re.findall(r"\d+", shape)[: len(MEANING[op])]))
            named = OF_EXPERTS.search(shape)
            experts = int(named[1]) if named else 1
            yield FusedTime(op, world_size, launch == "graph", sizes, element_bytes, times, orders, experts)


def element_bytes_of(device_type: str) -> int:
    """Of what the study measures: float32 on CPUs, else bfloat16."""
    return 4 if device_type == CPU else 2


def kept_of(results: Results) -> tuple[Key, tuple[FusedTime, ...]]:
    """Key of the machine and times of a result file.

    Raises:
        ValueError: a file of another study, or nothing in it to choose by.
    """
    device_type = "cuda" if results.gpus else CPU
    rows = [row for row in results.rows if isinstance(row, FusedRow)]
    times = tuple(times_of(rows, results.ranks, element_bytes_of(device_type)))
    if not times:
        raise ValueError(f"fused: --results (value={results.command}, allowed=a file of sidelane fused)")
    software = tuple(sorted((name, results.software[name]) for name in SOFTWARE if name in results.software))
    return Key(device_type, results.device, results.gpus, software=software), times
