"""The commands ``phases`` and ``power``, and how their rows are kept, shown and drawn."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import rich.console
from click.testing import CliRunner

from sidelane import cli
from sidelane_lab.harness import report
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.study import Results
from sidelane_lab.studies.phases.rows import PhaseRow
from sidelane_lab.studies.power.rows import PowerRow

MB = 1 << 20
PHASE = PhaseRow(
    *("all_gather_in_place", "b2b+prelaunch", MB, "eager", "measured"),
    *(6.25, 13.5, 1234.0, 11.25, 1265.0, 1250.0, 7.5, 9.25, 8.5, True),
)
POWER = PowerRow(
    *("all_gather", 64 * MB, "nccl", "window", False, "graph"),
    *(150.0, 420.5, 425.0, 138.0, 252.3, 169.5, 101.1, True),
)
FROM = {
    "machine": "h200x4",
    "gpus": 4,
    "device": "Example GPU",
    "ranks": 4,
    "date": "2026-11-20T12:00:00+00:00",
    "commit": "0123abc",
    "command": "sidelane",
    "software": {},
}


def phases() -> Results:
    rows = []
    for nbytes in (1 << 10, MB, 1 << 30):
        for launch, source in (("eager", "measured"), ("graph", "measured"), ("model", "predicted")):
            rows.append(dataclasses.replace(PHASE, bytes=nbytes, launch=launch, source=source))
    none = dict.fromkeys(("control_us", "schedule_us", "copy_us", "sync_us", "total_us", "total_unstamped_us"))
    rows.append(dataclasses.replace(PHASE, **none, correct=False, note="rank 1: 3 of 64 bytes are wrong"))
    return Results(study="phases", rows=tuple(rows), **FROM)


def power() -> Results:
    rows = [
        dataclasses.replace(POWER, bytes=nbytes, implementation=name, variant=variant, energy_mj=energy * nbytes / MB)
        for nbytes in (64 * MB, 256 * MB)
        for name, variant, energy in (
            ("nccl", "", 4.0),
            ("nccl", "window", 4.1),
            ("nccl_ce", "", 2.5),
            ("dma", "b2b", 2.4),
        )
    ]
    gone = dict.fromkeys(("time_us", "watts", "watts_sampled", "energy_mj", "energy_above_idle_mj"))
    rows.append(dataclasses.replace(POWER, **gone, implementation="symm_mem", correct=None, note="takes no part"))
    return Results(study="power", rows=tuple(rows), **FROM)


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (PHASE, {"source": "guessed"}, "source"),
        (PHASE, {"launch": "lazy"}, "launch"),
        (PHASE, {"copy_us": None}, "note"),
        (PHASE, {"sync_us": -1.0}, "sync_us"),
        (PHASE, {"correct": False}, "wrong result"),
        (POWER, {"implementation": "mpi"}, "implementation"),
        (POWER, {"watts": float("nan")}, "watts"),
        (POWER, {"energy_mj": None}, "note"),
        (POWER, {"launch": "lazy"}, "launch"),
    ],
)
def test_rows_refuse(row: PhaseRow | PowerRow, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row, **change)


def printed(results: Results, width: int) -> str:
    console = rich.console.Console(file=io.StringIO(), width=width)
    report.show(results, console)
    return console.file.getvalue()


def test_wrong_bytes_and_reasons_are_shown() -> None:
    assert "WRONG" in printed(phases(), 100) and "3 of 64 bytes are wrong" in printed(phases(), 100)
    assert "symm_mem window: takes no part" in printed(power(), 100)


def test_the_least_energy_of_each_size_is_set_off() -> None:
    (table,) = tables_of(power())
    assert [line.cells[:3] for line in table.lines if line.best] == [("64M", "dma", "b2b"), ("256M", "dma", "b2b")]


def test_predictions_have_no_columns_that_only_measurements_fill() -> None:
    rows = tuple(row for row in phases().rows if row.source == "predicted")
    (table,) = tables_of(dataclasses.replace(phases(), rows=rows))
    assert "no stamps\nus" not in table.columns and "<correct" not in table.columns


def test_studies_without_a_single_time_still_make_a_page(tmp_path: Path) -> None:
    rows = phases().rows[-1:], power().rows[-1:]
    empty = [dataclasses.replace(results, rows=few) for results, few in zip((phases(), power()), rows, strict=True)]
    assert "takes no part" in report.write(tmp_path, empty).read_text()


def test_power_without_gpus_says_what_is_missing_and_what_works() -> None:
    result = CliRunner().invoke(cli.main, ["power", "--device", "cpu"])
    assert result.exit_code == 1
    assert "Error: power: needs GPUs" in result.output and "--machine h200x4" in result.output
