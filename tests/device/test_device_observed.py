"""Metrics, traces and the flight recorder on GPUs."""

from __future__ import annotations

from pathlib import Path

from device_pool import Ranks

from sidelane.cli.recorder import analyse, read_dump

CASES = "observed_cases."


def test_a_trace_has_times_of_the_device(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(CASES + "traced", str(tmp_path / "trace.json"), timeout_s=120)[0]
    size = ranks.world_size
    gathers = [us for lane, label, us in found if lane == "device: calls" and label.startswith("all_gather")]
    reduces = [us for lane, label, us in found if lane == "device: calls" and label.startswith("all_reduce")]
    assert len(gathers) == 4 * size and len(reduces) == 3 * size  # the replayed one is not there
    assert all(us > 20 for us in gathers)
    assert all(us > 0 for us in reduces)
    assert len([label for lane, label, _ in found if lane == "host: calls"]) == 7 * size


def test_sums_and_states(ranks: Ranks, tmp_path: Path) -> None:
    for text, states in ranks.run(CASES + "observed", str(tmp_path), timeout_s=120):
        assert 'collective="all_gather",dtype="float32",device="cuda"} 5' in text
        assert "sidelane_timed_calls_total{" not in text  # the host does not know the ends
        assert set(states) == {"completed"}


def test_the_rank_behind_is_named(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(CASES + "late", str(tmp_path), timeout_s=120)
    found = analyse([read_dump(file) for file in tmp_path.iterdir()])
    assert {(one.kind, one.ranks, one.call) for one in found if one.kind in ("behind", "late")} == {("late", (1,), 6)}
