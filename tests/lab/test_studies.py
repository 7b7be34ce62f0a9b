"""A contract for studies: each runs once on CPU ranks, with ways that are wrong and ways that refuse.

``goldens/study-*.txt`` has the rows without their times. The first way of each class does nothing, so that its outputs
stay as they were poisoned; the second one refuses on the last rank; the third is right at first, and does nothing when
it is checked once more. All others must be right and have times. Where a library's way is what others are compared
with, it and the next way are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from marks import long

from goldens import check_golden
from sidelane.program.collective import Kind
from sidelane_lab.cli.e2e import EndToEndOptions
from sidelane_lab.cli.fsdp import FsdpOptions
from sidelane_lab.cli.fused import FusedOptions
from sidelane_lab.harness import running
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.options import StudyOptions
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.running import Sender
from sidelane_lab.harness.study import MODEL, FlatRow, read, study_of
from sidelane_lab.harness.ways import Rounds
from sidelane_lab.studies import prelaunch
from sidelane_lab.studies.chain import ChainOptions, ChainRow
from sidelane_lab.studies.collectives import CollectiveOptions, CollectiveRow, bus_gbps
from sidelane_lab.studies.e2e.rows import WorkloadRow
from sidelane_lab.studies.fsdp.rows import FsdpRow
from sidelane_lab.studies.fused.rows import FusedRow
from sidelane_lab.studies.gemms import GemmOptions, GemmRow
from sidelane_lab.studies.host import BLOCKS, HostOptions, HostRow
from sidelane_lab.studies.layouts import LayoutOptions, LayoutRow
from sidelane_lab.studies.ordinary import OrdinaryOptions
from sidelane_lab.studies.phases.rows import PhaseRow, PhasesOptions
from sidelane_lab.studies.prelaunch import PrelaunchOptions, PrelaunchRow
from sidelane_lab.studies.process_group import GroupOptions, GroupRow

QUICK: dict[str, Any] = {"device": "cpu", "ranks": 2, "quiet": True, "timeout_s": 100.0, "command": "test"}
ONCE: dict[str, Any] = {**QUICK, "warmup": 0, "repeats": 1}

CASES: dict[str, tuple[StudyOptions, int, int]] = {
    "collectives": (CollectiveOptions(**ONCE, sizes=(1000,)), 4, 4),
    "lists": (CollectiveOptions(**ONCE, collectives=(Kind.ALL_GATHER,), sizes=(1000,), tensors=5), 4, 2),
    "phases": (PhasesOptions(**QUICK, warmup=1, calls=1, sizes=(1000,), variants=("b2b", "b2b+prelaunch")), 10, 0),
    "host": (HostOptions(**{**ONCE, "repeats": 2}, sizes=(1000,), variants=("b2b",)), 3, 0),
    "gemms": (GemmOptions(**{**ONCE, "ranks": 1, "timeout_s": 230.0}, models=("qwen-32b/4",)), 1, 0),
    "chain": (ChainOptions(**ONCE, sizes=(1,), variants=("b2b",)), 3, 0),
    "prelaunch": (PrelaunchOptions(**ONCE, sizes=(1000,), variants=("pcpy", "b2b", "swap")), 2, 0),
    "layouts": (LayoutOptions(**ONCE, shapes=((1, 7, 4, 8),)), 2, 0),
    "one tensor": (LayoutOptions(**ONCE, shapes=((2, 4, 2, 8),), tensors=1, parts=("alone",)), 1, 0),
    "ordinary": (OrdinaryOptions(**ONCE, sizes=(1000,), pairs=("256x256x256_256K",)), 8, 0),
    "process_group": (GroupOptions(**ONCE, sizes=(1000,)), 5, 0),
    "fused": (FusedOptions(**{**ONCE, "timeout_s": 300.0}), 8, 0),
    "fsdp": (FsdpOptions(**ONCE, cases=("8b:1x512",), layers=2), 1, 1),
    "e2e": (EndToEndOptions(**QUICK, workloads=("decode",), warmup=1, rounds=2, steps=1), 1, 1),
}
"""Options of each run, the tables that show it, and the pictures."""

MEASURED = ("_us", "_ms", "gbps", "_mb", "tflops", "speedup", "ideal", "_percent", "per_second")
MEASURED += ("max_rel_err", "difference", "loss", "grad_norm", "percent_least", "percent_most")
"""Ends of the names of figures that no two runs have alike."""

LONG = ("lists", "gemms", "chain", "layouts", "ordinary", "process_group", "fused", "fsdp")
WITH_LIBRARY = ("fsdp", "e2e")
UNCOMPARED = ("compute", "collective", "compute_only", "compute_only_straight", "none")
READ_BYTES = {"embedding_all_to_all": 4 * 2 * 2 * 8 * 4, "gemv_all_reduce": 20 * 8 * 4}
"""Bytes of rows or weights that a call reads, of float32."""


def measured(rank: Rank, options: StudyOptions, sender: Sender) -> Iterator[FlatRow]:
    """Measure a study with spoilt ways of each class: one does nothing, and one cannot be made on the last rank."""
    first = -2 if options.study in WITH_LIBRARY else 0
    compare, numbers = Meter.compare, defaultdict[type, Iterator[int]](lambda: itertools.count(first))

    def spoilt(make: Callable[[], Any]) -> Any:
        way = make()
        number = next(numbers[type(way)])
        if number == 0 or (number == 2 and options.study not in WITH_LIBRARY):
            way.run_again = lambda: None
        if number == 0:
            way.run = way.run_again
        if number == 1 and rank.rank == rank.world_size - 1:
            way.close()
            raise RuntimeError("out of something")
        return way

    def compared(self: Meter, makers: dict[Any, Callable[[], Any]], *others: Any) -> Any:
        return compare(self, {key: functools.partial(spoilt, make) for key, make in makers.items()}, *others)

    Meter.compare = compared  # type: ignore[method-assign]
    measure = study_of(options.study).measure
    assert measure is not None
    yield from measure(rank, options, sender)


@pytest.mark.parametrize("name", [long(name) if name in LONG else name for name in CASES])
def test_rows_tables_and_page(name: str, tmp_path: Path) -> None:
    options, tables, pictures = CASES[name]
    study, path, report = study_of(options.study), tmp_path / "study.json", tmp_path / "report"
    options = dataclasses.replace(options, json=path, report=report)
    results = running.run_study(dataclasses.replace(study, measure=measured), options)
    assert results is not None and read(path).rows == results.rows
    shown = [table.title for table in tables_of(results)]
    assert len(shown) == tables, shown
    assert study.title in (report / "index.html").read_text()
    drawn = re.findall(r"]\((.*?\.png)\)", (report / "report.md").read_text())
    assert len(drawn) == pictures and all((report / file).stat().st_size for file in drawn)
    for row in results.rows:
        check_figures(row)
    check_golden(f"study-{name.replace(' ', '-')}", {"rows": "\n".join(map(text_of, results.rows))})


def check_figures(row: Any) -> None:
    """Check that what is right has times, and that figures are what the fields of the row say."""
    is_first = getattr(row, "launch", "") == "first"
    is_timed = is_first or getattr(row, "launch", "") == MODEL or (row.correct is True and row.note != BLOCKS)
    if getattr(row, "implementation", getattr(row, "way", "")) in UNCOMPARED:
        assert row.correct is None, row
        is_timed = "rank 1" not in row.note
    assert [getattr(row, figure) is not None for figure in row.figures] == [
        is_timed and not (figure == "bus_gbps" and getattr(row, "gemm", "")) for figure in row.figures
    ], row
    beside = [
        getattr(row, key) for key in ("gemm_us", "comm_us", "best_comm_us", "speedup", "ideal") if hasattr(row, key)
    ]
    if beside and not isinstance(row, ChainRow | FusedRow):
        assert [value is not None for value in beside] == [bool(row.gemm) and is_timed] * 5, row
    us = row.host_us if isinstance(row, HostRow) else getattr(row, "total_us", getattr(row, "time_us", None))
    match row:
        case CollectiveRow() if row.bus_gbps is not None:
            assert row.bus_gbps == pytest.approx(bus_gbps(row.collective, row.bytes, 2, us), rel=1e-3), row
        case PhaseRow() if is_timed:
            phases = (row.control_us, row.schedule_us, row.copy_us, row.sync_us)
            assert min(phases) >= 0 and sum(phases) == pytest.approx(us, rel=1e-3), row
            assert row.entry_us <= row.control_us + row.schedule_us + 1e-3 * us and row.exit_us <= 1.001 * row.sync_us
            if row.operation in ("copy", "copies"):
                assert row.entry_us == row.exit_us == 0, row
            else:  # on a busy machine the peers may be done before a rank looks, at one end or the other
                assert row.entry_us + row.exit_us > 0, row
        case HostRow():
            assert (row.best_us is not None) == is_timed and (us is None or row.best_us <= us), row
        case ChainRow():
            assert row.gemms_us > 0, row
        case PrelaunchRow():
            assert (row.arm_us is not None) == (is_timed and row.trigger != "call"), row
        case GemmRow() if is_timed:
            assert row.tflops == pytest.approx(2 * row.m * row.n * row.k / us / 1e6, rel=1e-3), row
        case LayoutRow():
            alone = is_timed and not row.gemm
            assert row.gbps == (pytest.approx(row.bytes / us / 1e3, rel=1e-3) if alone else None), row
        case GroupRow():
            assert (row.held_mb is not None) == (is_first and row.implementation == "sidelane"), row
        case FusedRow():
            assert row.bound_us == max(row.compute_us, row.comm_us), row
            assert (row.skew_us is not None) == is_timed, row
            read = None if row.implementation == "collective" else READ_BYTES.get(row.op)
            assert row.gbps == (None if read is None or us is None else pytest.approx(read / us / 1e3, rel=1e-3)), row
            assert row.implementation != "auto" or not is_timed or row.note.startswith(f"{row.op}: "), row
        case FsdpRow():
            assert (row.exposed_ms is not None) == is_timed and row.peak_mb is None, row
            assert (row.loss is not None) == (row.correct is True), row
        case WorkloadRow() if is_timed:
            assert row.fastest_ms <= row.step_ms <= row.slowest_ms and row.exposed_percent is not None, row
            assert row.per_second == pytest.approx(2e3 / row.step_ms, rel=1e-3), row


def text_of(row: FlatRow) -> str:
    """Return the values of a row but times, with the names of those that are no words, and why it is not right."""
    kept = {key: value for key, value in row.to_dict().items() if not key.endswith(MEASURED)}
    if kept.get("implementation") == "unfused_best":
        del kept["schedule"]
    note = kept.pop("note", "")  # of what is timed it has times, too
    values = [value if isinstance(value, str) else f"{key}={value}" for key, value in kept.items() if value != ""]
    return " ".join([*values, *([f"({note})"] if note and not (row.correct and getattr(row, row.figures[0])) else [])])


def test_a_kernel_that_fires_is_timed_without_its_own_time() -> None:
    assert prelaunch._less(Rounds((5.0, 3.0, 1.0)), 2.0).times_us == (3.0, 1.0, 0.0)
