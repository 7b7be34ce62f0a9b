"""Ordinary memory: what its command takes, and the ideal of a pair."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sidelane import cli
from sidelane.program.collective import Kind
from sidelane_lab.harness import running
from sidelane_lab.pairs.beside import RoundTimes
from sidelane_lab.studies.ordinary import OrdinaryOptions

SMALL = "256x256x256_256K"


def test_the_ideal_goes_by_the_fastest_collective_of_all() -> None:
    columns = RoundTimes((100.0,) * 3, (50.0,) * 3, (80.0, 90.0, 70.0), (110.0, 100.0, 125.0)).columns()
    assert columns["comm_us"] == 80.0 and columns["best_comm_us"] == 50.0
    assert columns["ideal"] == 1.5
    assert columns["speedup"] == pytest.approx(150 / 110)
    assert columns["percent_of_ideal"] == pytest.approx(100 * (150 / 110 - 1) / 0.5)
    looked_at = RoundTimes((100.0,) * 3, (50.0,) * 3, (80.0,) * 3, (110.0,) * 2)
    for figures in (looked_at.columns, looked_at.percent_of_ideal):
        with pytest.raises(ValueError, match="shorter"):  # a look has fewer rounds
            figures()


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[OrdinaryOptions] = []
    monkeypatch.setattr(running, "run", seen.append)

    def asked(*words: str) -> OrdinaryOptions:
        result = CliRunner().invoke(cli.main, ["ordinary", "--device", "cpu", *words])
        assert result.exit_code == 0, result.output
        return seen.pop()

    assert asked("--min-bytes", "16M").sizes == (16 << 20,)
    some = asked("--part", "beside", "--collective", "all_to_all", "--pair", SMALL)
    assert (some.parts, some.collectives, some.pairs) == (("beside",), (Kind.ALL_TO_ALL,), (SMALL,))
