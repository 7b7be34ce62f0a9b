"""Machine descriptions: the catalogue is complete and sourced, and mistakes are named with their path."""

from __future__ import annotations

import json
import pickle
import re
import tomllib
from pathlib import Path

import pytest

from sidelane.program.collective import Kind
from sidelane_lab.machines.load import canonical_name, find, limits_of, machine_names, named, parse
from sidelane_lab.machines.spec import NumberSource, Quantity, RunStatus, Topology
from sidelane_lab.model.pipeline import OPT1, Pipeline, run_pipeline
from sidelane_lab.model.power import library_power
from sidelane_lab.model.strategies import predict, predictable
from sidelane_lab.model.study import dma_study, table_ii_workload
from sidelane_lab.pairs.workload import parse_gemm
from sidelane_lab.studies.phases.programs import operations, predicted_row

NODES = {
    "h100x8x2": (2, 8),
    "h100x8x16": (16, 8),
    "h200x8x2": (2, 8),
    "mi300x8x2": (2, 8),
    "mi300x8x16": (16, 8),
    "mi210x1x2": (2, 1),
    "mi210x1x128": (128, 1),
    "a100x8x2": (2, 8),
    "b200x8x2": (2, 8),
}
ONE_NODE = {
    *("4090x2", "4090x8", "5090x4", "mi300x8", "mi210x4", "mi250x8", "a40x4", "a100-40x4", "a100-40x8", "b200x8"),
    *("a100x8", "l40sx8", "l4x8", "a10x8", "pro6000x8"),
    *("h100x2", "h100x4", "h100x8", "h200x2", "h200x2-host", "h200x4", "h200x8"),
}
EXPECTED = ONE_NODE | set(NODES)


def test_the_catalogue_has_all_machines():
    assert set(machine_names(one_node=True)) == ONE_NODE
    assert {name: (named(name).nodes, named(name).gpus) for name in NODES} == NODES
    assert set(machine_names()) == EXPECTED
    assert all(named(name).name == name and named(name).title for name in machine_names())


PEOPLES = tomllib.loads(Path(__file__).with_name("names_of_machines.toml").read_text(encoding="utf-8"))


def test_names_are_taken_as_people_write_them():
    assert named("8xH100") is not None and named("8xH100") == named("h100x8")
    assert named("2xh100x8") == named("2x8xH100") == named("h100x8x2")
    assert named("mi300xx8") == named("8xMI300X") == named("mi300x8")
    for written, name in PEOPLES.items():
        assert canonical_name(written) == name and named(written) == named(name), written
    for other in ("a100 80GB PCIe x 4", "h100 nvl x 8", "RTX 6000 Ada x 8", "mine.toml", "h100x8.json"):
        assert canonical_name(other) == other
    four = named("4xh200x8")
    assert (four.name, four.nodes, four.title) == ("h200x8x4", 4, "4 nodes of 8 x NVIDIA H200")
    assert four.links == named("h200x8x2").links and named("h100x8x16").nodes == 16


@pytest.mark.parametrize(
    "largest", [named(name) for name in sorted(ONE_NODE) if re.search("x8$|0x4$", name)], ids=lambda one: one.name
)
def test_any_number_of_a_gpu_is_a_machine(largest):
    gpu, most = largest.name.rpartition("x")[0], 4 if largest.name in ("mi210x4", "a100-40x4") else 8
    for found in (named(f"{gpus}x{gpu}") for gpus in {*range(1, most + 1)} - {largest.gpus, 2, 4}):
        assert found.gpu == largest.gpu and found.title == f"{found.gpus} x {largest.title.partition(' x ')[2]}"
        assert found.runs is not RunStatus.MEASURED and found.library.all_gather_us.source is NumberSource.ASSUMED
    with pytest.raises(ValueError, match="up to [48] of these GPUs"):
        named(f"9x{gpu}")


def test_rings_of_other_numbers_have_other_hops():
    assert named("h200x7").library.all_gather_us == pytest.approx(named("h200x8").library.all_gather_us - 0.7)
    assert named("8xa40").library.all_reduce_us == pytest.approx(named("a40x4").library.all_reduce_us + 4 * 1.4)
    assert (named("2x4xh100").nodes, named("16xa100").title) == (2, "2 nodes of 8 x NVIDIA A100 SXM 80 GB")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("H100", "'H100': say how many, such as 8xh100; the nearest names are 8xh100, 8xh200, "),
        ("8 x H100 NVL", "these GPUs are not described; the nearest names are 8xh100, "),
        ("2xT4", r"the nearest names are 8xl4, .* Yours can .* base = .l4x8. \(docs/internals/model.md\)"),
        ("16xL40S", "several nodes of these GPUs are not described, but 8xl40s is; the nearest names are 8xl40s, "),
        ("A100-40GB", "say how many, such as 8xa100-40; "),
        ("100xh100", "up to 8 of these GPUs in a node are described; more are whole nodes; "),
        ("4 x A100-SXM-64GB", "these GPUs are not described; the nearest names are "),
        ("0xh100", "up to 8 of these GPUs in a node are described; the nearest"),
        ("8xMI210", "up to 4 of these GPUs"),
        ("mi300", "8xmi300"),
        ("1xh100", "1 x NVIDIA H100 SXM communicates nothing: at least 2 GPUs"),
        ("nowhere.toml", "no such file"),
    ],
)
def test_unknown_names_get_the_nearest_ones(name, text):
    with pytest.raises(ValueError, match=text):
        find(name)


def test_a_machine_says_whether_sidelane_has_run_there():
    measured = {name for name in machine_names() if named(name).runs is RunStatus.MEASURED}
    assert measured == {"h100x2", "h200x2", "h200x2-host", "h200x4"}
    assert all((named(name).runs is RunStatus.UNSUPPORTED) == name.startswith("mi") for name in EXPECTED)
    assert parse('base = "h200x4"\nname = "mine"', "mine.toml").runs is RunStatus.UNRUN
    assert parse('base = "mi300x8"\nname = "mine"\nruns = "measured"', "mine.toml").runs is RunStatus.MEASURED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_says_where_it_comes_from(name):
    for path, quantity in named(name).quantities().items():
        assert quantity.of or quantity.source is NumberSource.DATASHEET, path
        if quantity.source is NumberSource.ASSUMED and quantity.low is None:
            assert quantity.of, path


@pytest.mark.parametrize("name", sorted(ONE_NODE))
def test_every_machine_runs_every_strategy(name):
    machine = named(name)
    for strategy in predictable():
        prediction = predict(machine, table_ii_workload("cb1_896M", Kind.ALL_GATHER), strategy)
        assert max(prediction.gemm_us, prediction.comm_us) * 0.5 < prediction.time_us


def test_a_file_may_state_what_differs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "mi300x8"\nname = "mine"\n\n[links]\nusable_gbps = 40\n')
    mine = find(str(path))
    assert (mine.name, mine.links.usable_gbps, mine.links.usable_gbps.source) == ("mine", 40.0, NumberSource.ASSUMED)
    assert mine.links.topology is Topology.MESH
    assert mine.gpu == named("mi300x8").gpu


@pytest.mark.parametrize(
    ("base", "counts", "title"),
    [
        ("h100x8", "nodes = 2", "2 nodes of 8 x NVIDIA H100 SXM"),
        ("h100x8x2", "nodes = 16\ngpus = 4", "16 nodes of 4 x NVIDIA H100 SXM"),
        ("h100x8x2", "nodes = 1", "8 x NVIDIA H100 SXM"),
        ("h100x8", 'nodes = 2\ntitle = "mine"', "mine"),
    ],
)
def test_a_title_follows_the_number_of_gpus_and_nodes(base, counts, title):
    network = "\n[links]\nnetwork_gbps = 50\nnetwork_us = 3\n"
    assert parse(f'base = "{base}"\nname = "x"\n{counts}{network}', "x.toml").title == title


def test_of_another_gpu_nothing_is_known_but_what_the_file_states():
    base = named("h200x4")
    other = parse('base = "h200x4"\n[gpu]\nunits = { value = 84, source = "datasheet" }\n', "other.toml")
    assert other.gpu.units.source is NumberSource.DATASHEET
    taken_over = {path: q for path, q in other.quantities().items() if path != "gpu.units"}
    assert {quantity.source for path, quantity in taken_over.items() if not path.startswith("gpu.")} == {
        NumberSource.ASSUMED
    }
    assert other.dma.copy_us == base.dma.copy_us and other.dma.copy_us.of.startswith("as on 4 x NVIDIA H200: ")
    assert other.power is None and base.power is not None
    same_gpu = parse('base = "h200x4"\n[links]\nusable_gbps = 40\n', "same.toml")
    assert same_gpu.power == base.power and same_gpu.dma == base.dma


def test_json_is_the_same(tmp_path):
    path = tmp_path / "mine.json"
    number = {"value": 40, "source": "measured", "of": "results/mine/collectives.json", "low": 39, "high": 41}
    path.write_text(json.dumps({"base": "mi300x8", "links": {"usable_gbps": number}}, indent=1))
    quantity = find(str(path)).links.usable_gbps
    assert (float(quantity), quantity.source, quantity.low, quantity.high) == (40.0, NumberSource.MEASURED, 39, 41)


MI300X, H200 = 'base = "mi300x8"\n', 'base = "h200x4"\n'
NODES_OF_8, TORUS = 'base = "h100x8x2"\n', 'base = "mi210x1x128"\n'


def assumed(value, low, high):
    return f'{{ value = {value}, source = "assumed", of = "a guess", low = {low}, high = {high} }}'


PLANTED = [
    # Names, and how a number is given.
    (MI300X + "[links]\nusable_gps = 40\n", "did you mean usable_gbps"),
    (MI300X + "[dam]\ncopy_us = 1\n", "dam: unknown name (allowed="),
    (MI300X + "[links]\ntopology = 'star'\n", "allowed=mesh, switch"),
    (MI300X + "[dma]\ncopy_us = {value = 1, source = 'guess'}\n", "allowed=datasheet, paper, measured"),
    (MI300X + "[dma]\ncopy_us = {value = 1, source = 'fitted'}\n", "'of' must say"),
    (MI300X + "[dma]\ncopy_us = {value = 1, source = 'fitted', of = 'x', low = 2, high = 3}\n", "low <= value"),
    (MI300X + "[dma]\ncopy_us = 'fast'\n", "allowed=a number"),
    (MI300X + "gpus = 0\n", "2 to 4096"),
    (MI300X + "runs = 'maybe'\n", "allowed=measured, never, unsupported"),
    ('base = "mi300"\n', "say how many, such as 8xmi300"),
    ('name = "x"\ntitle = "x"\ngpus = 2\n', "gpu: section is missing"),
    # Links and engines that cannot be.
    (H200 + "[links]\nusable_gbps = 500\n", "links.usable_gbps: (value=500, allowed=up to 450, which is links.peak"),
    (MI300X + "[links]\npeak_gbps = 64\nusable_gbps = 70\n", "allowed=up to 64, which is links.peak_gbps"),
    (MI300X + "[links]\npeak_gbps = 64e9\n", "allowed=0.1 to 10000 10^9 bytes a second"),
    (H200 + "[links]\nusable_gbps = 392.4e9\n", "allowed=0.1 to 10000 10^9 bytes a second"),
    (H200 + "[links]\nnetwork_gbps = 5e10\n", "allowed=0, or 0.1 to 10000 10^9 bytes a second"),
    (H200 + "[links]\nnetwork_us = 3e-6\n", "allowed=0, or 0.001 to 10000 microseconds"),
    (H200 + "[links]\npeak_gbps = 0\n", "allowed=0.1 to 10000"),
    (H200 + "[links]\npeak_gbps = 450\nusable_gbps = inf\n", "allowed=0.1 to 10000"),
    (H200 + "[links]\ntopology = 'mesh'\n", "allowed=switch as h200x4 has it, or with links.peak_gbps"),
    (H200 + "[links]\nusable_gbps = " + assumed(390, 380, 4e11) + "\n", "high (value=4e+11, allowed=0.1 to 10000"),
    (MI300X + "[dma]\nengines = 1.5\n", "allowed=a whole number from 1 to 256"),
    (MI300X + "[dma]\nengines = 0\n", "allowed=a whole number from 1 to 256"),
    (MI300X + "[dma]\nengine_gbps = 6000\n", "allowed=up to 5300, which is gpu.memory_gbps"),
    (MI300X + "[dma]\nengine_gbps = 4.8e10\n", "allowed=0.1 to 10000"),
    (MI300X + "[dma]\nlocal_gbps = 8000\n", "allowed=up to 5300, which is gpu.memory_gbps"),
    (MI300X + "[dma]\nreduce_gbps = 8000\n", "allowed=up to 5300, which is gpu.memory_gbps"),
    (MI300X + "[dma]\nruntime_share = 86\n", "allowed=0.01 to 1"),
    (MI300X + "[dma]\nshared_queues = 1.2\n", "allowed=0.01 to 1"),
    (MI300X + "[dma]\ncopy_us = 3.5e-6\n", "allowed=0, or 0.001 to 10000 microseconds"),
    (MI300X + "[dma]\nsync_us = 2400000\n", "allowed=0, or 0.001 to 10000 microseconds"),
    (MI300X + "[dma]\ncopy_us = 1\nnext_copy_us = 2\n", "allowed=up to 1, which is dma.copy_us"),
    (MI300X + "[dma]\ncopy_us = -1\n", "allowed=0, or 0.001 to 10000 microseconds"),
    # Networks.
    (H200 + "[links]\nnetwork = 'star'\n", "allowed=fat_tree, rails, torus"),
    (H200 + "[links]\nnics_per_gpu = 32\n", "allowed=0.015625 to 16"),
    (H200 + "[links]\nnics_per_gpu = 1.5\n", "allowed=a whole number, or less than 1 where GPUs share NICs"),
    (H200 + "[links]\noversubscription = 0.5\n", "allowed=1 to 64"),
    (H200 + "[links]\noversubscription = 100\n", "allowed=1 to 64"),
    (H200 + "[links]\nleaf_nodes = 0\n", "allowed=a whole number from 1 to 4096"),
    (H200 + "[links]\ntorus_row = 2.5\n", "allowed=a whole number from 1 to 4096"),
    (NODES_OF_8 + "[links]\nnics_per_gpu = 0.3\n", "allowed=whole NICs a node, which has 8 GPUs"),
    (TORUS + "[links]\ntorus_row = 12\n", "allowed=a divisor of the 128 nodes"),
    (TORUS + "nodes = 100\n", "links.torus_row: (value=16, allowed=a divisor of the 100 nodes"),
    (NODES_OF_8 + "nodes = 5000\n", "allowed=a whole number from 1 to 4096"),
    # The library.
    (H200 + "[library]\nall_gather_gbps = 480\n", "allowed=up to 450, which is links.peak_gbps"),
    (H200 + "[library]\nall_reduce_gbps = 3.6e11\n", "allowed=0.1 to 10000"),
    (H200 + "[library]\nall_to_all_us = 7e-6\n", "allowed=0.1 to 10000 microseconds"),
    (H200 + "[library]\ndefault_units = 200\n", "allowed=up to 132, which is gpu.units"),
    (H200 + "[library]\nall_to_all_need = 140\n", "allowed=up to 132, which is gpu.units"),
    (H200 + "[library]\nlow_latency_share = 1.5\n", "allowed=0.01 to 1"),
    (H200 + "[library]\nall_gather_need = 12.5\n", "allowed=a whole number from 1 to 1024"),
    # The GPU and its GEMMs.
    (H200 + "[gpu]\nunits = 4\n", "allowed=a whole number from 16 to 1024"),
    (H200 + "[gpu]\nunits = 16\n", "library.default_units: (value=24, allowed=up to 16, which is gpu.units"),
    (H200 + "[gpu]\npeak_tflops = 989.4e12\n", "allowed=1 to 100000 10^12 operations a second"),
    (H200 + "[gpu]\nmemory_gbps = 4.8\n", "allowed=10 to 100000 10^9 bytes a second"),
    (H200 + "[gpu]\nmemory_gb = 141e9\n", "allowed=1 to 4096 gigabytes"),
    (H200 + "[gpu]\nshared_kb = 233472\n", "allowed=8 to 4096 kilobytes"),
    (H200 + "[matmul]\nefficiency = 5\n", "allowed=0.01 to 1"),
    (H200 + "[matmul]\ntile_m = 0\n", "allowed=a whole number from 8 to 4096"),
    (H200 + "[interference]\nlate_share = 24\n", "allowed=0 to 1"),
]


@pytest.mark.parametrize(("text", "message"), PLANTED, ids=[text.splitlines()[-1] for text, _ in PLANTED])
def test_a_mistake_is_refused_with_its_path_and_what_is_allowed(text, message):
    section, key = re.findall(r"^\[(\w+)\]", text, re.MULTILINE), text.splitlines()[-1].partition(" ")[0]
    path = message.partition(": ")[0] if ": " in message else ".".join((*section, key))
    with pytest.raises(ValueError, match=rf"^x\.toml: {path}: ") as caught:
        parse(text, "x.toml")
    assert message in str(caught.value)


def test_mistakes_in_json_are_named_alike_and_broken_files_with_their_line():
    with pytest.raises(ValueError, match=r"^x.json: dma.copy_us: \(value=-2, allowed=0, or 0.001 to 10000 microsec"):
        parse('{"base": "mi300x8", "dma": {"copy_us": -2}}', "x.json")
    with pytest.raises(ValueError, match="^x.json: not JSON: .* line 2 "):
        parse('{\n "base": ,', "x.json")
    with pytest.raises(ValueError, match="^x.toml: not TOML: .* line 2"):
        parse(MI300X + "[dma\n", "x.toml")


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_has_a_limit_and_keeps_it(name):
    machine = named(name)
    for path, quantity in machine.quantities().items():
        section, _, field = path.partition(".")
        limit = limits_of(type(getattr(machine, section)))[field]
        assert all(limit.holds(end) for end in (quantity, quantity.low, quantity.high) if end is not None), path


def test_the_librarys_speed_follows_the_links_that_a_file_states():
    base, half = named("h200x4"), parse(H200 + "[links]\npeak_gbps = 225\n", "x.toml")
    assert half.links.usable_gbps == pytest.approx(base.links.usable_gbps / 2)
    assert half.library.all_gather_gbps == pytest.approx(base.library.all_gather_gbps / 2)
    assert half.library.all_gather_gbps.source is NumberSource.ASSUMED
    assert half.library.all_gather_gbps.of.startswith("in proportion to links.usable_gbps")
    stated = parse(H200 + "[links]\nusable_gbps = 200\n[library]\nall_gather_gbps = 190\n", "x.toml")
    assert stated.library.all_gather_gbps == 190
    assert stated.library.all_reduce_gbps == pytest.approx(base.library.all_reduce_gbps * 200 / base.links.usable_gbps)
    assert parse(H200, "x.toml").library == base.library


@pytest.mark.parametrize(
    "ask",
    [
        lambda machine: dma_study(machine, (1 << 20,)),
        lambda machine: run_pipeline(
            machine, Pipeline(parse_gemm("cb1"), Kind.ALL_REDUCE, 1 << 20, OPT1, 16), priority=False
        ),
        lambda machine: library_power(machine, Kind.ALL_GATHER, 1 << 20),
        lambda machine: predicted_row(machine, next(iter(operations(("copy",), ("b2b",), 1 << 20))), 2),
    ],
)
def test_several_nodes_are_refused_where_they_are_not_modelled(ask):
    """16 nodes had printed the table of one."""
    many = parse('base = "mi300x8"\nname = "many"\nnodes = 16\n', "many.toml")
    with pytest.raises(ValueError, match=r"nodes of many \(value=16, allowed=1; what crosses nodes is modelled for"):
        ask(many)


def test_changing_one_number():
    machine = named("mi300x8").with_value("dma.copy_us", 9.0)
    assert machine.dma.copy_us == 9.0
    assert named("mi300x8").dma.copy_us != 9.0
    with pytest.raises(ValueError, match=r"dma.copy_us"):
        machine.with_value("dma.speed", 1.0)


def test_quantities_are_numbers_that_keep_their_source():
    quantity = pickle.loads(pickle.dumps(Quantity(2.0, NumberSource.FITTED, "DM-PH-01", 1.0, 3.0)))
    assert (quantity + 1, quantity.source, quantity.of, quantity.high) == (3.0, NumberSource.FITTED, "DM-PH-01", 3.0)
    with pytest.raises(ValueError, match="finite"):
        Quantity(float("nan"), NumberSource.ASSUMED)
