"""``sidelane fused --machine``: fused operators, and the same unfused, on a machine one does not have.

With ``--results`` predictions are held against a file of measured operators (``papers/operator_results.py``). Figures
13 and 14 of the fused operators paper are predicted for any machine: time by occupancy, and by how much ranks differ. A
rank's time is from the launch until it has everything. With the same work everywhere, what its peers wait for first
makes all ranks end together; in the order of ranks, the first one's results come last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from sidelane_lab.cli.collectives import FUSED_OPS
from sidelane_lab.harness.drawing import RC, file_name, save_both
from sidelane_lab.harness.table import Line, Table, grouped, number
from sidelane_lab.harness.terminal import progress_console, say_written, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import write_report
from sidelane_lab.machines.ranges import bands, ends, variations
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.operators import (
    OBLIVIOUS,
    ORDERS,
    REMOTE_FIRST,
    AllReduceNorm,
    DispatchGemm,
    Embedding,
    FusedTimes,
    GatherGemm,
    GemmReduce,
    Gemv,
    OperatorModel,
    TiledGemm,
    UnfusedTimes,
    predict_fused,
    predict_unfused,
)
from sidelane_lab.model.panels import BANDS, Panel, PaperFigure, draw_all, draw_dots
from sidelane_lab.model.split import chain_us, split_us
from sidelane_lab.model.symmetry import predict_symmetric
from sidelane_lab.papers.fused import MACHINE, PAPER, SECTIONS
from sidelane_lab.papers.predictions import write_timeline
from sidelane_lab.studies.fused.pictures import draw_skew, skew_percent
from sidelane_lab.studies.fused.shapes import MEANING, ON_GPUS, half_for_one

TRACED = "embedding_all_to_all"
PIECES = (1, 2, 4)
"""Parts for each peer, as the study that measures has them."""
BYTES = 2
"""Bytes of an element: the study that measures takes bfloat16."""
OCCUPANCIES = (0.25, 0.5, 0.75, 0.875, 1.0)
SYMMETRIC = (Embedding.name, TiledGemm.name)
"""Operators among more nodes, or nodes of more GPUs, than can be simulated rank by rank."""
MOST_ALONE = 8
"""Number of nodes of one GPU up to which every rank is simulated."""
NUMBERS = ("fused", "links", "gpu")
"""Sections of a description that kernels reading memory depend on most."""


@dataclasses.dataclass(frozen=True, slots=True)
class FusedPredictionOptions:
    """Options of ``sidelane fused --machine``.

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

    def require(self, machine: Machine) -> None:
        """Refuse what is not modelled on a machine.

        Raises:
            ValueError: it is among many nodes.
        """
        if not among_many(machine):
            return
        where = f"on {machine.name}, where one rank stands for all"
        others = [op for op in self.ops if op not in SYMMETRIC]
        if others:
            raise ValueError(f"fused: --ops (value={', '.join(others)}, allowed={', '.join(SYMMETRIC)} {where})")
        if self.late_us or self.occupancy is not None:
            raise ValueError(f"fused: --late, --occupancy (allowed=neither {where})")

    def starts_us(self, machine: Machine) -> tuple[float, ...]:
        """Return when each rank begins; nothing where all do at once."""
        return (*[0.0] * (machine.world_size - 1), self.late_us) if self.late_us else ()


@dataclasses.dataclass(frozen=True, slots=True)
class PredictedOperator:
    """An operator at a shape, by order of the fused kernel, and how far the gain goes over the plausible values.

    Attributes:
        operator: at its shape.
        made_of: what computes, unfused.
        unfused: its times.
        times: by order; none where the operator has no kernel.
        chain_us: unfused, with the collective on copy engines; None where the model has none.
        parts_us: in parts on copy engines, by parts for each peer; none where the operator is not a GEMM.
    """

    operator: OperatorModel
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

    @property
    def reads_memory(self) -> bool:
        """True if how many workgroups are resident decides how fast it reads."""
        return isinstance(self.operator, Embedding | Gemv)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return what ``--json`` writes: an object for each order, or one."""
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


def main(options: FusedPredictionOptions) -> None:
    """Print every operator at every shape, fused and unfused.

    Raises:
        ValueError: no such machine, or one without figures of fused operators.
    """
    machine = find(options.machine)
    options.require(machine)
    console, progress = tables_console(options.json), progress_console()
    found = []
    ops = options.ops or (SYMMETRIC if among_many(machine) else FUSED_OPS)
    with progress.status("simulating, over the plausible values of the machine's numbers") as status:
        for op in ops:
            for shape in options.shapes or ON_GPUS[op]:
                status.update(f"{op} {','.join(map(str, shape))}")
                made = operators_of(op, shape, machine.world_size, even=among_many(machine))
                found += [predicted(machine, *one, options) for one in made]
    firsts = list({one.operator.name: one for one in reversed(found) if one.times}.values())[::-1]
    tables = fused_tables(machine, found)
    by_rank = [] if among_many(machine) else firsts
    if by_rank:
        tables.append(skew_table(machine, by_rank))
    if reading := [one for one in by_rank if one.reads_memory]:
        tables.append(occupancy_table(machine, reading, options.starts_us(machine)))
    for table in tables:
        console.print(table.to_rich())
    rows = [row for one in found for row in one.to_dicts()]
    files = write_report(options.json, options.report, "fused_predicted", machine, rows)
    if options.report is not None:
        _report(machine, found, by_rank, options, options.report)
    say_written(files)


def among_many(machine: Machine) -> bool:
    """Return whether one rank stands for all: nodes of several GPUs, or more nodes than are simulated one by one."""
    return machine.nodes > 1 and (machine.gpus > 1 or machine.nodes > MOST_ALONE)


def operators_of(op: str, shape: tuple[int, ...], ranks: int, *, even: bool = False) -> list[tuple[OperatorModel, str]]:
    """Return an operator among so many ranks in every way in which it is measured unfused, and what that is made of.

    Args:
        op: name of the operator.
        shape: its sizes, as the study that measures has them.
        ranks: number of ranks.
        even: as many rows go to each rank; False: half of an exchange's go to one.
    """
    if op == Embedding.name:
        batch, tables, pooling = shape
        ways = ((False, "a kernel a table"), (True, "one kernel"))
        return [(Embedding(batch, tables, pooling, element_bytes=BYTES, at_once=way), words) for way, words in ways]
    if op == Gemv.name:
        return [(Gemv(*shape), "GEMV")]
    if op == AllReduceNorm.name:
        return [(AllReduceNorm(shape[0], shape[1]), "addition, norm")]
    rows, depth, columns = shape
    counts = () if even else half_for_one(rows, ranks)
    gemms = (
        TiledGemm(rows, depth, columns, counts=counts),
        *(() if even else (DispatchGemm(rows, depth, columns, counts),)),
        GatherGemm(rows, depth, columns),
        GemmReduce(rows, depth, columns),
        GemmReduce(rows, depth, columns, gathers=True),
    )
    return [(made, "the library's GEMM") for made in gemms if made.name == op]


def predicted(
    machine: Machine, operator: OperatorModel, made_of: str, options: FusedPredictionOptions
) -> PredictedOperator:
    """Predict an operator in both orders, and its gain over the plausible values."""
    starts = options.starts_us(machine)
    predict: Callable[[Machine], FusedTimes]
    if among_many(machine):
        predict = functools.partial(predict_symmetric, operator=operator)
        times = {REMOTE_FIRST: predict(machine)}
        found = PredictedOperator(operator, made_of, times[REMOTE_FIRST], times)
    else:
        predict = functools.partial(predict_fused, operator=operator, occupancy=options.occupancy, starts_us=starts)
        times = {order: predict(machine, order=order) for order in ORDERS} if operator.has_kernel else {}
        found = PredictedOperator(operator, made_of, predict_unfused(machine, operator), times)
    if times:
        varied = [predict(one.machine).lower_percent for one in variations(machine, SECTIONS)]
        low, high = ends(times[REMOTE_FIRST].lower_percent, varied)
        found = dataclasses.replace(found, low_percent=low, high_percent=high)
    if machine.nodes > 1 or starts or options.occupancy is not None:
        return found  # those are about the fused kernel
    parts = {pieces: us for pieces in PIECES for us in [split_us(machine, operator, pieces)] if us is not None}
    return dataclasses.replace(found, chain_us=chain_us(machine, operator), parts_us=parts)


def fused_tables(machine: Machine, found: Sequence[PredictedOperator]) -> list[Table]:
    """Make a table an operator: the unfused times, the fused one in both orders, and the gain."""
    tables = []
    for op, alike in grouped(found, lambda one: one.operator.name, ordered=False):
        lines = []
        for one in alike:
            fused: tuple[str, ...] = ("",) * 4
            if one.times:
                known = [one.times.get(order) for order in (REMOTE_FIRST, OBLIVIOUS)]
                times = ["" if made is None else number(made.fused.time_us) for made in known]
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
        notes: tuple[str, ...] = (
            "engines: unfused, the collective on copy engines; parts: carried by them, the best of 1, 2 and 4 a peer",
            "fused: results for other ranks come first; oblivious: they come in the order of the ranks",
            "lower: the fused time next to both unfused ones together, percent",
            "how far predictions are off where one GPU was measured: --results, and docs/lab/model.md",
        )
        times_of = ("compute", "collective", "engines", "parts", "fused", "oblivious")
        columns = ("<shape", "<unfused", *(f"{word}\nus" for word in times_of), "lower\n%", "plausible")
        if among_many(machine):
            notes = (*notes, "one rank stands for all, which send to all peers in turn (model/symmetry.py)")
        nodes = (
            f", {machine.nodes} nodes of {machine.gpus}" if machine.nodes > 1 and "nodes" not in machine.title else ""
        )
        tables.append(Table(f"{op} on {machine.title}{nodes}: predicted", columns, tuple(lines), notes, keys=2))
    return tables


def skew_table(machine: Machine, found: Sequence[PredictedOperator]) -> Table:
    """Make a table of the fastest and the slowest rank of each operator in both orders."""
    lines = []
    for one in found:
        cells = [one.operator.name, str(one.operator)]
        for times in one.times.values():
            ended = times.fused.ended_us
            cells += [f"{number(min(ended))} .. {number(max(ended))}", f"{skew_percent([ended]):.1f}"]
        lines.append(Line(tuple(cells)))
    columns = ("<operator", "<shape", *(word for name in ORDERS for word in (f"{name}\nranks, us", "skew\n%")))
    notes = ("skew: the slowest rank over the fastest, percent (the fused operators paper, Figure 14)",)
    return Table(f"Ranks of fused operators on {machine.title}: predicted", columns, tuple(lines), notes, keys=2)


def occupancy_table(machine: Machine, found: Sequence[PredictedOperator], starts_us: Sequence[float]) -> Table:
    """Make a table of the times of kernels that read memory, by occupancy."""
    lines = [
        Line((o.name, str(o), *(number(time) for time in times_by_occupancy(machine, o, starts_us))))
        for o in (one.operator for one in found)
    ]
    columns = ("<operator", "<shape", *(f"{share:.1%}\nus" for share in OCCUPANCIES))
    notes = ("occupancy: of the threads that the GPU holds (the fused operators paper, Figure 13)",)
    title = f"Fused operators on {machine.title} by occupancy: predicted"
    return Table(title, columns, tuple(lines), notes, keys=2)


def times_by_occupancy(machine: Machine, operator: OperatorModel, starts_us: Sequence[float] = ()) -> list[float]:
    """Return microseconds of the fused kernel at each of ``OCCUPANCIES``."""
    runs = (predict_fused(machine, operator, occupancy=share, starts_us=starts_us) for share in OCCUPANCIES)
    return [run.fused.time_us for run in runs]


def _occupancy_panels(found: Sequence[PredictedOperator], machine: Machine, ranges: bool) -> list[Panel]:
    def over_most(changed: Machine) -> dict[str, list[float]]:
        times = {one.operator.name: times_by_occupancy(changed, one.operator) for one in found}
        return {name: [t / mine[OCCUPANCIES.index(0.75)] for t in mine] for name, mine in times.items()}

    if not found:
        return []
    curves, words = bands(machine, over_most, NUMBERS if ranges else ()), "time over that at 75%"
    return [Panel(curves=curves, x=OCCUPANCIES, log=False, low=0, xlabel=f"occupancy ({BANDS})", ylabel=words)]


def _draw_gains(machine: Machine, found: Sequence[PredictedOperator], folder: Path) -> None:
    """Draw by how much each operator is faster fused."""
    rows = [
        (f"{p.operator.name}: {p.operator}; {p.made_of}", p.low_percent, p.lower_percent, p.high_percent)
        for p in found
        if p.times
    ]
    if not rows:
        return
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, 1.6 + 0.24 * len(rows)), layout="constrained")
        axes = figure.subplots()
        draw_dots(axes, rows)
        axes.set_xlabel("time lower than unfused, % (lines: plausible)")
        axes.set_ylabel("operator and shape")
        axes.set_title(f"Fused operators on {machine.title}: predicted")
        save_both(figure, "fused-predicted", folder)


def _report(
    machine: Machine,
    found: Sequence[PredictedOperator],
    firsts: Sequence[PredictedOperator],
    options: FusedPredictionOptions,
    folder: Path,
) -> None:
    _draw_gains(machine, found, folder)
    for one in firsts:
        calls = {order: [times.fused.ended_us] for order, times in one.times.items()}
        title = f"{one.operator.name}, {one.operator}, {machine.title}: predicted"
        draw_skew(calls, title, folder, file_name(f"{one.operator.name} skew"))
    panels = functools.partial(_occupancy_panels, [one for one in firsts if one.reads_memory])
    title = "Fused operators on {machine}: predicted"
    PaperFigure(numbers=("13",), name="fused-occupancy", title=title, panels=panels, size=(7, 3.6)).draw(
        machine, folder
    )
    # The first embedding, if there is one: what its order changes can be seen.
    for order in ORDERS if firsts else ():
        traced = min((one.operator for one in firsts), key=lambda operator: operator.name != TRACED)
        run = predict_fused(machine, traced, order, occupancy=options.occupancy, record=True).fused
        write_timeline(run.timeline, f"{traced.name}, {order}, {machine.title}", folder, f"timeline-fused-{order}")
    if machine.name == MACHINE:
        draw_all(PAPER.figures, machine, folder)
