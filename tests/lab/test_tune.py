"""``sidelane tune`` on CPU ranks, and the profiles that rows of studies make."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from sidelane.choice import Candidate, choose
from sidelane.choice.key import key_here
from sidelane.choice.store import InForce, builtin, in_force, read_profile
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape
from sidelane_lab.harness.study import Results, write
from sidelane_lab.studies.collectives import CollectiveRow
from sidelane_lab.studies.tune import command as tune
from sidelane_lab.studies.tune.command import TuneOptions, changes_table, curves_of, passes, profile_of


def row(
    variant: str, nbytes: int, time_us: float | None, implementation: str = "dma", **others: object
) -> CollectiveRow:
    given: dict[str, object] = {
        "collective": "all_gather",
        "dtype": "bfloat16",
        "in_place": False,
        "launch": "eager",
        "prelaunch": False,
        "p10_us": time_us,
        "p90_us": time_us,
        "bus_gbps": time_us and 1.0,
        "energy_mj": None,
        "correct": time_us is not None or None,
        "note": "" if time_us else "it broke",
    }
    return CollectiveRow(  # type: ignore[arg-type]
        bytes=nbytes, implementation=implementation, variant=variant, time_us=time_us, **{**given, **others}
    )


ROWS = (
    row("b2b", 4096, 20.0),
    row("b2b", 1024, 10.0),
    row("b2b", 1024, 5.0, launch="graph"),
    row("one_shot", 1024, 3.0, "sm"),
    row("pcpy", 1024, None),
    row("b2b+prelaunch", 1024, 1.0, prelaunch=True),
    row("b2b", 1024, 0.5, "auto"),
    row("", 1024, 0.5, "nccl"),
    row("one_shot", 1024, 0.5, "dma"),
    row("b2b", 1024, 0.5, tensors=8),
    row("b2b", 65536, 0.5, tensors=8),
)
RESULTS = Results(
    "collectives", "h999x4", 4, "NVIDIA H999", 4, "2026-01-02T03:04:05+00:00", "abc", "sidelane collective",
    {"torch": "2.0", "driver": "1.0", "numpy": "3.0"}, ROWS,
)  # fmt: skip


def test_curves_are_what_candidates_took() -> None:
    found = {(curve.candidate.variant, curve.captured): curve.times for curve in curves_of(ROWS, 4)}
    assert found == {
        ("b2b", False): ((1024, 10.0), (4096, 20.0)),
        ("b2b", True): ((1024, 5.0),),
        ("one_shot", False): ((1024, 3.0),),
    }
    profile = profile_of(RESULTS)
    assert (profile.machine, profile.key.device, profile.key.count) == ("h999x4", "NVIDIA H999", 4)
    assert profile.key.software == (("driver", "1.0"), ("torch", "2.0"))
    assert choose(profile, CallShape(Kind.ALL_GATHER, 4, 1024)).candidate == Candidate("sm", "one_shot")
    with pytest.raises(ValueError, match="no times"):
        profile_of(dataclasses.replace(RESULTS, rows=ROWS[4:]))


def test_lists_are_no_times_to_choose_by() -> None:
    listed = tuple(dataclasses.replace(one, tensors=2) for one in ROWS)
    assert curves_of(listed, 4) == ()
    with pytest.raises(ValueError, match="one tensor a call"):
        profile_of(dataclasses.replace(RESULTS, rows=listed))


def test_a_table_from_a_result_file(tmp_path: Path) -> None:
    write(tmp_path / "collectives.json", RESULTS)
    made = tune.make_profile(tmp_path / "collectives.json", tmp_path / "table.json")
    assert read_profile(tmp_path / "table.json") == made == profile_of(RESULTS)


def test_the_built_in_table_is_made_from_the_published_results() -> None:
    published = Path(__file__).parent.parent.parent / "results" / "h200x4" / "collectives.json"
    table = builtin("h200x4")
    assert table is not None
    made = tune.profile_of(tune.read(published))
    assert table.to_text() == made.to_text(), "docs/internals/choice.md says how to make it again"


def test_passes_refine_each_other() -> None:
    coarse, fine = passes(256 << 20, quick=False)
    assert sorted((*coarse, *fine)) == [1024 * 4**power for power in range(10)]
    assert passes(256 << 20, quick=True) == [coarse]


def test_changes_are_said() -> None:
    after = profile_of(RESULTS)
    table = changes_table(InForce(None, "nothing"), after, after.curves)
    # The rule of thumb takes a kernel for both; one_shot was measured at 1 KB only, and a kernel takes 12 us at 4 KB.
    assert [line.cells for line in table.lines] == [
        ("all_gather", "out of place, graph", "1K", "sm one_shot", "dma b2b", "5", "-")
    ]
    assert "2 of 3 choices stay" in table.notes[0]
    assert not changes_table(InForce(after, "itself"), after, after.curves).lines


def test_tuning_from_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = TuneOptions(
        device="cpu", ranks=2, quiet=True, quick=True, sizes=(1024, 4096), output=path, timeout_s=100.0,
        collectives=(Kind.ALL_GATHER, Kind.ALL_REDUCE), command="sidelane tune",
    )  # fmt: skip
    profile = tune.main(options)
    assert profile == read_profile(path)
    assert profile is not None
    assert profile.key == key_here("cpu")
    found = {(curve.kind, curve.in_place, curve.candidate.variant) for curve in profile.curves}
    gathers = itertools.product([Kind.ALL_GATHER], (False, True), ("pcpy", "b2b", "striped", "bcst"))
    reduces = itertools.product([Kind.ALL_REDUCE], (False, True), ("pcpy", "b2b"))
    assert found == {*gathers, *reduces}
    assert all([nbytes for nbytes, _ in curve.times] == [1024, 4096] for curve in profile.curves)
    assert in_force(str(path), key_here("cpu")).profile == profile

    again = tune.main(dataclasses.replace(options, collectives=(Kind.BROADCAST,), sizes=(2048,)))
    assert again is not None
    kept = {curve for curve in again.curves if curve.kind is not Kind.BROADCAST}
    assert kept == set(profile.curves), "what was not measured again stays"
    assert {curve.times[0][0] for curve in set(again.curves) - kept} == {2048}


def test_time_that_runs_out_leaves_the_rest_out(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ValueError, match="nothing could be measured"):
        tune.main(TuneOptions(device="cpu", ranks=2, quiet=True, budget_s=1e-6, sizes=(1024,), output=path))
    assert not path.exists()
