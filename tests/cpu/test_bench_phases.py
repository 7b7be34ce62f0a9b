"""The study of phases from end to end on CPU ranks, and what it makes of bytes that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidelane.program import collective as define
from sidelane.program.builders.alternating import SLOT_BYTES
from sidelane.program.collective import Buffer, Collective
from sidelane_lab.harness.study import read
from sidelane_lab.studies.phases import check as phases_check
from sidelane_lab.studies.phases import study as phases_study
from sidelane_lab.studies.phases.programs import OPERATIONS
from sidelane_lab.studies.phases.split import Sample
from sidelane_lab.studies.phases.study import PhasesOptions
from sidelane_lab.studies.phases.turns import InTurn, TurnCounter

QUICK = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 1, "calls": 1, "timeout_s": 100.0}


def test_phases_from_end_to_end(tmp_path: Path) -> None:
    options = PhasesOptions(
        **{**QUICK, "ranks": 3},
        sizes=(1000, 4096),
        variants=("b2b", "b2b+prelaunch"),
        predict="mi300x8",
        json=tmp_path / "phases.json",
        report=tmp_path / "report",
        command="test",
    )
    results = phases_study.main(options)
    assert results is not None
    assert read(tmp_path / "phases.json").rows == results.rows
    assert (tmp_path / "report" / "phases-all_gather-b2b.png").exists()
    assert (tmp_path / "report" / "phases-copy-b2b-prelaunch.svg").exists()
    assert (tmp_path / "report" / "index.html").exists()
    rows = results.rows
    assert {(row.operation, row.variant, row.bytes, row.source) for row in rows} == {
        (operation, variant, nbytes, source)
        for operation in OPERATIONS
        for variant in ("b2b", "b2b+prelaunch")
        for nbytes in (1008, 4128)  # what divides among three ranks
        for source in ("measured", "predicted")
    }
    for row in rows:
        phases = (row.control_us, row.schedule_us, row.copy_us, row.sync_us)
        assert all(time_us >= 0 for time_us in phases), row
        assert sum(phases) == pytest.approx(row.total_us, rel=1e-3), row
        assert row.entry_us <= row.control_us + row.schedule_us + 1e-3 * row.total_us
        assert row.exit_us <= row.sync_us * 1.001
        if row.source == "measured":
            assert (row.launch, row.correct) == ("eager", True)
            assert row.total_unstamped_us > 0 and row.host_us > 0
            if row.operation in ("copy", "copies"):
                assert row.entry_us == row.exit_us == 0
            else:  # on a busy machine the peers may be done before a rank looks, at one end or the other
                assert row.entry_us + row.exit_us > 0
        else:
            assert (row.launch, row.correct) == ("model", None)
            assert row.note == "predicted for 3 ranks of 8 x AMD Instinct MI300X"


def test_programs_that_take_turns_have_phases_too(tmp_path: Path) -> None:
    operations, variants = ("all_gather", "all_gather_in_place", "all_to_all"), ("alternating",)
    options = PhasesOptions(
        **{**QUICK, "ranks": 3},
        operations=("copy", *operations),
        sizes=(4096, 3 * SLOT_BYTES + 48),
        variants=("b2b", *variants),
        json=tmp_path / "phases.json",
        report=tmp_path / "report",
        command="test",
    )
    results = phases_study.main(options)
    assert results is not None
    assert read(tmp_path / "phases.json").rows == results.rows
    rows = [row for row in results.rows if row.variant in variants]
    assert {row.operation for row in rows} == set(operations)
    small, large = (
        [row for row in rows if row.bytes == nbytes and row.source == "measured"]
        for nbytes in (4128, 3 * SLOT_BYTES + 48)
    )
    assert len(small) == len(large) == len(operations) * len(variants)
    for row in small:
        assert row.correct  # (a busy machine may add a note: ranks began late)
        assert row.control_us + row.schedule_us + row.copy_us + row.sync_us == pytest.approx(row.total_us, rel=1e-3)
        assert 0 < row.stage_us < row.copy_us
        assert 0 < row.entry_us <= row.control_us + row.schedule_us + 1e-3 * row.total_us
        assert row.total_unstamped_us > 0 and row.host_us > 0
    for row in large:
        assert row.total_us is None and "bytes that a rank sends" in row.note
    assert all(row.stage_us == 0 for row in results.rows if row.variant == "b2b")
    assert [row.bytes for row in rows if row.source == "predicted"] == [4128] * len(small)
    assert (tmp_path / "report" / "phases-all_to_all-alternating.png").stat().st_size > 5000


def test_the_opening_of_a_graph_is_refused_where_there_is_no_graph() -> None:
    options = PhasesOptions(**QUICK, variants=("alternating", "alternating+opening"))
    with pytest.raises(ValueError, match=r"in graphs only \(value=alternating\+opening, CPU ranks have no graphs"):
        phases_study.main(options)


class Seen:
    """A call that notes that it was made."""

    def __init__(self, name: str, made: list[str]) -> None:
        self.name, self.made = name, made

    def arm(self, epoch: int) -> None:
        self.made.append(f"arm {self.name}")

    def begin(self, epoch: int) -> None:
        self.made.append(f"{self.name} {epoch}")

    def finish(self) -> None:
        pass

    def sample(self, begin_ns: int, returned_ns: int, known_ns: int) -> Sample:
        return Sample(1.0, {"even": 2.0, "odd": 3.0, "first": 4.0}.get(self.name, 5.0))


def test_whatever_shares_slots_shares_the_turns() -> None:
    made: list[str] = []
    turns = TurnCounter()
    one, other = (InTurn(turns, [Seen(name, made) for name in names]) for names in (("even", "odd"), ("a", "b")))
    opening = InTurn(turns, [Seen("first", made)])
    totals = []
    for epoch, call in enumerate((one, one, other, one, opening, one, opening, opening, other, one), 1):
        call.arm(epoch)
        call.begin(epoch)
        call.finish()
        totals.append(call.sample(0, 1, 2).total_us)
    ran = [entry for entry in made if not entry.startswith("arm")]
    # What follows an opening, which is a turn 0, is a turn 1.
    assert ran == ["even 1", "odd 2", "a 3", "odd 4", "first 5", "odd 6", "first 7", "first 8", "b 9", "even 10"]
    assert totals == [2.0, 3.0, 5.0, 3.0, 4.0, 3.0, 4.0, 4.0, 5.0, 2.0]
    with pytest.raises(ValueError, match="allowed=1 that opens, or 2"):
        InTurn(turns, [])


def test_a_machine_with_too_few_gpus_predicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    options = PhasesOptions(
        **{**QUICK, "ranks": 5, "quiet": False}, sizes=(1024,), operations=("copy",), predict="h200x4"
    )
    results = phases_study.main(options)
    assert results is not None
    assert [row.source for row in results.rows] == ["measured"]
    assert "nothing is predicted: 4 x NVIDIA H200" in capsys.readouterr().err


def views_of(collective: Collective, rank: int) -> tuple[dict[Buffer, torch.Tensor], phases_check.Views]:
    memory = {b: torch.zeros(max(1, collective.buffer_bytes(rank, b)), dtype=torch.uint8) for b in Buffer}
    return memory, lambda buffer, nbytes: memory[buffer][:nbytes]


def test_wrong_bytes_are_found_and_named() -> None:
    collective = define.all_gather([64, 64, 64], in_place=True)
    memory, views = {}, {}
    for rank in range(3):
        memory[rank], views[rank] = views_of(collective, rank)
        phases_check.fill(collective, rank, views[rank], seed=5)
    output = memory[0][Buffer.OUTPUT]
    assert phases_check.error(collective, 0, views[0], 5, own_chunk=True) is not None, "poison is no result"
    for rank in (1, 2):
        output[64 * rank : 64 * rank + 64] = memory[rank][Buffer.OUTPUT][64 * rank : 64 * rank + 64]
    assert phases_check.error(collective, 0, views[0], 5, own_chunk=True) is None
    assert phases_check.error(collective, 0, views[0], 6, own_chunk=True) is not None, "another input"
    output[130] ^= 1
    assert phases_check.error(collective, 0, views[0], 5, own_chunk=True) == "1 of 64 bytes from rank 2 are wrong"


def test_a_transfer_owes_nothing_to_its_own_rank() -> None:
    transfer, whole = define.scatter([0, 32], root=0), define.all_to_all([[32, 32], [32, 32]])
    for collective, own_chunk, found in (
        (transfer, False, None),
        (whole, True, "32 of 32 bytes from rank 0 are wrong"),
    ):
        _, views = views_of(collective, 0)
        phases_check.fill(collective, 0, views, seed=1)
        assert phases_check.error(collective, 0, views, 1, own_chunk=own_chunk) == found


def test_options_are_checked_when_made() -> None:
    for wrong in (
        {"operations": ()},
        {"operations": ("move",)},
        {"variants": ("circle",)},
        {"calls": 0},
        {"warmup": 0},
        {"sizes": (0,)},
        {"predict": "mi300"},
    ):
        with pytest.raises(ValueError, match="value="):
            PhasesOptions(**wrong)
    assert phases_study.default_sizes("cuda")[-1] == 1 << 30
