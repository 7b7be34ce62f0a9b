"""The CUDA executor with a made-up driver, and the HIP executor on the stand-in: the right bytes in every way."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
from cuda_world import FLAGS, MakeWorld, World, world_of
from fake_driver import Stream
from hip_world import hip_world
from small_programs import SUM, programs
from started import start

from sidelane.errors import CommunicatorClosedError, UnavailableError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda import streams
from sidelane.program import collective as define
from sidelane.program.builders import build
from sidelane.program.transform import freeze


@pytest.mark.parametrize(
    ("make", "inline_bytes"), [(world_of, 0), (world_of, streams.INLINE_BYTES), (hip_world, streams.INLINE_BYTES)]
)
@pytest.mark.parametrize("channels", [None, 1])
@pytest.mark.parametrize("peer_writes", [True, False])
def test_every_builder_moves_the_right_bytes(
    make: MakeWorld, inline_bytes: int, peer_writes: bool, channels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "INLINE_BYTES", inline_bytes)
    with make(3, peer_writes=peer_writes, channels=channels) as world:
        for seed, program in enumerate(programs(3)):
            loaded = world.load(program)
            for repeat in range(2):
                expected = loaded.fill(2 * seed + repeat)
                pending = loaded.start()
                for each in pending:
                    each.wait()
                assert all(each.done() for each in pending)
                loaded.check(expected)


@pytest.mark.parametrize(
    ("make", "inline_bytes"), [(world_of, 0), (world_of, streams.INLINE_BYTES), (hip_world, streams.INLINE_BYTES)]
)
def test_captured_programs_are_replayed_and_their_flags_come_back(
    make: MakeWorld, inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "INLINE_BYTES", inline_bytes)
    with make(3) as world:
        for program in programs(3):
            loaded, pending = world.load(freeze(program), frozen=True), []
            graphs = world.captured(lambda loaded=loaded, pending=pending: pending.extend(loaded.start()))
            assert all(each.done() for each in pending)
            for repeat in range(3):
                expected = loaded.fill(repeat)
                world.replay(graphs)
                loaded.check(expected)
            kinds = {kind for driver in world.drivers for kind, _ in getattr(driver, "submitted", ())}
            assert "rows" not in kinds, "not mapped for it"
            assert not any(flags[FLAGS:].any() for flags in world.flags)


def test_a_program_without_flags_runs_eagerly_and_in_graphs() -> None:
    """That of a single rank: no epoch tells it from one that was made for a graph."""
    program = build(define.all_gather([4000]), "b2b")
    with world_of(1) as world:
        eager, captured = world.load(program), world.load(program, frozen=True)
        driver, graphs = world.drivers[0], []
        driver.begin_capture()
        captured.start()
        graphs.append(driver.end_capture())
        for repeat in range(3):
            expected = eager.fill(repeat)
            (pending,) = eager.start([Stream(0)] if repeat == 2 else None)
            pending.wait()
            eager.check(expected)
            expected = captured.fill(repeat + 10)
            driver.replay(graphs[0])
            driver.synchronize()
            captured.check(expected)


def test_a_capture_needs_a_frozen_program() -> None:
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([4, 4]), "b2b"))
        world.drivers[0].begin_capture()
        with pytest.raises(ValueError, match="loaded for eager calls"):
            start(loaded.ranks[0], 1, world.streams[0])
        assert world.drivers[0].end_capture() == []
        with pytest.raises(ValueError, match=r"transform\.freeze"):
            world.load(loaded.program, frozen=True)
        world.executors[0].check()


def test_programs_whose_engines_add_are_refused() -> None:
    reduction = define.Reduction(define.ReduceOp.SUM, "float32")
    with world_of(2) as world, pytest.raises(UnavailableError, match="no GPU's copy engines add"):
        world.load(dataclasses.replace(build(define.reduce_scatter([8, 8], reduction), "b2b"), engines_add=True))


def test_the_default_stream_goes_by_way_of_an_internal_one() -> None:
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([4, 4]), "b2b"))
        expected = loaded.fill(0)
        legacy = Stream(0)
        held = threading.Event()
        for driver in world.drivers:
            driver.do(0, held.wait)  # the caller's earlier work
        pending = loaded.start([legacy, legacy])
        time.sleep(0.02)
        assert not any(each.done() for each in pending), "ordered behind the default stream"
        held.set()
        for driver in world.drivers:
            done: list[bool] = []
            driver.do(0, lambda done=done, pending=pending: done.append(True))
            driver.synchronize()
        assert all(each.done() for each in pending), "the default stream is ordered behind the collective"
        loaded.check(expected)


def test_a_thousand_invocations_back_to_back_with_delays() -> None:
    random = np.random.default_rng(7)
    with world_of(3) as world:
        gather = world.load(build(define.all_gather([8] * 3), "b2b"))
        reduce = world.load(build(define.all_reduce([8] * 3, SUM), "b2b"))
        for step in range(60):
            chosen = gather if step % 2 else reduce
            expected = chosen.fill(step)
            world.epoch += 1 + int(random.integers(3))  # epochs grow by any step
            for rank in range(3):
                pause = float(random.integers(3)) * 1e-3
                world.drivers[rank].do(world.streams[rank].cuda_stream, lambda pause=pause: time.sleep(pause))
                start(chosen.ranks[rank], world.epoch, world.streams[rank])
            world.synchronize()
            chosen.check(expected)
        # Without a host in between: ranks run ahead of each other as far as the flags let them.
        expected = gather.fill(1000)
        for _ in range(300):
            gather.start()
        world.synchronize()
        gather.check(expected)


def test_wrong_calls_are_refused_and_harm_nothing() -> None:
    with world_of(2) as world:
        loaded = world.load(build(define.all_gather([8] * 2), "b2b"))
        program = loaded.ranks[0]
        with pytest.raises(ValueError, match="number of flag memories"):
            world.executors[0].load(loaded.program, Addresses({}, (1,)))
        with pytest.raises(ValueError, match="no address of buffer"):
            world.executors[0].load(loaded.program, Addresses({}, (0, 0)))
    world.close()
    with pytest.raises(CommunicatorClosedError):
        start(program, 5, world.streams[0])


def test_two_executors_on_the_same_streams_do_not_disturb_each_other() -> None:
    with world_of(2) as first, world_of(2) as second:
        loaded = []
        for world in (first, second):
            world.drivers, world.streams = first.drivers, first.streams
            loaded.append(world.load(build(define.all_to_all([[4, 4], [4, 4]]), "pcpy")))
        for round_number in range(20):
            expected = [each.fill(round_number) for each in loaded]
            for each in loaded:
                each.start()
            for world in (first, second):
                world.synchronize()
            for each, want in zip(loaded, expected, strict=True):
                each.check(want)


def test_threads_end_with_their_executor() -> None:
    def watching() -> int:
        return sum(thread.name.startswith("sidelane-watch") for thread in threading.enumerate())

    world = World(2)
    assert watching() == 2
    world.close()
    assert watching() == 0
