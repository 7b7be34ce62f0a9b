"""Profiles: what lies between their sizes, their files, and which of them is in force."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from choices import B2B, CROSSING, KEY, PCPY, curve, gather, profile

from sidelane.choice import Candidate, store
from sidelane.choice.candidate import find
from sidelane.choice.fused import FusedTime
from sidelane.choice.key import MachineKey
from sidelane.choice.profile import Profile
from sidelane.choice.store import InForce, builtin, builtin_for, builtin_names, in_force, read_profile, user_file
from sidelane.config import BUILTIN, Config, from_environment
from sidelane.machine.peers import PeerMemory
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape
from sidelane.user_files import write_whole
from sidelane_lab.harness import study as result_files
from sidelane_lab.machines import load
from sidelane_lab.pairs.isolated import isolated_times
from sidelane_lab.studies.tune.command import replacing


def test_times_between_measured_sizes_follow_a_power_of_the_size():
    measured = curve(B2B, (1000, 10.0), (10_000, 10.0), (1_000_000, 1000.0))
    assert measured.at(1) == measured.at(1000) == 10.0 and measured.at(3000) == pytest.approx(10.0)
    assert measured.at(100_000) == pytest.approx(100.0)  # the middle, in both logarithms
    assert measured.at(1_001_000) == pytest.approx(1000.0 + 0.99, rel=1e-3)  # a byte as dear as from end to end
    sizes = [2**power for power in range(8, 30)]
    times = [measured.at(size) for size in sizes]
    assert times == sorted(times)


@pytest.mark.parametrize(
    "times", [(), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),), ((1, 0.0),), ((1, float("nan")),)]
)
def test_a_curve_that_cannot_be_is_refused(times: tuple[tuple[int, float], ...]):
    with pytest.raises(ValueError, match="Curve"):
        curve(B2B, *times)


def test_a_profile_survives_its_file(tmp_path: Path):
    write_whole(tmp_path / "deep" / "profile.json", CROSSING.to_text().encode())
    assert read_profile(tmp_path / "deep" / "profile.json") == CROSSING
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["profile.json"]
    assert read_profile(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"curves": [{}]},
        {"curves": None},
        {"key": {"device": "x"}},
        {"machine": ["h200x4"]},
        {"date": None},
        {"key": {"device_type": "cuda", "device": [], "count": 2, "software": {}}},
        {"key": {"device_type": "cuda", "device": "x", "count": float("inf"), "software": {}}},
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, change: dict[str, object]):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**json.loads(CROSSING.to_text()), **change}))
    with pytest.raises(ValueError, match="not a profile"):
        read_profile(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a profile"):
        read_profile(path)


def test_cached_graphs_of_older_profiles_are_left_out(tmp_path: Path):
    """A profile that ``sidelane tune`` wrote while they were variants keeps the rest of its times."""
    content = json.loads(CROSSING.to_text())
    rows = [{**row, "launch": "calls", "signals": "memops"} for row in content["curves"]]
    content["curves"] = [*rows, {**rows[0], "launch": "graph"}]
    (tmp_path / "p.json").write_text(json.dumps(content))
    assert read_profile(tmp_path / "p.json") == CROSSING


@pytest.mark.parametrize("field", ["dtype", "variant", "implementation"])
def test_a_list_where_a_name_belongs_is_refused(tmp_path: Path, field: str):
    content = json.loads(CROSSING.to_text())
    content["curves"][0][field] = ["b2b"]
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"not a profile: ValueError: curves.0.: ValueError: {field} \(value="):
        read_profile(tmp_path / "p.json")


@pytest.mark.parametrize("times", ["[[1024, Infinity]]", "[[Infinity, 3.0]]", "[[1e999, 3.0]]", "[[1024, NaN]]"])
def test_times_that_are_no_numbers_are_refused(tmp_path: Path, times: str):
    content = json.loads(CROSSING.to_text())
    content["curves"][0]["times"] = "TIMES"
    (tmp_path / "p.json").write_text(json.dumps(content).replace('"TIMES"', times))
    with pytest.raises(ValueError, match="not a profile"):
        read_profile(tmp_path / "p.json")


def test_a_file_that_is_nested_too_deep_is_refused(tmp_path: Path):
    (tmp_path / "p.json").write_text('{"format": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ValueError, match="not a profile: ValueError: nested too deeply"):
        read_profile(tmp_path / "p.json")


def isolated_file() -> dict[str, Any]:
    row = {"m": 8, "n": 8, "k": 8, "dtype": "float32", "means": "free", "units": 0, "device_units": 4, "gemm": "8"}
    rows = [
        {**row, "what": "gemm", "time_us": 5.0, "gbps": None},
        {**row, "what": "memory", "time_us": 1.0, "gbps": 9.0},
    ]
    return {"study": "isolated", "rows": rows}


FUSED_ROW = {
    "op": "all_gather_gemm",
    "world_size": 2,
    "captured": False,
    "sizes": [8, 8],
    "element_bytes": 2,
    "times": {"fused": 3.0, "unfused": 4.0},
}
GIVEN: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "profile": (read_profile, json.loads(CROSSING.to_text())),
    "fused": (
        read_profile,
        json.loads(dataclasses.replace(CROSSING, curves=(), operators=(FusedTime.from_dict(FUSED_ROW),)).to_text()),
    ),
    "machine": (lambda path: load.find(str(path)), {"base": "mi300x8", "gpus": 4, "gpu": {"units": 100}}),
    "isolated": (lambda path: isolated_times(path, "cpu", 2), isolated_file()),
    "results": (result_files.read, {"study": "isolated", "rows": [{"what": "gemm"}]}),
}
ODD = (-1, 0, 1e308, 5e-324, "x", None, [], [[1]], {}, {"a": 1}, True, 1.5, 10**400)


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*before, key)
        yield from places(value[key], (*before, key))


def with_odd(content: dict[str, Any], place: tuple[Any, ...], odd: Any) -> str:
    whole = json.loads(json.dumps(content))
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = odd
    return json.dumps(whole)


@pytest.mark.parametrize("what", GIVEN)
def test_a_file_that_is_wrong_anywhere_is_a_value_error_that_names_it(tmp_path: Path, what: str):
    reader, content = GIVEN[what]
    path, named = tmp_path / "given.json", list[bool]()
    strange: list[bytes | str] = [b"", b"\xff\x00", b"{" * 100_000, b"[" * 100_000, b"[]", b"3", b"null", b"NaN", b"{}"]
    strange += [with_odd(content, place, odd) for place in places(content) for odd in ODD]
    for text in strange:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            found = reader(path)  # some are values that the field may have
        except ValueError as error:
            named.append("given.json" in str(error))
        else:
            if isinstance(found, Profile):
                for one in found.curves:
                    assert math.isfinite(one.at(5000)) and found.comparable(
                        CallShape(one.kind, 4, 5000, "float32", False, False)
                    )
    assert all(named) and len(named) > len(strange) // 4
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="given.json"):
        reader(path)


@pytest.mark.parametrize("nested", ["a = " + "[" * 100_000, "a = " + "{b=" * 100_000])
def test_a_machine_that_is_nested_too_deep_is_refused(tmp_path: Path, nested: str):
    (tmp_path / "given.toml").write_text(nested)
    with pytest.raises(ValueError, match="given.toml"):
        load.find(str(tmp_path / "given.toml"))


def test_the_nearest_way_to_call_that_was_measured_answers():
    both = profile(
        curve(B2B, (1024, 1.0)),
        curve(B2B, (1024, 2.0), in_place=True),
        curve(B2B, (1024, 3.0), captured=True),
        curve(B2B, (1024, 4.0), world_size=2),
        curve(B2B, (1024, 5.0), kind=Kind.ALL_REDUCE, dtype="float32"),
        curve(B2B, (1024, 6.0), kind=Kind.ALL_REDUCE, dtype="bfloat16"),
    )
    asked = {
        1.0: gather(1024),
        2.0: gather(1024, in_place=True),
        3.0: gather(1024, captured=True),
        4.0: dataclasses.replace(gather(1024), world_size=2),
        5.0: CallShape(Kind.ALL_REDUCE, 4, 1024, "float32"),
        6.0: CallShape(Kind.ALL_REDUCE, 4, 1024, "bfloat16"),
    }

    def expected_us(profile: Profile, call: CallShape, candidate: Candidate) -> float | None:
        found = [curve for curve in profile.comparable(call) if curve.candidate == candidate]
        return found[0].at(call.nbytes) if found else None

    for expected, call in asked.items():
        assert expected_us(both, call, B2B) == expected
    assert expected_us(both, dataclasses.replace(gather(1024), world_size=3), B2B) == 1.0
    assert expected_us(both, gather(1024, dtype="int32"), B2B) == 1.0, "bytes are bytes where nothing is added"
    assert expected_us(both, gather(1024), PCPY) is None
    assert expected_us(both, CallShape(Kind.BROADCAST, 4, 1024), B2B) is None


def test_new_curves_replace_all_of_the_same_collective_and_world_size():
    old = profile(curve(B2B, (1024, 1.0)), curve(PCPY, (1024, 1.0)), curve(B2B, (1024, 1.0), world_size=2))
    new = replacing(old.curves, (curve(B2B, (4096, 7.0)),))
    assert [(c.world_size, c.times) for c in new] == [(2, ((1024, 1.0),)), (4, ((4096, 7.0),))]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "sidelane" / "profiles"


def test_the_users_file_is_for_one_machine(home: Path):
    assert user_file(KEY) == home / "h999x4.json"
    assert user_file(MachineKey("cpu", "A processor", 2)) == home / "cpu.json"
    assert dataclasses.replace(KEY, count=8).short_name == "h999x8"


def test_the_users_file_is_used_when_its_key_fits(home: Path):
    write_whole(home / "h999x4.json", CROSSING.to_text().encode())
    found = in_force(None, KEY)
    assert found.profile == CROSSING and "h999x4.json" in found.where and not found.notes
    assert InForce.from_text(found.to_text()) == found and in_force(BUILTIN, KEY).profile != CROSSING


def test_times_through_host_memory_are_for_nothing_else(home: Path, monkeypatch: pytest.MonkeyPatch):
    host, peers = PeerMemory(True, "a test"), PeerMemory()
    key = KEY.between(host)
    slow = dataclasses.replace(CROSSING, key=key, curves=CROSSING.curves[:1])
    monkeypatch.setattr(store, "quick_key", lambda *_: dataclasses.replace(KEY, links="", software=()))
    monkeypatch.setattr(store, "key_here", lambda *_: KEY)

    def chosen(setting: str | None, memory: PeerMemory) -> InForce:
        found = in_force(setting, KEY, memory)
        assert InForce.from_text(store.choice_of_rank(setting, "cuda", 4, memory)).notes == found.notes
        return found

    assert (key.short_name, KEY.between(peers)) == ("h999x4-host", KEY)
    assert chosen(None, host) == chosen(BUILTIN, host) == InForce.through_host(host)
    files = {}
    for kept in (CROSSING, slow):
        path = files[kept.key] = user_file(kept.key)
        assert path is not None
        write_whole(path, kept.to_text().encode())
    assert chosen(None, host).profile == slow and chosen(None, peers).profile == CROSSING
    assert chosen(BUILTIN, host) == InForce.through_host(host)
    for measured, memory in ((KEY, host), (key, peers)):  # a file that a setting names
        found = chosen(str(files[measured]), memory)
        assert found.profile not in (slow, CROSSING) and "links (" in found.notes[0]
    unknown = dataclasses.replace(KEY, links="")
    assert unknown.differences(key) == ("links (not host memory there, host memory here)",)
    assert key.differences(unknown) == ("links (host memory there, not host memory here)",)


@pytest.mark.parametrize(
    ("change", "said", "instead"),
    [
        ({"software": (("driver", "2.0"), ("torch", "2.0"))}, "driver (1.0 there, 2.0 here)", "built-in table h200x4"),
        ({"links": "none"}, "links (18 to a switch there, none here)", "a rule of thumb: no table for NVIDIA H999"),
    ],
)
def test_a_profile_with_another_key_is_not_used_and_the_note_says_why(
    home: Path, change: dict, said: str, instead: str
):
    write_whole(home / "h999x4.json", CROSSING.to_text().encode())
    found = in_force(None, dataclasses.replace(KEY, **change))
    assert found.profile != CROSSING and said in found.notes[0] and instead in found.where
    assert InForce.from_text(found.to_text()) == found


def test_a_broken_file_is_a_note_if_nobody_named_it_and_an_error_if_somebody_did(home: Path, tmp_path: Path):
    (home).mkdir(parents=True)
    (home / "h999x4.json").write_text("{}")
    assert "not a profile" in in_force(None, KEY).notes[0]
    with pytest.raises(ValueError, match="not a profile"):
        in_force(str(home / "h999x4.json"), KEY)
    with pytest.raises(ValueError, match="no such file"):
        in_force(str(tmp_path / "none.json"), KEY)


def test_built_in_tables_are_for_a_device_whatever_its_software():
    assert {"h100x2", "h200x2", "h200x4", "cpu"} <= set(builtin_names())
    h200 = builtin("h200x4")
    assert h200 is not None and builtin("nothing") is None
    newer = MachineKey("cuda", "NVIDIA H200", 8, "18 to a switch", (("driver", "999"),))
    found = builtin_for(newer)
    assert found is not None and found.profile is not None and found.profile.machine == "h200x4"
    assert [curve for curve in found.profile.curves if curve.world_size == 4] == list(h200.curves)
    assert "8 here" in in_force(BUILTIN, newer).where
    by_cpu = builtin_for(MachineKey("cpu", "Some processor", 64))
    assert by_cpu is not None and by_cpu.profile == builtin("cpu")
    for name in builtin_names():
        table = builtin(name)
        assert table is not None and table.machine == name
        for measured in table.curves:
            assert find(measured.kind, measured.candidate.variant) == measured.candidate, "names that nothing has"


def test_a_rank_names_a_table_and_asks_for_what_matters_only(home: Path, monkeypatch: pytest.MonkeyPatch):
    asked, quick = [], MachineKey("cuda", "NVIDIA H200", 2)
    monkeypatch.setattr(store, "quick_key", lambda *_: quick)
    monkeypatch.setattr(store, "key_here", lambda *_: asked.append(1) or dataclasses.replace(KEY, count=2))
    text = store.choice_of_rank(None, "cuda", 2)
    found = InForce.from_text(text)
    assert (
        not asked and len(text) < 300 and found.profile == builtin("h200x2") and found.where.startswith("the built-in")
    )
    quick = dataclasses.replace(KEY, links="", software=(), count=2)  # without a table: links matter
    assert InForce.from_text(store.choice_of_rank(None, "cuda", 2)) == builtin_for(dataclasses.replace(KEY, count=2), 2)
    assert asked == [1]
    write_whole(
        home / "h999x2.json", dataclasses.replace(CROSSING, key=dataclasses.replace(KEY, count=2)).to_text().encode()
    )
    found = InForce.from_text(store.choice_of_rank(None, "cuda", 2))
    assert found.profile is not None and found.profile.curves == CROSSING.curves and asked == [1, 1]
    with pytest.raises(ValueError, match="no such file"):
        store.choice_of_rank(str(home / "none.json"), "cuda", 2)


def test_ranks_that_a_table_lacks_get_those_of_others():
    key = MachineKey("cuda", "NVIDIA H200", 4, "18 to a switch")
    for ranks in (2, 3, 4, 8):
        some, every = builtin_for(key, ranks), builtin_for(key)
        assert some is not None and some.profile is not None and every is not None and every.profile is not None
        for kind in Kind:
            call = CallShape(kind, ranks, 64 << 20, dtype="bfloat16")
            assert some.profile.comparable(call) == every.profile.comparable(call)
    assert len(builtin_for(key, 4).profile.curves) < len(builtin_for(key).profile.curves)


def test_a_device_without_a_table_goes_by_a_similar_one():
    """Of its vendor, with links; another processor's table is the only one that CPU ranks have."""
    four, two = builtin("h200x4"), builtin("h100x2")
    assert four is not None and two is not None
    found = builtin_for(dataclasses.replace(KEY, device="NVIDIA H100 80GB HBM3"))
    assert found is not None and found.profile is not None and "h100x2" in found.where and "4 here" in found.where
    for ranks, measured in ((2, two), (4, four), (8, four)):
        call = CallShape(Kind.ALL_REDUCE, ranks, 64 << 20)
        assert found.profile.comparable(call) == measured.comparable(call)
    found = builtin_for(KEY)
    assert found is not None and found.profile is not None and found.profile.machine == "h200x4"
    assert "none of NVIDIA H999: sidelane tune makes one" in found.where
    assert builtin_for(dataclasses.replace(KEY, links="")) == found
    assert builtin_for(dataclasses.replace(KEY, links="none")) is None
    assert builtin_for(dataclasses.replace(KEY, device="AMD Instinct MI300X")) is None


@pytest.mark.parametrize(
    ("gpus", "where"),
    [
        (2, r"h200x2 \(....-..-..; 4 ranks by h200x4\)"),
        (3, r"h200x4 \(....-..-..; 2 ranks by h200x2; 3 here\)"),
        (4, r"h200x4 \(....-..-..; 2 ranks by h200x2\)"),
    ],
)
def test_two_ranks_are_judged_by_what_two_ranks_took(gpus: int, where: str):
    four, two = builtin("h200x4"), builtin("h200x2")
    found = builtin_for(MachineKey("cuda", "NVIDIA H200", gpus))
    assert four is not None and two is not None and found is not None and found.profile is not None
    assert re.search(where, found.where)
    for ranks, measured in ((2, two), (3, four), (4, four), (8, four)):
        call = CallShape(Kind.ALL_REDUCE, ranks, 64 << 20)
        assert found.profile.comparable(call) == measured.comparable(call)


def test_settings():
    assert (Config().beside, Config().profile) == ("nothing", None)
    found = from_environment({"SIDELANE_BESIDE": "compute", "SIDELANE_PROFILE": "x.json"})
    assert (found.beside, found.profile) == ("compute", "x.json")
    assert from_environment({"SIDELANE_PROFILE": ""}).profile is None
    with pytest.raises(ValueError, match="beside.*music"):
        Config(beside="music")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"timeout_s": value} for value in ("5", None, timedelta(seconds=5), True)),
        *({"memory_bytes": value} for value in ("1G", 1e9, True)),
        *({"debug": "0"}, {"native": 1}, {"profile": 3}, {"virtual_nodes": "0,1"}),
    ],
    ids=str,
)
def test_settings_of_another_kind_are_refused_by_name(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(TypeError, match=rf"^Config: {name} \(value={re.escape(repr(value))}, allowed=") as told:
        Config(**wrong)
    assert told.value.__notes__ == ["See docs/reference/settings.md"]


def test_a_variable_that_means_nothing_is_told() -> None:
    with pytest.warns(
        UserWarning, match=r"SIDELANE_TIMEOUT: no such setting, ignored \(the nearest=SIDELANE_TIMEOUT_S, "
    ):
        assert from_environment({"SIDELANE_TIMEOUT": "5"}) == Config()
