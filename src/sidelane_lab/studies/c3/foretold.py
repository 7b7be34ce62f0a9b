"""What was measured of pairs, next to what a machine's description predicts of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from sidelane.c3.strategies import named
from sidelane.c3.workload import TABLE_I, Gemm, Workload, parse_gemm
from sidelane.cli.output import write_json
from sidelane.cli.table import Line, Table, grouped, notes_of
from sidelane.cli.terminal import say_written, tables_console
from sidelane.program.collective import Kind
from sidelane_lab.harness.drawing import RC
from sidelane_lab.harness.study import read
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.strategies import objection, predict
from sidelane_lab.papers.claims import in_between, nearest
from sidelane_lab.papers.row_predictions import predict_together
from sidelane_lab.studies.c3.grouped_pictures import draw_groups
from sidelane_lab.studies.c3.rows import C3Row


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A row of a file and its prediction, with the speedup that each has over its own serial execution.

    Attributes:
        time_us: predicted from the description alone.
        given_us: predicted from the times alone of the row.
        note: why there is no prediction.

    Where either of the two may come first a prediction is two times. The one that the measured is nearer to stands
    here, and ``between`` tells that it is near neither: a median of rounds that went either way.
    """

    row: C3Row
    time_us: float | None = None
    speedup: float | None = None
    note: str = ""
    given_us: float | None = None
    between: bool = False

    @property
    def off(self) -> float | None:
        """0.1: predicted 10% too long."""
        return self._off(self.time_us)

    @property
    def given_off(self) -> float | None:
        """The same of the prediction from the times alone."""
        return self._off(self.given_us)

    def _off(self, predicted: float | None) -> float | None:
        measured = self.row.time_us
        return None if predicted is None or not measured or self.between else predicted / measured - 1


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
        numbers = [
            {
                **one.row.to_dict(),
                "predicted_us": one.time_us,
                "predicted_from_alone_us": one.given_us,
                "between": one.between,
                "predicted_note": one.note,
            }
            for one in compared
        ]
        write_json(
            json, {"study": "c3_compared", "machine": machine.name, "measured": results.machine, "rows": numbers}
        )
    say_written([path for path in (json, report) if path is not None])
    return compared


def compare(machine: Machine, rows: Sequence[C3Row]) -> list[Compared]:
    """Every row that has a time, but for ``auto``'s, which repeat others."""
    return [_compare(machine, row) for row in rows if row.time_us is not None and not row.chosen]


def _compare(machine: Machine, row: C3Row) -> Compared:
    strategy, measured = named(row.strategy), row.time_us
    assert measured is not None
    given = predict_together(machine, row)
    given_us = nearest(measured, given) if given else None
    between = bool(given) and in_between(measured, given)
    if reason := objection(strategy, machine):
        return Compared(row, note=reason, given_us=given_us, between=between)
    swept = strategy.partition is not None and strategy.partition.units is None
    try:
        found = predict(machine, workload_of(row), strategy, units=row.units if swept else None)
    except ValueError as problem:
        return Compared(row, note=str(problem), given_us=given_us, between=between)
    ends = (found.time_us,) if found.other_us is None else (found.time_us, found.other_us)
    time_us = nearest(measured, ends)
    return Compared(row, time_us, (found.gemm_us + found.best_comm_us) / time_us, "", given_us, between)


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
    """How far predictions are off, by strategy: from the description alone, and from the times alone of a row."""
    lines, notes = [], []
    for name, alike in grouped(compared, lambda one: one.row.strategy, ordered=False):
        offs = [one.off for one in alike if one.off is not None]
        given = [one.given_off for one in alike if one.given_off is not None]
        if offs or given:
            worst = max(alike, key=lambda one: abs((one.given_off if given else one.off) or 0.0))
            pair = f"{worst.row.gemm} {worst.row.collective}"
            between = sum(one.between for one in alike)
            figures = (*_median_and_worst(offs), *_median_and_worst(given), pair, str(between) if between else "")
            lines.append(Line((str(name), str(len(alike)), *figures)))
        notes += [(str(name), alike[0].note)] if not offs else []
    columns = ("<strategy", "pairs", "median\noff, %", "worst", "times alone\nknown: %", "worst", "<of", "between")
    title = f"measured, and predicted by {machine.title}"
    return Table(title, columns, tuple(lines), notes_of(notes), keys=1)


def _median_and_worst(offs: Sequence[float]) -> tuple[str, str]:
    if not offs:
        return "", ""
    return f"{100 * statistics.median(map(abs, offs)):.1f}", f"{100 * max(offs, key=abs):+.1f}"
