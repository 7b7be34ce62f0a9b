"""The study of phases on GPUs: calls whose programs take turns, eager, as graphs of their own and in graphs."""

from __future__ import annotations

import pytest
import torch

from sidelane_lab.studies.phases import study as phases_study
from sidelane_lab.studies.phases.programs import OPENING
from sidelane_lab.studies.phases.study import PhasesOptions


def test_phases_of_programs_that_take_turns() -> None:
    ranks, operations = min(4, torch.cuda.device_count()), ("all_gather", "all_gather_in_place", "all_to_all")
    options = PhasesOptions(
        ranks=ranks,
        operations=operations,
        sizes=(1 << 10, 1 << 20),  # rows, and parts that are too large for them
        variants=("b2b", "alternating", OPENING),
        calls=9,
        quiet=True,
        timeout_s=150.0,
    )
    results = phases_study.main(options)
    assert results is not None
    rows = [row for row in results.rows if row.source == "measured"]
    assert len(rows) == len(operations) * 2 * (2 + 2 + 1), "both launches, or the one that there is"
    for row in rows:
        assert row.correct, row
        assert row.control_us + row.schedule_us + row.copy_us + row.sync_us == pytest.approx(row.total_us, rel=1e-3)
        assert (row.stage_us > 0) is row.variant.startswith("alternating"), row
        if row.variant == "alternating" and row.launch == "eager":
            assert row.exit_us == 0 and row.entry_us > 0
