"""Claims and figures of the papers as formulas over a study's rows, which the model fills as a measurement does.

A claim's quantity and a figure's curves are written once. Held against a paper's machine they read the model's rows,
beside our result files those of a file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sidelane.sizes import format_bytes
from sidelane_lab.harness.options import StudyOptions
from sidelane_lab.harness.study import FlatRow, study_of
from sidelane_lab.machines.ranges import Band, Curves, bands
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.panels import BANDS, Panel
from sidelane_lab.papers.claims import Claim, ClaimReading, numbers, published, rounded
from sidelane_lab.papers.files import ResultFile, files_of

X = TypeVar("X")
MOST_TICKS = 6
"""Number of sizes that can be named below a panel of a row."""


@functools.lru_cache(maxsize=256)
def model_rows(machine: Machine, options: StudyOptions) -> ResultFile:
    """Return the rows that the model fills for a machine. ``options``: of a study that predicts."""
    predict = study_of(options.study).predict
    assert predict is not None, options.study
    return in_file(machine, options.study, predict(machine, options))


def in_file(machine: Machine, study: str, rows: Sequence[FlatRow]) -> ResultFile:
    """Return predicted rows as those of a file."""
    exact = tuple(row.exact() for row in rows)
    return ResultFile(Path(), study, machine.name, machine.title, machine.world_size, exact)


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredClaim:
    """A claim beside one of our files.

    Attributes:
        value: in the claim's form; None where the file has not all of it.
        ratio: of the value to the published one, where each is one number.
    """

    claim_id: str
    machine: str
    where: str
    path: str
    value: Any
    ratio: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``, inside that of its claim."""
        return {"machine": self.machine, "file": self.path, "measured": self.value, "ratio": self.ratio}


def measure_claim(claim: Claim[Any], sources: Sequence[Path]) -> list[MeasuredClaim]:
    """Return what each machine's file says of a claim; nothing where none speaks to it."""
    reading = claim.reading
    if reading is None:
        return []
    found = []
    fuller = files_of(reading.fuller, sources) if reading.fuller else []
    machines = {file.machine for file in fuller}
    for file in [*fuller, *(file for file in files_of(reading.study, sources) if file.machine not in machines)]:
        value = read_value(reading, file)
        if value is not None:
            ratio = ratio_of(published()[claim.claim_id]["value"], value)
            found.append(MeasuredClaim(claim.claim_id, file.machine, file.where, str(file.path), value, ratio))
    return found


def read_value(reading: ClaimReading, file: ResultFile) -> Any:
    """Return a claim's value from a file; None where the file has not all that it needs.

    Raises:
        ValueError: the file lacks a key.
    """
    try:
        return rounded(reading.read(file))
    except (ValueError, ZeroDivisionError, StopIteration, statistics.StatisticsError):
        return None  # a mean, or the least, of nothing: sizes or pairs that were not measured
    except KeyError as problem:
        if isinstance(problem.args[0], str) and problem.args[0] in LACKING:
            raise ValueError(f"results: {file.path} is no file of {file.study} (missing={problem})") from problem
        return None


LACKING = ("time_us", "bytes", "collective", "implementation", "operation", "op", "strategy", "launch")
"""Keys without which a file is not what it says."""


def ratio_of(claimed: Any, measured: Any) -> float | None:
    """Return a measured number over the published one; None where one of them is no single number other than 0.

    >>> ratio_of(1.6, 1.2), ratio_of(True, True), ratio_of([1, 2], [1, 2])
    (0.75, None, None)
    """
    wanted, found = numbers(claimed), numbers(measured)
    if list(wanted) != [""] or list(found) != [""] or not wanted[""]:
        return None
    return float(f"{found[''] / wanted['']:.3g}")


@dataclasses.dataclass(frozen=True, slots=True)
class RowFigure:
    """A figure's panel as curves over rows, drawn for the model with plausible ranges and for each result file.

    Attributes:
        rows: makes the rows that the model fills for a machine and a version of the paper.
        curves: of rows: values by place, by the word of the legend.
        panel: makes the panel of bands and places, with what is published or without: files have it, and predictions of
            ``machine``.
        machine: that the paper measured on.
        numbers: of a description that the curves depend on; None: all.
        order: of places that are names; others follow them.
    """

    rows: Callable[[Machine, str], ResultFile]
    curves: Callable[[ResultFile], Mapping[str, Mapping[Any, float]]]
    panel: Callable[[Mapping[str, Band], Sequence[Any], bool], Panel]
    machine: str
    numbers: Sequence[str] | None
    order: Sequence[str] = ()

    def predicted(self, machine: Machine, ranges: bool, version: str) -> list[Panel]:
        """Return the panel of a machine that is described."""

        def found(changed: Machine) -> tuple[list[Any], dict[str, Band]]:
            return aligned(self.curves(self.rows(changed, version)), self.order)

        def values(changed: Machine) -> Curves[str]:
            return {name: band.values for name, band in found(changed)[1].items()}

        places, _ = found(machine)
        curves = bands(machine, values, self.numbers if ranges else ())
        return [self.panel(curves, places, machine.name == self.machine)]

    def measured(self, file: ResultFile) -> list[Panel]:
        """Return the panel of a result file; nothing where it has no such rows."""
        places, found = aligned(self.curves(file), self.order)
        if not places:
            return []
        panel = self.panel(found, places, True)
        return [dataclasses.replace(panel, xlabel=panel.xlabel.partition(" (")[0])]  # it has no plausible ranges


def size_places(sizes: Sequence[int]) -> dict[str, Any]:
    """Return how a panel over bytes names them."""
    ticks = {float(n): format_bytes(n) for n in sizes[:: -(-len(sizes) // MOST_TICKS)]}
    return {"x": sizes, "ticks": ticks, "xlabel": f"bytes ({BANDS})"}


def exact(values: Sequence[float]) -> Band:
    """Return a band without width."""
    return Band(tuple(values), tuple(values), tuple(values))


def aligned(curves: Mapping[str, Mapping[X, float]], order: Sequence[X] = ()) -> tuple[list[X], dict[str, Band]]:
    """Return the places that any curve has, and each curve there; where it has none, its value is not a number.

    Numbers are in order; names as they come, behind those that ``order`` has.
    """
    known: list[Any] = list(dict.fromkeys(x for points in curves.values() for x in points))
    if known and not isinstance(known[0], str):
        known.sort()
    places = [*(x for x in order if x in known), *(x for x in known if x not in order)]
    return places, {name: exact([points.get(x, math.nan) for x in places]) for name, points in curves.items() if points}


def by_size(curves: Mapping[str, Mapping[int, float]], **fields: Any) -> list[Panel]:
    """Return a panel of curves over bytes; none where there is no point."""
    sizes, found = aligned(curves)
    if not sizes:
        return []
    return [Panel(curves=found, **{**size_places(sizes), "xlabel": "bytes"}, **fields)]
