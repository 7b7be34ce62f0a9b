"""The choice: candidates and what forbids them, profiles and what lies between their sizes, the pick and its reason."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from sidelane.choice import Abilities, Call, Candidate, Curve, Profile, candidates, choose, expected_us, objection
from sidelane.choice.candidate import DMA, EVERYTHING, IMPLEMENTATIONS, LAUNCHES, SIGNALS, SM, everything, find
from sidelane.choice.key import Key
from sidelane.choice.profile import parse
from sidelane.choice.store import (
    InForce,
    builtin,
    builtin_for,
    builtin_names,
    in_force,
    name_of,
    read,
    user_file,
    write,
)
from sidelane.config import BESIDE, BUILTIN, COMPUTE, Config, from_environment
from sidelane.program import collective as define
from sidelane.program.build.alternating import SLOT_BYTES
from sidelane.program.collective import REDUCING, Kind, ReduceOp, Reduction
from sidelane.program.kernel import NARROW

B2B, PCPY, BCST, ALTERNATING = (Candidate(DMA, name) for name in ("b2b", "pcpy", "bcst", "alternating"))
ONE_SHOT = Candidate(SM, "one_shot")
KEY = Key("cuda", "NVIDIA H999", 4, "18 to a switch", (("driver", "1.0"), ("torch", "2.0")))


def curve(candidate: Candidate, *times: tuple[int, float], **others: object) -> Curve:
    given = {"kind": Kind.ALL_GATHER, "world_size": 4, "dtype": "bfloat16", "in_place": False, "captured": False}
    return Curve(**{**given, **others}, candidate=candidate, times=times)  # type: ignore[arg-type]


def profile(*curves: Curve) -> Profile:
    return Profile("h999x4", KEY, "2026-01-02T03:04:05+00:00", "sidelane tune", curves)


def gather(nbytes: int = 4096, **others: object) -> Call:
    return Call(Kind.ALL_GATHER, 4, nbytes, **others)  # type: ignore[arg-type]


CROSSING = profile(
    curve(ONE_SHOT, (1024, 5.0), (1 << 20, 50.0)),
    curve(B2B, (1024, 20.0), (1 << 20, 25.0)),
    curve(PCPY, (1024, 21.0), (1 << 20, 40.0)),
)


# --- candidates -------------------------------------------------------------------------------------------------------


def calls_of_all_kinds() -> list[Call]:
    axes = itertools.product(Kind, (1, 2, 8, 16), (False, True), (False, True), (False, True), BESIDE, (False, True))
    return [
        Call(kind, n, 4096, "int32", place, symm, captured, hint, even)
        for kind, n, place, symm, captured, hint, even in axes
    ]


@pytest.mark.parametrize("kind", Kind)
def test_names_are_unique_and_lead_back(kind: Kind):
    found = everything(kind)
    assert len({candidate.name for candidate in found}) == len(found)
    assert all(find(kind, candidate.name) == candidate for candidate in found)
    assert find(kind, "no such") is None


def test_plain_names_mean_the_first_launch_and_the_first_signals():
    assert Candidate(DMA, "b2b", LAUNCHES[0], SIGNALS[0]).name == "b2b"
    assert Candidate(DMA, "b2b", "another", "third").name == "b2b+another+third"


def test_copy_engines_without_a_kernel_run_every_call():
    for call in calls_of_all_kinds():
        assert any(not candidate.launches_kernels for candidate in candidates(call)), call
        assert candidates(call, Abilities()), call


def test_a_narrow_kernel_that_was_not_measured_is_judged_by_the_wide_one():
    wide, narrow = Candidate(SM, "one_shot"), Candidate(SM, "one_shot_narrow")
    given = {"kind": Kind.REDUCE_SCATTER}
    slow = curve(B2B, (1024, 50.0), (1 << 20, 60.0), **given)
    measured = profile(curve(wide, (1024, 5.0), (1 << 20, 10.0), **given), slow)
    beside = Call(Kind.REDUCE_SCATTER, 4, 1024, beside=COMPUTE)
    assert choose(measured, beside).candidate == narrow
    measured = profile(*measured.curves, curve(narrow, (1024, 70.0), (1 << 20, 80.0), **given))
    assert choose(measured, beside).candidate == B2B, "its own times count"


def test_a_narrow_kernel_is_for_calls_beside_compute():
    wide, narrow = Candidate(SM, "one_shot"), Candidate(SM, "one_shot_narrow")
    given = {"kind": Kind.REDUCE_SCATTER}
    measured = profile(curve(wide, (1024, 5.0), **given), curve(narrow, (1024, 4.8), **given))
    call = Call(Kind.REDUCE_SCATTER, 4, 1024)
    assert choose(measured, call).candidate == wide, "it is the same kernel, and its time chance"
    assert "nothing runs beside" in objection(call, narrow)


def test_equals_go_by_preference():
    close = profile(curve(PCPY, (1024, 10.0)), curve(ONE_SHOT, (1024, 10.01)), curve(B2B, (1024, 10.04)))
    found = choose(close, gather(1024))
    assert (found.candidate, found.table[1][0]) == (B2B, PCPY)
    apart = profile(curve(PCPY, (1024, 10.0)), curve(B2B, (1024, 10.06)))
    assert choose(apart, gather(1024)).candidate == PCPY


def test_beside_compute_only_reductions_launch_kernels_and_on_few_units():
    for call in calls_of_all_kinds():
        if call.beside == COMPUTE:
            kernels = [found.variant for found in candidates(call) if found.launches_kernels]
            assert all(call.kind in REDUCING and variant.endswith(NARROW) for variant in kernels), call
    assert ONE_SHOT in candidates(gather())
    assert ONE_SHOT not in candidates(gather(beside=COMPUTE))
    reduction = Call(Kind.ALL_REDUCE, 4, 4096, beside=COMPUTE)
    assert [found.name for found in candidates(reduction) if found.implementation == SM] == [
        "one_shot_narrow",
        "two_shot_narrow",
    ]
    by_kernel = Candidate(DMA, "b2b", signals="kernel")
    abilities = Abilities(signals=("memops", "kernel"))
    assert "compute units" in objection(gather(beside=COMPUTE), by_kernel, abilities)
    assert not objection(gather(), by_kernel, abilities)


@pytest.mark.parametrize(
    ("call", "candidate", "reason"),
    [
        (gather(symmetric=False), BCST, "ordinary memory"),
        (Call(Kind.ALL_TO_ALL, 4, 4096, symmetric=False), Candidate(DMA, "swap"), "ordinary memory"),
        (Call(Kind.ALL_TO_ALL, 4, 4096, even=False), Candidate(DMA, "swap"), "equal counts"),
        (Call(Kind.ALL_TO_ALL, 4, 4096, even=False), ONE_SHOT, "equal counts"),
        (gather(captured=True), Candidate(DMA, "b2b", launch="graph"), "graph already"),
        (Call(Kind.ALL_GATHER, 16, 4096), ONE_SHOT, "ranks at most"),
        (gather(4 * SLOT_BYTES + 4), ALTERNATING, "slot"),
        (gather(SLOT_BYTES + 1, even=False), ALTERNATING, "slot"),
        (Call(Kind.ALL_TO_ALL, 4, SLOT_BYTES + 1), ALTERNATING, "slot"),
        (gather(beside=COMPUTE), ALTERNATING, "may wait"),
        (gather(captured=True), Candidate(DMA, "alternating", launch="graph"), "graph already"),
        (gather(listed=True), ALTERNATING, "one tensor"),
        (gather(listed=True, mixed=True), ONE_SHOT, "every kind"),
        (gather(listed=True, even=False), ONE_SHOT, "equal counts"),
        (gather(listed=True, uniform=False), ONE_SHOT, "one dtype"),
        (gather(listed=True, tensors=4097), ONE_SHOT, "4096 tensors at most"),
        (gather(listed=True, mixed=True), BCST, "every kind"),
    ],
)
def test_what_is_not_legal_says_why(call: Call, candidate: Candidate, reason: str):
    assert reason in objection(call, candidate)
    assert candidate not in candidates(call)
    assert not objection(gather(), B2B)


def test_a_copy_that_every_program_needs_is_no_objection():
    for call in (
        gather(beside=COMPUTE, symmetric=False),
        Call(Kind.ALL_TO_ALL, 4, SLOT_BYTES, in_place=True, beside=COMPUTE),
        gather(4 * SLOT_BYTES, captured=True),
    ):
        assert not objection(call, ALTERNATING), call


def test_implementations_that_a_machine_lacks():
    assert {candidate.implementation for candidate in candidates(gather())} == set(IMPLEMENTATIONS)
    assert {candidate.implementation for candidate in candidates(gather(), Abilities())} == {DMA}
    assert "not available" in objection(gather(), ONE_SHOT, Abilities())


def test_a_call_is_described_by_what_all_ranks_know():
    uneven = define.all_to_all([[1, 2, 3], [0, 4, 100], [7, 7, 7]])
    call = Call.of(uneven, "int32", symmetric=False, captured=True, beside=COMPUTE)
    assert (call.nbytes, call.even, call.world_size, call.captured) == (110, False, 3, True)
    reduced = define.all_reduce((512, 512, 40), Reduction(ReduceOp.SUM, "float32"), in_place=True)
    assert Call.of(reduced, "float32", symmetric=True, captured=False, beside="nothing").even
    assert Call.of(define.all_gather([64] * 4), "int32", symmetric=True, captured=False, beside="nothing").nbytes == 256
    with pytest.raises(ValueError, match="beside.*value='music', allowed=nothing, compute"):
        Call.of(uneven, "int32", symmetric=True, captured=False, beside="music")


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_times_between_measured_sizes_follow_a_power_of_the_size():
    measured = curve(B2B, (1000, 10.0), (10_000, 10.0), (1_000_000, 1000.0))
    assert measured.at(1) == measured.at(1000) == 10.0
    assert measured.at(3000) == pytest.approx(10.0)
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
    write(tmp_path / "deep" / "profile.json", CROSSING)
    assert read(tmp_path / "deep" / "profile.json") == CROSSING
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["profile.json"]
    assert read(tmp_path / "none.json") is None


@pytest.mark.parametrize("change", [{"format": 99}, {"curves": [{}]}, {"curves": None}, {"key": {"device": "x"}}])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, change: dict[str, object]):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**json.loads(CROSSING.to_text()), **change}))
    with pytest.raises(ValueError, match="not a profile"):
        read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a profile"):
        read(path)


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
        5.0: Call(Kind.ALL_REDUCE, 4, 1024, "float32"),
        6.0: Call(Kind.ALL_REDUCE, 4, 1024, "bfloat16"),
    }
    for expected, call in asked.items():
        assert expected_us(both, call, B2B) == expected
    assert expected_us(both, dataclasses.replace(gather(1024), world_size=3), B2B) == 1.0
    assert expected_us(both, gather(1024, dtype="int32"), B2B) == 1.0, "bytes are bytes where nothing is added"
    assert expected_us(both, gather(1024), PCPY) is None
    assert expected_us(both, Call(Kind.BROADCAST, 4, 1024), B2B) is None


def test_new_curves_replace_all_of_the_same_collective_and_world_size():
    old = profile(curve(B2B, (1024, 1.0)), curve(PCPY, (1024, 1.0)), curve(B2B, (1024, 1.0), world_size=2))
    new = old.replacing((curve(B2B, (4096, 7.0)),))
    assert [(c.world_size, c.times) for c in new.curves] == [(2, ((1024, 1.0),)), (4, ((4096, 7.0),))]


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_the_reason_says_how_fast():
    small, large = choose(CROSSING, gather(1024)), choose(CROSSING, gather(1 << 20))
    assert (small.candidate, large.candidate) == (ONE_SHOT, B2B)
    assert "5 us expected, next dma b2b 20 us" in small.reason
    assert [candidate for candidate, _ in large.table[:2]] == [B2B, PCPY]
    assert (BCST, None) in large.table[2:], "what was not measured comes last"
    assert dict(large.table)[ONE_SHOT] is not None, "slower, but known"
    assert choose(CROSSING, gather(1024, beside=COMPUTE)).candidate == B2B
    assert choose(CROSSING, gather(1024), Abilities()).candidate == B2B


def test_a_choice_from_other_measurements_says_so():
    reason = choose(
        CROSSING, dataclasses.replace(gather(in_place=True, captured=True, symmetric=False), world_size=8)
    ).reason
    assert "measured with 4 ranks, out of place, eager, on symmetric memory" in reason
    assert "measured" not in choose(CROSSING, gather()).reason
    assert "measured" not in choose(CROSSING, gather(dtype="float32")).reason, "bytes are bytes where nothing is added"
    added = profile(curve(ONE_SHOT, (1 << 10, 5.0), kind=Kind.REDUCE_SCATTER))
    call = dataclasses.replace(gather(dtype="float32"), kind=Kind.REDUCE_SCATTER)
    assert f"(measured with {added.curves[0].dtype})" in choose(added, call).reason


def test_a_kernel_that_has_to_stage_its_input_takes_that_much_longer():
    measured = profile(
        curve(ONE_SHOT, (1 << 28, 600.0), kind=Kind.REDUCE_SCATTER),
        curve(B2B, (1 << 28, 700.0), kind=Kind.REDUCE_SCATTER),
    )
    call = Call(Kind.REDUCE_SCATTER, 4, 1 << 28)
    assert choose(measured, call).candidate == ONE_SHOT
    ordinary = choose(measured, dataclasses.replace(call, symmetric=False))
    assert ordinary.candidate == B2B
    assert dict(ordinary.table)[ONE_SHOT] == pytest.approx(600 + 170, abs=1)


def test_small_reductions_stage_nothing_in_one_shot():
    two_shot = Candidate(SM, "two_shot")
    measured = profile(*(curve(found, (1024, 10.0), kind=Kind.ALL_REDUCE) for found in (ONE_SHOT, two_shot)))
    for nbytes, in_place, one_shot_us in ((1024, False, 10.0), (1 << 20, True, 10240.0), (1 << 20, False, 10242.7)):
        call = Call(Kind.ALL_REDUCE, 4, nbytes, in_place=in_place, symmetric=False)
        times = dict(choose(measured, call).table)
        assert times[ONE_SHOT] == pytest.approx(one_shot_us, rel=1e-4)
        assert times[two_shot] == pytest.approx(10 * nbytes / 1024 + 5 + nbytes / 1.6e6)


def test_ties_go_to_the_copy_engines():
    tied = profile(curve(ONE_SHOT, (1024, 5.0)), curve(B2B, (1024, 5.0)))
    assert choose(tied, gather(1024)).candidate == B2B


def test_nothing_measured_leaves_a_rule_of_thumb():
    small, large = choose(None, gather(1024)), choose(None, gather(64 << 20))
    assert (small.candidate, large.candidate) == (ONE_SHOT, B2B)
    assert "rule of thumb" in small.reason and "rule of thumb" in large.reason
    assert choose(None, gather(1024), Abilities()).candidate == ALTERNATING
    assert choose(None, gather(64 << 20), Abilities()).candidate == B2B
    assert choose(None, gather(1024, beside=COMPUTE)).candidate == B2B
    assert choose(None, gather(1024, beside=COMPUTE, symmetric=False)).candidate == ALTERNATING
    assert "reduce_scatter was not measured" in choose(CROSSING, Call(Kind.REDUCE_SCATTER, 4, 64 << 20)).reason
    assert choose(CROSSING, Call(Kind.SCATTER, 4, 1024)).candidate == ALTERNATING
    assert choose(CROSSING, Call(Kind.SCATTER, 4, 1 << 20)).candidate == B2B


@pytest.mark.parametrize("given", [None, CROSSING], ids=["nothing measured", "measured"])
def test_lists_are_one_kernel_or_have_one_engine_and_small_ones_are_graphs(given: Profile | None):
    def choice(nbytes: int, abilities: Abilities = EVERYTHING, **others: object) -> Candidate:
        return choose(given, gather(nbytes, listed=True, **others), abilities).candidate

    graph = Candidate(DMA, "b2b", launch="graph")
    engines = Abilities(launches=EVERYTHING.launches)
    for nbytes, launched in ((1024, graph), ((32 << 20) - 1, graph), (32 << 20, B2B), (256 << 20, B2B), (4 << 30, B2B)):
        assert choice(nbytes, beside=COMPUTE, in_place=True) == B2B, "its copies are one call"
        kernel = nbytes < 256 << 20
        assert choice(nbytes) == (ONE_SHOT if kernel else launched)
        in_a_graph = ONE_SHOT if nbytes < 512 << 20 else B2B
        assert choice(nbytes, captured=True) == in_a_graph, "it is part of a graph already"
        assert choice(nbytes, symmetric=False) == (ONE_SHOT if nbytes < 64 << 20 else launched), "it is staged"
        for reason in ({"beside": COMPUTE}, {"mixed": True}, {"even": False}, {"uniform": False}):
            assert choice(nbytes, **reason) == launched
        assert choice(nbytes, engines) == launched
        assert choice(nbytes, Abilities()) in (B2B, PCPY), "where there are no graphs, by the times of single tensors"
    assert "a list of tensors" in choose(given, gather(1024, listed=True)).reason


@pytest.mark.parametrize(
    ("kind", "in_place", "symmetric", "most"),
    [
        (Kind.ALL_TO_ALL, False, True, 256),
        (Kind.ALL_TO_ALL, True, True, 64),
        (Kind.REDUCE_SCATTER, True, True, None),
        (Kind.REDUCE_SCATTER, False, False, 128),
        (Kind.ALL_REDUCE, True, True, None),
        (Kind.ALL_REDUCE, True, False, 128),
        (Kind.BROADCAST, True, True, None),
    ],
)
def test_up_to_where_lists_are_one_kernel(kind: Kind, in_place: bool, symmetric: bool, most: int | None):
    def by_kernel(nbytes: int) -> bool:
        call = Call(kind, 4, nbytes, in_place=in_place, symmetric=symmetric, listed=True)
        return choose(None, call).candidate.implementation == SM

    assert by_kernel(1)
    if most is None:
        assert by_kernel(64 << 30)
    else:
        assert [by_kernel((most << 20) - 1), by_kernel(most << 20)] == [True, False]


@pytest.mark.parametrize(("listed", "symmetric", "most"), [(False, True, 128), (True, True, 128), (True, False, 64)])
def test_broadcasts_by_a_kernel(listed: bool, symmetric: bool, most: int):
    def implementation(ranks: int, nbytes: int, **others: object) -> str:
        call = Call(Kind.BROADCAST, ranks, nbytes, in_place=True, symmetric=symmetric, listed=listed, **others)
        return choose(None, call).candidate.implementation

    assert [implementation(2, (most << 20) - 1), implementation(2, most << 20)] == [SM, DMA]
    assert implementation(3, 4 << 30) == SM, "copy engines would send it twice"
    assert implementation(3, 1024, beside=COMPUTE) == DMA
    assert implementation(3, 1024, uniform=False) == DMA


@pytest.mark.parametrize(
    ("ranks", "nbytes", "others", "variant"),
    [
        (4, 8 << 20, {}, "relay"),
        (4, (8 << 20) - 1, {}, "b2b"),
        (8, 3 << 20, {}, "relay"),
        (2, 1 << 30, {}, "b2b"),
        (4, 1 << 30, {"symmetric": False}, "b2b"),
        (4, 1 << 30, {"listed": True}, "b2b"),
    ],
)
def test_broadcasts_by_copy_engines_are_relayed(ranks: int, nbytes: int, others: dict[str, object], variant: str):
    call = Call(Kind.BROADCAST, ranks, nbytes, in_place=True, beside=COMPUTE, **others)
    found = choose(None, call).candidate
    assert (found.implementation, found.name) == (DMA, variant)


def test_lists_to_reduce_everywhere_are_in_one_shot_or_two_by_size():
    def variants(ranks: int, **others: object) -> list[str]:
        calls = (Call(Kind.ALL_REDUCE, ranks, nbytes, listed=True, **others) for nbytes in (1, 512 << 10, 513 << 10))
        return [choose(None, call).candidate.name for call in calls]

    assert variants(4) == variants(2) == variants(4, symmetric=False) == ["one_shot", "one_shot", "two_shot"]
    assert variants(2, symmetric=False) == ["one_shot"] * 3


def test_one_rank_alone():
    choice = choose(CROSSING, Call(Kind.ALL_GATHER, 1, 1024))
    assert choice.candidate.implementation == DMA
    assert "single rank" in choice.reason


def test_every_call_gets_the_same_legal_choice_every_time():
    for call in calls_of_all_kinds():
        for given in (None, CROSSING, builtin("h200x4")):
            choice = choose(given, call)
            assert choice.candidate in candidates(call)
            assert choice == choose(parse(given.to_text()) if given else None, call), "as on another rank"


# --- which profile is in force ----------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "sidelane" / "profiles"


def test_the_users_file_is_for_one_machine(home: Path):
    assert user_file(KEY) == home / "h999x4.json"
    assert user_file(Key("cpu", "A processor", 2)) == home / "cpu.json"
    assert name_of(dataclasses.replace(KEY, count=8)) == "h999x8"


def test_the_users_file_is_used_when_its_key_fits(home: Path):
    write(home / "h999x4.json", CROSSING)
    found = in_force(None, KEY)
    assert found.profile == CROSSING
    assert "h999x4.json" in found.where and not found.notes
    assert InForce.from_text(found.to_text()) == found
    assert in_force(BUILTIN, KEY).profile is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"software": (("driver", "2.0"), ("torch", "2.0"))}, "driver (1.0 there, 2.0 here)"),
        ({"links": "none"}, "links (18 to a switch there, none here)"),
    ],
)
def test_a_profile_with_another_key_is_not_used_and_the_note_says_why(home: Path, change: dict, said: str):
    write(home / "h999x4.json", CROSSING)
    found = in_force(None, dataclasses.replace(KEY, **change))
    assert found.profile is None
    assert said in found.notes[0] and "rule of thumb" in found.where
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
    assert {"h200x4", "cpu"} <= set(builtin_names())
    h200 = builtin("h200x4")
    assert h200 is not None and builtin("nothing") is None
    newer = Key("cuda", "NVIDIA H200", 8, "18 to a switch", (("driver", "999"),))
    assert builtin_for(newer) == h200
    assert "8 here" in in_force(BUILTIN, newer).where
    assert builtin_for(KEY) is None
    assert builtin_for(Key("cpu", "Some processor", 64)) == builtin("cpu")
    for name in builtin_names():
        table = builtin(name)
        assert table is not None and table.machine == name
        for measured in table.curves:
            assert find(measured.kind, measured.candidate.name) == measured.candidate, "names that nothing has any more"


def test_settings():
    assert (Config().beside, Config().profile) == ("nothing", None)
    found = from_environment({"SIDELANE_BESIDE": "compute", "SIDELANE_PROFILE": "x.json"})
    assert (found.beside, found.profile) == ("compute", "x.json")
    assert from_environment({"SIDELANE_PROFILE": ""}).profile is None
    with pytest.raises(ValueError, match="beside.*music"):
        Config(beside="music")
