"""``sidelane fused --machine``: predictions of fused operators, and these held against a file of measured ones.

Rows of graphs are compared, whose host has no part in them: the computation alone, the collective alone, both one
after the other, and the fused kernel in each order. What the model does not speak to is counted. Nothing is fitted.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sidelane_lab.cli.fused import FusedOptions
from sidelane_lab.harness import study as files
from sidelane_lab.harness.table import Line, Table, grouped, number
from sidelane_lab.harness.terminal import say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import predict_study, write_numbers
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model import operators
from sidelane_lab.model.split import chain_us, ours_us, split_us
from sidelane_lab.papers.claims import error_of
from sidelane_lab.studies.fused.predict import draw, operators_of
from sidelane_lab.studies.fused.rows import ALONE, IN_PARTS, FusedRow, sizes_of
from sidelane_lab.studies.fused.shapes import EVENLY, EXPERTS

COMPUTE, COLLECTIVE, UNFUSED, FUSED = "compute alone", "collective alone", "unfused, process group", "fused"
CHAIN, PARTS = "unfused, copy engines", "in parts"
SCHEDULES = {
    "remote_first": operators.REMOTE_FIRST,
    "oblivious": operators.OBLIVIOUS,
    "two_phase": operators.REMOTE_FIRST,
    "two_phase, oblivious": operators.OBLIVIOUS,
    "rows as they come": operators.REMOTE_FIRST,
    "cells": operators.REMOTE_FIRST,
    "pushed": operators.REMOTE_FIRST,
}
"""Orders of the model by schedules of the study."""

UNKNOWN = {("gemv_all_reduce", "cells")}
"""Operators and schedules with a name that the model has of others only."""

OUR_KERNEL, COMPILED = "our kernel", "add+norm by "
"""Schedules with these words compute unfused bags by our own kernel, and norms by compiled kernels: those of the
framework are predicted."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorComparison:
    """A time that was measured, and what was predicted. ``schedule``: of a fused kernel."""

    op: str
    shape: str
    part: str
    schedule: str
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Error of the prediction, next to the measured time; without a sign."""
        error = error_of(self.measured_us, self.predicted_us)
        assert error is not None
        return error

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` writes."""
        return {**dataclasses.asdict(self), "error_percent": 100 * self.error}


def main(machine_name: str, options: FusedOptions) -> None:
    """Print predictions, and write what the options ask for; with a file, how far they are off what it has measured.

    Raises:
        ValueError: no such machine, options that the file has, or as :func:`predict` and :func:`hold`.
    """
    if options.results is None:
        predict_study(machine_name, options, draw=draw)
        return
    if any((options.ops, options.shapes, options.report)):
        raise ValueError("fused: --results (allowed=with --machine and --json alone: the file has the shapes)")
    machine, held, unknown = hold(find(machine_name), options.results)
    for table in held_tables(machine, held, unknown):
        tables_console(options.json).print(table.to_rich())
    say_written(write_numbers(options.json, "fused_held", machine, [one.to_dict() for one in held]))


def hold(machine: Machine, path: Path) -> tuple[Machine, list[OperatorComparison], int]:
    """Predict what a file has measured.

    Args:
        machine: whose GPUs and links these are; its number of GPUs becomes the file's number of ranks.
        path: a result file of ``sidelane fused``.

    Returns:
        The machine, what was compared, and how many rows of graphs the model does not speak to.

    Raises:
        ValueError: no such result file, or nothing in it that is predicted.
    """
    if not path.is_file():
        raise ValueError(f"fused: --results (value={path}, allowed=a file that is there)")
    results = files.read(path)
    captured = [row for row in results.rows if isinstance(row, FusedRow) and row.launch == "graph"]
    rows = [row for row in captured if row.correct or row.implementation in ALONE]
    if not rows:
        raise ValueError(f"fused: --results (value={path}, allowed=a file of sidelane fused on GPUs, with graphs)")
    machine = dataclasses.replace(machine, gpus=results.ranks, nodes=1)
    found: list[OperatorComparison] = []
    unknown = 0
    for (op, shape), alike in grouped(rows, lambda row: (row.op, row.shape), ordered=False):
        held = [] if shape.endswith((EVENLY, EXPERTS)) else list(_of_shape(machine, op, shape, alike))
        found += held
        known = {one.schedule for one in held}
        chain = any(one.part == CHAIN for one in held)
        others = ("unfused_best", "auto", *ALONE, *(("unfused_sidelane",) if chain else ()))
        unknown += sum(row.implementation not in others and row.schedule not in known for row in alike)
    if not found:
        raise ValueError(f"fused: --results (value={path}, allowed=with an operator that is predicted)")
    return machine, found, unknown


def held_tables(machine: Machine, found: Sequence[OperatorComparison], unknown: int) -> list[Table]:
    """Errors by operator and part: the median, and the worst with its shape."""
    lines = []
    for op, alike in grouped(found, lambda one: one.op, ordered=False):
        parts = grouped(alike, lambda one: one.part, ordered=False)
        for place, (part, same) in enumerate(parts):
            worst = max(same, key=lambda one: one.error)
            errors = statistics.median(one.error for one in same), worst.error
            cells = (op, part, str(len(same)), *(f"{100 * error:.0f}" for error in errors))
            seen = f"{number(worst.measured_us)} ({number(worst.predicted_us)})"
            lines.append(Line((*cells, worst.shape, seen), rule=place == len(parts) - 1))
    notes = (
        "captured in graphs; nothing of the description was taken from these rows",
        f"{unknown} rows of graphs are not predicted: GEMVs in cells, other routings than half for one "
        "peer, kernels that there were, and ours unfused with one rank",
    )
    columns = ("<operator", "<what", "rows", "median\n%", "worst\n%", "<at", "measured\n(predicted), us")
    title = f"fused operators on {machine.gpus} of {machine.title}: errors of predictions"
    return [Table(title, columns, tuple(lines), notes, keys=2)]


def _of_shape(machine: Machine, op: str, shape: str, rows: Sequence[FusedRow]) -> Iterator[OperatorComparison]:
    made_of = operators_of(op, sizes_of(op, shape), machine.world_size)
    ways = [(made, operators.predict_unfused(machine, made)) for made, _ in made_of]
    made, times = min(ways, key=lambda way: way[1].compute_us)
    rows = [row for row in rows if not row.schedule.startswith(OUR_KERNEL) and COMPILED not in row.schedule]
    first = rows[0]
    computed = first.compute_us
    if op in ("embedding_all_to_all", "all_reduce_rms_norm"):  # whose fastest computation is another kernel
        alone = [row.time_us for row in rows if row.implementation == "compute" and row.time_us]
        computed = min(alone, default=computed)
    if computed is not None:
        yield OperatorComparison(op, shape, COMPUTE, "", computed, times.compute_us)
    if first.comm_us is not None and times.collective_us and machine.world_size > 1:
        uneven = operators.counts_of(made)  # of which a kernel of ours knows nothing
        nbytes = made.collective_bytes(machine.world_size)
        ours = times.collective_us if uneven else ours_us(machine, made.kind, nbytes)
        fastest_us = min(times.collective_us, ours)  # the best of all implementations was measured
        yield OperatorComparison(op, shape, COLLECTIVE, "", first.comm_us, fastest_us)
    unfused = [row for row in rows if row.implementation == "unfused_nccl"]
    if unfused:
        row = min(unfused, key=lambda one: one.time_us or 0.0)
        yield OperatorComparison(op, shape, UNFUSED, row.schedule, row.time_us or 0.0, times.unfused_us)
    chain = [row.time_us for row in rows if row.implementation == "unfused_sidelane" and row.time_us]
    predicted = chain_us(machine, made)
    if chain and predicted is not None:  # auto takes kernels where they are faster: held against the fastest
        yield OperatorComparison(op, shape, CHAIN, "", min(chain), predicted)
    for row in rows:
        pieces = IN_PARTS.fullmatch(row.schedule)
        if row.implementation == "fused" and pieces:
            carried_us = split_us(machine, made, int(pieces[1]))
            assert carried_us is not None
            yield OperatorComparison(op, shape, PARTS, row.schedule, row.time_us or 0.0, carried_us)
        is_known = row.implementation == "fused" and (op, row.schedule) not in UNKNOWN
        order = SCHEDULES.get(row.schedule) if is_known else None
        if order is not None and made.has_kernel:
            if isinstance(made, operators.AllReduceNorm):
                made = dataclasses.replace(made, pushed=row.schedule == "pushed")
            fused = operators.predict_fused(machine, made, order).fused
            yield OperatorComparison(op, shape, FUSED, row.schedule, row.time_us or 0.0, fused.time_us)
