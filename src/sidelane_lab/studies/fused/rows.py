"""Rows of operators that are fused with their collective, as tables and as pictures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sidelane.cli.table import Line, Table, grouped, notes_of, number, verdict, without_empty_columns
from sidelane_lab.harness.drawing import BLUE, ORANGE, save
from sidelane_lab.harness.rows import LAUNCHES, FlatRow
from sidelane_lab.harness.study import Picture

FUSED_OPS = (
    *("gemv_all_reduce", "all_reduce_rms_norm", "embedding_all_to_all", "gemm_all_to_all", "all_to_all_gemm"),
    *("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"),
)
ALONE = ("compute", "collective")
"""Implementations of rows that are a part of an operator."""

FUSED_IMPLEMENTATIONS = ("fused", "auto", "unfused_nccl", "unfused_sidelane", "symm_mem", "unfused_best", *ALONE)


@dataclasses.dataclass(frozen=True, slots=True)
class FusedRow(FlatRow):
    """A fused operator, or the same unfused, at one shape.

    Attributes:
        op: the operator.
        shape: in words.
        implementation: ``fused``; ``unfused_nccl`` with the process group's collective (on CPUs Gloo's),
            ``unfused_sidelane`` with ours, ``symm_mem`` with that of PyTorch's symmetric memory; ``unfused_best``
            repeats the fastest of these; ``auto`` is a call with ``method="auto"``; ``compute`` and ``collective`` are
            the parts alone.
        schedule: of a fused one; what an unfused one is made of; how a part is done.
        launch: ``eager`` or ``graph``.
        time_us: median over the rounds of the slowest rank; p10_us and p90_us likewise.
        compute_us: the computation alone, the fastest there is.
        comm_us: the collective alone, likewise.
        bound_us: the larger of the two.
        max_rel_err: the largest difference from the result in float64, next to the largest element.
        correct: None when it could not run, or is a part.
        note: why there is no time; what ``auto`` has chosen, and why.
        gbps: bytes of the rows of tables, or of the weight of a GEMV, that a call reads, over the time.
        skew_us: by how much the ends of the ranks lie apart behind the last call of a sample, median over the rounds.
    """

    allowed = (("op", FUSED_OPS), ("implementation", FUSED_IMPLEMENTATIONS), ("launch", LAUNCHES))
    figures = ("time_us",)

    op: str
    shape: str
    implementation: str
    schedule: str
    launch: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    compute_us: float | None
    comm_us: float | None
    bound_us: float | None
    max_rel_err: float | None
    correct: bool | None
    note: str = ""
    gbps: float | None = None
    skew_us: float | None = None


FUSED_COLUMNS: tuple[str, ...] = (
    *("<shape", "<implementation", "<made of, schedule", "us", "bound\nus", "times the\nbest unfused"),
    *("GB/s\nread", "skew\nus", "<correct"),
)


def fused_tables(rows: Sequence[FusedRow]) -> list[Table]:
    """One table an operator and launch; each shape's fastest is set off."""
    tables = []
    for (op, launch), alike in grouped(rows, lambda row: (row.op, row.launch), ordered=False):
        lines = []
        for _, same in grouped(alike, lambda row: row.shape, ordered=False):
            whole = [row for row in same if row.implementation not in ALONE]
            best = min((row.time_us for row in whole if row.time_us is not None), default=None)
            unfused = next((row.time_us for row in same if row.implementation == "unfused_best"), None)
            shown = [row for row in same if row.implementation != "unfused_best"]
            lines += [
                Line(_cells(row, unfused), best=row in whole and row.time_us == best, rule=row is shown[-1])
                for row in shown
            ]
        notes = notes_of([(" ".join(_cells(row, None)[:3]), row.note) for row in alike])
        made = Table(f"{op}, {launch}", FUSED_COLUMNS, tuple(lines), notes, keys=3)
        tables.append(without_empty_columns(made))
    return tables


def _cells(row: FusedRow, unfused_us: float | None) -> tuple[str, ...]:
    is_whole = unfused_us is not None and row.time_us is not None and row.implementation not in ALONE
    ratio = unfused_us / row.time_us if is_whole and unfused_us and row.time_us else None
    return (
        row.shape,
        row.implementation,
        row.schedule,
        number(row.time_us),
        number(row.bound_us),
        "" if ratio is None else f"{ratio:.2f}",
        "" if row.gbps is None else number(row.gbps),
        "" if row.skew_us is None else number(row.skew_us),
        "" if row.implementation in ALONE and row.time_us is not None else verdict(row.correct),
    )


BY_PROGRAMS = re.compile(r"\w+, (\d+) programs a unit")
"""Schedules that say how many programs a unit has."""

ORDERS = {"remote_first": BLUE, "oblivious": ORANGE}


def draw_fused(rows: Sequence[FusedRow], where: str, folder: Path) -> list[Picture]:
    """Time by programs on a unit, and both orders next to each other: time, and how far ranks end apart.

    Graphs where there are some, whose host has no part in the times; else eager calls.
    """
    launch = "graph" if any(row.launch == "graph" for row in rows) else "eager"
    good = [row for row in rows if row.implementation == "fused" and row.launch == launch and row.time_us]
    return [*_by_programs(good, f"{where}, {launch}", folder), *_by_order(good, f"{where}, {launch}", folder)]


def _by_programs(rows: Sequence[FusedRow], where: str, folder: Path) -> list[Picture]:
    lines = []
    for (op, shape), alike in grouped(rows, lambda row: (row.op, row.shape), ordered=False):
        found = [(int(match[1]), row.time_us or 0.0) for row in alike if (match := BY_PROGRAMS.fullmatch(row.schedule))]
        if found:
            lines.append((f"{op}, {shape}", sorted(found)))
    if not lines:
        return []
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, points in lines:
        counts, times = zip(*points, strict=True)
        axes.plot(counts, [time / min(times) for time in times], "o-", markersize=4, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("programs on each compute unit")
    axes.set_ylabel("time over the fastest")
    title = f"Fused operators by occupancy, {where}"
    axes.set_title(title)
    axes.legend(fontsize=7)
    text = f"{title}: " + "; ".join(
        f"{name}: {', '.join(f'{time:.4g} us with {count}' for count, time in points)}" for name, points in lines
    )
    return [save(figure, "fused-occupancy", title, text, folder)]


def _by_order(rows: Sequence[FusedRow], where: str, folder: Path) -> list[Picture]:
    pairs = []
    for (op, shape), alike in grouped(rows, lambda row: (row.op, row.shape), ordered=False):
        by_order = {row.schedule: row for row in alike if row.schedule in ORDERS}
        if len(by_order) == len(ORDERS) and all(row.skew_us is not None for row in by_order.values()):
            pairs.append((f"{op}\n{shape}", by_order))
    if not pairs:
        return []
    figure = Figure(figsize=(10, 1.8 + 0.42 * len(pairs)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, (_, by_order) in enumerate(pairs):
        base = by_order["remote_first"].time_us or 1.0
        for which, (order, colour) in enumerate(ORDERS.items()):
            row, label = by_order[order], order if place == 0 else None
            at = place + 0.4 * which - 0.2
            left.barh(at, (row.time_us or 0.0) / base, 0.36, color=colour, label=label)
            right.barh(at, 100 * (row.skew_us or 0.0) / (row.time_us or 1.0), 0.36, color=colour)
    left.set_yticks(range(len(pairs)), [name for name, _ in pairs], fontsize=6)
    left.set_ylabel("operator and shape")
    left.invert_yaxis()
    left.set_xlabel("time over remote_first")
    right.set_xlabel("ends of ranks apart, % of the time")
    title = f"Fused operators by order, {where}"
    figure.suptitle(title, fontsize=10)
    left.legend(fontsize=7, loc="lower right")
    text = f"{title}: " + "; ".join(
        f"{name.replace(chr(10), ', ')}: "
        + ", ".join(f"{order} {row.time_us:.4g} us, ends {row.skew_us:.3g} us apart" for order, row in by_order.items())
        for name, by_order in pairs
    )
    return [save(figure, "fused-order", title, text, folder)]
