"""Stamped programs that take turns on the CUDA executor: eager, as graphs of their own, in a graph of the caller's."""

from __future__ import annotations

import threading
import time

import pytest
from fake_driver import FakeDriver
from test_cuda_executor import FLAGS, Loaded, World, world_of

from sidelane.bench.phases_programs import OPENING, Operation
from sidelane.bench.phases_split import Sample, split
from sidelane.bench.phases_turns import InTurn, TurnCounter
from sidelane.program.build.alternating import staging_of
from sidelane.program.transform.stamp import Mark, slots_of

RANKS = 3
LATE_US = 50_000


class WorldCall:
    """What ``phases_rig`` makes of one program on one GPU, for all ranks of a world at once; samples are of rank 0."""

    def __init__(self, world: World, loaded: Loaded, *, captured: bool) -> None:
        self.world, self.loaded = world, loaded
        self.slots = slots_of(loaded.program, 0)
        self.graphs: list[list] = []
        if captured:
            for driver in world.drivers:
                driver.begin_capture()
            loaded.start()
            self.graphs = [driver.end_capture() for driver in world.drivers]

    def arm(self, epoch: int) -> None:
        self.expected = self.loaded.fill(epoch)

    def begin(self, epoch: int) -> None:
        for driver, graph in zip(self.world.drivers, self.graphs, strict=False):
            driver.replay(graph)
        if not self.graphs:
            self.loaded.start()

    def finish(self) -> None:
        for driver in self.world.drivers:
            driver.synchronize()
        self.loaded.check(self.expected)

    def sample(self, begin_ns: int, returned_ns: int, known_ns: int) -> Sample:
        host, total = (returned_ns - begin_ns) / 1e3, (known_ns - begin_ns) / 1e3
        stamps = {slot: self.loaded.ranks[0].elapsed_us(self.slots[0], slot) for slot in self.slots}
        return Sample.stamped(host, total, stamps, known_us=None)


def calls_of(world: World, operation: Operation, turns: TurnCounter, *, captured: bool, spread: bool) -> InTurn:
    plan = operation.plan(RANKS, stamped=True, frozen=captured)
    plan.verify()
    frozen = captured or operation.variant != "alternating"
    distance = staging_of(4 << 20) if spread else None
    programs = plan.turns if plan.opening is None else (plan.opening,)
    loaded = [world.load(program, frozen=frozen, staging_distance=distance) for program in programs]
    return InTurn(turns, [WorldCall(world, each, captured=captured) for each in loaded])


def timed(call: InTurn, epoch: int) -> Sample:
    call.arm(epoch)
    begin = time.perf_counter_ns()
    call.begin(epoch)
    returned = time.perf_counter_ns()
    call.finish()
    return call.sample(begin, returned, time.perf_counter_ns())


@pytest.mark.parametrize("spread", [False, True], ids=["copies", "rows"])
@pytest.mark.parametrize("name", ["all_gather", "all_gather_in_place", "all_to_all"])
@pytest.mark.parametrize(
    ("variant", "captured"),
    [("alternating", False), ("alternating+graph", False), ("alternating", True), (OPENING, True)],
)
def test_every_turn_moves_its_bytes_and_the_phases_add_up(
    variant: str, captured: bool, name: str, spread: bool
) -> None:
    with world_of(RANKS) as world:
        calls = calls_of(world, Operation(name, variant, 3 * 1024), TurnCounter(), captured=captured, spread=spread)
        for epoch in range(1, 6):
            sample = timed(calls, epoch)
            found = split(sample)
            phases = (found.control_us, found.schedule_us, found.copy_us, found.sync_us)
            assert all(phase >= 0 for phase in phases)
            assert sum(phases) == pytest.approx(found.total_us)
            assert 0 < found.stage_us < found.copy_us
            assert found.entry_us > 0
            # Exit is what resets take beyond the pulls, where they stand beside them.
            assert found.exit_us == 0 or captured or variant.endswith("+graph")
        if variant != "alternating" or captured:
            assert not any(flags[FLAGS:].any() for flags in world.flags), "flags come back"
        if captured:
            kinds = [kind for kind, _ in world.drivers[0].submitted]
            assert ("rows" in kinds) is spread, "the pulls of a stamped program are rows as well"


def wait_for(driver: FakeDriver, event: int) -> None:
    deadline = time.monotonic() + 10
    while event not in driver._reached_ns:
        assert time.monotonic() < deadline, "a stamp is not reached"
        time.sleep(1e-4)


@pytest.mark.parametrize("captured", [False, True])
def test_a_peer_that_is_late_shows_in_the_handshake_and_not_in_the_copies(captured: bool) -> None:
    with world_of(RANKS) as world:
        operation = Operation("all_gather", "alternating", 3 * 1024)
        calls = calls_of(world, operation, TurnCounter(), captured=captured, spread=captured)
        late = threading.Event()
        world.drivers[2].do(world.streams[2].cuda_stream, late.wait)
        calls.arm(1)
        begin = time.perf_counter_ns()
        calls.begin(1)
        loaded = calls._now.loaded
        wait_for(world.drivers[0], loaded.ranks[0]._stamps[Mark.STAGED])
        time.sleep(LATE_US / 1e6)
        late.set()
        calls.finish()
        sample = calls.sample(begin, begin, time.perf_counter_ns())
        assert sample.entry_us >= LATE_US > sample.copy_us, sample
