"""Ordinary memory: what its command takes, and the ideal of a pair."""

from __future__ import annotations

import pytest

from sidelane_lab.pairs.beside import RoundTimes

SMALL = "256x256x256_256K"


def test_the_ideal_goes_by_the_fastest_collective_of_all() -> None:
    columns = RoundTimes((100.0,) * 3, (50.0,) * 3, (80.0, 90.0, 70.0), (110.0, 100.0, 125.0)).columns()
    assert columns["comm_us"] == 80.0 and columns["best_comm_us"] == 50.0
    assert columns["ideal"] == 1.5
    assert columns["speedup"] == pytest.approx(150 / 110)
    assert columns["percent_of_ideal"] == pytest.approx(100 * (150 / 110 - 1) / 0.5)
    impossible = RoundTimes((100.0,) * 3, (50.0,) * 3, (50.0,) * 3, (97.0, 90.0, 160.0))
    assert impossible.percent_of_ideal() == pytest.approx(109.28, abs=0.01)
    ends = (impossible.columns()["percent_least"], impossible.columns()["percent_most"])
    assert ends == pytest.approx((-12.5, 133.33), abs=0.01)
    assert impossible.columns()["percent_of_ideal"] is None and impossible.columns()["speedup"] > 1.5
    looked_at = RoundTimes((100.0,) * 3, (50.0,) * 3, (80.0,) * 3, (110.0,) * 2)
    for figures in (looked_at.columns, looked_at.percent_of_ideal):
        with pytest.raises(ValueError, match="shorter"):  # a look has fewer rounds
            figures()
