"""Calls with lists of tensors in the study of collectives: what is bound, run, checked and compared."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_calls import communicator
from marks import long
from ranks import RankPool

from sidelane.choice.candidate import takes_one_tensor
from sidelane.program.collective import REDUCING, Kind
from sidelane_lab.baselines import candidate as candidates
from sidelane_lab.baselines.baselines_cpu import Gloo
from sidelane_lab.baselines.baselines_cuda import Nccl, NcclCopyEngines
from sidelane_lab.baselines.baselines_symm_mem import SymmetricMemoryOperators
from sidelane_lab.baselines.candidate import (
    COALESCED,
    Entrant,
    ReadyCall,
    TensorLists,
    Tensors,
    candidates_of,
    coalesced,
    is_separate,
)
from sidelane_lab.baselines.reference import KINDS, Case, fill_input
from sidelane_lab.baselines.roster import OwnAuto, OwnDma, Roster, check_asked, make_roster
from sidelane_lab.harness.measure import Meter
from sidelane_lab.studies import collectives as collective_study
from sidelane_lab.studies.collectives import CollectiveOptions, CollectiveRow, measure_case

CPU = torch.device("cpu")
QUICK = {"device": "cpu", "ranks": 2, "quiet": True, "warmup": 0, "repeats": 2, "timeout_s": 100.0}
UNEVEN = (1, 7, 1021, 64)
"""Elements for each rank: none of the tensors is like another, and most are odd."""


def case_of(kind: Kind, rank: int, world_size: int, elements: tuple[int, ...] = UNEVEN) -> Case:
    dtype = torch.float32 if kind in REDUCING else torch.uint8
    sizes = tuple(count * world_size * dtype.itemsize for count in elements)
    return Case(kind, sum(sizes), dtype, rank, world_size, CPU, sizes)


def case_here(group: dist.ProcessGroup, kind: Kind, elements: tuple[int, ...] = UNEVEN) -> Case:
    return case_of(kind, dist.get_rank(group), dist.get_world_size(group), elements)


# What a list is.


def test_the_tensors_of_a_list_lie_apart_and_are_its_bytes() -> None:
    case = case_of(Kind.ALL_GATHER, 1, 3)
    assert (case.tensors, len(case.parts)) == (4, 4)
    assert sum(part.nbytes for part in case.parts) == case.nbytes
    assert [part.output_at for part in case.parts] == [0, 512, 1024, 1024 + 3072]
    assert [part.input_at for part in case.parts] == [0, 512, 1024, 2048]
    assert (case.output_room, case.input_room) == (4096 + 3 * 64, 2048 + 64)
    single = Case(Kind.ALL_GATHER, 96, torch.uint8, 0, 3, CPU)
    assert (single.tensors, single.parts, single.output_room) == (1, (single,), single.output_bytes)


def test_lists_that_make_no_sense_are_refused() -> None:
    def case(nbytes: int, *sizes: int) -> Case:
        return Case(Kind.ALL_TO_ALL, nbytes, torch.int32, 0, 2, CPU, sizes)

    case(24, 8, 16)
    with pytest.raises(ValueError, match=r"value=8, 12, allowed=multiples of 8"):
        case(20, 8, 12)
    with pytest.raises(ValueError, match=r"value=2 of 16 bytes, allowed=up to 1024 of 24 bytes"):
        case(24, 8, 8)
    with pytest.raises(ValueError, match="value=1025 of"):
        case(8 * 1025, *[8] * 1025)


def test_inputs_differ_between_the_tensors_of_a_list() -> None:
    case = case_of(Kind.ALL_TO_ALL, 0, 2, (256, 256, 256))
    inputs = []
    for seed, part in itertools.product((1, 2), case.parts):
        inputs.append(torch.zeros(part.input_bytes, dtype=torch.uint8))
        fill_input(part, inputs[-1], seed)
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(inputs, 2))


@pytest.mark.parametrize(
    ("nbytes", "tensors", "hidden"),
    [(64 << 20, 1, True), (64 << 20, 8, False), (1 << 30, 8, True), (1 << 20, 1, False)],
)
def test_what_the_host_takes_counts_until_each_tensor_takes_long(nbytes: int, tensors: int, hidden: bool) -> None:
    sizes = (nbytes // tensors,) * tensors if tensors > 1 else ()
    case = Case(Kind.ALL_GATHER, nbytes, torch.uint8, 0, 2, torch.device("cuda"), sizes)
    asked: list[float] = []
    prepared: Any = SimpleNamespace(job=asked.append)
    meter: Any = SimpleNamespace(rounds=lambda *_, **__: {})
    collective_study.time_candidates(meter, {Entrant("dma"): prepared}, case, CollectiveOptions(tensors=tensors))
    assert [us > 0 for us in asked] == [hidden]


# Every implementation on ranks.


def every_way(group: dist.ProcessGroup, kinds: tuple[Kind, ...]) -> tuple[list[str], set[tuple[Any, ...]]]:
    """Run all there is on uneven lists. Returns what was wrong, and what ran."""
    errors: list[str] = []
    ran: set[tuple[Any, ...]] = set()
    with communicator(group) as comm:
        dma = OwnDma(comm)
        for implementation in (Gloo(group), dma, OwnAuto(dma)):
            cases = [case_here(group, kind) for kind in kinds]
            implementation.reserve(max(c.output_room for c in cases), max(c.input_room for c in cases))
            for case in cases:
                for candidate in candidates_of(implementation, case.kind, listed=True):
                    prepared = ReadyCall(candidate, case, implementation)
                    prepared.fill(1)
                    if prepared.error(1) is None and not (case.kind is Kind.BROADCAST and case.rank == 0):
                        errors.append(f"{case.kind} {candidate}: accepted without a run")
                    for seed in (2, 3):
                        prepared.fill(seed)
                        prepared.run()
                        if prepared.repeatable:
                            prepared.run()
                        error = prepared.error(seed)
                        if error is not None:
                            errors.append(f"{case.kind} {candidate}: {error}")
                    prepared.settle()
                    ran.add((implementation.name, case.kind, candidate.in_place, candidate.variant, prepared.variant))
    return errors, ran


@pytest.mark.parametrize("world_size", [2, long(3)])
def test_every_way_is_right_on_uneven_lists_and_nothing_is_without_running(pool: RankPool, world_size: int) -> None:
    for errors, ran in pool.run(every_way, world_size, KINDS):
        assert errors == []
        own = {(kind, variant) for name, kind, _, variant, _ in ran if name == "dma"}
        moving = {"pcpy", "b2b", "striped"}
        assert {variant for kind, variant in own if kind is Kind.ALL_GATHER} == {*moving, "bcst"}
        assert {variant for kind, variant in own if kind is Kind.ALL_TO_ALL} == {*moving, "swap"}
        assert {variant for kind, variant in own if kind is Kind.ALL_REDUCE} == {"pcpy", "b2b"}
        assert {(kind, v) for name, kind, _, v, _ in ran if name == "gloo"} == set(
            itertools.product(KINDS, ("", "separate"))
        )
        for name, kind, in_place, variant, shown in ran:
            if name == "auto":
                assert is_separate(shown) is is_separate(variant), "its rows say what it chose, and how it was called"
                assert not shown.startswith("auto")
            other = "auto" if variant == "auto+separate" else "auto+separate"
            assert name != "auto" or (name, kind, in_place, other) in {way[:4] for way in ran}


class Forgetful(Gloo):
    """Leaves one byte of one tensor out, on one rank."""

    name = "symm_mem"

    def start_list(self, lists: TensorLists, variant: str) -> Callable[[], None]:
        wait = super().start_list(lists, variant)

        def forget() -> None:
            wait()
            if lists.parts[0].rank == 1:
                lists.outputs[2].view(torch.uint8)[-1] ^= 255

        return forget


class Mixed(Gloo):
    """Takes one tensor for another of the same size."""

    name = "nccl"

    def start_list(self, lists: TensorLists, variant: str) -> Callable[[], None]:
        outputs = [lists.outputs[1], lists.outputs[0], *lists.outputs[2:]]
        pairs = tuple(Tensors(o, pair.input) for o, pair in zip(outputs, lists.pairs, strict=True))
        return super().start_list(dataclasses.replace(lists, pairs=pairs), variant)


class Ungrouped(Gloo):
    """Refuses a list in the middle of it, on every rank: as a library that does not take an operation in a group."""

    name = "nccl_ce"
    lists = False

    def start_list(self, lists: TensorLists, variant: str) -> Callable[[], None]:
        self.lists = True
        try:
            return super().start_list(lists, variant)
        finally:
            self.lists = False

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        if self.lists and case.spot is not None and case.spot.number == 1:
            raise RuntimeError("not in a group")
        return super().start(case, tensors, variant)


def measured_rows(group: dist.ProcessGroup, kind: Kind) -> list[CollectiveRow]:
    made = (Ungrouped(group), Forgetful(group), Mixed(group), Gloo(group))
    roster = Roster(Meter(CPU, group=group), {implementation.name: implementation for implementation in made})
    case = case_here(group, kind, (48, 48, 1021))
    roster.reserve(case.output_room, case.input_room)
    return list(measure_case(roster, case, CollectiveOptions(**QUICK, tensors=3, places=("out",)), itertools.count(1)))


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_TO_ALL])
def test_a_list_that_is_wrong_or_refused_is_a_row_and_the_study_goes_on(pool: RankPool, kind: Kind) -> None:
    for rows in pool.run(measured_rows, 3, kind):
        assert {row.tensors for row in rows} == {3}
        found = {(row.implementation, row.variant): row for row in rows}
        for name in ("gloo", "symm_mem", "nccl", "nccl_ce"):
            assert found[name, "separate"].correct is True, found[name, "separate"]
        assert found["gloo", ""].correct is True
        assert found["gloo", ""].time_us is not None
        for name, correct, note in (
            ("symm_mem", False, "rank 1: number 2 in the list: 1 of 3063 output bytes are wrong"),
            ("nccl", False, "number 0 in the list: "),
            ("nccl_ce", None, "rank 0: RuntimeError: not in a group"),
        ):
            assert found[name, ""].correct is correct
            assert note in found[name, ""].note
            assert (found[name, ""].time_us, found[name, ""].bus_gbps) == (None, None)


# What takes part.


def without_ranks() -> list[Any]:
    meter: Any = SimpleNamespace()
    return [Nccl(CPU, meter), SymmetricMemoryOperators(CPU, meter, SimpleNamespace(group_name="all"))]


def test_what_takes_one_tensor_a_call_has_no_candidates_for_lists() -> None:
    nccl, symmetric = without_ranks()
    assert candidates_of(symmetric, Kind.ALL_REDUCE)
    assert not candidates_of(symmetric, Kind.ALL_REDUCE, listed=True)
    found = {(c.variant, c.in_place, c.launch) for c in candidates_of(nccl, Kind.ALL_GATHER, listed=True)}
    variants = ("", "separate", "window", "window+separate")
    assert found == set(itertools.product(variants, (False, True), ("eager", "graph")))
    assert {c.in_place for c in candidates_of(nccl, Kind.ALL_TO_ALL, listed=True)} == {False}


def test_names_that_take_no_lists_are_refused_with_those_that_do() -> None:
    def asked(**names: tuple[str, ...]) -> None:
        check_asked("cuda", (Kind.ALL_GATHER,), listed=True, **names)

    asked(implementations=("nccl", "dma"), variants=("b2b", "bcst"))
    asked(implementations=("sm",), variants=("one_shot",))
    with pytest.raises(
        ValueError, match=r"take one tensor a call \(value=symm_mem, allowed=nccl, nccl_ce, dma, auto, sm\)"
    ):
        asked(implementations=("nccl", "symm_mem"))
    with pytest.raises(ValueError, match=r"for lists of all_gather \(value=one_shot_narrow, allowed=b2b, "):
        asked(variants=("one_shot_narrow",))
    with pytest.raises(ValueError, match=r"value=one_shot_narrow"):
        asked(variants=("one_shot_narrow",))
    check_asked("cuda", (Kind.ALL_GATHER,), implementations=("sm",), variants=("one_shot",))


def test_a_study_of_lists_says_what_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("sidelane_lab.baselines.roster.make_meter", lambda *_: None)
    monkeypatch.setattr(Roster, "add", lambda self, name, make: made.append(name))
    rank: Any = SimpleNamespace(device=torch.device("cuda"), rank=0)
    roster = make_roster(rank, listed=True)
    assert made == ["nccl", "nccl_ce", "dma", "auto", "sm"]
    assert roster.unavailable.keys() == {"symm_mem"}
    assert "one tensor a call" in roster.unavailable["symm_mem"]
    assert make_roster(rank, listed=True, wanted=("dma",)).unavailable == {}
    assert "sm" in made * bool(make_roster(rank))


def test_sidelanes_variants_for_lists_are_those_that_lists_can_have(pool: RankPool) -> None:
    for names in pool.run(list_names, 2):
        assert names
        assert not any(map(takes_one_tensor, names))


def list_names(group: dist.ProcessGroup) -> list[Any]:
    from sidelane.choice.candidate import find

    with communicator(group) as comm:
        return [find(kind, name) for kind in KINDS for name in OwnDma(comm).list_variants(kind, False)]


# TensorLists in NCCL, with the library played by a recorder.


class Recorder:
    """Stands for torch.distributed: what was called between which marks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []

        @contextlib.contextmanager
        def manager(*, group: Any, device: torch.device | None, async_ops: bool) -> Iterator[Any]:
            self.log.append(f"begin {group} {device} {async_ops}")
            yield
            self.log.append("end")

        def note(name: str) -> Callable[..., None]:
            return lambda output, *others, group, **_: self.log.append(f"{name} {output.storage_offset()} {group}")

        monkeypatch.setattr(dist, "_coalescing_manager", manager)
        for name in ("all_gather", "reduce_scatter"):
            monkeypatch.setattr(candidates, name, note(name))
        for name in ("all_reduce", "broadcast"):
            monkeypatch.setattr(dist, name, note(name))
        monkeypatch.setattr(dist, "all_to_all_single", note("all_to_all"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["", "window"])
def test_nccl_gets_a_list_as_one_group(monkeypatch: pytest.MonkeyPatch, kind: Kind, variant: str) -> None:
    recorder = Recorder(monkeypatch)
    nccl = Nccl(CPU, SimpleNamespace(), "group")
    ordinary, windows = ((torch.zeros(1 << 16, dtype=torch.uint8),) * 2 for _ in range(2))
    nccl.buffers, nccl._windows = ordinary, SimpleNamespace(buffers=windows)
    case = case_of(kind, 0, 2, (64, 128))
    where = windows if variant else ordinary
    offsets = [512 * number // case.dtype.itemsize for number in (0, 1)]
    calls = [f"{kind} {offset} group" for offset in offsets]

    together = ReadyCall(Entrant("nccl", variant, in_place=True), case, nccl)
    together.run()
    # Those that torch hands over as one operation need no device to stand between.
    device = None if kind in COALESCED else CPU
    assert recorder.log == [f"begin group {device} False", *calls, "end"]
    assert {pair.output.untyped_storage().data_ptr() for pair in together.pairs} == {where[0].data_ptr()}
    assert {pair.input.untyped_storage().data_ptr() for pair in together.pairs} == {where[0].data_ptr()}

    recorder.log.clear()
    apart = ReadyCall(Entrant("nccl", f"{variant}+separate".lstrip("+"), in_place=True), case, nccl)
    apart.run()
    assert recorder.log == calls
    assert {pair.output.untyped_storage().data_ptr() for pair in apart.pairs} == {where[0].data_ptr()}
    assert str(apart.candidate) == apart.label
    assert apart.variant.endswith("separate")


def rows_of_nccl(group: dist.ProcessGroup) -> dict[tuple[Kind, str], CollectiveRow]:
    """NCCL's baseline with torch's own manager, on ranks whose library is Gloo."""
    meter = Meter(CPU, group=group)
    roster = Roster(meter, {"nccl": Nccl(CPU, meter, group)})
    roster.reserve(1 << 14, 1 << 14)
    options = CollectiveOptions(**QUICK, launches=("eager",), places=("out",), tensors=3)
    return {
        (kind, row.variant): row
        for kind in (Kind.ALL_TO_ALL, Kind.ALL_GATHER)
        for row in measure_case(roster, case_here(group, kind, (48, 1, 1021)), options, itertools.count(1))
    }


def test_what_a_library_takes_in_no_group_is_a_row_and_the_rest_is_right(pool: RankPool) -> None:
    for rows in pool.run(rows_of_nccl, 2):
        for (kind, variant), row in rows.items():
            if variant.startswith("window"):
                assert row.note.startswith("rank 0: UnavailableError: NCCL's symmetric windows")
            elif (kind, variant) == (Kind.ALL_TO_ALL, ""):
                assert (row.correct, row.time_us) == (None, None)
                assert "does not implement startCoalescing" in row.note
            else:
                assert row.correct is True, row
        assert len(rows) == 2 * 4


def test_copy_engines_of_nccl_get_lists_too() -> None:
    found = NcclCopyEngines.__new__(NcclCopyEngines)
    assert found.list_variants(Kind.ALL_GATHER, True) == ("", "separate")
    assert found.list_variants(Kind.ALL_REDUCE, True) == ()


def test_a_graph_holds_every_call_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)

    class Graph:
        def capture_begin(self, *, capture_error_mode: str) -> None:
            recorder.log.append("capture")

        def capture_end(self) -> None:
            recorder.log.append("captured")

        def replay(self) -> None:
            recorder.log.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    nccl = Nccl(CPU, SimpleNamespace(), "group")
    nccl.buffers = (torch.zeros(4096, dtype=torch.uint8),) * 2
    case = case_of(Kind.ALL_GATHER, 0, 2, (64, 128))
    one = ["all_gather 0 group", "all_gather 512 group"]
    for variant, call in (("separate", one), ("", ["begin group None False", *one, "end"])):
        prepared: ReadyCall = ReadyCall(Entrant("nccl", variant, launch="graph"), case, nccl, calls=3)
        recorder.log.clear()
        prepared.capture()
        assert recorder.log == ["capture", *3 * call, "captured", "capture", *call, "captured"]
        prepared.job().run()
        assert recorder.log[-1] == "replay"


# Torch's manager, mended.


def groups_survive_errors(group: dist.ProcessGroup) -> list[str]:
    problems = []
    for device in (None, CPU):  # Gloo has no group calls: with a device, it is the beginning that fails
        try:
            with coalesced(group, device):
                dist.all_reduce(torch.ones(3), group=group)
                raise RuntimeError("half way")
        except RuntimeError as error:
            problems.append(str(error))
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        problems.append(str(total.tolist()))
    return problems


def test_an_error_among_grouped_calls_ends_the_group(pool: RankPool) -> None:
    """Torch's own manager would go on collecting: the all_reduce behind it would not run."""
    for half_way, after, unknown, again in pool.run(groups_survive_errors, 2):
        assert (half_way, after, again) == ("half way", "[2.0, 2.0]", "[2.0, 2.0]")
        assert "startCoalescing" in unknown


def test_the_librarys_group_is_ended_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    group: Any = SimpleNamespace(_end_coalescing=ended.append)
    state: dict[Any, Any] = {"it": []}
    monkeypatch.setattr(
        dist.distributed_c10d._world, "_pg_coalesce_state", SimpleNamespace(pop=lambda *_: state.pop("it", None))
    )

    @contextlib.contextmanager
    def manager(**_: Any) -> Iterator[Any]:
        yield

    monkeypatch.setattr(dist, "_coalescing_manager", manager)
    for device, calls in ((CPU, [CPU]), (None, [])):
        state["it"], ended[:] = [], []
        with pytest.raises(KeyError), coalesced(group, device):
            raise KeyError("x")
        assert ended == calls
        assert not state
