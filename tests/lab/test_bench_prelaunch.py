"""The study of prelaunched calls, on CPU ranks, and what it takes off and leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidelane.program.collective import Kind
from sidelane_lab.harness import running
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.study import Results, read
from sidelane_lab.harness.ways import Rounds
from sidelane_lab.studies import prelaunch as study
from sidelane_lab.studies.prelaunch import PrelaunchOptions, PrelaunchRow

QUICK = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 2, "timeout_s": 100.0}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[PrelaunchRow], Path]:
    folder = tmp_path_factory.mktemp("prelaunch")
    options = PrelaunchOptions(
        **QUICK, sizes=(1000,), variants=("b2b", "swap"), json=folder / "prelaunch.json", report=folder / "report"
    )
    results = running.run(options)
    assert isinstance(results, Results)
    return results, [row for row in read(folder / "prelaunch.json").rows if isinstance(row, PrelaunchRow)], folder


def test_every_way_is_checked_and_timed(measured: tuple[Results, list[PrelaunchRow], Path]) -> None:
    _, rows, _ = measured
    found = [(row.collective, row.variant, row.in_place, row.trigger) for row in rows]
    assert found == [
        *(("all_gather", "b2b", False, trigger) for trigger in ("call", "stream", "host")),
        *((Kind.ALL_TO_ALL, *way, "call") for way in (("b2b", False), ("swap", True))),
        *(
            (Kind.ALL_TO_ALL, *way, trigger)
            for way in (("b2b", False), ("swap", True))
            for trigger in ("stream", "host")
        ),
    ]
    for row in rows:
        assert row.correct and row.time_us and (row.arm_us is None) == (row.trigger == "call"), row


def test_a_table_and_a_picture_a_collective(measured: tuple[Results, list[PrelaunchRow], Path]) -> None:
    results, _, folder = measured
    assert [table.title.partition(":")[0] for table in tables_of(results)] == ["all_gather", "all_to_all"]
    page = (folder / "report" / "report.md").read_text()
    for kind in ("all_gather", "all_to_all"):
        assert f"](prelaunch-{kind}.png)" in page and (folder / "report" / f"prelaunch-{kind}.png").stat().st_size > 0


def test_a_kernel_that_fires_is_timed_without_its_own_time() -> None:
    assert study._less(Rounds((5.0, 3.0, 1.0)), 2.0).times_us == (3.0, 1.0, 0.0)
