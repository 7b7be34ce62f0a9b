"""Machine descriptions: the catalogue is complete and sourced, and mistakes are named with their line."""

from __future__ import annotations

import json
import pickle

import pytest

from sidelane.machine.load import find, machine_names, named, parse
from sidelane.machine.spec import Quantity, Source, Topology
from sidelane.model.strategies import STRATEGIES, predict
from sidelane.model.study import table_ii_workload
from sidelane.program.collective import Kind

EXPECTED = {"mi300x8", "mi210x4", "mi250x8", "a40x4", "a100x4", "h100x4", "h200x4", "b200x8"}


def test_the_catalogue_has_the_eight_machines():
    assert set(machine_names()) == EXPECTED
    assert all(named(name).name == name and named(name).title for name in machine_names())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_says_where_it_comes_from(name):
    for path, quantity in named(name).quantities().items():
        assert quantity.of or quantity.source is Source.DATASHEET, path
        if quantity.source is Source.ASSUMED and quantity.low is None:
            assert quantity.of, path


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_machine_runs_every_strategy(name):
    machine = named(name)
    for strategy in STRATEGIES:
        prediction = predict(machine, table_ii_workload("cb1_896M", Kind.ALL_GATHER), strategy)
        assert max(prediction.gemm_us, prediction.comm_us) * 0.5 < prediction.time_us


def test_a_file_may_state_what_differs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "mi300x8"\nname = "mine"\n\n[links]\nusable_gbps = 40\n')
    mine = find(str(path))
    assert (mine.name, mine.links.usable_gbps, mine.links.usable_gbps.source) == ("mine", 40.0, Source.ASSUMED)
    assert mine.links.topology is Topology.MESH
    assert mine.gpu == named("mi300x8").gpu


def test_of_another_gpu_nothing_is_known_but_what_the_file_states():
    base = named("h200x4")
    other = parse('base = "h200x4"\n[gpu]\nunits = { value = 84, source = "datasheet" }\n', "other.toml")
    assert other.gpu.units.source is Source.DATASHEET
    taken_over = {path: q for path, q in other.quantities().items() if path != "gpu.units"}
    assert {quantity.source for path, quantity in taken_over.items() if not path.startswith("gpu.")} == {Source.ASSUMED}
    assert other.dma.copy_us == base.dma.copy_us and other.dma.copy_us.of.startswith("as on 4 x NVIDIA H200: ")
    assert other.power is None and base.power is not None
    same_gpu = parse('base = "h200x4"\n[links]\nusable_gbps = 40\n', "same.toml")
    assert same_gpu.power == base.power and same_gpu.dma == base.dma


def test_json_is_the_same(tmp_path):
    path = tmp_path / "mine.json"
    number = {"value": 40, "source": "measured", "of": "results/mine/collectives.json", "low": 39, "high": 41}
    path.write_text(json.dumps({"base": "mi300x8", "links": {"usable_gbps": number}}, indent=1))
    quantity = find(str(path)).links.usable_gbps
    assert (float(quantity), quantity.source, quantity.low, quantity.high) == (40.0, Source.MEASURED, 39, 41)


BASE = 'base = "mi300x8"\nname = "x"\n'


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (BASE + "[links]\nusable_gps = 40\n", "x.toml:4", "did you mean usable_gbps"),
        (BASE + "[links]\ntopology = 'star'\n", "x.toml:4", "allowed=mesh, switch"),
        (BASE + "[dma]\n\ncopy_us = -1\n", "x.toml:5", "not negative"),
        (BASE + "[dma]\ncopy_us = {value = 1, source = 'guess'}\n", "x.toml:4", "allowed=datasheet, paper, measured"),
        (BASE + "[dma]\ncopy_us = {value = 1, source = 'fitted'}\n", "x.toml:4", "'of' must say"),
        (
            BASE + "[dma]\ncopy_us = {value = 1, source = 'fitted', of = 'x', low = 2, high = 3}\n",
            "x.toml:4",
            "low <= value",
        ),
        (BASE + "[dma]\ncopy_us = 'fast'\n", "x.toml:4", "allowed=a number"),
        (BASE + "[dam]\ncopy_us = 1\n", "x.toml:3", "did you mean dma"),
        (BASE + "gpus = 0\n", "x.toml:3", "2 to 4096"),
        (BASE + "[gpu]\nmemory_gbps = 0\n", "x.toml:4", "greater than 0"),
        (BASE + "[gpu]\nunits = 4\n", "x.toml:4", "16 or more"),
        ('base = "mi300"\n', "x.toml:1", "allowed=a100x4"),
        ('name = "x"\ntitle = "x"\ngpus = 2\n', "x.toml:1", "gpu: section is missing"),
        (BASE + "[dma\n", "x.toml:3", "not TOML"),
        ('{\n "base": "mi300x8",\n "dma": {\n  "copy_us": -2}}', "x.json:4", "not negative"),
        ('{\n "base": ,', "x.json:2", "not JSON"),
    ],
)
def test_mistakes_name_the_line_and_what_is_allowed(text, where, message):
    with pytest.raises(ValueError, match="(?s)") as caught:
        parse(text, where.split(":")[0])
    assert str(caught.value).startswith(f"{where}:"), caught.value
    assert message in str(caught.value)


def test_unknown_names_list_the_catalogue():
    with pytest.raises(ValueError, match="mi300x8"):
        find("mi300")
    with pytest.raises(ValueError, match="no such file"):
        find("nowhere.toml")


def test_changing_one_number():
    machine = named("mi300x8").with_value("dma.copy_us", 9.0)
    assert machine.dma.copy_us == 9.0
    assert named("mi300x8").dma.copy_us != 9.0
    with pytest.raises(ValueError, match=r"dma.copy_us"):
        machine.with_value("dma.speed", 1.0)


def test_quantities_are_numbers_that_keep_their_source():
    quantity = pickle.loads(pickle.dumps(Quantity(2.0, Source.FITTED, "DM-PH-01", 1.0, 3.0)))
    assert (quantity + 1, quantity.source, quantity.of, quantity.high) == (3.0, Source.FITTED, "DM-PH-01", 3.0)
    with pytest.raises(ValueError, match="finite"):
        Quantity(float("nan"), Source.ASSUMED)
