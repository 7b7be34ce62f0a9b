"""Phases: how a call is split, what is predicted for the same programs, and what the command prints and writes."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from sidelane.choice.candidate import find
from sidelane.collectives.agreement import Agreement, CallPart
from sidelane.collectives.plan import make_program
from sidelane.program.collective import Collective, Kind
from sidelane.program.ir import Copy
from sidelane_lab.machines.load import named
from sidelane_lab.machines.numbers import predict_study
from sidelane_lab.studies.phases.programs import Operation, operations, predicted_row
from sidelane_lab.studies.phases.rows import PHASED, PhaseRow, PhasesOptions
from sidelane_lab.studies.phases.split import FIELDS, Sample, predict, slowest, split

MI300X, H200 = named("mi300x8"), named("h200x4")
KB, MB = 1 << 10, 1 << 20
PHASES = ("control_us", "schedule_us", "copy_us", "sync_us")


def test_the_phases_of_a_call_add_up() -> None:
    found = split(Sample(host_us=6.0, total_us=50.0, entry_us=9.0, copy_us=20.0, exit_us=8.0, notify_us=3.0))
    assert (found.control_us, found.schedule_us, found.copy_us, found.sync_us) == (6.0, 13.0, 20.0, 11.0)
    assert (found.entry_us, found.exit_us, found.host_us, found.total_us) == (9.0, 8.0, 6.0, 50.0)


def test_the_host_delays_only_what_comes_after_it() -> None:
    """It still submits while bytes move: what it takes then is no part of the time of the call."""
    found = split(Sample(host_us=40.0, total_us=50.0, copy_us=30.0, exit_us=5.0, notify_us=3.0))
    assert (found.control_us, found.schedule_us, found.host_us) == (12.0, 0.0, 40.0)
    assert sum(getattr(found, name) for name in PHASES) == found.total_us == 50.0


def test_clocks_that_disagree_leave_no_negative_phase() -> None:
    found = split(Sample(host_us=2.0, total_us=30.0, copy_us=29.0, notify_us=4.0))
    assert (found.control_us, found.schedule_us) == (0.0, 0.0)
    assert sum(getattr(found, name) for name in PHASES) == found.total_us == 33.0


def test_stamps_on_the_clock_of_the_host_tell_when_it_knew() -> None:
    stamps = {0: 12.0, 1: 20.0, 2: 50.0, 3: 60.0}
    sample = Sample.stamped(10.0, 66.0, stamps, known_us=66.0)
    assert sample == Sample(10.0, 66.0, entry_us=8.0, copy_us=30.0, exit_us=10.0, notify_us=6.0)
    assert split(sample).schedule_us == 10.0
    assert Sample.stamped(10.0, 66.0, stamps, known_us=None, notify_us=2.0).notify_us == 2.0


def sample_values(total: float, copy: float) -> tuple[float, ...]:
    return Sample(1.0, total, copy_us=copy).values()


def test_the_slowest_rank_of_every_call_counts() -> None:
    calls = np.full((3, 3, FIELDS), np.nan)
    totals = [(10, 30, 20), (20, 15, 21), (5, 5, 5)]
    for rank, row in enumerate(totals):
        for call, total in enumerate(row):
            calls[rank, call] = sample_values(total, 100 * rank + total)
    found = slowest(calls, np.array([True, True, True]))
    assert (found.total_us, found.copy_us) == (21.0, 121.0)  # of 20, 30 and 21, the call with the median total
    calls[2] = np.nan  # a rank that has no part
    assert slowest(calls, np.array([True, True, True])) == found


def test_calls_that_some_rank_began_late_are_left_out_unless_most_are() -> None:
    calls = np.array([[sample_values(total, 0.0) for total in (10.0, 11.0, 900.0)]])
    assert slowest(calls, np.array([True, True, False])).total_us == 10.5
    assert slowest(calls, np.array([True, False, False])).total_us == 11.0


@pytest.mark.parametrize("nbytes", [4 * KB, 64 * KB, 2 * MB])
def test_one_copy_has_the_phases_that_the_dma_collectives_paper_describes(nbytes: int) -> None:
    row, dma = predicted_row(MI300X, Operation("copy", "b2b", nbytes), 8), MI300X.dma
    described = 2 * dma.control_us, dma.doorbell_us + dma.fetch_us, float(dma.sync_us)
    assert (row.control_us, row.schedule_us, row.sync_us) == pytest.approx(described)


@pytest.mark.parametrize("machine", [MI300X, H200], ids=lambda machine: machine.name)
def test_predicted_phases_add_up_for_every_operation(machine) -> None:
    variants = ("b2b", "pcpy", "bcst", "swap", "b2b+prelaunch")
    for operation in operations(PHASED, variants, 64 * KB):
        found = predict(operation.program(machine.gpus, stamped=True), machine)
        assert math.isclose(sum(getattr(found, name) for name in PHASES), found.total_us, abs_tol=1e-9)
        assert min(dataclasses.astuple(found)) > -1e-9, operation
        assert 0 <= found.entry_us <= found.control_us + found.schedule_us + 1e-9
        assert 0 <= found.exit_us <= found.sync_us
        if operation.name in ("copy", "copies") and not operation.prelaunched:
            assert found.entry_us == found.exit_us == 0


def test_prediction_sees_what_changes() -> None:
    def of(name: str, variant: str, nbytes: int):
        return predict(Operation(name, variant, nbytes).program(8, stamped=True), MI300X)

    small, large = of("copies", "b2b", KB), of("copies", "b2b", 16 * MB)
    assert large.copy_us > 100 * small.copy_us
    for phase in ("control_us", "schedule_us", "sync_us"):
        assert getattr(large, phase) == pytest.approx(getattr(small, phase))
    armed = of("copies", "b2b+prelaunch", KB)
    assert armed.control_us + armed.schedule_us < small.control_us + small.schedule_us
    assert of("copies", "pcpy", 16 * MB).copy_us < large.copy_us / 3, "engines side by side"
    assert of("all_gather", "b2b", KB).entry_us > 0


def test_transfers_are_the_copies_alone() -> None:
    one, many = (Operation(name, "b2b", 256).program(4) for name in ("copy", "copies"))
    for program, count in ((one, 1), (many, 3)):
        (queue,) = program.queues
        assert queue.rank == 0 and len(queue.commands) == count
        assert all(isinstance(c, Copy) and c.src.nbytes == 256 and c.dst.rank != 0 for c in queue.commands)
    assert Operation("all_gather_in_place", "b2b", 256).program(4).collective.in_place
    assert Operation("all_to_all", "b2b", 256).program(4).collective.kind is Kind.ALL_TO_ALL


def test_copies_inside_a_gpu_are_those_of_calls_that_say_nothing_of_a_computation() -> None:
    for name, variant in (("all_gather", "b2b"), ("all_to_all", "b2b")):
        operation = Operation(name, variant, 64 * MB)
        program, candidate = operation.program(2, native={Copy}), find(Kind(name), "b2b")
        assert isinstance(program.collective, Collective) and candidate is not None
        part = CallPart(program.collective, "uint8", (0, 0), (1, 0))
        assert program == make_program(Agreement((part,), variant, frozen=False), candidate, {Copy})


def test_variants_go_to_the_operations_that_have_them() -> None:
    found = [str(o) for o in operations(("copy", "copies", "all_to_all"), ("b2b", "pcpy", "swap", "b2b+prelaunch"), 64)]
    assert found == [
        *("copy b2b", "copy b2b+prelaunch", "copies b2b", "copies pcpy", "copies b2b+prelaunch"),
        *("all_to_all b2b", "all_to_all pcpy", "all_to_all swap", "all_to_all b2b+prelaunch"),
    ]
    with pytest.raises(ValueError, match="value=bcst, allowed=b2b, chunked, pcpy, striped, swap, each also with"):
        operations(("all_to_all",), ("b2b", "bcst"), 64)
    with pytest.raises(ValueError, match=r"allowed=b2b, chunked, pcpy, striped, each also with .prelaunch\)"):
        operations(("copy", "copies"), ("bcst",), 64)
    with pytest.raises(ValueError, match="copy, copies"):
        operations(("move",), ("b2b",), 64)
    with pytest.raises(ValueError, match="ranks"):
        Operation("copy", "b2b", 64).program(1)


def test_the_command_prints_and_writes(tmp_path, capsys) -> None:
    options = PhasesOptions(
        operations=("copy", "all_gather"),
        variants=("b2b", "pcpy"),
        sizes=(4 * KB, MB),
        json=tmp_path / "phases.json",
        report=tmp_path / "report",
    )
    predict_study("mi300x8", options)
    shown = capsys.readouterr().out
    assert "MI300X" in shown and "all_gather pcpy" in shown and "no stamps" not in shown
    content = json.loads((tmp_path / "phases.json").read_text())
    assert (content["study"], content["machine"], content["predicted"]) == ("phases", "mi300x8", True)
    rows = [PhaseRow.from_dict(row) for row in content["rows"]]
    assert {(row.operation, row.variant, row.bytes) for row in rows} == {
        (name, variant, nbytes)
        for name, variant in (("copy", "b2b"), ("all_gather", "b2b"), ("all_gather", "pcpy"))
        for nbytes in (4 * KB, MB)
    }
    assert {(row.launch, row.source) for row in rows} == {("model", "predicted")}
