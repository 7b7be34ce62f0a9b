"""Partitions and shaped GEMMs on one GPU: which SMs run what, results, and the studies that need a single rank."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sidelane.c3.partitions import DevicePartitions
from sidelane.c3.strategies import named
from sidelane_lab.harness import running
from sidelane_lab.pairs.heuristics import units_to_spare
from sidelane_lab.pairs.isolated import isolated_of
from sidelane_lab.pairs.pair import orders_of, pair_streams
from sidelane_lab.pairs.workload import parse_workload
from sidelane_lab.shaping.shape import OPT1, OPT2, TUNED
from sidelane_lab.studies.c3.comparison import run_workload
from sidelane_lab.studies.c3.occupancy import OccupancyOptions
from sidelane_lab.studies.tune.isolated import IsolatedOptions

pytest.importorskip("triton")

import triton
import triton.language as tl

DEVICE = torch.device("cuda", 0)


@triton.jit
def _write_sm(target, rounds):  # type: ignore[no-untyped-def]
    """The SM that runs each block, which stays there for a while so that all SMs get some."""
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    total = 0
    for i in range(rounds):
        total += tl.load(target + tl.program_id(0) + 0 * i, volatile=True)
    tl.store(target + tl.program_id(0), sm + 0 * total)


def sms(stream: torch.cuda.Stream) -> set[int]:
    target = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _write_sm[(4096,)](target, 2000)
    stream.synchronize()
    return set(target.tolist())


@pytest.mark.parametrize("units", [8, 32])
def test_the_two_parts_run_on_sms_of_their_own(units: int) -> None:
    partitions, usual = DevicePartitions(DEVICE), pair_streams(DEVICE)
    assert usual is not None
    streams = partitions.streams(units, usual, confine=True)
    gemm, collective, urgent = sms(streams.gemm), sms(streams.collective), sms(streams.urgent)
    assert len(collective) == units and urgent == collective
    assert len(gemm) == partitions.units - units and not gemm & collective
    assert partitions.streams(units, usual, confine=False).collective is usual.collective


class Adding:
    """In the place of a collective: a kernel that adds 1."""

    label, implementation, in_place = "adding", "nccl", False

    def __init__(self) -> None:
        self.values = torch.zeros(1 << 20, device=DEVICE)

    def start(self) -> Callable[[], None]:
        self.values.add_(1)
        return lambda: None

    def fill(self, seed: int) -> None:
        self.values.fill_(seed)

    def error(self, seed: int) -> str | None:
        return None if self.values.eq(seed + 1).all() else "not added once"


class Alone:
    """Instruments of one rank."""

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.Stream(DEVICE))

    def attempt(self, step: Callable[[], Any]) -> str | None:
        return step()  # type: ignore[no-any-return]

    def finish(self, what: str) -> None:
        torch.cuda.synchronize()

    def time(self, runs: Mapping[str, Callable[[], None]]) -> Mapping[str, Sequence[float]]:
        for run in runs.values():
            run()
        torch.cuda.synchronize()
        return {name: [1.0 + number] for number, name in enumerate(runs)}

    look = time


def test_pairs_run_under_partitions_and_are_right() -> None:
    names = ("serial", "c3_rp", "c3_sp_rp", "conccl_rp")
    by_engine = Adding()
    by_engine.label, by_engine.implementation = "by engine", "dma"
    outcome = run_workload(
        parse_workload("1024x1024x1024_4M"),
        [Adding(), by_engine],
        Alone(),
        device=DEVICE,
        streams=pair_streams(DEVICE),
        partitions=DevicePartitions(DEVICE),
        memory_bound=True,
        strategies=[named(name) for name in names],
    )
    assert [(row.strategy, row.correct) for row in outcome.rows if not row.chosen] == [(name, True) for name in names]
    units = {row.strategy: row.units for row in outcome.rows}
    assert units["serial"] == 0 and units["conccl_rp"] >= 8 and units["c3_rp"] >= 8


def test_three_kernels_in_every_order() -> None:
    workload, call = parse_workload("1024x1024x1024_4M"), Adding()
    orders = orders_of(workload, call, Alone(), DEVICE, itertools.count(1))
    names = ("gemm", "small gemm", str(workload.collective))
    assert set(orders) == set(itertools.permutations(names)), "each is right, and has a time"


@pytest.mark.parametrize("shape", [OPT1, OPT2, TUNED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("resident", [None, 1, 2])
def test_a_shaped_gemm_has_as_many_blocks_on_an_sm_as_it_is_told(shape: Any, resident: int | None) -> None:
    from sidelane.execute.cuda.driver import Driver
    from sidelane_lab.shaping.gemm import ShapedGemm

    torch.manual_seed(0)
    m, n, k = 515, 648, 264
    a, b = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
    c = torch.full((m, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    kernel = ShapedGemm(Driver(DEVICE), dataclasses.replace(shape, resident=resident), a, b, c)
    assert kernel.resident >= 1 and (resident is None or kernel.resident <= resident)
    if resident and shape is not TUNED:
        assert kernel.resident == resident
    for blocks in (1, shape.tiles(m, n)):
        c.fill_(float("nan"))
        kernel.bind(blocks)()
        torch.cuda.synchronize()
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=2**-7, atol=2**-7 * k**0.5)


def test_the_occupancy_study_on_one_gpu() -> None:
    options = OccupancyOptions(
        device="gpu", ranks=1, workloads=("1024x1024x512_4M",), shapes=("opt1",), blocks=(16, 0), iterations=3,
        warmup=1, repeats=2, quiet=True, timeout_s=150.0, command="test",
    )  # fmt: skip
    results = running.run(options)
    assert results is not None
    for row in results.rows:
        assert row.correct and row.time_us and row.resident, row  # type: ignore[union-attr]


def test_isolated_times_on_one_gpu(tmp_path: Path) -> None:
    options = IsolatedOptions(
        device="gpu", ranks=1, gemms=("4096x4096x4096",), warmup=1, repeats=3, quiet=True, command="test",
        output=tmp_path / "c3.json",
    )  # fmt: skip
    results = running.run(options)
    assert results is not None
    rows = list(results.rows)
    means = {row.means for row in rows if row.what == "gemm" and row.units and row.time_us}  # type: ignore[union-attr]
    assert {"split"} <= means, [row.note for row in rows]
    assert any(row.what == "beside" and row.time_us for row in rows)  # type: ignore[union-attr]
    gemm = parse_workload("4096x4096x4096_1M").gemm
    assert units_to_spare(isolated_of(rows), gemm).reason  # type: ignore[arg-type]
