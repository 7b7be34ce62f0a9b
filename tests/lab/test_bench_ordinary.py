"""The study of ordinary memory: from end to end on CPU ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from forgetful import Forgetful
from ranks import RankPool

from sidelane import cli
from sidelane.program.collective import Kind
from sidelane_lab.baselines import baselines_cpu
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness import running
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.study import read
from sidelane_lab.pairs.beside import RoundTimes
from sidelane_lab.pairs.workload import parse_workload
from sidelane_lab.studies.ordinary.parts import Parts
from sidelane_lab.studies.ordinary.rows import OrdinaryRow
from sidelane_lab.studies.ordinary.study import OrdinaryOptions
from sidelane_lab.studies.ordinary.ways import make_ways

QUICK: dict[str, Any] = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 1, "timeout_s": 100.0}
WAYS = [("auto", "symmetric"), ("auto", "staged"), ("gloo", "")]
SMALL = "256x256x256_256K"
CPU = torch.device("cpu")


@pytest.mark.long
def test_from_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "ordinary.json"
    options = OrdinaryOptions(
        **QUICK, sizes=(1000,), pairs=(SMALL,), json=path, report=tmp_path / "report", command="test"
    )
    results = running.run(options)
    assert results is not None
    rows = [row for row in read(path).rows if isinstance(row, OrdinaryRow)]
    assert all(row.correct and row.time_us for row in rows), [row.note for row in rows if not row.correct]
    alone = [row for row in rows if not row.gemm]
    both = ("all_gather", "all_reduce")
    places = {kind: (False, True) if kind in both else (False,) for kind in (*both, "all_to_all", "reduce_scatter")}
    for kind, in_places in places.items():
        for in_place in in_places:
            ways = [(r.implementation, r.reach) for r in alone if (r.collective, r.in_place) == (kind, in_place)]
            # torch's all_reduce has no output of its own.
            assert ways == (WAYS[:2] if (kind, in_place) == ("all_reduce", False) else WAYS)
    assert {row.bytes for row in alone} == {1024 - 1024 % 32}
    pairs = [row for row in rows if row.gemm]
    assert [(r.collective, r.implementation, r.reach) for r in pairs] == [
        (kind, *way) for kind in ("all_gather", "all_to_all") for way in WAYS
    ]
    for row in pairs:
        assert (row.gemm, row.m, row.bus_gbps) == ("256x256x256", 256, None)
        assert row.gemm_us and row.best_comm_us and row.comm_us and row.speedup and row.ideal
    titles = [table.title for table in tables_of(results)]
    assert len(titles) == 6 + 2
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Collectives on ordinary memory" in page and page.count("<img") == 6
    assert {"reach", "gemm_us", "best_comm_us", "percent_of_ideal"} <= set(json.loads(path.read_text())["rows"][0])


def rows_of_a_wrong_library(group: dist.ProcessGroup) -> list[OrdinaryRow]:
    torch.set_num_threads(1)
    rank = Rank(dist.get_rank(group), dist.get_world_size(group), CPU, print)
    case = Case(Kind.ALL_GATHER, 4096, torch.float32, rank.rank, rank.world_size, rank.device)
    workload = parse_workload("64x64x64_4K", case.kind, "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines_cpu, "Gloo", Forgetful)
        meter = Meter(CPU, group=group)
        roster, ways = make_ways(rank, meter, 60.0, group)
        roster.reserve(case.output_bytes, case.input_bytes)
        parts = Parts(meter, ways, OrdinaryOptions(**{**QUICK, "repeats": 2}), itertools.count(1))
        rows = [*parts.alone(case), *parts.pair(workload, case, None)]
        roster.close()
    return rows


@pytest.mark.long
def test_what_is_wrong_has_no_time_and_spoils_nobody_elses(pool: RankPool) -> None:
    for rows in pool.run(rows_of_a_wrong_library, 2):
        for row in rows:
            if row.implementation == "gloo":
                assert (row.correct, row.time_us, row.speedup) == (False, None, None)
                assert "output bytes are wrong" in row.note
            else:
                assert row.correct and row.time_us


def test_the_ideal_goes_by_the_fastest_collective_of_all() -> None:
    columns = RoundTimes((100.0,) * 3, (50.0,) * 3, (80.0, 90.0, 70.0), (110.0, 100.0, 125.0)).columns()
    assert columns["comm_us"] == 80.0 and columns["best_comm_us"] == 50.0
    assert columns["ideal"] == 1.5
    assert columns["speedup"] == pytest.approx(150 / 110)
    assert columns["percent_of_ideal"] == pytest.approx(100 * (150 / 110 - 1) / 0.5)


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
