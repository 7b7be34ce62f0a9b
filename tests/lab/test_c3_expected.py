"""The choice by measured curves, by files of isolated times that are made up so that each strategy wins once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from isolated_files import SIZE, collective, file_of, gemm, pair

from sidelane.c3.strategies import LaunchMode, named
from sidelane.choice.selection import Selection
from sidelane.program.collective import Kind
from sidelane_lab.pairs.expected_times import decide
from sidelane_lab.pairs.isolated_times import Isolated
from sidelane_lab.pairs.measured_curves import isolated_times, parse_isolated
from sidelane_lab.pairs.workload import Bound, Gemm, Workload

GEMM = Gemm(8192, 8192, 8192)
MOVE = Workload(GEMM, Kind.ALL_GATHER, SIZE)


def expected_of(choice: Selection[LaunchMode]) -> dict[str, float]:
    """Expected times by strategy, and units if it takes some."""
    return {str(mode): us for mode, us in choice.table if us is not None}


def made_up(winner: str, implementation: str = "nccl") -> Isolated:
    """A GEMM of 1000 us and collectives of 800; under every strategy both take 1700, under one of them 1100."""
    together = dict.fromkeys(("c3_base", "c3_sp", "priority", "c3_rp", "c3_sp_rp"), 1700.0)
    engines = {"conccl": 1700.0, "conccl_rp": 1700.0}
    gemms = [gemm(1000.0, "split", 0)]
    slower = 1.4 if winner != "conccl_rp" else 0.9  # only then the GEMM gains by having fewer units
    gemms += [gemm(1000.0 * slower, "split", units) for units in (8, 64)]
    for times in (together, engines):
        if winner in times:
            times[winner] = 1100.0
    rows = [*gemms, collective(800.0, implementation), collective(800.0, "dma")]
    rows += [collective(880.0, implementation, units) for units in (8, 64)]
    if winner != "serial":
        rows += [pair("serial", 1800.0, name, alone=800.0) for name in (implementation, "dma")]
        for name, time_us in {**together, **engines}.items():
            units = named(name).partition is not None
            by = "dma" if name in engines else implementation
            rows += [pair(name, time_us if n != 64 else 1750.0, by, n) for n in ((8, 64) if units else (0,))]
    else:
        rows += [pair("serial", 1800.0, name, alone=800.0) for name in (implementation, "dma")]
        for name in {**together, **engines}:
            units = 8 if named(name).partition is not None else 0
            rows += [pair(name, 2600.0, "dma" if name in engines else implementation, units)]
    return parse_isolated(file_of(*rows), "made up")


OF_LIBRARY = ("serial", "c3_base", "c3_sp", "priority", "c3_rp", "c3_sp_rp", "conccl", "conccl_rp")


@pytest.mark.parametrize("winner", OF_LIBRARY)
def test_each_strategy_wins_by_a_file_of_its_own(winner: str) -> None:
    able = [named(name) for name in OF_LIBRARY]
    choice = decide(MOVE, 1000.0, able, made_up(winner))
    assert choice.candidate.strategy.name == winner, choice.table
    assert choice.reason.startswith(winner) and choice.reason.endswith("shares measured here")
    assert (choice.candidate.units > 0) == (named(winner).partition is not None)
    expected = expected_of(choice)
    assert choice.table[0][1] == min(expected.values()) <= expected["serial"] == 1800.0


def test_never_slower_than_serial_by_its_own_estimate() -> None:
    for winner in OF_LIBRARY:
        for gemm_us in (10.0, 1000.0, 50_000.0):
            expected = expected_of(decide(MOVE, gemm_us, [named(n) for n in OF_LIBRARY], made_up(winner)))
            assert min(expected.values()) <= expected["serial"]


def test_units_are_taken_from_gemms_of_a_profiled_bound_only() -> None:
    """The only profiled GEMM is compute-bound, so nobody knows what units cost one that is limited by its bytes."""
    rows = [gemm(1000.0), gemm(1900.0, units=64), collective(800.0, "dma"), pair("serial", 1800.0, "dma", alone=800.0)]
    rows += [collective(800.0, "nccl"), collective(900, "nccl", 64)]
    rows += [pair("conccl", 1700.0, "dma"), pair("serial", 1800.0, "nccl", alone=800.0)]
    known = parse_isolated(file_of(*rows), "made up")
    able = [named(name) for name in OF_LIBRARY]
    names = {}
    for asked, us in ((Gemm(8192, 16384, 8192), 2000.0), (Gemm(64, 57344, 8192), 300.0)):
        bound = known.bound(asked, us)[0]
        names[bound] = {
            name.split()[0] for name in expected_of(decide(dataclasses.replace(MOVE, gemm=asked), us, able, known))
        }
    assert names[Bound.COMPUTE] - names[Bound.MEMORY] == {"c3_rp", "c3_sp_rp"}
    assert "conccl_rp" not in names[Bound.MEMORY] and "conccl" in names[Bound.MEMORY]


@pytest.mark.parametrize("text", ["", "[]", '{"study": "c3", "rows": []}', '{"study": "isolated", "rows": [{}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c3.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"value='.*c3.json'"):
        isolated_times(path, "cpu", 2)


def test_pairs_that_say_nothing_are_left_out() -> None:
    """A collective of 3% of the GEMM, and one that seems to hide more than itself."""
    short = (pair("serial", 1030.0, "dma", alone=30.0), pair("conccl", 970.0, "dma"))
    able = [named(name) for name in ("serial", "conccl")]
    known = parse_isolated(file_of(gemm(1000.0), collective(800.0, "dma"), *short), "made up")
    with pytest.raises(ValueError, match="decide: pairs"):
        decide(MOVE, 1000.0, able, known)
    more = (pair("serial", 1300.0, "dma", alone=300.0), pair("conccl", 950.0, "dma"))
    known = parse_isolated(file_of(gemm(1000.0), collective(800.0, "dma"), *more), "made up")
    found = decide(MOVE, 1000.0, able, known)
    assert next(iter(expected_of(found).items())) == ("conccl", 1000.0), "nothing takes less than the longer"


def test_what_differs_from_pair_to_pair_counts_for_its_least() -> None:
    """The device lets a kernel in or not: a strategy that leaves it to that is taken for what it hid at the least."""

    def known(second_us: float) -> Isolated:
        rows = [gemm(1000.0), collective(800.0, "nccl"), collective(800.0, "dma")]
        for one, together in ((8192, 1050.0), (4096, second_us)):
            rows += [pair("serial", 1800.0, "nccl", alone=800.0, rows=one), pair("c3_sp", together, "nccl", rows=one)]
            rows += [pair("serial", 1800.0, "dma", alone=800.0, rows=one), pair("conccl", 1200.0, "dma", rows=one)]
        return parse_isolated(file_of(*rows), "made up")

    able = [named(name) for name in ("serial", "c3_sp", "conccl")]
    steady, drawn = (decide(MOVE, 1000.0, able, known(second)) for second in (1070.0, 1790.0))
    assert str(steady.candidate) == "c3_sp"
    assert str(drawn.candidate) == "conccl" and round(expected_of(drawn)["c3_sp"]) == 1790


def test_what_adds_is_judged_by_what_adds() -> None:
    """Of a collective that no pair has, the pairs that say most are those of one that reduces, too."""
    kinds = ("all_gather", "reduce_scatter", "all_to_all")
    rows = [gemm(1000.0), *(collective(800.0, "dma", kind=kind) for kind in kinds)]
    for kind, together in (("all_gather", 1100.0), ("all_reduce", 1600.0)):
        rows += [pair("serial", 1800.0, "dma", alone=800.0, kind=kind), pair("conccl", together, "dma", kind=kind)]
    known = parse_isolated(file_of(*rows), "made up")
    able = [named(name) for name in ("serial", "conccl")]
    for kind, expected in ((Kind.REDUCE_SCATTER, 1600), (Kind.ALL_TO_ALL, 1100)):
        choice = decide(Workload(GEMM, kind, SIZE), 1000.0, able, known)
        assert round(expected_of(choice)["conccl"]) == expected
