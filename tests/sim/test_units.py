"""Blocks on compute units: room, speed, order, and a GEMM and a collective of many iterations as measured."""

from __future__ import annotations

import dataclasses
import itertools
import statistics

import pytest

from sidelane.program.collective import Kind
from sidelane_lab.machines.load import machine_names, named
from sidelane_lab.model.blocks import BlockFootprint, most_blocks, share_of_speed
from sidelane_lab.model.device import Gang, Tiled, run_device
from sidelane_lab.model.pipeline import OPT1, OPT2, Pipeline, blocks_per_unit, grid_of, run_pipeline, sequential_us
from sidelane_lab.pairs.workload import Gemm, parse_gemm
from sidelane_lab.papers.overlap import BLOCKS, PLATFORMS, OverlapContext

H100, MI250X = named("h100x4"), named("mi250x8")
SMALL, LARGE = BlockFootprint(128, 9216, 16.0), BlockFootprint(640, 61440, 80.0)

COPY = Gang("C", 950.0, 2000.0, 24, 24, footprint=BlockFootprint(640, 640 * 80, 0.0))
"""The collective's stand-in of the probe: 24 blocks of 640 threads that copy 939 MB, 0.95 ms alone."""
MEASURED = {
    ("fitted to", Gemm(8192, 8192, 4096), OPT1): {
        16: (82.714, 830.4, 85.181, 85.273),
        132: (10.076, 105.079, 32.270, 31.929),
        264: (5.238, 57.514, 29.071, 31.434),
        528: (2.807, 33.036, 28.457, 29.611),
        2048: (2.486, 30.095, 29.198, 28.142),
        16384: (2.145, 26.148, 29.219, 26.231),
    },
    ("not fitted to: larger tile", Gemm(8192, 8192, 4096), OPT2): {
        16: (46.887, 473.231, 53.608, 53.438),
        132: (5.997, 64.761, 29.599, 29.557),
        264: (3.260, 37.637, 29.695, 30.430),
        528: (2.124, 27.216, 29.803, 29.367),
        2048: (2.213, 27.918, 29.840, 28.944),
        16384: (2.020, 25.837, 28.266, 24.944),
    },
    ("not fitted to: shorter sums", Gemm(8192, 16384, 1024), OPT1): {
        16: (33.254, 326.090, 47.548, 47.564),
        132: (4.916, 54.903, 18.836, 19.815),
        264: (2.639, 32.524, 19.545, 18.987),
        528: (1.450, 20.766, 18.721, 18.322),
        2048: (1.316, 19.031, 19.615, 18.195),
        16384: (1.126, 17.362, 19.447, 17.305),
    },
}
"""Milliseconds on an H100 by blocks (results/notes/model.md): the GEMM; ten iterations in order; with a stream for each
GEMM; the same with priority for the collective."""


def iterations(gemm, tile, blocks, *, in_order, priority):
    grids = [grid_of(H100, gemm, tile, blocks, f"G{i}", (f"G{i - 1}",) if i and in_order else ()) for i in range(10)]
    copies = [
        dataclasses.replace(COPY, name=f"C{i}", after=(f"G{i}", *([f"C{i - 1}"] if i else [])), priority=int(priority))
        for i in range(10)
    ]
    return run_device(H100, [*grids, *copies]).time_us / 1e3


@pytest.mark.parametrize("key", MEASURED, ids=[words for words, *_ in MEASURED])
def test_iterations_on_an_h100_as_measured(key):
    _, gemm, tile = key
    errors = {name: [] for name in ("alone", "in order", "base", "priority")}
    for blocks, measured in MEASURED[key].items():
        predicted = (
            run_device(H100, [grid_of(H100, gemm, tile, blocks)]).time_us / 1e3,
            iterations(gemm, tile, blocks, in_order=True, priority=False),
            iterations(gemm, tile, blocks, in_order=False, priority=False),
            iterations(gemm, tile, blocks, in_order=False, priority=True),
        )
        for name, a, b in zip(errors, predicted, measured, strict=True):
            errors[name].append(abs(a / b - 1))
    assert all(statistics.median(found) <= 0.13 and max(found) <= 0.30 for found in errors.values()), errors


def test_overlapped_over_sequential_time_rises_with_the_blocks_as_measured():
    """Predicted it had fallen from 0.97 to 0.77, and with GEMMs in order that is how it is measured, too."""
    rows = MEASURED["fitted to", Gemm(8192, 8192, 4096), OPT1]
    measured = [base / (10 * (gemm + 0.95)) for gemm, _, base, _ in rows.values()]
    in_order = [base / (10 * (gemm + 0.95)) for gemm, base, _, _ in rows.values()]
    assert measured[0] < 0.3 < 0.9 < measured[-1] and in_order[0] > 0.95 > in_order[-1]
    for name in PLATFORMS.values():
        machine, ratios = named(name), []
        for blocks in BLOCKS:
            pipeline = Pipeline(parse_gemm("cb1"), Kind.ALL_REDUCE, 896 << 20, OPT1, blocks)
            ratios.append(run_pipeline(machine, pipeline, priority=False).time_us / sequential_us(machine, pipeline))
        assert ratios == sorted(ratios) and ratios[0] < 0.4 < 0.9 < ratios[-1] < 1.02, name


def test_priority_pays_on_every_nvidia_gpu_and_mi250x_overlaps_least():
    """On an A100 with 1,024 blocks it had cost 54%, and MI250X had overlapped best."""
    context = OverlapContext()
    assert min(context.of("reduction", ("A100",), (1024,), "cb-ar")) > 10
    assert min(context.of("reduction", ("A40", "A100", "H100"))) > -10 and context.lowest("overlap") == "MI250X"


def test_a_unit_is_a_concave_function_of_its_blocks():
    sums = [n * share_of_speed(n, 5.6) for n in range(1, 33)]
    steps = [b - a for a, b in zip([0.0, *sums], sums, strict=False)]
    assert all(a > b > 0 for a, b in itertools.pairwise(steps)) and sums[0] > 0.98 and sums[-1] < 5.6


@pytest.mark.parametrize(
    ("name", "opt1", "opt2"), [("a40x4", 6, 3), ("a100-40x4", 7, 4), ("h100x4", 7, 4), ("mi250x8", 4, 2)]
)
def test_registers_and_shared_memory_bound_the_blocks_of_a_unit(name, opt1, opt2):
    machine = named(name)
    assert (OPT1.shared_kb("bfloat16"), OPT2.shared_kb("bfloat16")) == (16.0, 32.0)
    assert (blocks_per_unit(machine, OPT1, "bfloat16"), blocks_per_unit(machine, OPT2, "bfloat16")) == (opt1, opt2)


def test_warp_slots_bound_them_too():
    assert most_blocks(H100, BlockFootprint(1024, 1024, 0.0)) == 2


def grid(name, blocks, us=100.0, **more):
    return Tiled(name, blocks, us, 0.0, footprint=SMALL, saturation=100.0, **more)


def gang(units=24, footprint=LARGE, **more):
    return Gang("C", 50.0, 0.0, units, units, footprint=footprint, **more)


def test_a_collective_gets_the_units_that_few_blocks_leave_empty():
    beside = run_device(H100, [grid("G", 100), gang()])
    assert beside.began_us["C"] == 0 and beside.ended_us["C"] == pytest.approx(50)
    full = run_device(H100, [grid("G", 132), gang()])
    assert full.began_us["C"] == full.ended_us["G"], "its registers do not fit beside a block of the GEMM"


def test_blocks_of_a_collective_that_have_a_place_progress():
    run = run_device(H100, [grid("G", 120), gang()])
    assert run.began_us["C"] == 0 and run.ended_us["C"] == pytest.approx(100, rel=0.01), "half speed on 12 units"


def test_priority_goes_before_blocks_that_wait_but_takes_no_unit_away():
    kernels = [grid("G", 132 * 7 * 4), gang(after=("first",)), grid("first", 1, 1.0)]
    kernels = [kernels[2], *kernels[:2]]
    ends = {}
    for priority in (0, 1):
        kernels[2] = dataclasses.replace(kernels[2], priority=priority)
        ends[priority] = run_device(H100, kernels).began_us["C"]
    assert 90 < ends[1] < 120 and ends[0] > 350


def test_where_units_do_not_drain_smaller_blocks_take_the_room_first():
    large = BlockFootprint(256, 256 * 128, 32.0)
    kernels = [grid("G", 110 * 4 * 3), gang(16, large, priority=1, after=("first",)), Gang("first", 10.0, 0.0)]
    assert MI250X.occupancy.drains == 0
    apart = run_device(MI250X, kernels)
    drained = run_device(MI250X.with_value("occupancy.drains", 1), kernels)
    assert drained.began_us["C"] < 0.5 * apart.began_us["C"]


@pytest.mark.parametrize("streams", [1, 2, 0])
def test_gemms_take_turns_on_as_many_streams_as_there_are(streams):
    pipeline = Pipeline(parse_gemm("cb1"), Kind.ALL_TO_ALL, 64 << 20, OPT1, 16, iterations=5, streams=streams)
    run = run_pipeline(H100, pipeline, priority=False)
    for i in range(5):
        before = run.ended_us[f"G{i - streams}"] if 0 < streams <= i else 0.0
        assert before <= run.began_us[f"G{i}"] <= before + 10


def test_blocks_that_ask_for_more_shared_memory_leave_less_room():
    pipeline = Pipeline(parse_gemm("cb1"), Kind.ALL_TO_ALL, 64 << 20, OPT1, 16384, iterations=2)
    asking = dataclasses.replace(pipeline, asked_kb=115.0)  # one of them, not two, fits a unit of 228
    assert sequential_us(H100, asking) > 4 * sequential_us(H100, pipeline)
    with pytest.raises(ValueError, match="allowed=0 or more"):
        dataclasses.replace(pipeline, streams=-1)


@pytest.mark.parametrize("name", machine_names(one_node=True))
def test_every_machine_of_the_catalogue_runs_the_pipeline(name):
    machine = named(name)
    pipeline = Pipeline(parse_gemm("cb1"), Kind.ALL_TO_ALL, 64 << 20, OPT2, 200, iterations=2)
    run = run_pipeline(machine, pipeline, priority=True, record=True)
    assert run.time_us <= sequential_us(machine, pipeline) * 1.2 and run.timeline


def test_what_cannot_run_is_refused():
    with pytest.raises(ValueError, match="what a compute unit has"):
        run_device(H100, [Tiled("G", 1, 1.0, 0.0, footprint=BlockFootprint(4096, 1, 0.0))])
    with pytest.raises(ValueError, match="unknown=..x"):
        run_device(H100, [grid("G", 1, after=("x",))])
    with pytest.raises(ValueError, match=r"a section \[occupancy\]"):
        run_device(dataclasses.replace(H100, occupancy=None), [grid("G", 1)])
