"""``sidelane tune --study c3``: on CPU ranks from end to end, and a file that grows and is gone on with."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sidelane.c3.strategies import named
from sidelane.program.collective import Kind
from sidelane_lab.harness import running
from sidelane_lab.harness.launch import Rank, RankFailedError
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.study import read, write
from sidelane_lab.pairs.heuristics import units_for
from sidelane_lab.pairs.isolated import isolated_file, isolated_of, isolated_times
from sidelane_lab.pairs.pair import GEMM
from sidelane_lab.pairs.sweep import HeuristicRow
from sidelane_lab.pairs.workload import Bound, Workload, gemm_of, parse_workload
from sidelane_lab.papers.conccl_figures import counted_bandwidth
from sidelane_lab.papers.files import ResultFile
from sidelane_lab.studies.c3.bench import is_bound_by_memory
from sidelane_lab.studies.c3.comparison import judge
from sidelane_lab.studies.c3.heuristics import HeuristicsOptions
from sidelane_lab.studies.tune import counters
from sidelane_lab.studies.tune.isolated import IsolatedOptions, batches_of, main
from sidelane_lab.studies.tune.isolated_rows import IsolatedRow, key_of

OPTIONS: dict[str, Any] = {"device": "cpu", "ranks": 2, "quiet": True, "command": "test"}


def row(**changed: Any) -> IsolatedRow:
    values = {
        "what": "gemm", "gemm": "cb1", "m": 8192, "n": 8192, "k": 8192, "dtype": "float32", "collective": "",
        "bytes": 0, "implementation": "", "variant": "", "means": "split", "units": 0, "device_units": 132,
        "time_us": 1400.0, "alone_us": None, "gbps": None,
    }  # fmt: skip
    return IsolatedRow(**(values | changed))


def gather(**changed: Any) -> IsolatedRow:
    alike = {"what": "collective", "gemm": "", "m": 0, "n": 0, "k": 0, "collective": "all_gather", "bytes": 896 << 20}
    return row(**{**alike, "implementation": "nccl", "means": "", "time_us": 2200.0, **changed})


MEMORY = row(what="memory", gemm="", m=0, n=0, k=0, means="", bytes=1 << 30, time_us=500.0, gbps=4000.0)
ROWS = (
    MEMORY,
    row(),
    row(units=8, time_us=1530.0),
    row(units=64, time_us=2700.0),
    row(means="grid", time_us=1800.0),
    row(means="split", units=32, time_us=None, note="torch has none"),
    gather(),
    gather(variant="window", time_us=2000.0),
    gather(variant="window", means="split", units=8, time_us=4400.0),
    gather(variant="window", means="split", units=64, time_us=2100.0),
    row(what="beside", means="gemm", implementation="dma", bytes=1 << 28, time_us=1500.0, alone_us=1400.0),
)


def test_curves_and_choices_from_rows() -> None:
    known = isolated_of(ROWS)
    assert (known.memory_gbps, round(known.tflops)) == (4000.0, 785)
    assert [(curve.means, len(curve.times_us)) for curve in known.gemms] == [("split", 3), ("grid", 1)]
    (curve,) = known.collectives
    assert curve.times_us == {0: 2000.0, 8: 4400.0, 64: 2100.0}, "of two variants the fastest"
    assert known.bound(known.gemms[0].gemm)[0] is Bound.COMPUTE
    assert units_for(known, parse_workload("cb1_896M", dtype="float32")).candidate == (64,)
    titles = [table.title for table in tables_of(results_of(ROWS))]
    assert [title.partition(",")[0].partition(":")[0] for title in titles] == [
        "GEMMs by units taken", "collectives by units given", "a GEMM beside DMA traffic", "classes",
        "partition heuristic",
    ]  # fmt: skip
    text = " ".join(note for table in tables_of(results_of(ROWS)) for note in table.notes)
    assert "64 units: GEMM 1400 x 1.93, collective 2000 x 1.05" in text and "torch has none" in text
    assert [gemm_of(row(gemm="cb1/8", **size)).name for size in ({"m": 1024, "n": 1024, "k": 1024}, {})] == [
        "cb1/8",
        "8192x8192x8192",
    ]
    with pytest.raises(ValueError, match="none of the memory"):
        isolated_of(ROWS[1:])
    assert len(tables_of(results_of(ROWS[1:]))) == 3


def results_of(rows: tuple[IsolatedRow, ...]) -> Any:
    from sidelane_lab.harness.study import collect

    return collect("isolated", rows, device_type="cpu", ranks=2, command="test")


def test_batches_of_which_the_file_has_rows_are_left_out() -> None:
    options = IsolatedOptions(**OPTIONS, gemms=("8x8x8",), sizes=(1024,), collectives=(Kind.ALL_GATHER,))
    rank = Rank(0, 2, torch.device("cuda"), print)
    batches = batches_of(rank, dataclasses.replace(options, dtype="bfloat16"))
    names = [str(batch) for batch in batches]
    assert names[:2] == ["memory 1073741824", "gemm 8x8x8 split"]
    assert "collective all_gather 1024" in names
    assert f"pair 8x8x8 all_gather {896 << 20}" in names, "as soon as it can be judged"
    assert names.index(f"pair 8x8x8 all_gather {896 << 20}") < names.index("collective all_gather 1024")
    assert names[-1] == "beside 8x8x8 268435456 dma"
    small = {"gemm": "8x8x8", "m": 8, "n": 8, "k": 8, "dtype": "bfloat16"}
    rows = [
        MEMORY,
        row(**small, means="threads"),
        gather(bytes=1024, variant="window"),
        row(**small, what="beside", means="gemm", implementation="host", bytes=1 << 28, alone_us=1.0),
    ]
    done = [str(batch) for batch in batches if batch.is_done([key_of(one) for one in rows])]
    assert done == [names[0], "gemm 8x8x8 threads", "collective all_gather 1024", "beside 8x8x8 268435456 host"]
    alone = batches_of(Rank(0, 1, torch.device("cuda"), print), options)
    assert not any(batch.collective or batch.means == "dma" for batch in alone), "what one rank cannot do"


def following(
    rows: tuple[IsolatedRow, ...], seen: list[Any], failure: BaseException | None = None
) -> Callable[..., bool]:
    def run_ranks(measure: Any, ranks: int, name: str, options: Any, *, progress: Any, **others: Any) -> int:
        seen.append(options.done)
        for one in rows:
            progress(json.dumps({"row": one.to_dict()}))
        if failure is not None:
            raise failure
        return len(rows)

    return run_ranks


def test_what_was_measured_is_kept_when_a_rank_fails_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, seen = IsolatedOptions(**OPTIONS, output=tmp_path / "c3.json"), []  # type: ignore[var-annotated]
    monkeypatch.setattr(running, "run_ranks", following(ROWS[:6], seen, RankFailedError("rank 1 hangs", 1)))
    with pytest.raises(RankFailedError):
        running.run(options)
    assert read(tmp_path / "c3.json").rows == ROWS[:6]
    newer = dataclasses.replace(ROWS[5], time_us=1450.0, note="")
    monkeypatch.setattr(running, "run_ranks", following((newer, *ROWS[6:]), seen))
    results = running.run(options)
    assert results is not None
    assert results.rows == (*ROWS[:5], newer, *ROWS[6:]) == read(tmp_path / "c3.json").rows
    write(tmp_path / "c3.json", dataclasses.replace(results, commit="older"))
    kept = running.run(options)
    assert kept and [one.commit for one in kept.rows] == ["older"] * 5 + [""] * 6 == [
        one.commit for one in read(tmp_path / "c3.json").rows
    ]
    # What has no time is tried again.
    assert seen[:2] == [frozenset(), frozenset(map(key_of, ROWS[:5]))]
    monkeypatch.setattr(running, "run_ranks", following(ROWS[:1], seen))
    running.run(dataclasses.replace(options, fresh=True))
    assert read(tmp_path / "c3.json").rows == ROWS[:1] and seen[-1] == frozenset()


@pytest.mark.long
def test_from_end_to_end_on_cpu_ranks(tmp_path: Path) -> None:
    options = IsolatedOptions(
        **OPTIONS, gemms=("64x48x32",), sizes=(3000,), collectives=(Kind.ALL_GATHER,), warmup=0, repeats=2,
        output=tmp_path / "c3.json", report=tmp_path / "report",
    )  # fmt: skip
    results = running.run(options)
    assert results is not None
    rows = [one for one in results.rows if isinstance(one, IsolatedRow)]
    timed = [one for one in rows if one.time_us is not None]
    assert {one.what for one in timed} == {"memory", "gemm", "collective", "beside", "pair"}
    assert {one.implementation for one in timed if one.what == "collective"} == {"gloo", "dma"}
    assert {one.bytes for one in timed if one.what == "collective"} == {3008}
    assert {(one.implementation, one.means) for one in timed if one.what == "beside"} == {
        ("copy", "gemm"), ("copy", "traffic"), ("dma", "gemm"), ("dma", "traffic"),
    }  # fmt: skip
    assert all(one.note for one in rows if one.time_us is None)
    assert {one.means for one in rows if one.what == "gemm"} == {"split", "threads"}
    known = isolated_of(rows)
    assert known.comm_us(parse_workload("64x48x32_3008")) > 0
    pairs = {pair.implementation: {name for name, _ in pair.times_us} for pair in known.pairs}
    assert pairs == {"gloo": {"c3_base", "c3_sp", "priority"}, "dma": {"conccl"}}
    assert all(pair.serial_us > 0 and pair.comm_us > 0 for pair in known.pairs)
    judged = running.run(
        HeuristicsOptions(
            **OPTIONS, workloads=("64x48x32_3008",), collectives=(Kind.ALL_GATHER,), warmup=0,
            repeats=2, isolated=tmp_path / "c3.json",
        )
    )  # fmt: skip
    assert judged is not None
    verdicts = {one.heuristic: one for one in judged.rows if isinstance(one, HeuristicRow)}
    assert verdicts["auto"].seen and verdicts["auto"].lost_percent is not None and verdicts["auto"].note
    assert verdicts["launch_order"].chosen in ("compute_first", "collective_first")
    assert verdicts["partition"].time_us is None and verdicts["partition"].note == "no partition was run"
    refused = {one.means: one.note for one in rows if one.what == "pair" and one.time_us is None}
    assert set(refused) == {"c3_rp", "c3_sp_rp", "conccl_rp", "conccl_sums"} and "green contexts" in refused["c3_rp"]


def test_the_heuristic_is_held_against_a_sweep(tmp_path: Path) -> None:
    known = isolated_of(ROWS)
    gemm = known.gemms[0].gemm
    workload = Workload(gemm, Kind.ALL_GATHER, 896 << 20)
    ways = [SimpleNamespace(implementation="nccl", label="nccl", in_place=False)]
    strategies = [named(name) for name in ("serial", "c3_rp", "conccl_rp")]
    times = {GEMM: [1400.0], "nccl": [2000.0], "serial: nccl": [3400.0]}
    times |= {f"partition: nccl, {units} units": [us] for units, us in ((8, 2750.0), (16, 2500.0), (64, 2600.0))}
    given = (ways, strategies, times, {}, {}, {"c3_rp": (8, 16, 64)})
    of_sweep = functools.partial(judge, workload, *given)
    notes = {row.strategy: row.note for row in of_sweep(known).rows}
    assert notes["c3_rp"].startswith("nccl; heuristic: 64 units, 4.0% behind the best (64 units: GEMM 1400 x 1.93")
    unknown = judge(dataclasses.replace(workload, collective=Kind.ALL_TO_ALL), *given, known).rows[1].note
    assert "no heuristic: allocate: no all_to_all was measured" in unknown
    assert notes["serial"] == "nccl" and "heuristic" not in notes["conccl_rp"]
    assert of_sweep().rows[1].note == "nccl" and of_sweep().rows[1].units == 16


def test_where_isolated_times_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert isolated_times(None, "cpu", 2) is None
    write(isolated_file("cpu", 2), results_of(ROWS))
    found = isolated_times(None, "cpu", 2)
    assert found == isolated_of(ROWS) == isolated_times(isolated_file("cpu", 2), "cpu", 2)
    with pytest.raises(ValueError, match="no such file"):
        isolated_times(tmp_path / "none.json", "cpu", 2)
    assert is_bound_by_memory(parse_workload("mb1_1M").gemm, None, "", 2)
    assert not is_bound_by_memory(found.gemms[0].gemm, found, "", 2)


NCU = """#!/bin/sh
printf '==PROF== Connected to process 1\\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\\n'
for kernel in 0 1; do
printf '"%s","gemm","dram__bytes_read.sum","byte","3,000,000"\\n' $kernel
printf '"%s","gemm","dram__bytes_write.sum","byte","1000000"\\n' $kernel
printf '"%s","gemm","lts__t_sectors.sum","sector","%s"\\n' $kernel $((1000 + 2000 * kernel))
printf '"%s","gemm","lts__t_sector_hit_rate.pct","%%","%s"\\n' $kernel $((40 + 40 * kernel))
printf '"%s","gemm","gpu__time_duration.sum","ns","1,000"\\n' $kernel
done
echo "$@" > "$0.asked"
"""


def test_bytes_are_counted_with_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    gemm, program = parse_workload("64x48x32_1M").gemm, tmp_path / "ncu"
    for asked in (lambda: counters.count(gemm, 5.0), lambda: main(IsolatedOptions(**OPTIONS, counters=True))):
        with pytest.raises(FileNotFoundError, match="must be in PATH"):
            asked()
    program.write_text(NCU)
    program.chmod(0o755)
    assert counters.count(gemm, 5.0) == {"time_us": 2.0, "moved_bytes": 8e6, "hit_percent": 70.0, "gbps": 4000.0}
    assert (tmp_path / "ncu.asked").read_text().endswith("sidelane_lab.studies.tune.counters 64x48x32 bfloat16\n")
    with pytest.raises(ValueError, match="must count a kernel, but said: ==ERROR== ERR_NVGPUCTRPERM"):
        counters.counted("==ERROR== ERR_NVGPUCTRPERM")
    counters.main("64x48x32", "float32")  # which ncu runs


def test_counted_bytes_decide_the_bound() -> None:
    counted = row(what="counters", means="", moved_bytes=7e9, hit_percent=81.0, gbps=2400.0)
    known = isolated_of((*ROWS, counted))
    gemm = known.gemms[0].gemm
    assert known.bound(gemm) == (
        Bound.MEMORY, "157 operations a byte by counters, 81% in the cache, 60% of the bandwidth; the machine 196",
    )  # fmt: skip
    idle = isolated_of((*ROWS, dataclasses.replace(counted, gbps=1900.0)))
    assert idle.bound(gemm)[0] is Bound.COMPUTE, "its bytes do not fill half of the bandwidth"
    assert isolated_of(ROWS).bound(gemm)[1] == "fewer units cost it 0.99 of their share"
    assert (known.bytes_of(gemm), isolated_of(ROWS).bytes_of(gemm)) == (7e9, gemm.nbytes)
    options = IsolatedOptions(**OPTIONS, gemms=("8x8x8", "bag"), counters=True)
    assert list(map(str, batches_of(Rank(0, 2, torch.device("cuda"), print), options))) == [
        "counters 8x8x8",
        "counters bag",
    ]
    file = ResultFile(Path(), "isolated", "h200x2", "", 1, (counted.to_dict(),))
    assert [(one.x, list(one.curves["counted"].values)) for one in counted_bandwidth(file)] == [(["cb1"], [50.0])]
