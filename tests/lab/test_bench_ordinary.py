"""The study of ordinary memory: from end to end on CPU ranks."""

from __future__ import annotations

import itertools
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
from sidelane_lab.pairs.beside import RoundTimes
from sidelane_lab.pairs.workload import parse_workload
from sidelane_lab.studies.memory_ways import make_ways
from sidelane_lab.studies.ordinary import OrdinaryOptions, OrdinaryRow, Parts

QUICK: dict[str, Any] = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 1, "timeout_s": 100.0}
WAYS = [("auto", "symmetric"), ("auto", "staged"), ("gloo", "")]
SMALL = "256x256x256_256K"
CPU = torch.device("cpu")


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
