"""What was measured of pairs, next to what a machine's description predicts of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from sidelane.bench.c3.grouped_pictures import draw_groups
from sidelane.bench.report.drawing import RC
from sidelane.bench.report.table import Line, Table, grouped, notes_of
from sidelane.bench.report.terminal import say_written, tables_console
from sidelane.bench.results.files import read
from sidelane.bench.results.rows.pairs import C3Row
from sidelane.bench.results.written import write_json
from sidelane.c3.strategies import named
from sidelane.c3.workload import TABLE_I, Gemm, Workload, parse_gemm
from sidelane.machine.load import find
from sidelane.machine.spec import Machine
from sidelane.model.strategies import objection, predict
from sidelane.program.collective import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A row of a file and its prediction, with the speedup that each has over its own serial execution.

    ``note``: why there is no prediction.
    """

    row: C3Row
    time_us: float | None = None
    speedup: float | None = None
    note: str = ""

    @property
    def off(self) -> float | None:
        """0.1: predicted 10% too long."""
        measured = self.row.time_us
        return None if self.time_us is None or not measured else self.time_us / measured - 1


def main(machine_name: str, file: Path, report: Path | None, json: Path | None) -> list[Compared]:
    """Compare a file of ``sidelane c3`` with a machine's description: a table, pictures and a file.

    Raises:
        ValueError: no such machine, or another file.
    """
    machine, results = find(machine_name), read(file)
    if results.study != "c3":
        raise ValueError(f"c3: results (value={results.study!r}, allowed=a file of sidelane c3)")
    rows = [row for row in results.rows if isinstance(row, C3Row)]
    compared = compare(machine, rows)
    tables_console(json).print(compared_table(machine, compared).to_rich())
    if report is not None:
        with mpl.rc_context(RC):
            draw_groups(rows, speedups(compared), results, report)
    if json is not None:
        numbers = [{**one.row.to_dict(), "predicted_us": one.time_us, "predicted_note": one.note} for one in compared]
        write_json(
            json, {"study": "c3_compared", "machine": machine.name, "measured": results.machine, "rows": numbers}
        )
    say_written([path for path in (json, report) if path is not None])
    return compared


def compare(machine: Machine, rows: Sequence[C3Row]) -> list[Compared]:
    """Every row that has a time, but for ``auto``'s, which repeat others."""
    return [_compare(machine, row) for row in rows if row.time_us is not None and not row.chosen]


def _compare(machine: Machine, row: C3Row) -> Compared:
    strategy = named(row.strategy)
    if reason := objection(strategy):
        return Compared(row, note=reason)
    swept = strategy.partition is not None and strategy.partition.units is None
    try:
        found = predict(machine, workload_of(row), strategy, units=row.units if swept else None)
    except ValueError as problem:
        return Compared(row, note=str(problem))
    speedup = (found.gemm_us + found.best_comm_us) / found.time_us
    return Compared(row, found.time_us, speedup)


def workload_of(row: C3Row) -> Workload:
    """The pair of a row, its GEMM by its name in the table if it has these sizes, divided or not."""
    gemm = Gemm(row.m, row.n, row.k, row.dtype)
    tag, _, divisor = row.gemm.partition("/")
    if tag in TABLE_I:
        known = parse_gemm(tag, row.dtype).scaled(int(divisor or 1))
        gemm = known if (known.m, known.n, known.k) == (row.m, row.n, row.k) else gemm
    return Workload(gemm, Kind(row.collective), row.bytes)


def speedups(compared: Sequence[Compared]) -> dict[tuple[str, str, int, str], float]:
    """Predicted, by GEMM, collective, bytes and strategy."""
    return {
        (one.row.gemm, one.row.collective, one.row.bytes, one.row.strategy): one.speedup
        for one in compared
        if one.speedup is not None
    }


def compared_table(machine: Machine, compared: Sequence[Compared]) -> Table:
    """How far predictions are off, by strategy."""
    lines, notes = [], []
    for name, alike in grouped(compared, lambda one: one.row.strategy, ordered=False):
        offs = [one.off for one in alike if one.off is not None]
        if offs:
            worst = max(alike, key=lambda one: abs(one.off or 0.0))
            median = statistics.median(abs(off) for off in offs)
            pair = f"{worst.row.gemm} {worst.row.collective}"
            figures = (f"{100 * median:.1f}", f"{100 * (worst.off or 0.0):+.1f}", pair)
            lines.append(Line((str(name), str(len(offs)), *figures)))
        notes += [(str(name), alike[0].note)] if not offs else []
    columns = ("<strategy", "pairs", "median\noff, %", "worst\noff, %", "<of")
    title = f"measured, and predicted by {machine.title}"
    return Table(title, columns, tuple(lines), notes_of(notes), keys=1)
