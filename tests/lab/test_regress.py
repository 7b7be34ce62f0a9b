"""The gate on speed: what is slower beyond noise, and what cannot be compared."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from sidelane import cli
from sidelane_lab.harness.regress import compare
from sidelane_lab.harness.study import Results, read, write

FILE = Path(__file__).resolve().parents[2] / "results/h100x2/collectives.json"


@pytest.fixture(scope="module")
def before() -> Results:
    return read(FILE)


def changed(results: Results, factor_of) -> Results:
    rows = []
    for row in results.rows:
        factor = factor_of(row)
        times = {name: getattr(row, name) and getattr(row, name) * factor for name in ("time_us", "p10_us", "p90_us")}
        rows.append(dataclasses.replace(row, **times))
    return dataclasses.replace(results, rows=tuple(rows))


def test_nothing_has_changed_in_a_file_itself(before: Results) -> None:
    found = compare(before, before)
    assert len(found.points) == sum(row.time_us is not None for row in before.rows) > 3000
    assert found.changed(slower=True) == found.changed(slower=False) == [] and found.lost == () and found.new == 0


def test_files_without_a_common_point_are_not_compared(before: Results, tmp_path: Path) -> None:
    """Whosever the points are: libraries' are not missed, and nothing would be said with exit code 0."""
    theirs = [row for row in before.rows if row.implementation == "nccl" and row.time_us]
    for name, rows in (("old", theirs[:1]), ("new", theirs[1:2])):
        write(tmp_path / f"{name}.json", dataclasses.replace(before, rows=tuple(rows)))
    ended = CliRunner().invoke(cli.main, ["regress", str(tmp_path / "old.json"), str(tmp_path / "new.json")])
    assert ended.exit_code == 2 and "value=none in common" in ended.output


def test_one_slower_point_is_found_among_thousands(before: Results) -> None:
    chosen = next(row for row in before.rows if row.implementation == "auto" and row.time_us)
    found = compare(before, changed(before, lambda row: 1.3 if row is chosen else 1.0))
    (point,) = found.changed(slower=True)
    assert dict(point.key)["bytes"] == chosen.bytes and point.ratio == pytest.approx(1.3)
    assert found.changed(slower=False) == []


def test_noise_is_what_other_libraries_do(before: Results) -> None:
    chance = random.Random(1)
    later = changed(before, lambda row: chance.uniform(0.9, 1.1))
    found = compare(before, later)
    assert 0.08 < found.noise < 0.12 and found.library_points > 900
    ours = [point for point in found.points if not point.of_library]
    assert len(found.changed(slower=True)) < 0.05 * len(ours)
    other = dataclasses.replace(later, software={**later.software, "nccl": "9.9"})
    assert compare(before, other).noise == 0.02, "another NCCL says nothing about chance"


def test_what_a_group_took_is_measured_and_points_of_libraries_may_go(before: Results) -> None:
    calls = read(FILE.parents[1] / "h200x2/process-group.json")
    taken = [dataclasses.replace(row, variant="another", made_by="another") for row in calls.rows]
    found = compare(calls, dataclasses.replace(calls, rows=tuple(taken)))
    assert found.lost == () and found.new == 0
    left = [row for row in before.rows if row.implementation != "nccl_ce"]
    assert compare(before, dataclasses.replace(before, rows=tuple(left))).lost == ()


@pytest.mark.parametrize("name", ["e2e", "clients"])
def test_whole_steps_are_points_whatever_their_rounds(name: str) -> None:
    """With rows of two NCCLs in one file, the library's ways as such, and the rounds for a spread."""
    steps = read(FILE.parents[1] / f"h200x2/{name}.json")
    timed = [row for row in steps.rows if row.step_ms]

    def times(row, factor):
        figures = ("step_ms", "fastest_ms", "slowest_ms")
        return dataclasses.replace(
            row, rounds=row.rounds + 1, **{name: getattr(row, name) * factor for name in figures}
        )

    again = dataclasses.replace(steps, rows=tuple(times(row, 1.0) for row in timed))
    found = compare(steps, again)
    assert (len(found.points), found.lost, found.new) == (len(timed), (), 0)
    ours = {dict(point.key)["way"] for point in found.points if not point.of_library}
    assert ours == {row.way for row in timed} & {
        "group",
        "enable",
        "operators",
        "operators, routed",
        "ring",
        "gemv",
        "copies",
        "copies, halves",
        "nccl, our sums",
        "nccl, our bags",
    }
    chosen = next(row for row in timed if row.way == "group")
    for row, count in ((times(chosen, 2.0), 1), (dataclasses.replace(chosen, step_ms=2 * chosen.slowest_ms), 0)):
        later = dataclasses.replace(steps, rows=tuple(row if one is chosen else one for one in timed))
        assert len(compare(steps, later).changed(slower=True)) == count


def test_what_was_best_is_measured() -> None:
    choices = read(FILE.parents[1] / "h200x2/heuristics.json")
    others = [dataclasses.replace(row, best="another", right=row.right is False) for row in choices.rows]
    found = compare(choices, dataclasses.replace(choices, rows=tuple(others)))
    assert found.points and found.lost == () and found.new == 0


def test_spreads_that_meet_are_no_change(before: Results) -> None:
    rows = [dataclasses.replace(row, p10_us=row.time_us and row.time_us / 2) for row in before.rows]
    later = changed(dataclasses.replace(before, rows=tuple(rows)), lambda row: 1.5)
    assert compare(before, later).changed(slower=True) == []


def test_files_that_cannot_be_compared_are_refused(before: Results) -> None:
    for change, text in (({"device": "another"}, "regress: device"), ({"ranks": 3}, "regress: ranks")):
        with pytest.raises(ValueError, match=text):
            compare(before, dataclasses.replace(before, **change))
    twice = dataclasses.replace(before, rows=(*before.rows, before.rows[0]))
    with pytest.raises(ValueError, match="2 rows are one point"):
        compare(before, twice)


def test_the_command_ends_with_1_where_something_is_slower_or_lost(before: Results, tmp_path: Path) -> None:
    later, out = tmp_path / "later.json", tmp_path / "out.json"
    last = max(n for n, row in enumerate(before.rows) if row.time_us)
    for factor, kept, code in ((1.0, None, 0), (1.2, None, 1), (1.0, last, 1)):
        after = changed(before, lambda row, factor=factor: factor if row.implementation == "auto" else 1.0)
        write(later, dataclasses.replace(after, rows=after.rows[:kept]))
        result = CliRunner().invoke(cli.main, ["regress", str(FILE), str(later), "--json", str(out)])
        assert result.exit_code == code, result.output
        told = json.loads(out.read_text())
        assert len(told["lost"]) == (kept is not None) and bool(told["rows"]) == (factor > 1)
