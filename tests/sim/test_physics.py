"""What holds of every machine and shape: peaks are not passed, shapes have no cliffs, names decide nothing."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
from marks import long

from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.harness.study import read
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.gemm import gemm_us, is_memory_bound
from sidelane_lab.model.kernels import dma_us
from sidelane_lab.model.strategies import predict, predictable
from sidelane_lab.pairs.workload import TABLE_I, Gemm, Workload, parse_gemm, percent_of_ideal
from sidelane_lab.papers.results import gemm_times, predict_gemms

ROOT = Path(__file__).resolve().parents[2]
MACHINES = [named(name) for name in machine_names(one_node=True)]
H200, MI300X = named("h200x4"), named("mi300x8")
ISOLATED = ROOT / "results" / "h200x2" / "isolated.json"
KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, *REDUCING)


def between(rng, low, high):
    """Evenly by orders of magnitude."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def random_gemm(rng):
    return Gemm(*(between(rng, 1, 131072) for _ in range(3)), rng.choice(("bfloat16", "float16")))


def roofline_us(machine, gemm):
    """The least time that the GPU's peaks allow."""
    return max(gemm.flops / (machine.gpu.peak_tflops * 1e6), gemm.nbytes / (machine.gpu.memory_gbps * 1e3))


def wire_us(machine, kind, nbytes):
    """Bytes that a GPU must send, over all of its links at their peak."""
    links = machine.gpus - 1 if machine.links.topology == "mesh" else 1
    sent = (2 if kind is Kind.ALL_REDUCE else 1) * nbytes * (machine.gpus - 1) / machine.gpus
    return sent / (links * machine.links.peak_gbps * 1e3)


@pytest.mark.parametrize("seed", [*range(20), *map(long, range(20, 400))])
def test_nothing_is_faster_than_its_roofline_and_percentages_are_ones(seed):
    rng = random.Random(seed)
    machine, kind = rng.choice(MACHINES), rng.choice(KINDS)
    pair = Workload(random_gemm(rng), kind, between(rng, 1 << 10, 8 << 30) // 64 * 64)
    found = predict(machine, pair, rng.choice(predictable()))
    gemm_floor, wire_floor = roofline_us(machine, pair.gemm), wire_us(machine, kind, pair.nbytes)
    assert found.gemm_us >= gemm_floor + machine.matmul.launch_us * 0.99
    assert found.comm_us >= wire_floor and found.best_comm_us >= wire_floor
    assert found.time_us >= max(gemm_floor, wire_floor)
    assert found.percent is None or -100 <= found.percent <= 105, found


@pytest.mark.parametrize("kind", KINDS)
def test_a_gemm_that_gains_by_fewer_units_than_are_there_has_no_percentage(kind):
    """It is bound by memory, and 135% of ideal had been printed."""
    found = predict(named("mi210x4"), Workload(Gemm(122498, 20, 320), kind, 1 << 10), "c3_rp")
    assert found.percent is None and found.time_us < found.gemm_us


@pytest.mark.parametrize("tag", ["cb2", "cb3", "cb4"])
def test_a_gemm_of_whole_tiles_loses_whole_waves(tag):
    """A kernel whose grid was chosen for 304 units; the ConCCL paper has 17 to 27% for 32 to 64 units (Figure 5 a)."""
    machine, gemm = named("mi300x8"), parse_gemm(tag)
    tiles = math.ceil(gemm.m / 256) * math.ceil(gemm.n / 256)
    alone = gemm_us(machine, gemm)
    for lost in (8, 32, 64, 152):
        waves = math.ceil(tiles / (304 - lost)) / math.ceil(tiles / 304)
        assert gemm_us(machine, gemm, 304 - lost) / alone == pytest.approx(waves, rel=0.01)


@pytest.mark.parametrize("seed", [*range(20), *map(long, range(20, 40))])
def test_a_slightly_larger_gemm_takes_slightly_longer(seed):
    """31360x259x28608 had taken twice as long as 31360x256x28608."""
    rng = random.Random(seed)
    machine, gemm = rng.choice(MACHINES), random_gemm(rng)
    edge = {"m": machine.matmul.tile_m, "n": machine.matmul.tile_n, "k": 64}
    for name, tile in edge.items():
        size = int(tile) * between(rng, 1, 200)
        before, after = (gemm_us(machine, dataclasses.replace(gemm, **{name: size + more})) for more in (0, 1))
        step = int(machine.matmul.row_step) if name == "m" else 1  # measured: 333 tokens take as long as 384
        assert 0.999 * before <= after <= before * (1 + (12 + step) / size) + 1e-6, (machine.name, gemm, name, size)


def test_the_case_of_the_tile_edge():
    small, large = (gemm_us(H200, Gemm(31360, n, 28608)) for n in (256, 259))
    assert large == pytest.approx(small * 259 / 256, rel=0.01)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_name_decides_nothing(machine):
    """mb1 had taken 24.7 ms on an MI300X, and 10.8 by its numbers."""
    for tag in TABLE_I:
        tagged = parse_gemm(tag)
        plain = dataclasses.replace(tagged, tag="")
        for strategy in ("c3_base", "conccl_rp"):
            runs = [predict(machine, Workload(gemm, Kind.ALL_GATHER, 1 << 30), strategy) for gemm in (tagged, plain)]
            assert runs[0].time_us == runs[1].time_us and runs[0].gemm_us == runs[1].gemm_us


def test_arithmetic_finds_the_papers_memory_bound_gemms():
    assert {tag for tag in TABLE_I if is_memory_bound(MI300X, parse_gemm(tag))} == {"mb1", "mb2"}
    assert is_memory_bound(H200, Gemm(8, 8192, 8192)) and not is_memory_bound(H200, parse_gemm("cb1"))


def test_every_kernel_costs_a_launch():
    """A GEMM of 1x1x1 had taken 0.011 us."""
    for machine in MACHINES:
        assert gemm_us(machine, Gemm(1, 1, 1)) >= machine.matmul.launch_us > 1
        assert library_us(machine, Kind.ALL_GATHER, 1) > 1 and dma_us(machine, Kind.ALL_GATHER, 64) > 1


def test_a_skinny_gemm_takes_the_time_of_its_weights():
    """One token through a layer of 8,192: 134 MB, 28 us at the memory's peak."""
    for rows in (1, 8, 64):
        time = gemm_us(H200, Gemm(rows, 8192, 8192))
        assert 28 < time - H200.matmul.launch_us < 35


def test_where_there_is_nothing_to_gain_a_percentage_is_undefined():
    assert percent_of_ideal(1000.0, 49.0, 1049.0) is None
    assert percent_of_ideal(1000.0, 51.0, 1051.0) == pytest.approx(0.0)
    tiny = predict(H200, Workload(parse_gemm("cb5"), Kind.ALL_GATHER, 1 << 20), "conccl")
    assert tiny.percent is None
    slow = predict(H200, Workload(Gemm(64, 64, 64), Kind.ALL_GATHER, 1 << 20), "conccl")
    assert slow.percent is None and slow.speedup < 0.6


@pytest.mark.parametrize(
    ("name", "median", "worst"),
    [("h200x4", 0.05, 0.11), ("h200x2", 0.08, 0.16)],
    ids=["fitted to", "not fitted to"],
)
def test_gemms_alone_as_measured(name, median, worst):
    files = [path for path in (ROOT / "results" / name).glob("*.json") if path.stem in ("c3", "chain")]
    times = gemm_times([row for path in files for row in read(path).rows], named(name).gpus)
    errors = sorted(abs(predict_gemms(named(name), time) / time.time_us - 1) for time in times)
    assert len(errors) == {"h200x4": 8, "h200x2": 12}[name]
    assert errors[len(errors) // 2] <= median and errors[-1] <= worst, errors


def test_a_gemm_in_a_partition_loses_what_was_measured():
    """In proportion to the units, less what higher clocks give back; 97% of ideal had been predicted once.

    An older probe had a GEMM lose 24% with 6% of the SMs gone: 21% was predicted for all until pairs were measured.
    """
    alone = {(row.gemm, row.means, row.units): row.time_us for row in read(ISOLATED).rows if row.what == "gemm"}
    for name in ("cb1", "cb3", "mb1"):
        gemm, whole = parse_gemm(name), gemm_us(H200, parse_gemm(name))
        for units, most in {8: 0.07, 16: 0.07, 32: 0.09}.items():
            measured = alone[name, "split", units] / alone[name, "split", 0]
            assert gemm_us(H200, gemm, 132 - units) / whole == pytest.approx(measured, rel=most)
    found = predict(H200, Workload(parse_gemm("cb1"), Kind.ALL_GATHER, 896 << 20), "c3_rp")
    assert found.percent is not None and found.percent < 70
