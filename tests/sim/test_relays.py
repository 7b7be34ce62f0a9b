"""Relayed broadcasts in the simulator: figures of results/notes/performance.md, and the ground of the rule of thumb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidelane.program.builders import build
from sidelane.program.builders.relay import SAVES_BYTES
from sidelane.program.collective import broadcast
from sidelane.program.transform import freeze
from sidelane_lab.machines.load import named
from sidelane_lab.sim.simulate import simulate

MB = 1 << 20
RANKS = 4
MEASURED = Path(__file__).parents[2] / "results" / "h200x4" / "broadcasts.json"


def by_variant(nbytes: int, variant: str) -> float:
    program = freeze(build(broadcast(nbytes, RANKS, 0, in_place=True), variant))
    return simulate(program, named("h200x4")).time_us


@pytest.mark.parametrize(
    ("nbytes", "relayed_us", "direct_us"),
    [(16 * MB, 105, 159), (64 * MB, 233, 544), (256 * MB, 786, 2083), (1024 * MB, 3095, 8240)],
)
def test_figures_of_the_docs(nbytes: int, relayed_us: float, direct_us: float) -> None:
    assert by_variant(nbytes, "relay") == pytest.approx(relayed_us, rel=0.01)
    assert by_variant(nbytes, "b2b") == pytest.approx(direct_us, rel=0.01)


def test_what_is_simulated_without_relays_is_what_was_measured() -> None:
    rows = json.loads(MEASURED.read_text())["rows"]
    measured = {
        row["bytes"]: row["time_us"]
        for row in rows
        if (row["implementation"], row["variant"], row["launch"], row["tensors"]) == ("dma", "b2b", "graph", 1)
    }
    sizes = [nbytes for nbytes in measured if nbytes >= MB]
    assert len(sizes) > 4
    for nbytes in sizes:
        # At 1 MiB it is the latencies that count, and those were fitted to another file.
        assert by_variant(nbytes, "b2b") == pytest.approx(measured[nbytes], rel=0.05 if nbytes > MB else 0.07)


def test_relays_are_simulated_about_as_measured() -> None:
    rows = json.loads(MEASURED.read_text())["rows"]
    measured = {row["bytes"]: row["time_us"] for row in rows if (row["variant"], row["launch"]) == ("relay", "graph")}
    for nbytes in (16 * MB, 64 * MB, 256 * MB, 1024 * MB):
        assert 0.75 * measured[nbytes] < by_variant(nbytes, "relay") < measured[nbytes]


def test_relays_pay_where_the_rule_of_thumb_takes_them() -> None:
    least = SAVES_BYTES // (RANKS - 2)
    for nbytes in (least, 3 * least, 100 * least):
        assert by_variant(nbytes, "relay") < 0.9 * by_variant(nbytes, "b2b")
