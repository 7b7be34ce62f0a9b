"""Rows of operators that are fused with their collective, as tables and as pictures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from sidelane.choice import Profile
from sidelane.choice.fused import FUSED, ORDERS, ROUTED, SPLIT, UNFUSED, WITHOUT_KERNEL, FusedTime
from sidelane.choice.key import CPU, SOFTWARE, MachineKey
from sidelane_lab.cli.fused import FUSED_OPS, SINGLE
from sidelane_lab.harness.drawing import BLUE, ORANGE
from sidelane_lab.harness.options import LAUNCHES
from sidelane_lab.harness.report import Cell, table_of
from sidelane_lab.harness.study import MODEL, FlatRow, Results
from sidelane_lab.harness.table import Table, grouped, verdict
from sidelane_lab.studies.fused.shapes import EVENLY, EXPERTS, MEANING

ALONE = ("compute", "collective")
"""Implementations of rows that are a part of an operator."""

UNFUSED_IMPLEMENTATIONS = ("unfused_nccl", "unfused_sidelane", "symm_mem")
FUSED_IMPLEMENTATIONS = ("fused", "auto", *UNFUSED_IMPLEMENTATIONS, "unfused_best", *ALONE)


@dataclasses.dataclass(frozen=True, slots=True)
class FusedRow(FlatRow):
    """A fused operator, or the same unfused, at one shape.

    Attributes:
        op: the operator.
        shape: shape in words.
        implementation: ``fused``; ``unfused_nccl`` with the process group's collective (on CPUs Gloo's),
            ``unfused_sidelane`` with ours, ``symm_mem`` with that of PyTorch's symmetric memory; ``unfused_best``
            repeats the fastest of these; ``auto`` is a call with ``method="auto"``; ``compute`` and ``collective`` are
            the parts alone.
        schedule: schedule of a fused operator, parts of an unfused one, or the way in which a part is done.
        launch: ``eager``, ``graph``, ``single`` of a graph of one call, or ``model`` of a prediction.
        time_us: time of a call, median over the rounds of the slowest rank.
        compute_us: time of the computation alone, in the fastest way.
        comm_us: time of the collective alone, in the fastest way.
        bound_us: larger one of ``compute_us`` and ``comm_us``.
        max_rel_err: largest difference from the result in float64, over the largest element.
        correct: True if the result agreed with a reference; None when it could not run, or is a part.
        note: reason why there is no time, or the choice of ``auto`` with its reason.
        low_percent, high_percent: of an unfused way that is predicted, the ends of the percent by which the fused
            kernel's time is lower, over the plausible values of the machine's description.
        gbps: bytes of the rows of tables, or of the weight of a GEMV, that a call reads, over the time.
        skew_us: time between the first and the last end of the ranks after the last call of a sample, median over the
            rounds.
    """

    allowed = (("op", FUSED_OPS), ("implementation", FUSED_IMPLEMENTATIONS), ("launch", (*LAUNCHES, SINGLE, MODEL)))
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
    low_percent: float | None = None
    high_percent: float | None = None


def lower_percent(row: FusedRow, rows: Sequence[FusedRow]) -> float:
    """Return the percent by which the fused kernel takes less time than an unfused way that is predicted."""
    kernel = (row.op, row.shape, FUSED, ORDERS[0])
    fused = next(one for one in rows if (one.op, one.shape, one.implementation, one.schedule) == kernel)
    return 100 * (1 - (fused.time_us or 0.0) / (row.time_us or 1.0))


def _lower(row: FusedRow, same: Sequence[FusedRow]) -> str:
    if row.low_percent is None:
        return ""
    return f"{lower_percent(row, same):.0f} ({row.low_percent:.0f} .. {row.high_percent:.0f})"


def _ratio(row: FusedRow, same: Sequence[FusedRow]) -> str:
    unfused = [one.time_us for one in same if one.implementation in UNFUSED_IMPLEMENTATIONS and one.time_us]
    return f"{min(unfused) / row.time_us:.2f}" if unfused and row.time_us and row.implementation not in ALONE else ""


FUSED_COLUMNS: Mapping[str, Cell] = {
    "<shape": "shape",
    "<implementation": "implementation",
    "<made of, schedule": "schedule",
    "us": "time_us",
    "bound\nus": "bound_us",
    "times the\nbest unfused": _ratio,
    "fused: lower\n% (plausible)": _lower,
    "GB/s\nread": "gbps",
    "skew\nus": "skew_us",
    "<correct": lambda row, _: "" if _is_unchecked(row) else verdict(row.correct),
}
OF_MODEL = (
    "fused: results for other ranks come first; oblivious: they come in the order of the ranks",
    "unfused_sidelane: the collective on copy engines, or by our kernel; in parts: carried by copy engines",
    "how far predictions are off where one GPU was measured: --results, and results/notes/model.md",
)
"""Notes below tables of predictions."""


def _is_unchecked(row: FusedRow) -> bool:
    return row.launch == MODEL or (row.implementation in ALONE and row.time_us is not None)


def fused_tables(rows: Sequence[FusedRow]) -> list[Table]:
    """Make one table an operator and launch; each shape's fastest is set off."""
    return [
        table_of(
            f"{op}, {launch}",
            [row for row in alike if row.implementation != "unfused_best"],
            FUSED_COLUMNS,
            by=lambda row: row.shape,
            value=lambda row: None if row.implementation in ALONE else row.time_us,
            keys=3,
            notes=OF_MODEL if launch == MODEL else (),
        )
        for (op, launch), alike in grouped(rows, lambda row: (row.op, row.launch), ordered=False)
    ]


BY_PROGRAMS = re.compile(r"\w+, (\d+) programs a unit")
"""Schedules that say how many programs a unit has."""

ORDER_COLOURS = {"remote_first": BLUE, "oblivious": ORANGE}


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


def with_programs(schedule: str, count: int) -> str:
    """The schedule of an operator with so many programs on each compute unit.

    >>> with_programs("cells", 4)
    'cells, 4 programs a unit'
    """
    return f"{schedule}, {count} programs a unit"


def times_of(rows: Sequence[FusedRow], world_size: int, element_bytes: int) -> Iterator[FusedTime]:
    """Yield what to choose by, eager and in graphs, of shapes that have two ways and more.

    Args:
        rows: of any operators and shapes.
        world_size: ranks that measured them.
        element_bytes: of their dtype.
    """
    for (op, shape, launch), alike in grouped(rows, lambda row: (row.op, row.shape, row.launch), ordered=False):
        if launch == SINGLE or shape.endswith((EVENLY, EXPERTS)):
            continue  # times are looked up by sizes alone: those of the skewed routing count
        good = [row for row in alike if row.time_us is not None and row.correct]
        times: dict[str, float] = {}
        plain = [row for row in good if row.implementation == FUSED and not IN_PARTS.fullmatch(row.schedule)]
        if plain and op not in WITHOUT_KERNEL:
            times[FUSED] = plain[0].time_us or 0.0  # what a plain call takes
        for row in good:
            if row.implementation == FUSED and (found := IN_PARTS.fullmatch(row.schedule)):
                times[f"{SPLIT}/{found[1]}"] = row.time_us or 0.0
        if op == "embedding_all_to_all" and world_size > 1:  # ``auto`` has the faster order
            orders = [row.time_us or 0.0 for row in plain if row.schedule in ORDERS]
            times |= {FUSED: min(orders)} if orders else {}
        unfused = [row for row in good if row.implementation == OWN]
        unfused.sort(key=lambda row: row.schedule != OWN_METHOD)
        if op in ROUTED:  # whose others have the host wait
            unfused = [row for row in unfused if row.schedule == OWN_METHOD]
        if unfused:
            times[UNFUSED] = unfused[0].time_us or 0.0
        if len(times) > 1:
            yield FusedTime(op, world_size, launch == "graph", sizes_of(op, shape), element_bytes, times)


def sizes_of(op: str, shape: str) -> tuple[int, ...]:
    """Return the sizes in the words of a shape.

    >>> sizes_of("gemv_all_reduce", "8192x4096, 16 tokens")
    (8192, 4096, 16)
    """
    return tuple(map(int, re.findall(r"\d+", shape)[: len(MEANING[op])]))


def element_bytes_of(device_type: str) -> int:
    """Return the bytes of an element: of: float32 on CPUs, else bfloat16."""
    return 4 if device_type == CPU else 2


def kept_of(results: Results) -> Profile:
    """Return the profile that a result file holds: how the built-in tables are made.

    Raises:
        ValueError: a file of another study, or nothing in it to choose by.
    """
    device_type = "cuda" if results.gpus else CPU
    rows = [row for row in results.rows if isinstance(row, FusedRow)]
    times = tuple(times_of(rows, results.ranks, element_bytes_of(device_type)))
    if not times:
        raise ValueError(f"fused: --results (value={results.command}, allowed=a file of sidelane fused)")
    software = tuple(sorted((name, results.software[name]) for name in SOFTWARE if name in results.software))
    key = MachineKey(device_type, results.device, results.gpus, software=software)
    return Profile(results.machine, key, results.date, results.command, (), times)
