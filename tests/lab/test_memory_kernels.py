"""Computations that read a lot, and the table of pairs by class."""

from __future__ import annotations

import math

import pytest
import torch
from click.testing import CliRunner

from sidelane.cli.tool import main
from sidelane_lab.cli.c3 import C3Options, OccupancyOptions
from sidelane_lab.machines.load import named
from sidelane_lab.model.pair_classes import pairs_by_class
from sidelane_lab.pairs.pair import BAG_READS, GemmRun
from sidelane_lab.pairs.workload import CPU_GEMM_BYTES, MEMORY_KERNELS, parse_workload
from sidelane_lab.studies.c3.prediction import workload_of
from sidelane_lab.studies.c3.rows import C3Row, c3_tables


@pytest.mark.parametrize("tag", sorted(MEMORY_KERNELS))
def test_a_kernel_runs_and_a_wrong_result_is_noticed(tag: str) -> None:
    workload = parse_workload(f"{tag}_1G").scaled_for_cpu()
    assert workload.gemm.nbytes <= 2 * CPU_GEMM_BYTES and workload.gemm.name.startswith(f"{tag}/")
    gemm = workload.gemm.scaled(4)
    run = GemmRun(gemm, torch.device("cpu"))
    run.fill(7)
    assert run.c.isnan().all() and "differs" in (run.error() or "")
    run.run()
    assert run.error() is None
    if tag == "bag":
        assert len(run.b) == gemm.m * gemm.k // BAG_READS
        expected = run.b[run.a[3]].sum(0)
    elif tag == "add":
        expected = run.a[3] + run.b[3]
    else:
        keys, values = run.b[:, 3, 0]
        expected = (run.a[3, 0] @ keys.T / math.sqrt(gemm.n)).softmax(-1)[0] @ values
    torch.testing.assert_close(run.c[3], expected)


def test_rows_of_kernels_are_read_back_by_their_names() -> None:
    for text in ("bag_1G", "attend_512M", "cb1_1G", "64x57344x8192_64M"):
        workload = parse_workload(text)
        row = C3Row(**workload.columns, c3_class="", strategy="", chosen="", **dict.fromkeys(FIGURES), note="x")  # type: ignore[arg-type]
        assert workload_of(row) == workload


FIGURES = (
    *("gemm_us", "comm_us", "best_comm_us", "time_us", "speedup", "ideal", "percent_of_ideal"),
    "percent_of_ideal_nccl",
)


def test_pairs_are_summed_up_by_class_and_bound() -> None:
    def row(bound: str, c3_class: str, strategy: str, percent: float | None, units: int = 0) -> C3Row:
        columns = parse_workload("cb1_1G").columns
        figures = dict.fromkeys(FIGURES) | {"percent_of_ideal": percent}
        return C3Row(
            **columns, c3_class=c3_class, strategy=strategy, chosen="", note="x", **figures, units=units, bound=bound
        )

    rows = [row("memory", "G-long", "conccl", 90.0), row("memory", "G-long", "conccl", 70.0)]
    assert len(c3_tables(rows)) == 1, "one class needs no summary"
    rows += [row("memory", "C-long", "conccl_rp", 95.0, 8), row("memory", "C-long", "conccl_rp", 85.0, 16)]
    rows.append(row("compute", "C-long", "conccl", None))
    table = c3_tables(rows)[-1]
    assert [line.cells for line in table.lines] == [
        ("memory-bound, G-long", "copy_engines", "2", "0", "80", "70"),
        ("memory-bound, C-long", "copy_engines_partition", "2", "8, 16", "90", "85"),
    ]


def test_the_command_takes_pairs_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[C3Options] = []
    monkeypatch.setattr("sidelane_lab.cli.c3.run", asked.append)
    found = CliRunner().invoke(main, ["c3", "--pairs-by-class", "h200x2"])
    assert found.exit_code == 0, found.output
    pairs = pairs_by_class(named("h200x2"))
    assert asked[0].workloads == tuple(pair.name for pair in pairs)
    assert "64x57344x8192_154M: GC-equal, memory, " in found.output
    assert CliRunner().invoke(main, ["c3", "--pairs-by-class", "nothing"]).exit_code == 2
    with pytest.raises(ValueError, match="allowed=GEMMs"):
        OccupancyOptions(workloads=("bag_1G",))
