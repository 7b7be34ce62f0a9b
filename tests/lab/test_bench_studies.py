"""Both studies from end to end on CPU ranks, and what they make of implementations that are wrong or refuse."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forgetful import Forgetful
from ranks import RankPool

from interpreter import Interpreter
from sidelane.c3.strategies import Mover, Order, Strategy, named, strategies
from sidelane.program.builders import variants
from sidelane.program.collective import Kind
from sidelane_lab.baselines.baselines_cpu import Gloo
from sidelane_lab.baselines.candidate import ReadyCall, Tensors, candidates_of
from sidelane_lab.baselines.reference import Case
from sidelane_lab.baselines.roster import Roster
from sidelane_lab.harness import running
from sidelane_lab.harness.launch import RankFailedError
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.running import StudyFollower, merged
from sidelane_lab.harness.study import Results, read
from sidelane_lab.pairs.workload import implementation_of, parse_workload
from sidelane_lab.studies import collectives as collective_study
from sidelane_lab.studies.c3.bench import is_done, rows_not_run, too_large
from sidelane_lab.studies.c3.comparison import Instruments, run_workload
from sidelane_lab.studies.c3.heuristics import sweeps_of
from sidelane_lab.studies.c3.rows import C3Row
from sidelane_lab.studies.c3.study import C3Options, key_of_row
from sidelane_lab.studies.collectives import (
    CollectiveOptions,
    CollectiveRow,
    absent_rows,
)

CPU = torch.device("cpu")
QUICK = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 1, "timeout_s": 100.0}


class Named(Forgetful):
    name = "nccl_ce"


class Refusing(Gloo):
    """Raises on one rank, before it communicates."""

    name = "dma_left"

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        if case.rank == 1:
            raise RuntimeError("no such buffer")
        return lambda: None


def roster_of(group: dist.ProcessGroup, *implementations: Gloo) -> Roster:
    roster = Roster(
        Meter(CPU, group=group), {implementation.name: implementation for implementation in implementations}
    )
    roster.reserve(1 << 16, 1 << 16)
    return roster


def outcome_of_a_pair(group: dist.ProcessGroup) -> dict[str, Any]:
    torch.set_num_threads(1)
    workload = parse_workload("32x32x32_3K", Kind.ALL_GATHER, "float32")
    roster = roster_of(group, Gloo(group), Named(group), Refusing(group))
    case = Case(
        workload.collective, workload.nbytes, torch.float32, dist.get_rank(group), dist.get_world_size(group), CPU
    )
    runs = [
        ReadyCall(candidate, case, implementation)
        for implementation in roster.implementations.values()
        for candidate in candidates_of(implementation, case.kind)
        if not candidate.in_place or implementation.name == "gloo"
    ]
    wanted = (
        *map(named, ("serial", "c3_base", "c3_sp", "priority", "c3_rp", "conccl")),
        Strategy(
            name="urgent", code="urgent", order=Order.COLLECTIVE_FIRST, mover=Mover.LIBRARY, priority=1, recipe=""
        ),
        Strategy(name="forgetful", code="forgetful", order=Order.COLLECTIVE_FIRST, mover=Mover.LIBRARY_DMA, recipe=""),
        Strategy(name="refusing", code="refusing", order=Order.GEMM_FIRST, mover=Mover.DMA_LEFT, recipe=""),
    )
    instruments = Instruments(roster.meter, warmup=0, repeats=1)
    outcome = run_workload(
        workload, runs, instruments, device=CPU, strategies=wanted, unavailable={"dma": "no engines"}
    )
    return {row.strategy: row for row in outcome.rows}


def test_every_strategy_of_a_pair_is_checked(pool: RankPool) -> None:
    results = pool.run(outcome_of_a_pair, 3)
    for rows in results:
        ran = ("serial", "c3_base", "c3_sp", "priority", "urgent")
        assert list(rows) == [*ran[:4], "c3_rp", "conccl", "urgent", "forgetful", "refusing", "auto"]
        for name in ran:
            row = rows[name]
            assert row.correct is True
            assert row.time_us > 0
            assert row.ideal == pytest.approx(results[0][name].ideal)  # all ranks judge the same times
        assert rows["c3_rp"].correct is None and "green contexts" in rows["c3_rp"].note
        assert rows["conccl"].correct is None
        assert rows["conccl"].note == "not available: no engines"
        assert rows["forgetful"].correct is False
        assert rows["forgetful"].time_us is None
        assert "output bytes are wrong" in rows["forgetful"].note
        assert rows["refusing"].correct is None
        assert "no such buffer" in rows["refusing"].note
        assert rows["auto"].chosen in ran
        assert rows["auto"].time_us == rows[rows["auto"].chosen].time_us


class WrongGemm:
    """Counts on the order of fill, run, error; the product is spoilt behind the GEMM's back."""

    def __init__(self, run: ReadyCall, spoil: Callable[[], None]) -> None:
        self.implementation, self.in_place, self.label = run.implementation, run.in_place, run.label
        self.fill, self.error = run.fill, run.error
        self._run, self._spoil = run, spoil

    def start(self) -> Callable[[], None]:
        wait = self._run.start()

        def end() -> None:
            wait()
            self._spoil()

        return end


def outcome_with_a_spoilt_gemm(group: dist.ProcessGroup) -> list[Any]:
    from sidelane_lab.pairs.pair import GemmRun

    gemms: list[GemmRun] = []
    make = GemmRun.__init__

    def remember(self: GemmRun, *args: Any) -> None:
        make(self, *args)
        gemms.append(self)

    GemmRun.__init__ = remember  # type: ignore[method-assign]
    try:
        workload = parse_workload("32x32x32_1K", Kind.ALL_GATHER, "float32")
        roster = roster_of(group, Gloo(group))
        case = Case(workload.collective, workload.nbytes, torch.float32, dist.get_rank(group), 2, CPU)
        run = ReadyCall(candidates_of(Gloo(group), case.kind)[0], case, roster.implementations["gloo"])
        spoilt = WrongGemm(run, lambda: gemms[0].c[3].fill_(0.5))
        instruments = Instruments(roster.meter, warmup=0, repeats=1)
        outcome = run_workload(workload, [spoilt], instruments, device=CPU)
    finally:
        GemmRun.__init__ = make  # type: ignore[method-assign]
    return [(row.strategy, (row.correct, row.note)) for row in outcome.rows]


def test_a_collective_that_spoils_the_gemm_is_wrong(pool: RankPool) -> None:
    # In c3_sp the collective ends behind the GEMM for sure; in serial too.
    found = dict(pool.run(outcome_with_a_spoilt_gemm, 2)[0])
    for correct, note in (found["serial"], found["c3_sp"]):
        assert correct is False and "GEMM" in note


def test_which_calls_are_measured() -> None:
    class Engines:
        name = "dma"
        launches = ("eager", "graph")

        def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
            return variants(kind)

    def wanted(nbytes: int, kind: Kind = Kind.ALL_GATHER, **others: Any) -> set[tuple[str, bool, str]]:
        case = Case(kind, nbytes, torch.bfloat16, 0, 2, CPU)
        found = collective_study.wanted_candidates(Engines(), case, CollectiveOptions(**others))
        return {(c.variant, c.in_place, c.launch) for c in found}

    assert wanted(1 << 20) == wanted(2 << 20)
    assert wanted(1 << 20, variants=("b2b",), launches=("graph",), places=("in",)) == {("b2b", True, "graph")}
    assert {in_place for _, in_place, _ in wanted(64, places=("out",))} == {False}
    with pytest.raises(ValueError, match="places"):
        CollectiveOptions(places=("left",))


def test_pairs_leave_traces(tmp_path: Path) -> None:
    options = C3Options(
        **QUICK, workloads=("64x64x64_30K",), collectives=(Kind.ALL_GATHER,), strategies=("serial", "conccl"),
        timeline=tmp_path / "traces", report=tmp_path / "report", command="test", third=True,
    )  # fmt: skip
    results = running.run(options)
    assert results is not None
    traces = tmp_path / "traces"
    (sweep,) = sweeps_of(rows_there(results), workgroups=1)
    assert sweep.workload.name == "64x64x64_30K all_gather" and not sweep.why_not
    assert set(sweep.orders_us) == set(itertools.permutations(("gemm", "small gemm", "all_gather")))
    assert [kernel.workgroups for kernel in sweep.others] == [1, 1, 1] and all(
        us > 0 for us in sweep.orders_us.values()
    )
    serial, conccl = (traces / f"64x64x64_30k-all_gather-{name}.trace.json" for name in ("serial", "conccl"))
    assert len(list(traces.glob("*.png"))) == 2
    page = (tmp_path / "report" / "report.md").read_text()
    for name in ("serial", "conccl"):
        assert f"](64x64x64_30k-all_gather-{name}.png)" in page, "in the page, too"
        assert (tmp_path / "report" / f"64x64x64_30k-all_gather-{name}.svg").exists()
    assert "under serial, on every rank" in (tmp_path / "report" / "index.html").read_text()
    for path in (serial, conccl):
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
        assert len(events) == 2 * results.ranks and all(event["dur"] > 0 and event["ts"] >= 0 for event in events)
    product, collective = [event for event in json.loads(serial.read_text())["traceEvents"] if event["ph"] == "X"][:2]
    assert (product["name"], collective["name"]) == ("GEMM 64x64x64", "all_gather")
    assert collective["ts"] >= product["ts"] + product["dur"] - 0.001


def test_c3_from_end_to_end(tmp_path: Path) -> None:
    options = C3Options(
        **{**QUICK, "ranks": 3}, workloads=("64x64x64_30K", "96x64x32_1K"), json=tmp_path / "c3.json", command="test"
    )
    results = running.run(options)
    assert results is not None
    content = json.loads((tmp_path / "c3.json").read_text())
    assert (content["study"], content["gpus"], content["ranks"]) == ("c3", 0, 3)
    rows = content["rows"]
    pairs = {(row["gemm"], row["collective"], row["bytes"]) for row in rows}
    assert pairs == {
        (gemm, kind, nbytes)
        for gemm, nbytes in (("64x64x64", 30720), ("96x64x32", 1056))
        for kind in ("all_gather", "all_to_all")
    }
    here, exchanges = {"gloo", "dma"}, {"conccl_left"}
    run = [one.code for one in strategies() if implementation_of(one, here) and one.partition is None]
    assert run == ["serial", "c3_base", "c3_sp", "priority", "conccl"]
    for row in rows:
        is_exchange = row["collective"] == "all_to_all"
        assert row["dtype"] == "float32"
        assert row["class"] in ("G-long", "C-long", "GC-equal")
        if row["strategy"] in (*run, "auto") or (is_exchange and row["strategy"] in exchanges):
            assert row["correct"], row
            assert row["ideal"] > 1
        else:
            assert (row["correct"], row["time_us"]) == (None, None)
            others = ", dma_left" if is_exchange else ""
            reason = f"among what runs here (gloo, dma{others})"
            if named(row["strategy"]).partition is not None:
                reason = "green contexts"
            elif row["strategy"] in exchanges:
                reason = "only an all-to-all copies inside a GPU"
            assert reason in row["note"], row
    for pair in pairs:
        mine = [row for row in rows if (row["gemm"], row["collective"], row["bytes"]) == pair]
        assert [row["strategy"] for row in mine] == [*(one.code for one in strategies()), "auto"]
        assert mine[-1]["chosen"] in run


@pytest.mark.long
def test_a_study_goes_on_where_it_stopped(tmp_path: Path) -> None:
    pairs = ("64x64x64_30K", "32x32x32_1K")
    options = C3Options(
        **QUICK, workloads=pairs, collectives=(Kind.ALL_GATHER,), strategies=("serial", "conccl"), budget_s=1e-9,
        json=tmp_path / "c3.json", resume=True,
    )  # fmt: skip
    first = rows_there(running.run(options))
    assert [(row.gemm, row.strategy) for row in first] == [("64x64x64", one) for one in ("serial", "conccl", "auto")]
    results = running.run(options)
    assert results == read(tmp_path / "c3.json")
    second = rows_there(results)
    assert second[: len(first)] == first, "kept"
    assert [(row.gemm, row.strategy) for row in second[3:]] == [
        ("32x32x32", one) for one in ("serial", "conccl", "auto")
    ]
    assert all(row.time_us for row in second)
    with pytest.raises(ValueError, match="resume"):
        dataclasses.replace(options, json=None)
    with pytest.raises(ValueError, match="measured elsewhere"):
        running.run(dataclasses.replace(options, ranks=3))


def rows_there(results: Results | None) -> list[C3Row]:
    assert results is not None
    return [row for row in results.rows if isinstance(row, C3Row)]


def test_rows_of_two_runs() -> None:
    old, new = (rows_not_run(parse_workload("cb1_1M"), why, ("serial", "conccl")) for why in ("old", "new"))
    more = rows_not_run(parse_workload("cb2_1M"), "old", ("serial",))
    joined = merged(key_of_row, [*old, *more, new[1], *rows_not_run(parse_workload("cb1_1M"), "new", ("c3_sp",))])
    assert [(row.gemm, row.strategy, row.note[-3:]) for row in joined] == [
        ("cb1", "serial", "old"), ("cb1", "conccl", "new"), ("cb2", "serial", "old"), ("cb1", "c3_sp", "new"),
    ]  # fmt: skip
    done = {key_of_row(row) for row in joined}
    assert is_done(parse_workload("cb1_1M"), ("serial", "c3_sp"), done)
    assert not is_done(parse_workload("cb1_1M"), (), done), "all strategies are asked for"
    assert not is_done(parse_workload("cb2_1M"), ("serial", "conccl"), done)


def test_a_pair_that_no_memory_holds_says_so() -> None:
    workload = parse_workload("mb2_26.5G")
    case = Case(Kind.ALL_GATHER, workload.nbytes, torch.bfloat16, 0, 2, torch.device("cpu"))
    assert too_large(workload, case, 141e9) is None and too_large(workload, case, None) is None
    assert "GB at least, and the device has 40" in str(too_large(workload, case, 40e9))
    rows = rows_not_run(workload, "no room")
    assert [row.strategy for row in rows] == [one.code for one in strategies()]


def test_tags_are_scaled_down_on_cpus() -> None:
    options = C3Options(**QUICK, workloads=("cb1_8M",), collectives=(Kind.ALL_TO_ALL,))
    results = running.run(options)
    assert results is not None
    assert {(row.gemm, row.m, row.n, row.k, row.bytes) for row in results.rows} == {
        ("cb1/8", 1024, 1024, 1024, 1 << 20)
    }


def test_an_implementation_that_does_not_exist_here() -> None:
    with pytest.raises(ValueError, match=r"not known on CPU ranks \(value=nccl, allowed=gloo, dma, auto\)"):
        running.run(CollectiveOptions(**QUICK, sizes=(1024,), implementations=("nccl",)))


def test_a_study_that_would_have_no_rows() -> None:
    options = CollectiveOptions(
        **QUICK, collectives=(Kind.BROADCAST,), sizes=(1024,), implementations=("dma",), places=("out",)
    )
    with pytest.raises(ValueError, match="nothing .* can run here .collectives=broadcast, implementations=dma, places"):
        running.run(options)


def absent(group: dist.ProcessGroup) -> list[CollectiveRow]:
    roster = Roster(Meter(CPU, group=group))

    def make() -> Gloo:
        if dist.get_rank(group) == 0:
            raise OSError("no library")
        return Gloo(group)

    roster.add("nccl_ce", make)
    assert not roster.implementations
    case = Case(Kind.ALL_GATHER, 64, torch.uint8, dist.get_rank(group), 2, CPU)
    return absent_rows(roster, case)


def test_an_implementation_that_one_rank_cannot_make_is_a_row_on_all(pool: RankPool) -> None:
    for (row,) in pool.run(absent, 2):
        assert (row.implementation, row.correct, row.time_us) == ("nccl_ce", None, None)
        assert row.note == "takes no part: rank 0: OSError: no library"


@pytest.mark.parametrize(
    "failure", [RankFailedError("rank 1 hangs", 1), KeyboardInterrupt("hangs"), LookupError("hangs")]
)
def test_rows_until_a_failure_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    row = CollectiveRow("all_gather", 64, "uint8", False, "eager", "gloo", "", False, 1.0, 1.0, 1.0, 0.1, None, True)

    def half_way(
        function: Any, world_size: int, *asked: Any, progress: StudyFollower[CollectiveRow], **others: Any
    ) -> None:
        progress(json.dumps({"step": 0, "of": 2, "text": "all_gather"}))
        progress(json.dumps({"row": row.to_dict()}))
        raise failure

    monkeypatch.setattr("sidelane_lab.harness.running.run_ranks", half_way)
    with pytest.raises(type(failure), match="hangs"):
        running.run(CollectiveOptions(**QUICK, json=tmp_path / "collectives.json"))
    assert read(tmp_path / "collectives.json").rows == (row,)


def test_what_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr("sidelane_lab.harness.running.run_ranks", never)
    (tmp_path / "file").touch()
    for name, value in (("json", tmp_path / "file" / "x.json"), ("json", tmp_path), ("report", tmp_path / "file")):
        with pytest.raises(ValueError, match=rf"^--{name}: {value}.*\(allowed="):
            running.run(CollectiveOptions(**QUICK, **{name: value}))


def test_a_row_of_one_variant_loads_few_modules_of_the_laboratory(interpreter: Interpreter, tmp_path: Path) -> None:
    script = """
import sys
from sidelane.cli import main
try: main("collective --device cpu --ranks 2 --collective all_gather --variants b2b --implementations dma"
          " --max-bytes 1K --iterations 1 --warmup 0".split())
except SystemExit as ended: assert not ended.code
names = [name for name in sys.modules if name.partition(".")[0] == "sidelane_lab"]
assert len(names) <= 24, names
"""
    interpreter.run(script, tmp_path)
