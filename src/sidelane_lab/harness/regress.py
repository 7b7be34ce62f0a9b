"""Comparison of two result files of one study: which points have become slower, beyond what the machine does by itself.

A point is what two rows have in common: everything in them that is not measured. Two files of one machine differ by
chance, and host times by more than that from one hour to the next. Rows of other libraries say by how much, where both
files ran the same versions of them: nothing of Sidelane's can change them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from sidelane.cli.help import CHOOSE
from sidelane.cli.output import plain_errors, write_json
from sidelane_lab.harness.help import GroupedCommand, how, json_option
from sidelane_lab.harness.study import FlatRow, Results, read
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import say, tables_console

LIBRARIES = ("nccl", "nccl_ctas", "nccl_ce", "symm_mem", "gloo", "unfused_nccl", "none")
"""Implementations, and ways of whole steps up to a comma, whose communication is not Sidelane's."""

OF_LIBRARIES = ("torch", "nccl")
"""Names in ``Results.software`` that must be equal for rows of :data:`LIBRARIES` to say what chance does."""

LEAST_LIBRARY_ROWS = 10
"""Number of points of libraries from which their spread counts."""

MEASURED = (
    *("commit", "note", "chosen", "sweep", "correct", "made_by", "nccl", "package"),
    *("rounds", "best", "right", "orders"),
)
"""Fields that are measured, follow from times, or say how, though they are no figures."""

TIMES = ("time_us", "step_ms", "total_us", "host_us")
"""Fields that a study may have its time in; the first that a row has is compared."""

Key = tuple[tuple[str, object], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A point of both files.

    Attributes:
        key: names and values of what is not measured.
        old, new: medians, in the unit of the study.
        apart: the spread of the slower file lies above that of the faster one: from the tenth to the ninetieth
            percentile or, of rows without these, from the fastest to the slowest round.
        of_library: Sidelane cannot change it.
    """

    key: Key
    old: float
    new: float
    apart: bool
    of_library: bool

    @property
    def ratio(self) -> float:
        """Time in the new file over that in the old one."""
        return self.new / self.old


@dataclasses.dataclass(frozen=True, slots=True)
class FileComparison:
    """Points of two files.

    Attributes:
        points: points of both, with times in both.
        lost: keys of points of Sidelane's that have a time in the old file only.
        new: number of points that have a time in the new file only.
        noise: change that counts as none, as a share: the larger of what was asked for and what nineteen of twenty
            points of libraries stay within.
        library_points: number of points that the noise is from; 0 if it was asked for.
    """

    points: tuple[Point, ...]
    lost: tuple[Key, ...]
    new: int
    noise: float
    library_points: int

    def changed(self, *, slower: bool) -> list[Point]:
        """Return points of Sidelane's that are slower, or faster, beyond noise; the largest change first."""
        factor = 1 + self.noise
        found = [
            point
            for point in self.points
            if not point.of_library and point.apart and (point.ratio > factor if slower else point.ratio < 1 / factor)
        ]
        return sorted(found, key=lambda point: point.ratio, reverse=slower)


def compare(old: Results, new: Results, least: float = 0.02) -> FileComparison:
    """Compare two files.

    Args:
        old: file from before.
        new: file of the same study and the same machine.
        least: smallest change that counts, as a share.

    Raises:
        ValueError: the files are of different studies, devices or numbers of ranks; no row has a
            time; or two rows of one file are the same point.
    """
    for name in ("study", "device", "ranks"):
        if getattr(old, name) != getattr(new, name):
            raise ValueError(f"regress: {name} (value={getattr(new, name)!r}, allowed={getattr(old, name)!r}, as OLD)")
    before, after = _timed(old), _timed(new)
    points = tuple(_point(key, before[key], after[key]) for key in before if key in after)
    same_libraries = all(old.software.get(name) == new.software.get(name) for name in OF_LIBRARIES)
    changes = sorted(abs(math.log(point.ratio)) for point in points if point.of_library)
    counted = len(changes) if same_libraries and len(changes) >= LEAST_LIBRARY_ROWS else 0
    noise = math.exp(changes[math.ceil(0.95 * counted) - 1]) - 1 if counted else 0.0
    lost = tuple(key for key in before if key not in after and not _is_of_library(key))
    return FileComparison(points, lost, len(after) - len(points), max(noise, least), counted if noise > least else 0)


def _timed(results: Results) -> dict[Key, FlatRow]:
    rows = [row for row in results.rows if _time_of(row)]
    if not rows:
        raise ValueError(f"regress: rows of {results.study} (value=no {', '.join(TIMES)}, allowed=one of them)")
    timed = [(key_of(row, results.software.get("nccl", "")), row) for row in rows]
    keys = Counter(key for key, _ in timed)
    (key, count), *_ = keys.most_common(1)
    if count > 1:
        raise ValueError(f"regress: {results.study}: {count} rows are one point (value={text_of(key)}, allowed=one)")
    return dict(timed)


def _time_of(row: FlatRow) -> str:
    """Return the name of the field with the row's time; empty if it has none."""
    return next((name for name in TIMES if getattr(row, name, None)), "")


def key_of(row: FlatRow, nccl: str = "") -> Key:
    """Return names and values of what is not measured; ``nccl``: the version of the file."""
    measured = {*MEASURED}
    if getattr(row, "nccl", "") not in ("", nccl):
        measured.remove("nccl")  # a further one, whose rows stand beside those of the file's own
    if hasattr(row, "sweep"):
        measured.add("units")  # the best number of them
    if hasattr(row, "made_by"):
        measured.add("variant")  # the one that was taken, where others are told which to take
    names = (field.name for field in dataclasses.fields(row) if field.name not in measured)
    found = ((name, getattr(row, name)) for name in names)
    return tuple((name, value) for name, value in found if isinstance(value, (str, bool, int)) and value != "")


def _point(key: Key, old: FlatRow, new: FlatRow) -> Point:
    (was, was_low, was_high), (now, now_low, now_high) = _figures_of(old), _figures_of(new)
    return Point(key, was, now, now_low > was_high or now_high < was_low, _is_of_library(key))


def _is_of_library(key: Key) -> bool:
    values = dict(key)
    name = str(values.get("implementation", values.get("way", "")))
    return name.partition(",")[0] in LIBRARIES and ", our " not in name  # such a way has kernels of Sidelane


def _figures_of(row: FlatRow) -> list[float]:
    """Return the median and the ends of the spread; rows without a spread have their median for them."""
    time = _time_of(row)
    unit = time.rpartition("_")[2]
    found = [float(getattr(row, time))]
    for names in (("p10", "fastest"), ("p90", "slowest")):
        ends = (getattr(row, f"{name}_{unit}", None) for name in names)
        found.append(float(next(filter(None, ends), found[0])))
    return found


def text_of(key: Key, common: Sequence[tuple[str, object]] = ()) -> str:
    """Return names and values in one line, without those that ``common`` has."""
    return ", ".join(
        name if value is True else f"{name} {value}"
        for name, value in key
        if value is not False and (name, value) not in common
    )


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    cls=GroupedCommand,
    heading=CHOOSE,
    examples=(
        ("sidelane regress before.json after.json", "two runs of one study on one machine"),
        ("sidelane regress before.json after.json --least 5", "changes of 5% and more"),
    ),
)
@click.argument("old", type=FILE)
@click.argument("new", type=FILE)
@how("--least", type=click.FloatRange(0), default=2.0, metavar="PERCENT", help="Smallest change that counts.")
@json_option
def regress(old: Path, new: Path, least: float, json: Path | None) -> None:
    """Compare two result files of one study, point by point, and say what is slower beyond noise.

    A point is slower if its spread (10% to 90% of its samples, or all rounds of whole steps) lies above the old one's,
    and if it changed by more than points of other libraries did, which Sidelane cannot change. The exit code is 1 if
    one is, or has no time any more.
    """
    with plain_errors():
        sys.exit(main(old, new, least / 100, json))


def main(old: Path, new: Path, least: float, json: Path | None, *, is_whole: bool = True) -> int:
    """Print what has changed; return 1 if a point of Sidelane's is slower beyond noise, or has no time any more.

    ``is_whole``: the new file is complete; otherwise points that it does not have yet are no failure.

    Raises:
        ValueError: as :func:`compare`, and for two whole files that have no point in common.
    """
    before, after = read(old), read(new)
    found = compare(before, after, least)
    if is_whole and not found.points:
        raise ValueError(f"regress: points of {old} and {new} (value=none in common, allowed=one and more)")
    slower, faster = found.changed(slower=True), found.changed(slower=False)
    console = tables_console(json)
    for title, points in (("slower", slower), ("faster", faster)):
        if points:
            console.print(_table(f"Points of {before.study} on {before.where} that are {title}", points).to_rich())
    if found.lost and is_whole:
        say(console, f"{len(found.lost)} points have a time in {old} only, the first: {text_of(found.lost[0])}")
    source = f"nineteen of twenty of {found.library_points} points of other libraries stay within"
    say(console, f"noise: {100 * found.noise:.1f}%, {source if found.library_points else 'as asked for'} it")
    verdict = f"{len(slower)} slower, {len(faster)} faster of {len(found.points)} points; {found.new} new"
    say(console, f"{verdict}; median ratio {_median(found, of_library=False)}, of other libraries "
        f"{_median(found, of_library=True)}", style="bold")  # fmt: skip
    if json is not None:
        rows = [{**dict(point.key), **_figures(point)} for point in (*slower, *faster)]
        write_json(
            json,
            {
                "study": before.study,
                "old": before.commit,
                "new": after.commit,
                "noise": found.noise,
                "points": len(found.points),
                "lost": [dict(key) for key in found.lost],
                "rows": rows,
            },
        )
    return 1 if slower or (found.lost and is_whole) else 0


def _median(found: FileComparison, *, of_library: bool) -> str:
    ratios = [point.ratio for point in found.points if point.of_library is of_library]
    return f"{statistics.median(ratios):.3f}" if ratios else "-"


def _figures(point: Point) -> Mapping[str, float]:
    return {"old": point.old, "new": point.new, "ratio": float(f"{point.ratio:.4f}")}


def _table(title: str, points: Sequence[Point]) -> Table:
    common = [pair for pair in points[0].key if all(pair in point.key for point in points)]
    lines = tuple(
        Line((text_of(point.key, common) or "-", f"{point.old:.4g}", f"{point.new:.4g}", f"{point.ratio:.3f}"))
        for point in points
    )
    notes = (f"all of them: {text_of(tuple(common))}",) if common else ()
    return Table(title, ("<point", "old", "new", "new/old"), lines, notes, keys=1)
