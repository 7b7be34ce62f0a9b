"""Storms of ordinary tensors that come and go: what they count, and that they notice what is wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import storm_cases
from marks import long
from ranks import RankError, RankPool

from soak import campaign
from soak.campaign import parts_of
from soak.episode import Episode, Storm
from soak.judge import Tally
from soak.storm import Where
from soak.world import Verdict

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped where")


@pytest.mark.parametrize(("mode", "n", "steps"), [long("learn", 2, 400), ("learn", 3, 50), long("always", 4, 80)])
def test_every_byte_is_right_and_nothing_is_left(pool: RankPool, mode: str, n: int, steps: int) -> None:
    found = pool.run(storm_cases.storm, n, mode, steps, n)
    assert [said for _, said in found] == [""] * n
    for counts, _ in found:
        assert counts["wrong"] == counts["errors"] == counts["stale"] == 0
        assert counts["bytes missing"] == counts["mapped at the end"] == 0
        assert counts["bystanders"] > steps // 15
    assert sum(counts["calls"] for counts, _ in found) == steps
    if mode == "always" or n == 2:
        assert all(counts["mapped at most"] > 0 for counts, _ in found)
    if mode == "learn" and n == 2:
        assert sum(counts["went ahead"] for counts, _ in found) > n * steps // 20
        assert sum(counts.get("replaced", 0) for counts, _ in found) > 0


@pytest.mark.parametrize(("mode", "steps"), [("learn", 70), long("always", 100)])
def test_graphs_are_replayed_in_a_storm(pool: RankPool, mode: str, steps: int) -> None:
    """On a made-up driver: CPU ranks capture nothing. So many steps have graphs on memory of every kind."""
    found = pool.run(storm_cases.with_graphs, 2, mode, steps, 1)
    assert [said for _, said in found] == [""] * 2
    for counts, _ in found:
        assert counts["wrong"] == counts["errors"] == counts["stale"] == counts["mapped at the end"] == 0
        assert all(counts[f"graphs on {where}"] > 0 for where in Where), counts
        assert counts["replays"] > 2 * counts["graphs"] and counts["graphs let go of"] == counts["graphs"]


@pytest.mark.long
def test_ranks_that_give_up_some_calls_go_on_with_others_alike(pool: RankPool) -> None:
    for counts, said in pool.run(storm_cases.gives_up, 2, 1500, 1):
        assert said == "" and counts["wrong"] == counts["errors"] == counts["stale"] == 0
        assert counts["went ahead"] > 20


def test_a_replay_that_does_nothing_is_noticed(pool: RankPool) -> None:
    with pytest.raises(RankError, match="outputs were wrong"):
        pool.run(storm_cases.with_graphs, 2, "off", 40, 1, "nothing is replayed")


def test_a_write_elsewhere_is_noticed(pool: RankPool) -> None:
    for counts, said in pool.run(storm_cases.storm, 2, "off", 100, 1, "a write elsewhere"):
        assert counts["stale"] == counts["wrong"] > 0 and "bystander" in said


def test_a_mapping_that_stays_is_noticed(pool: RankPool) -> None:
    for counts, said in pool.run(storm_cases.storm, 2, "always", 40, 1, "a mapping that stays"):
        assert counts["mapped at the end"] > 0 and counts["bytes missing"] > 0 and counts["errors"] == 2
        assert "are still mapped" in said and "bytes of memory are missing" in said


def test_parts() -> None:
    assert sum(part.steps for part in parts_of(100_001, ("learn", "always"), on_cpu=False)) == 100_001
    assert [part.expandable for part in parts_of(8, ("off",), on_cpu=False)] == [False, True]
    assert parts_of(8, ("off",), on_cpu=True) == [Storm(8, "off")]


@pytest.mark.long
def test_a_storm_is_run_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "storm.txt"
    line = f"--device cpu --storm 100 --map-memory always --text {path}"
    assert campaign.main(line.split()) == 0, capsys.readouterr().out
    text = path.read_text()
    assert "result:   every byte was right, nothing stale, nothing left" in text and str(tmp_path) not in text
    assert len(re.findall(r'^{"rank": [01], "calls": 100, "wrong": 0, "errors": 0', text, re.MULTILINE)) == 2


def test_a_part_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Episode] = []

    def run(episode: Episode) -> Verdict:
        seen.append(episode)
        wrong = len(seen) == 2
        failures: list[tuple[int | None, str]] = [(1, "wrong bytes (3 of 8)")] if wrong else []
        return Verdict(episode, failures=failures, by_rank={0: Tally(), 1: Tally(wrong=int(wrong))})

    monkeypatch.setattr(campaign, "run_episode", run)
    path = tmp_path / "storm.txt"
    assert campaign.main(f"--device cpu --ranks 3 --seed 5 --storm 101 --text {path}".split()) == 1
    assert "map_memory always, rank 1: wrong bytes (3 of 8)" in capsys.readouterr().out
    assert "result:   1 parts failed" in path.read_text()
    assert [(each.seed, each.world_size, each.storm and each.storm.steps) for each in seen] == [(5, 3, 51), (5, 3, 50)]
