"""Pairs of every class: their bytes, what limits their GEMMs, and the one definition of that."""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from sidelane_lab.machines.load import named
from sidelane_lab.model.gemm import bound_of, gemm_us, is_memory_bound
from sidelane_lab.model.heuristic import isolated_of_machine
from sidelane_lab.model.pair_classes import COMPUTATIONS, KINDS, class_of, pairs_by_class
from sidelane_lab.model.strategies import predict
from sidelane_lab.pairs.heuristics import units_to_spare
from sidelane_lab.pairs.workload import MEMORY_KERNELS, TABLE_I, Bound, C3Class, ComputeKind, Workload, parse_gemm

MI300X, H200 = named("mi300x8"), named("h200x2")


@pytest.mark.parametrize("name", ["h100x2", "h200x2", "mi300x8"])
def test_every_class_and_bound_has_four_pairs_or_more(name: str) -> None:
    machine, cells = named(name), collections.Counter[tuple[Bound, C3Class]]()
    for pair in pairs_by_class(machine):
        for kind in KINDS:
            assert class_of(machine, Workload(pair.gemm, kind, pair.nbytes)) is pair.c3_class, pair
            cells[pair.bound, pair.c3_class] += 1
        assert bound_of(machine, pair.gemm) is pair.bound
    assert len(cells) == 6 and min(cells.values()) >= 4 and cells.total() >= 24


def test_what_has_no_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="two GPUs or more"):
        pairs_by_class(dataclasses.replace(H200, gpus=1))
    with pytest.raises(ValueError, match="nodes"):
        pairs_by_class(named("h100x8x2"))


@pytest.mark.parametrize("name", ["mi300x8", "h200x2", "h100x2"])
def test_the_loss_of_units_agrees_with_the_bytes_of_a_gemm(name: str) -> None:
    machine = named(name)
    for gemm in map(parse_gemm, (*TABLE_I, *COMPUTATIONS)):
        assert (bound_of(machine, gemm) is Bound.MEMORY) == is_memory_bound(machine, gemm), gemm.name


def test_heuristic_and_strategies_agree_on_mb2_of_the_described_mi300x() -> None:
    known = isolated_of_machine(MI300X)
    assert known.bound(parse_gemm("mb2")) == (Bound.MEMORY, "as predicted of the described machine")
    assert units_to_spare(known, parse_gemm("mb2")).candidate == 8
    pair = Workload(parse_gemm("mb2"), KINDS[0], 3 << 30)
    assert predict(MI300X, pair, "conccl_rp").units == 8
    assert predict(MI300X, dataclasses.replace(pair, gemm=parse_gemm("cb1")), "conccl_rp").units == 0
    assert predict(MI300X, pair, "conccl_rp", units=64).units == 64


def test_memory_kernels_take_the_time_of_their_bytes() -> None:
    for tag in MEMORY_KERNELS:
        kernel = parse_gemm(tag)
        assert kernel.operation is ComputeKind(tag) and bound_of(MI300X, kernel) is Bound.MEMORY
        for machine in (H200, MI300X) if tag != "bag" else (MI300X,):
            least_us = kernel.nbytes / (float(machine.gpu.memory_gbps) * 1e3)
            assert least_us <= gemm_us(machine, kernel) <= 1.3 * least_us
    assert parse_gemm("add").nbytes == 3 * 65536 * 8192 * 2
    assert parse_gemm("bag").nbytes == (65536 * 64 + 65536) * 256 * 2


def test_embedding_bags_take_the_time_of_their_rows_where_it_is_known() -> None:
    """By rows that ``results/h200x1/fused.json`` timed, and not by bytes, as ``c3-classes.json`` has them."""
    rows = json.loads((Path(__file__).parents[2] / "results" / "h200x2" / "c3-classes.json").read_text())["rows"]
    bags = {row["gemm_us"] for row in rows if row["gemm"] == "bag"}
    assert gemm_us(H200, parse_gemm("bag")) == pytest.approx(statistics.median(bags), rel=0.03)
    beside = {
        row["collective"]: row["sweep"]
        for row in rows
        if row["gemm"] == "bag"
        and row["strategy"] == "conccl_rp"
        and row["bytes"] == min(r["bytes"] for r in rows if r["gemm"] == "bag")
    }
    for sweep in beside.values():  # copy engines whose collective ends long before the bags
        for units, time_us in (map(float, part.split()) for part in sweep.split(", ")):
            assert gemm_us(H200, parse_gemm("bag"), 132 - int(units)) == pytest.approx(time_us, rel=0.11), units
    assert len(beside) == 2 and bound_of(H200, parse_gemm("bag")) is Bound.COMPUTE, "its units limit it"
    unknown = H200.with_value("fused.bag_row_us", 0.0).with_value("fused.bag_us", 0.0)
    assert bound_of(unknown, parse_gemm("bag")) is Bound.MEMORY
    assert gemm_us(unknown, parse_gemm("bag")) < gemm_us(H200, parse_gemm("bag")) / 3
