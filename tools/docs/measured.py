"""Rows of result files, and the figures that tables take of them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from sidelane_lab.pairs.workload import MOST_PERCENT, possible_percent

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "results"

Row = dict[str, Any]
Where = dict[str, Any]
Cells = list[list[str]]

COPY_ENGINES: Where = {"implementation": "dma", "prelaunch": False}
KERNELS: Where = {"implementation": "sm", "variant": ("one_shot", "two_shot", "two_shot_push")}
NCCL: Where = {"implementation": ("nccl", "nccl_ce")}
LIBRARIES = ("nccl", "nccl_ce", "symm_mem")
OTHERS: Where = {"implementation": LIBRARIES}

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

EAGER: Where = {"launch": "eager"}
GRAPH: Where = {"launch": "graph"}
IN: Where = {"in_place": True}
OUT: Where = {"in_place": False}
GATHER, EXCHANGE = "all_gather", "all_to_all"
SCATTERED, REDUCED, BROADCAST = "reduce_scatter", "all_reduce", "broadcast"
AUTO: Where = {"implementation": "auto"}

LABELS = {
    GATHER: "all-gather",
    EXCHANGE: "all-to-all",
    SCATTERED: "reduce-scatter",
    REDUCED: "all-reduce",
    BROADCAST: "broadcast",
}


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Read a result file, by its path in results/."""
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def rows_of(*names: str) -> list[Row]:
    """Return the rows of some files, one after another."""
    return [row for name in names for row in load(name)["rows"]]


def run(file: str, where: Where | None = None, column: str = "time_us") -> str:
    """Link a file, with the day and Sidelane's version of its fastest row that has all these values, and NCCL's.

    A row that another run made than the file's last one has that run's commit, whose day and version runs.json has.
    """
    of = load(file)
    row = fastest(of["rows"], where, column) if where else None
    by = load("runs.json")[row["commit"]] if row and row.get("commit") else {"date": of["date"], **of["software"]}
    return f"[{by['date'][5:10]}, {by['sidelane']}, NCCL {of['software']['nccl']}](results/{file})"


def matching(rows: Iterable[Row], where: Where) -> list[Row]:
    """Return the rows that have all these values (one of a tuple's)."""
    allowed = [(key, value if isinstance(value, tuple) else (value,)) for key, value in where.items()]
    return [row for row in rows if all(row.get(key) in values for key, values in allowed)]


def fastest(rows: Iterable[Row], where: Where, column: str) -> Row | None:
    """Return the row with the least of a column among those that have all these values; None without any."""
    return min((row for row in matching(rows, where) if row[column] is not None), key=itemgetter(column), default=None)


def best(rows: Iterable[Row], where: Where, column: str = "time_us") -> float | None:
    """Return the least of a column among rows that have all these values; None without any."""
    row = fastest(rows, where, column)
    return None if row is None else row[column]


def is_possible(row: Row) -> bool:
    """Return True for a percent of ideal that means count."""
    return possible_percent(row["percent_of_ideal"]) is not None


def percent_words(percent: float | None) -> str:
    """Return a percent of ideal as tables have it."""
    return f"over {MOST_PERCENT:.0f}" if percent is not None and percent > MOST_PERCENT else whole(percent)


def is_one_call(row: Row) -> bool:
    """Return True for a call with all tensors of a list, or with its one tensor: not a call for each."""
    return str(row["variant"]).rpartition("+")[2] != "separate"


def ratios(rows: Iterable[Row], others: Sequence[str] = LIBRARIES) -> dict[tuple[Any, ...], float]:
    """Return how many times as fast ``auto`` is as the best of the others, for each way to call that both have."""
    ours: dict[tuple[Any, ...], float] = {}
    theirs: dict[tuple[Any, ...], float] = {}
    for row in (row for row in rows if row["time_us"] is not None):
        point = tuple(row.get(key) for key in ("collective", "bytes", "in_place", "launch", "tensors"))
        if row["implementation"] == "auto" and is_one_call(row):
            ours[point] = min(row["time_us"], ours.get(point, math.inf))
        elif row["implementation"] in others:
            theirs[point] = min(row["time_us"], theirs.get(point, math.inf))
    return {point: theirs[point] / ours[point] for point in ours if point in theirs}


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def size(nbytes: int) -> str:
    """Return a size in powers of two, as pages write it.

    >>> size(65536), size(1 << 30)
    ('64 KiB', '1 GiB')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} bytes"


def short(value: float | None) -> str:
    """Return three digits, or all digits of a number that has more in front of the point.

    >>> short(4.0), short(63.94), short(2091.4), short(None)
    ('4.00', '63.9', '2091', '')
    """
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def two(value: float | None) -> str:
    """Return a number with two digits behind the point."""
    return "" if value is None else f"{value:.2f}"


def each(places: Iterable[Where], rows: Sequence[Row], write: Callable[[float | None], str] = short) -> str:
    """Return the best of each place, with semicolons between them."""
    return "; ".join(write(best(rows, place)) for place in places)


def ratio(rows: Sequence[Row], where: Where, theirs: Where, ours: Where, column: str = "time_us") -> str:
    """Return how many times as fast ours is as theirs."""
    over, under = best(rows, {**where, **theirs}, column), best(rows, {**where, **ours}, column)
    return two(over / under) if over is not None and under is not None else ""


def whole(value: float | None) -> str:
    """Return a number without digits behind the point."""
    return "" if value is None else f"{value:.0f}"
