"""Stamped programs that take turns, as the study of phases calls them on GPUs, with a made-up driver for each rank.

Everything but the driver, the memory and the capture is what runs there: rigs, calls, executors.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_world import World, world_of
from fake_driver import FakeDriver

from sidelane.collectives.alternate import FLAGS as TURN_FLAGS
from sidelane.collectives.alternate import SLOTS_BYTES
from sidelane.program.collective import Buffer
from sidelane.program.transform.stamp import StampMark
from sidelane_lab.studies.phases import check as phases_check
from sidelane_lab.studies.phases import rig as phases_rig
from sidelane_lab.studies.phases.programs import OPENING, Operation
from sidelane_lab.studies.phases.rig import Rig
from sidelane_lab.studies.phases.split import Sample, split
from sidelane_lab.studies.phases.turns import InTurn, TurnCounter

RANKS = 3
LATE_US = 50_000
NBYTES = 3 * 1024


class Memory:
    """Buffers of all ranks; slots lie next to each other, as a mirror maps them, or are said not to."""

    def __init__(self, *, spread: bool) -> None:
        self.flags = torch.zeros(RANKS, 2 * (phases_rig.FLAGS + TURN_FLAGS), dtype=torch.int32)
        self.slots = torch.zeros(RANKS, SLOTS_BYTES, dtype=torch.uint8)
        self.buffers = {
            buffer: torch.zeros(RANKS, NBYTES, dtype=torch.uint8) for buffer in (Buffer.INPUT, Buffer.OUTPUT)
        }
        self.spread = spread

    def block(self, whole: torch.Tensor, rank: int) -> Any:
        return SimpleNamespace(tensor=whole[rank], addresses=addresses_of(whole), is_spread=self.spread)


def addresses_of(whole: torch.Tensor) -> tuple[int, ...]:
    return tuple(part.data_ptr() for part in whole)


class FakeStream:
    def __init__(self, driver: FakeDriver, handle: int) -> None:
        self.cuda_stream, self._driver = handle, driver

    def query(self) -> bool:
        return self._driver.is_idle(self.cuda_stream)


class FakeGraph:
    def __init__(self, driver: FakeDriver, run: Callable[[], None]) -> None:
        driver.begin_capture()
        run()
        self._driver, self._graph = driver, driver.end_capture()

    def replay(self) -> None:
        self._driver.replay(self._graph)


class Rigs:
    """The rigs of all ranks, in one process."""

    def __init__(self, world: World, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.memory, self.epoch = world, memory, 0
        self._driver = world.drivers[0]
        self.streams = [FakeStream(d, s.cuda_stream) for d, s in zip(world.drivers, world.streams, strict=True)]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.streams[device.index])
        monkeypatch.setattr(phases_rig, "captured", lambda run, calls: FakeGraph(self._driver, run))
        self.rigs = [self._rig(rank) for rank in range(RANKS)]

    def _rig(self, rank: int) -> Rig:
        rig, memory = object.__new__(Rig), self.memory
        rig.rank = SimpleNamespace(rank=rank, world_size=RANKS, device=torch.device("cuda", rank))
        rig.timeout_s, rig.notify_us, rig.notice = 30.0, 0.0, ""
        rig.executor, rig._turns = self.world.executors[rank], TurnCounter()
        rig._flags, rig._slots = memory.block(memory.flags, rank), memory.block(memory.slots, rank)
        rig._blocks = {buffer: memory.block(whole, rank) for buffer, whole in memory.buffers.items()}
        return rig

    def prepare(self, operation: Operation, launch: str, *, stamped: bool = True) -> Calls:
        plan = operation.plan(RANKS, stamped=stamped, frozen=launch == "graph")
        plan.verify()
        calls = []
        for rig, driver in zip(self.rigs, self.world.drivers, strict=True):
            self._driver = driver  # whose capture it is
            calls.append(rig.prepare(plan, launch))
        return Calls(self, plan.collective, calls)


class Calls:
    """One call of all ranks."""

    def __init__(self, rigs: Rigs, collective: Any, calls: list[InTurn]) -> None:
        self.rigs, self.collective, self.calls = rigs, collective, calls

    def run(self, late: Callable[[], None] = lambda: None) -> list[Sample]:
        rigs = self.rigs
        rigs.epoch += 1
        for rank, rig in enumerate(rigs.rigs):
            phases_check.fill(self.collective, rank, rig.tensor, rigs.epoch)
        for call in self.calls:
            call.arm(rigs.epoch)
        begin = time.perf_counter_ns()
        for call in self.calls:
            call.begin(rigs.epoch)
        returned = time.perf_counter_ns()
        late()
        for call in self.calls:
            call.finish()
        known = time.perf_counter_ns()
        for driver in rigs.world.drivers:
            driver.synchronize()
        for rank, rig in enumerate(rigs.rigs):
            assert phases_check.error(self.collective, rank, rig.tensor, rigs.epoch, own_chunk=True) is None
        return [call.sample(begin, returned, known) for call in self.calls]


@contextlib.contextmanager
def rigs_of(monkeypatch: pytest.MonkeyPatch, *, spread: bool) -> Iterator[Rigs]:
    with world_of(RANKS) as world:
        yield Rigs(world, Memory(spread=spread), monkeypatch)


@pytest.mark.parametrize("spread", [False, True], ids=["copies", "rows"])
@pytest.mark.parametrize("name", ["all_gather", "all_gather_in_place", "all_to_all"])
@pytest.mark.parametrize(
    ("variant", "launch"),
    [("alternating", "eager"), ("alternating", "graph"), (OPENING, "graph")],
)
def test_every_turn_moves_its_bytes_and_the_phases_add_up(
    monkeypatch: pytest.MonkeyPatch, variant: str, launch: str, name: str, spread: bool
) -> None:
    with rigs_of(monkeypatch, spread=spread) as rigs:
        calls = rigs.prepare(Operation(name, variant, NBYTES), launch)
        frozen = launch == "graph"
        for _ in range(5):
            for found in map(split, calls.run()):
                phases = (found.control_us, found.schedule_us, found.copy_us, found.sync_us)
                assert all(phase >= 0 for phase in phases)
                assert sum(phases) == pytest.approx(found.total_us)
                assert 0 < found.stage_us < found.copy_us
                assert found.entry_us > 0
                assert found.exit_us == 0 or frozen, "where resets stand beside the pulls, what they take beyond them"
        if frozen:
            assert not rigs.memory.flags.any(), "flags come back"
            kinds = [kind for kind, _ in rigs.world.drivers[0].submitted]
            assert ("rows" in kinds) is spread, "the pulls of a stamped program are rows as well"


def test_calls_of_all_kinds_share_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a round of the study: with stamps and without, eager and in graphs, an odd number of each."""
    with rigs_of(monkeypatch, spread=True) as rigs:
        ways = [("alternating", "eager"), ("alternating", "graph"), (OPENING, "graph")]
        calls = [
            rigs.prepare(Operation(name, *way, NBYTES), launch, stamped=stamped)
            for *way, launch in ways
            for name in ("all_gather", "all_to_all")
            for stamped in (True, False)
        ]
        for number in range(3 * len(calls)):
            samples = calls[5 * number % len(calls)].run()
            assert all(sample.total_us > 0 for sample in samples)


def wait_for(driver: FakeDriver, event: int) -> None:
    deadline = time.monotonic() + 10
    while event not in driver._reached_ns:
        assert time.monotonic() < deadline, "a stamp is not reached"
        time.sleep(1e-4)


@pytest.mark.parametrize("launch", ["eager", "graph"])
def test_a_peer_that_is_late_shows_in_the_handshake_and_not_in_the_copies(
    monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    with rigs_of(monkeypatch, spread=True) as rigs:
        calls = rigs.prepare(Operation("all_gather", "alternating", NBYTES), launch)
        late = threading.Event()
        rigs.world.drivers[2].do(rigs.streams[2].cuda_stream, late.wait)

        def come() -> None:
            wait_for(rigs.world.drivers[0], calls.calls[0]._now._loaded._stamps[StampMark.STAGED])
            time.sleep(LATE_US / 1e6)
            late.set()

        sample = calls.run(come)[0]
        assert sample.entry_us >= LATE_US > sample.copy_us, sample
