"""Measurements of pairs, next to what a machine's description predicts of them."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane.c3.strategies import Mover, Strategy
from sidelane.c3.strategies import named as strategy_named
from sidelane.c3.strategies import strategies as all_strategies
from sidelane.cli.output import write_json
from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.harness.drawing import BLACK, COLOURS, GREY, RC, plain_name, save_titled
from sidelane_lab.harness.study import Picture, Results, read
from sidelane_lab.harness.table import Line, Table, grouped, notes_of
from sidelane_lab.harness.terminal import say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.ranges import in_between, nearest
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import KINDS, default_units
from sidelane_lab.model.device import run_device
from sidelane_lab.model.strategies import PairAlone, Prediction, objection, pair_kernels, predict
from sidelane_lab.model.study import TABLE_II, c3_study
from sidelane_lab.pairs.workload import C3Class, Workload, gemm_of, ideal_speedup, parse_workload, percent_of_ideal
from sidelane_lab.studies.c3.rows import C3Row, name_of, strategy_of

SERIAL = "serial"
ALL = tuple(strategy.code for strategy in all_strategies())
NOTHING: dict[str, Any] = dict.fromkeys(
    ("comm_us", "time_us", "speedup", "percent_of_ideal", "percent_of_ideal_nccl"),
)
"""Figures of a row without a prediction."""
OUT_OF_PLACE = "out of place"
"""Words of a note: the collective had a buffer of its own for its output."""


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


def predicted_rows(machine: Machine, options: C3Options) -> list[C3Row]:
    """Return the rows of a machine that is described; with all pairs of Table II those of the ConCCL paper's study.

    Raises:
        ValueError: a pair, a strategy or a machine that the model does not speak to.
    """
    if options.workloads == tuple(TABLE_II):
        machine.refuse_nodes("c3 without pairs, which is the ConCCL paper's study")
        return [_row(one) for one in c3_study(machine, options.strategies, version=options.version)]
    rows = []
    for kind, text in itertools.product(options.collectives, options.workloads):
        workload = parse_workload(text, kind)
        serial = _row(predict(machine, workload, SERIAL))  # which has the times of both alone
        others = [named for name in options.strategies or ALL if (named := strategy_named(name)).concurrent]
        rows += [serial, *(_row_under(machine, workload, strategy, serial) for strategy in others)]
    return rows


def _row_under(machine: Machine, workload: Workload, strategy: Strategy, serial: C3Row) -> C3Row:
    if not (reason := objection(strategy, machine)):
        return _row(predict(machine, workload, strategy))
    return dataclasses.replace(serial, **NOTHING, strategy=strategy.code, note=reason)


def _row(found: Prediction) -> C3Row:
    strategy, best_us = strategy_named(found.strategy), found.best_comm_us
    other = f"{found.other_us:.5g} us where the other of the two gets the units first" if found.other_us else ""
    alone_us = found.comm_us if strategy.mover is Mover.LIBRARY else found.engines_us
    return C3Row(
        **found.workload.columns,
        c3_class=found.c3_class,
        strategy=found.strategy,
        chosen="",
        gemm_us=found.gemm_us,
        comm_us=alone_us,
        best_comm_us=best_us,
        time_us=found.time_us,
        speedup=(found.gemm_us + best_us) / found.time_us,
        ideal=ideal_speedup(found.gemm_us, best_us),
        percent_of_ideal=found.percent,
        percent_of_ideal_nccl=percent_of_ideal(found.gemm_us, found.comm_us, found.time_us),
        units=found.units,
        note=other,
    )


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
    """Every row that has a time, and a strategy (``strategy_of``)."""
    named = ((row, strategy_of(row)) for row in rows if row.time_us is not None)
    return [_compare(machine, row, strategy) for row, strategy in named if strategy is not None]


def predict_together(machine: Machine, row: C3Row) -> tuple[float, ...]:
    """Predict a strategy from the isolated times of its row; nothing if the model does not speak to it.

    Returns:
        Microseconds; twice where either of the two may come first, see ``model.strategies.orders``.
    """
    if row.gemm_us is None or row.comm_us is None or row.collective not in tuple(KINDS):
        return ()
    kind, strategy = Kind(row.collective), strategy_of(row)
    if strategy is None:
        return ()
    if not strategy.concurrent:
        return (row.gemm_us + row.comm_us,)
    if strategy.mover is Mover.LIBRARY_DMA and kind in REDUCING:
        return ()
    if strategy.partition is not None and (objection(strategy, machine) or not row.units):
        return ()  # files of another version do not say how many units were taken
    pair = Workload(gemm_of(row), kind, row.bytes)
    # Without windows the library's gathers are exchanges, too.
    units = default_units(machine.library, kind if "window" in row.note else Kind.ALL_TO_ALL)
    alone = PairAlone(row.gemm_us, row.comm_us, units, OUT_OF_PLACE in row.note)
    launches = pair_kernels(machine, pair, strategy, row.units, alone=alone)
    return tuple(run_device(machine, kernels).time_us for kernels in launches)


def _compare(machine: Machine, row: C3Row, strategy: Strategy) -> Compared:
    measured = row.time_us
    assert measured is not None
    given = predict_together(machine, row)
    given_us = nearest(measured, given) if given else None
    between = bool(given) and in_between(measured, given)
    if reason := objection(strategy, machine):
        return Compared(row, note=reason, given_us=given_us, between=between)
    try:
        found = predict(machine, workload_of(row), strategy, units=None if strategy.partition is None else row.units)
    except ValueError as problem:
        return Compared(row, note=str(problem), given_us=given_us, between=between)
    ends = (found.time_us,) if found.other_us is None else (found.time_us, found.other_us)
    time_us = nearest(measured, ends)
    return Compared(row, time_us, (found.gemm_us + found.best_comm_us) / time_us, "", given_us, between)


def workload_of(row: C3Row) -> Workload:
    """The pair of a row."""
    return Workload(gemm_of(row), Kind(row.collective), row.bytes)


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
    for name, alike in grouped(compared, lambda one: name_of(one.row), ordered=False):
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


FEWEST_PAIRS = 3
"""Below that there is nothing to average."""

Predicted = Mapping[tuple[str, str, int, str], float]
"""Speedups by GEMM, collective, bytes and strategy."""


def draw_groups(rows: Sequence[C3Row], predicted: Predicted, results: Results, directory: Path) -> list[Picture]:
    """Three pictures where there are pairs enough; none elsewhere.

    Args:
        rows: of the study.
        predicted: by a description of the machine; drawn as rings on the bars.
        results: where they are from.
        directory: for the files, made if need be.
    """
    timed = [row for row in rows if row.speedup is not None]
    pairs = grouped(timed, lambda row: row.pair, ordered=False)
    if len(pairs) < FEWEST_PAIRS:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    by_name = {strategy.code: strategy for row in timed if (strategy := strategy_of(row)) is not None}
    kernels = [name for name, one in by_name.items() if one.concurrent and one.mover is Mover.LIBRARY]
    engines = [name for name, one in by_name.items() if not one.mover.takes_units]
    auto = ["auto"] if any(row.chosen for row in timed) else []
    pictures: list[Picture] = []
    figures = (
        ("c3-kernels", kernels, "with kernels"),
        ("c3-engines", [*kernels[:1], *engines, *auto], "on copy engines"),
    )
    for name, strategies, what in figures:
        if strategies:
            pictures.append(_mean_speedups(timed, strategies, what, predicted, results, directory, name))
    return pictures


def _mean_speedups(
    rows: Sequence[C3Row],
    strategies: Sequence[str],
    what: str,
    predicted: Predicted,
    results: Results,
    directory: Path,
    name: str,
) -> Picture:
    groups: dict[str, list[C3Row]] = {}
    for collective, alike in grouped(rows, lambda row: row.collective, ordered=False):
        for c3_class in C3Class:
            mine = [row for row in alike if row.c3_class == c3_class]
            if mine:
                groups[f"{collective}\n{c3_class}"] = mine
    groups["all"] = list(rows)
    figure = Figure(figsize=(3 + 1.3 * len(groups), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(strategies)
    for number, strategy in enumerate(strategies):
        shift = (number - (len(strategies) - 1) / 2) * width
        shade = 0.35 + 0.65 * (number + 1) / len(strategies)
        for place, mine in enumerate(groups.values()):
            ran = [row for row in mine if _is(row, strategy)]
            if not ran:
                continue
            mean = statistics.fmean(row.speedup or 1.0 for row in ran)
            colour = COLOURS.get(strategy, GREY)
            label = plain_name(strategy, on_cpu=results.on_cpu) if place == len(groups) - 1 else None
            axes.bar(place + shift, mean - 1, width, bottom=1.0, color=colour, alpha=shade, label=label)
            told = [predicted.get((row.gemm, row.collective, row.bytes, row.strategy)) for row in ran]
            known = [value for value in told if value is not None]
            if len(known) == len(ran):
                axes.plot(place + shift, statistics.fmean(known), "o", color=BLACK, markersize=5, fillstyle="none")
    for place, mine in enumerate(groups.values()):
        pairs = {(row.gemm, row.collective, row.bytes): row.ideal or 1.0 for row in mine}
        axes.plot(place, statistics.fmean(pairs.values()), marker="_", markersize=28, color=BLACK)
    axes.plot([], [], color=BLACK, label="ideal")
    if predicted:
        axes.plot([], [], "o", color=BLACK, fillstyle="none", label="predicted")
    axes.axhline(1.0, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set_ylabel("speedup over the sum of both alone")
    axes.legend(ncols=4, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.18))
    title = f"Computation and collectives {what}: {results.where}"
    text = "Mean speedup over serial execution by collective and class, with the ideal."
    return save_titled(figure, name, title, text, directory)


def _is(row: C3Row, strategy: str) -> bool:
    return bool(row.chosen) if strategy == "auto" else row.strategy == strategy and not row.chosen
