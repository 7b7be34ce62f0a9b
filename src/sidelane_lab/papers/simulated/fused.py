"""``sidelane fused --machine``: fused operators, and the same unfused, on a machine one does not have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sidelane.cli.table import Line, Table, grouped, number
from sidelane.cli.terminal import progress_console, say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.claims_fused import MACHINE, SECTIONS
from sidelane_lab.model.fused_study import FusedStudy
from sidelane_lab.model.gemm_operators import GatherGemm, GemmReduce
from sidelane_lab.model.operators import (
    OBLIVIOUS,
    ORDERS,
    REMOTE_FIRST,
    FusedOperator,
    FusedTimes,
    Operator,
    UnfusedTimes,
    predict_fused,
    predict_unfused,
)
from sidelane_lab.model.split import chain_us, split_us
from sidelane_lab.papers.simulated import figures as sim_figures
from sidelane_lab.papers.simulated import fused_figures, fused_results, fused_skew
from sidelane_lab.papers.simulated.fused_shapes import operators_of
from sidelane_lab.papers.simulated.study import write_numbers
from sidelane_lab.sim import write_chrome_trace
from sidelane_lab.studies.fused.rows import FUSED_OPS
from sidelane_lab.studies.fused.shapes import MEANING, ON_GPUS

TRACED = "embedding_all_to_all"
PIECES = (1, 2, 4)
"""Parts for each peer, as the study that measures has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What ``sidelane fused --machine`` takes.

    Attributes:
        machine: in the catalogue, or a file.
        ops: operators; empty takes all.
        shapes: of the one operator; empty takes those of the study that measures.
        occupancy: of fused kernels, from 0 to 1; None: all that they can have.
        late_us: the last rank begins so much later.
        report: folder for pictures and timelines; None: none.
        json: file for the numbers, or ``written.STDOUT``.
        results: file of measured operators, which predictions are held against; None: none.
    """

    machine: str
    ops: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    occupancy: float | None = None
    late_us: float = 0.0
    report: Path | None = None
    json: Path | None = None
    results: Path | None = None

    def __post_init__(self) -> None:
        if not set(self.ops) <= set(FUSED_OPS):
            raise ValueError(f"fused: --ops (value={', '.join(self.ops)}, allowed={', '.join(FUSED_OPS)})")
        alone = (self.ops, self.shapes, self.occupancy, self.late_us, self.report)
        if self.results is not None and any(alone):
            raise ValueError("fused: --results (allowed=with --machine and --json alone: the file has the shapes)")
        if self.shapes and len(self.ops) != 1:
            raise ValueError(f"fused: --shape (value={len(self.ops)} operators, allowed=with --ops and one of them)")
        meaning = MEANING[self.ops[0]] if self.shapes else ()
        for shape in self.shapes:
            if len(shape) != len(meaning) or min(shape) < 1:
                text = ",".join(map(str, shape))
                raise ValueError(f"fused: --shape (value={text}, allowed={', '.join(meaning)}: each 1 or more)")
        if not 0 <= self.late_us < math.inf:
            raise ValueError(f"fused: --late (value={self.late_us}, allowed=microseconds, 0 or more)")


@dataclasses.dataclass(frozen=True, slots=True)
class Predicted:
    """An operator at a shape, by order of the fused kernel, and how far the gain goes over the plausible values.

    Attributes:
        operator: at its shape.
        made_of: what computes, unfused.
        unfused: its times.
        times: by order; none where the operator has no kernel.
        chain_us: unfused, with the collective on copy engines; None where the model has none.
        parts_us: in parts on copy engines, by parts for each peer; none where the operator is not a GEMM.
    """

    operator: Operator
    made_of: str
    unfused: UnfusedTimes
    times: dict[str, FusedTimes] = dataclasses.field(default_factory=dict)
    low_percent: float = 0.0
    high_percent: float = 0.0
    chain_us: float | None = None
    parts_us: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def lower_percent(self) -> float:
        """The gain with what peers wait for first."""
        return self.times[REMOTE_FIRST].lower_percent

    def to_dicts(self) -> list[dict[str, Any]]:
        """As ``--json`` writes it: an object for each order, or one."""
        plausible = {"low_percent": self.low_percent, "high_percent": self.high_percent}
        alone = {
            "op": self.operator.name,
            "shape": str(self.operator),
            "unfused": self.made_of,
            "compute_us": self.unfused.compute_us,
            "comm_us": self.unfused.collective_us,
            "unfused_us": self.unfused.unfused_us,
            "bound_us": self.unfused.bound_us,
        }
        others = {"unfused_engines_us": self.chain_us, **{f"in_{n}_parts_us": us for n, us in self.parts_us.items()}}
        if not self.times:
            return [alone | others]
        return [
            {
                **alone,
                "order": order,
                "time_us": times.fused.time_us,
                "rank_us": list(times.fused.ended_us),
                "lower_percent": times.lower_percent,
                **(plausible | others if order == REMOTE_FIRST else {}),
            }
            for order, times in self.times.items()
        ]


def main(options: Options) -> int:
    """Print every operator at every shape, fused and unfused.

    Returns:
        0.

    Raises:
        ValueError: no such machine, or one without figures of fused operators.
    """
    machine = find(options.machine)
    console, progress = tables_console(options.json), progress_console()
    if options.results is not None:
        machine, held, unknown_rows = fused_results.hold(machine, options.results)
        for table in fused_results.held_tables(machine, held, unknown_rows):
            console.print(table.to_rich())
        if options.json is not None:
            write_numbers(options.json, "fused_held", machine, [one.to_dict() for one in held])
            say_written([options.json])
        return 0
    found = []
    with progress.status("simulating, over the plausible values of the machine's numbers") as status:
        for op in options.ops or FUSED_OPS:
            for shape in options.shapes or ON_GPUS[op]:
                status.update(f"{op} {','.join(map(str, shape))}")
                found += [predicted(machine, *made, options) for made in operators_of(op, shape, machine.world_size)]
    starts, firsts = _starts(machine, options), _first_shapes(found)
    reading = [operator for operator, _ in firsts if fused_skew.reads_memory(operator)]
    tables = fused_tables(machine, found)
    if firsts:
        tables.append(fused_skew.skew_table(machine, firsts))
    tables += [table for table in (fused_skew.occupancy_table(machine, reading, starts),) if table is not None]
    for table in tables:
        console.print(table.to_rich())
    rows = [row for one in found for row in one.to_dicts()]
    for path in (options.json, options.report and options.report / "fused_predicted.json"):
        if path is not None:
            write_numbers(path, "fused_predicted", machine, rows)
    if options.report is not None:
        _report(machine, found, options, options.report)
    say_written([path for path in (options.json, options.report) if path is not None])
    return 0


def predicted(machine: Machine, operator: Operator, made_of: str, options: Options) -> Predicted:
    """Predict an operator in both orders, and its gain over the plausible values: one number at a time, squares add."""
    starts = _starts(machine, options)

    found = Predicted(operator, made_of, predict_unfused(machine, operator))
    if not isinstance(operator, GemmReduce | GatherGemm):
        predict = functools.partial(predict_fused, operator=operator, occupancy=options.occupancy, starts_us=starts)
        times = {order: predict(machine, order=order) for order in ORDERS}
        value = times[REMOTE_FIRST].lower_percent
        below, above = spread(machine, lambda changed: predict(changed).lower_percent, value)
        found = dataclasses.replace(found, times=times, low_percent=value - below, high_percent=value + above)
    if machine.nodes > 1 or starts or options.occupancy is not None:
        return found  # those are about the fused kernel
    parts = {pieces: us for pieces in PIECES for us in [split_us(machine, operator, pieces)] if us is not None}
    return dataclasses.replace(found, chain_us=chain_us(machine, operator), parts_us=parts)


def _starts(machine: Machine, options: Options) -> tuple[float, ...]:
    return (*[0.0] * (machine.world_size - 1), options.late_us) if options.late_us else ()


def _first_shapes(found: Sequence[Predicted]) -> list[tuple[FusedOperator, dict[str, FusedTimes]]]:
    """Return the first shape of each operator that has a kernel."""
    firsts: dict[str, tuple[FusedOperator, dict[str, FusedTimes]]] = {}
    for one in found:
        if not isinstance(one.operator, GemmReduce | GatherGemm):
            firsts.setdefault(one.operator.name, (one.operator, one.times))
    return list(firsts.values())


def spread(machine: Machine, predict: Callable[[Machine], float], value: float) -> tuple[float, float]:
    """How far a prediction goes below and above its value with each uncertain number at both ends of its range."""
    squares = {-1: 0.0, 1: 0.0}
    for path, quantity in machine.quantities().items():
        for end in (quantity.low, quantity.high) if path.partition(".")[0] in SECTIONS else ():
            if end is not None:
                by = predict(machine.with_value(path, end)) - value
                squares[1 if by > 0 else -1] += by * by
    return math.sqrt(squares[-1]), math.sqrt(squares[1])


def fused_tables(machine: Machine, found: Sequence[Predicted]) -> list[Table]:
    """A table an operator: the unfused times, the fused one in both orders, and the gain."""
    tables = []
    for op, alike in grouped(found, lambda one: one.operator.name, ordered=False):
        lines = []
        for one in alike:
            fused: tuple[str, ...] = ("",) * 4
            if one.times:
                times = [number(one.times[order].fused.time_us) for order in (REMOTE_FIRST, OBLIVIOUS)]
                fused = (*times, f"{one.lower_percent:.0f}", f"{one.low_percent:.0f} .. {one.high_percent:.0f}")
            cells = (
                str(one.operator),
                one.made_of,
                number(one.unfused.compute_us),
                number(one.unfused.collective_us),
                "" if one.chain_us is None else number(one.chain_us),
                number(min(one.parts_us.values())) if one.parts_us else "",
                *fused,
            )
            lines.append(Line(cells))
        notes = (
            "engines: unfused, the collective on copy engines; parts: carried by them, the best of 1, 2 and 4 a peer",
            "lower: the fused time next to both unfused ones together, percent",
            "how far predictions are off where one GPU was measured: --results, and docs/lab/model.md",
        )
        columns = (
            "<shape",
            "<unfused",
            "compute\nus",
            "collective\nus",
            "engines\nus",
            "parts\nus",
            "fused\nus",
            "oblivious\nus",
            "lower\n%",
        )
        nodes = f", {machine.nodes} nodes of {machine.gpus}" if machine.nodes > 1 else ""
        title = f"{op} on {machine.title}{nodes}: predicted"
        tables.append(Table(title, (*columns, "plausible"), tuple(lines), notes, keys=2))
    return tables


def _report(machine: Machine, found: Sequence[Predicted], options: Options, folder: Path) -> None:
    gains = [
        (f"{p.operator.name}: {p.operator}; {p.made_of}", p.low_percent, p.lower_percent, p.high_percent)
        for p in found
        if p.times
    ]
    if gains:
        fused_figures.draw_gains(machine, gains, folder)
    firsts = _first_shapes(found)
    fused_skew.draw_ranks(firsts, machine, folder)
    fused_skew.draw_occupancy(machine, [one for one, _ in firsts if fused_skew.reads_memory(one)], folder)
    # The first embedding, if there is one: what its order changes can be seen.
    for order in ORDERS if firsts else ():
        traced = min((one for one, _ in firsts), key=lambda operator: operator.name != TRACED)
        run = predict_fused(machine, traced, order, occupancy=options.occupancy, record=True).fused
        write_chrome_trace(folder / f"timeline-fused-{order}.trace.json", run.timeline)
        title = f"{traced.name}, {order}, {machine.title}"
        sim_figures.draw_timeline(run.timeline, title, folder, f"timeline-fused-{order}")
    if machine.name == MACHINE:
        fused_figures.draw_published(FusedStudy(machine), spread, folder)
