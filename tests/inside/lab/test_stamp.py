"""Stamps around the copies of a program: where they stand, what the CUDA executor makes of them, what they tell."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from cuda_world import FLAGS, world_of
from fake_driver import FakeDriver

from sidelane.errors import UnavailableError
from sidelane.execute.cuda.calls import (
    Memcpy,
    MemcpyBatch,
    MemOps,
    RecordEvent,
    RecordStamp,
    StreamPlan,
    WaitEvent,
)
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.streams import INLINE_BYTES
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import Collective
from sidelane.program.ir import MOVES, Copy, EngineKind, Stamp
from sidelane.program.transform import freeze, lower
from sidelane.program.verify import verify
from sidelane_lab.model.collectives import bare
from sidelane_lab.sim.prelaunch import prelaunch
from sidelane_lab.studies.phases.rig import round_trip_us
from sidelane_lab.studies.phases.stamp import StampMark, slots_of, stamp, times_of


def gather(ranks: int = 4, nbytes: int = 64, *, in_place: bool = False) -> Collective:
    return define.all_gather([nbytes] * ranks, in_place=in_place)


def marks_of(commands: tuple[object, ...]) -> list[str]:
    return [
        StampMark(c.slot % len(StampMark)).name if isinstance(c, Stamp) else "copy" if isinstance(c, MOVES) else "flag"
        for c in commands
    ]


def test_stamps_stand_around_the_copies_and_never_between_them() -> None:
    (dma, local) = stamp(build(gather(3), "b2b")).queues_of(0)
    assert marks_of(dma.commands) == [
        *["BEGIN", *["flag"] * 5, "FIRST", "copy", "copy", "LAST", *["flag"] * 4, "END"],
    ]
    assert local.engine.kind is EngineKind.LOCAL and marks_of(local.commands) == ["flag", "copy", "LAST"]


def test_nothing_but_copies_has_no_stamps_for_handshakes() -> None:
    program = stamp(bare(build(define.scatter([0, 8, 8], root=0), "b2b")))
    assert marks_of(program.queues[0].commands) == ["FIRST", "copy", "copy", "LAST"]


def test_a_rank_that_only_receives_is_stamped_at_its_ends() -> None:
    (queue,) = stamp(build(define.scatter([0, 8], root=0), "b2b")).queues_of(1)
    assert marks_of(queue.commands) == ["BEGIN", "flag", "flag", "END"]
    with pytest.raises(ValueError, match="no stamps around copies"):
        times_of({StampMark.BEGIN: 1.0, StampMark.END: 2.0})


@pytest.mark.parametrize("kind", [define.Kind.ALL_GATHER, define.Kind.ALL_TO_ALL])
def test_stamped_programs_are_proven_like_any_other(kind: define.Kind) -> None:
    collective = gather(3) if kind is define.Kind.ALL_GATHER else define.all_to_all([[8] * 3] * 3)
    for variant in variants(kind):
        program = stamp(lower(build(collective, variant), {Copy}))
        for each in (program, freeze(program), prelaunch(program)):
            verify(each)
        slots = slots_of(program, 1)
        assert len(slots) == len(set(slots)) > 2


def test_stamps_come_once_and_before_the_trigger() -> None:
    program = build(gather(), "b2b")
    with pytest.raises(ValueError, match="has stamps already"):
        stamp(stamp(program))
    with pytest.raises(ValueError, match="before prelaunch"):
        stamp(prelaunch(program))
    triggered = prelaunch(stamp(program)).queues_of(0)[0]
    assert marks_of(triggered.commands)[:2] == ["flag", "BEGIN"]


def kinds_of(plan: StreamPlan) -> list[str]:
    """The calls of stream 0 by kind; of stamps the mark."""
    names = {MemOps: "ops", Memcpy: "copy", MemcpyBatch: "copies"}
    return [
        StampMark(call.slot % len(StampMark)).name
        if isinstance(call, RecordStamp)
        else names.get(type(call), type(call).__name__)
        for call in plan.calls(0)
    ]


def without_stamps(plan: StreamPlan) -> list[tuple[int, object]]:
    """The calls with their streams, those of the flags taken together where a stamp has split them."""
    found: list[tuple[int, object]] = []
    for step in plan.steps:
        call = step.call
        if isinstance(call, RecordStamp):
            continue
        if found and isinstance(call, MemOps) and isinstance(found[-1][1], MemOps) and found[-1][0] == step.stream:
            call = MemOps((*found.pop()[1].ops, *call.ops))
        found.append((step.stream, call))
    return found


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "collective",
    [gather(), gather(in_place=True), gather(nbytes=INLINE_BYTES + 64), gather(2), define.all_to_all([[64] * 4] * 4)],
    ids=str,
)
def test_a_stamped_plan_is_the_plan_and_the_stamps(collective: Collective, captured: bool) -> None:
    """The run that is stamped must differ from the one that is not by nothing else."""
    program = build(collective, "b2b")
    pair = (freeze(program), freeze(stamp(program))) if captured else (program, stamp(program))
    plain, stamped = (plan_calls(each, 0, captured=captured) for each in pair)
    assert without_stamps(stamped) == without_stamps(plain)
    assert any(isinstance(c, Memcpy | MemcpyBatch) for c in plain.calls())
    assert (plain.streams, plain.events) == (stamped.streams, stamped.events)
    assert any(isinstance(c, RecordStamp) for c in stamped.calls()), stamped


def test_the_own_chunk_is_stamped_beside_the_copies() -> None:
    plan = plan_calls(stamp(build(gather(), "b2b")), 0)
    assert kinds_of(plan) == [
        *["BEGIN", "ops", "RecordEvent", "FIRST", "copies", "LAST", "ops", "WaitEvent", "ops", "END", "ops"]
    ]
    assert [type(call) for call in plan.calls(1)] == [WaitEvent, Memcpy, RecordStamp, RecordEvent]


def test_marks_are_the_outermost_of_all_queues() -> None:
    # Two engines (slots 0 to 3 and 4 to 7), and an own chunk that ends last (slot 10).
    times = {0: 0.0, 1: 5.0, 2: 9.0, 3: 11.0, 4: 1.0, 5: 4.0, 6: 8.0, 7: 12.0, 10: 20.0}
    assert times_of(times) == {
        StampMark.BEGIN: 0.0,
        StampMark.FIRST: 4.0,
        StampMark.LAST: 20.0,
        StampMark.END: 20.0,
    }
    del times[10]
    assert times_of(times) == {
        StampMark.BEGIN: 0.0,
        StampMark.FIRST: 4.0,
        StampMark.LAST: 9.0,
        StampMark.END: 12.0,
    }


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("variant", ["b2b", "pcpy"])
def test_the_executor_times_the_phases_and_moves_the_bytes(variant: str, captured: bool) -> None:
    with world_of(3) as world:
        program = stamp(build(gather(3, 4096), variant, Transport.PUSH))
        loaded = world.load(freeze(program) if captured else program, frozen=captured)
        graphs = []
        if captured:
            graphs = world.captured(loaded.start)
        expected = loaded.fill(1)
        late = threading.Event()
        world.drivers[2].do(world.streams[2].cuda_stream, late.wait)
        if captured:
            for driver, graph in zip(world.drivers, graphs, strict=True):
                driver.replay(graph)
        else:
            loaded.start()
        for rank in range(2):
            begun = loaded.ranks[rank]._stamps[slots_of(program, rank)[0]]
            while begun not in world.drivers[rank].reached_ns:
                time.sleep(1e-4)
        time.sleep(0.01)
        late.set()
        for driver in world.drivers:
            driver.synchronize()
        loaded.check(expected)
        for rank, each in enumerate(loaded.ranks):
            slots = slots_of(program, rank)
            marks = times_of({slot: each.elapsed_us(slots[0], slot) for slot in slots})
            assert marks[StampMark.BEGIN] <= marks[StampMark.FIRST] <= marks[StampMark.LAST] <= marks[StampMark.END]
            if rank != 2:
                # Nothing can go to the rank that is late. With an engine for each peer, the other's copy goes ahead.
                held = StampMark.FIRST if variant == "b2b" else StampMark.LAST
                assert marks[held] - marks[StampMark.BEGIN] >= 10_000
        assert not captured or not any(flags[FLAGS:].any() for flags in world.flags)


def test_the_round_trip_is_a_wait_and_a_write() -> None:
    driver = FakeDriver()
    assert 0 < round_trip_us(driver, trips=5) < 1e6  # type: ignore[arg-type]
    assert [kind for kind, _ in driver.submitted] == ["memory_ops"] * 5
    driver.stop()


def test_a_stream_that_never_gets_on_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(sys.modules[round_trip_us.__module__], "_LONGEST_S", 0.02)
    monkeypatch.setattr(driver, "is_idle", lambda stream: False)
    with pytest.raises(UnavailableError, match="does not see"):
        round_trip_us(driver, trips=1)  # type: ignore[arg-type]
    driver.stop()
