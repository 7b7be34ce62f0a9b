"""Triggers of programs under way on GPUs, with a made-up driver."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_world import World, world_of
from fake_driver import LEGACY, FakeDriver
from sliced import sliced_gather

from sidelane.collectives.backend_cuda import CudaBackend
from sidelane.errors import PeerTimeoutError, UnavailableError
from sidelane.execute.base import Addresses
from sidelane.execute.cuda import CudaProgram
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.order import submission_order
from sidelane.execute.cuda.trigger import CUDA_CHANNELS, require_free_channel
from sidelane.program.ir import Program, has_epochs
from sidelane.program.pieces import gathering_program, row_slices
from sidelane.program.transform import arrivals_of, flags_of_callers, freeze, triggers_of, without_callers
from sidelane.program.verify import verify


class Sliced:
    """A program of slices on all ranks of a world, each on a stream aside."""

    def __init__(self, world: World, program: Program) -> None:
        self.world = world
        self.memory = {
            (rank, name): np.zeros(program.collective.buffer_bytes(rank, name), np.uint8)
            for rank in range(world.world_size)
            for name in ("shard", "output")
        }
        buffers = {place: array.ctypes.data for place, array in self.memory.items()}
        flags = tuple(flags.ctypes.data for flags in world.flags)
        captured, addresses = not has_epochs(program), Addresses(buffers, flags)
        runs = program if captured else without_callers(program)
        self.ranks: list[CudaProgram] = [
            executor.load(runs, addresses, captured=captured) for executor in world.executors
        ]
        self.aside = [driver.create_stream() for driver in world.drivers]
        self.triggers = [
            [
                CudaBackend.bind_trigger(
                    SimpleNamespace(executor=executor, channels=CUDA_CHANNELS),
                    [(flags[rank] + 4 * s.flag.index, s.value) for s in signals],
                    self.ranks[rank],
                )
                for signals in (triggers_of(program, rank) if has_epochs(program) else ())
            ]
            for rank, executor in enumerate(world.executors)
        ]

    def start(self) -> int:
        self.world.epoch += 1
        for loaded, stream in zip(self.ranks, self.aside, strict=True):
            loaded.run(self.world.epoch, (stream, False))
        return self.world.epoch


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stream", ["own", "legacy", "host"])
def test_slices_go_as_they_come(seed: int, stream: str) -> None:
    draw = random.Random(seed)
    ranks, slices, nbytes = draw.randrange(1, 4), draw.randrange(1, 5), draw.choice((8, 40))
    with world_of(ranks) as world:
        sliced = Sliced(world, sliced_gather(ranks, slices, nbytes))
        for call in range(6):
            epoch = sliced.start()
            fires = [(rank, number) for rank in range(ranks) for number in range(slices)]
            draw.shuffle(fires)
            for rank, number in fires:
                driver, trigger = world.drivers[rank], sliced.triggers[rank][number]
                tile = sliced.memory[rank, "shard"][number * nbytes :][:nbytes]
                if stream == "host":
                    tile[:] = 40 * call + 7 * rank + number
                    trigger.fire_from_host(epoch)
                    continue
                handle = LEGACY if stream == "legacy" else world.streams[rank].cuda_stream
                driver.do(handle, lambda tile=tile, value=40 * call + 7 * rank + number: tile.fill(value))
                trigger.fire(epoch, (handle, False))
            world.synchronize()
            for driver in world.drivers:
                driver.synchronize()
            for rank in range(ranks):
                found = sliced.memory[rank, "output"].reshape(ranks, slices, nbytes)[:, :, -1].tolist()
                assert found == [[40 * call + 7 * peer + number for number in range(slices)] for peer in range(ranks)]


def test_nothing_moves_before_its_trigger() -> None:
    with world_of(1) as world:
        sliced = Sliced(world, sliced_gather(1, 2, 8))
        output = sliced.memory[0, "output"]
        sliced.memory[0, "shard"][:] = 9
        assert not world.executors[0].waits_for_the_host()
        epoch = sliced.start()
        time.sleep(0.05)
        assert not output.any() and world.executors[0].waits_for_the_host()
        sliced.triggers[0][0].fire_from_host(epoch)
        deadline = time.monotonic() + 10
        while not output[:8].all() and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(0.02)
        assert output[:8].all() and not output[8:].any()
        sliced.triggers[0][1].fire_from_host(epoch)
        world.synchronize()
        assert output.all() and not world.executors[0].waits_for_the_host()


def test_the_order_of_submission_is_that_of_an_execution() -> None:
    """Signals of one rank before the waits of another, in every slice, as if all triggers had been fired."""
    program = without_callers(sliced_gather(2, 3, 8))
    for rank, order in enumerate(submission_order(program, lambda queue: True)):
        (queue,) = program.queues_of(rank)
        assert order == tuple((0, position) for position in range(len(queue.commands)))


def test_a_trigger_that_nobody_fires_is_named() -> None:
    with world_of(2, timeout_s=0.4) as world:
        sliced = Sliced(world, sliced_gather(2, 2, 8))
        epoch = sliced.start()
        for rank, number in ((0, 0), (1, 0), (1, 1)):
            sliced.triggers[rank][number].fire_from_host(epoch)
        for executor in world.executors:
            with pytest.raises(PeerTimeoutError) as caught:
                executor.synchronize()
            assert caught.value.ranks == (0,), caught.value
            # Rank 0 waits for its trigger, rank 1 for what rank 0 would send: all hear of who came first.
            own, peers = ("wait flag 1",), ("rank 1 waited", "wait flag 4", "rank 0 (in call 1) has not signalled")
            said = str(caught.value)
            assert any(all(words in said for words in waits) for waits in (own, peers)), said


@pytest.mark.parametrize("seed", range(6))
def test_in_a_graph_triggers_are_dependencies(seed: int) -> None:
    """Slices leave behind the caller's work that computes them, in every replay, whatever order triggers are fired in;
    and no rank writes where a peer has not yet read what came before.
    """
    draw = random.Random(seed)
    ranks, slices, nbytes = draw.randrange(1, 4), draw.randrange(1, 5), draw.choice((8, 40))
    channels = draw.choice((None, 1))
    program = freeze(sliced_gather(ranks, slices, nbytes))
    verify(program)
    with world_of(ranks, channels=channels) as world:
        sliced = Sliced(world, flags_of_callers(program))
        call, found, graphs = [0], [], []
        for rank, loaded in enumerate(sliced.ranks):
            driver, own, aside = world.drivers[rank], world.streams[rank].cuda_stream, sliced.aside[rank]
            assert loaded.marks == slices
            driver.begin_capture()
            fork, join = driver.create_event(), driver.create_event()
            driver.submit([driver.bind_record(fork, own), driver.bind_wait(fork, aside)])
            order = list(range(slices))
            draw.shuffle(order)
            for number in order:
                tile = sliced.memory[rank, "shard"][number * nbytes :][:nbytes]
                driver.submit([(computing(driver, own, tile, call, 7 * rank + number), ())])
                loaded.mark(number, own)
            loaded.run(0, (aside, True))
            driver.submit([driver.bind_record(join, aside), driver.bind_wait(join, own)])
            output = sliced.memory[rank, "output"]
            reading = reads(driver, own, output.reshape(ranks, slices, nbytes)[:, :, -1], found)
            driver.submit([(reading, ())])
            graphs.append(driver.end_capture())
        for call[0] in range(5):
            world.replay(graphs)
            expected = [[40 * call[0] + 7 * peer + number for number in range(slices)] for peer in range(ranks)]
            assert found == [expected] * ranks, call
            found.clear()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("captured", [False, True])
def test_what_has_arrived_is_read_while_the_rest_travels(seed: int, captured: bool) -> None:
    draw = random.Random(seed)
    ranks, pieces, rows = draw.randrange(1, 4), draw.randrange(1, 4), draw.randrange(3, 9)
    program = gathering_program(ranks, rows, pieces, 8)
    runs = flags_of_callers(freeze(program)) if captured else without_callers(program)
    with world_of(ranks, channels=1 if captured and draw.random() < 0.5 else None) as world:
        memory = {(rank, "rows"): np.zeros(ranks * rows * 8, np.uint8) for rank in range(ranks)}
        flags = tuple(flags.ctypes.data for flags in world.flags)
        buffers = {place: array.ctypes.data for place, array in memory.items()}
        addresses = Addresses(buffers, flags)
        loaded = [executor.load(runs, addresses, captured=captured) for executor in world.executors]
        asides = [driver.create_stream() for driver in world.drivers]
        call, graphs = [0], []
        found: list[list[object]] = [[] for _ in range(ranks)]

        def read(rank: int, stream: int, number: int) -> Callable[[], None]:
            turn, piece = divmod(number, len(row_slices(rows, pieces)))
            source, part = (rank - turn - 1) % ranks, row_slices(rows, pieces)[piece]
            there = memory[rank, "rows"].reshape(ranks, rows, 8)[source, part]
            return reads(world.drivers[rank], stream, there, found[rank])

        def one_call(rank: int, epoch: int) -> None:
            driver, own, aside = world.drivers[rank], world.streams[rank].cuda_stream, asides[rank]
            mine = memory[rank, "rows"].reshape(ranks, rows * 8)[rank]
            fork, join = driver.create_event(), driver.create_event()
            driver.submit([(computing(driver, own, mine, call, 7 * rank), ())])
            driver.submit([driver.bind_record(fork, own), driver.bind_wait(fork, aside)])
            loaded[rank].run(epoch, (aside, captured))
            for number, waits in enumerate(arrivals_of(program, rank)):
                if captured:
                    loaded[rank].follow(number, own)
                else:
                    words = [(flags[rank] + 4 * wait.flag.index, wait.value) for wait in waits]
                    backend = SimpleNamespace(executor=world.executors[rank], channels=CUDA_CHANNELS)
                    CudaBackend.bind_arrival(backend, words, loaded[rank]).follow(epoch, (own, False))
                driver.submit([(read(rank, own, number), ())])
            driver.submit([driver.bind_record(join, aside), driver.bind_wait(join, own)])

        if captured:
            for rank, driver in enumerate(world.drivers):
                driver.begin_capture()
                one_call(rank, 0)
                graphs.append(driver.end_capture())
        for call[0] in range(5):
            world.epoch += 1
            for rank in draw.sample(range(ranks), ranks):
                if captured:
                    world.drivers[rank].replay(graphs[rank])
                else:
                    one_call(rank, world.epoch)
            for driver in world.drivers:
                driver.synchronize()
            for rank, read_there in enumerate(found):
                sources = [(rank - turn) % ranks for turn in range(1, ranks) for _ in row_slices(rows, pieces)]
                assert [{*np.ravel(one)} for one in read_there] == [{40 * call[0] + 7 * source} for source in sources]
                read_there.clear()


def computing(driver: FakeDriver, stream: int, tile: np.ndarray, call: list[int], number: int) -> Callable[[], None]:
    def compute() -> None:
        time.sleep(2e-3)  # a copy that does not wait takes what was there
        tile.fill(40 * call[0] + number)

    return lambda: driver.do(stream, compute)


def reads(driver: FakeDriver, stream: int, output: np.ndarray, found: list[object]) -> Callable[[], None]:
    return lambda: driver.do(stream, lambda: found.append(output.tolist()))


def test_a_channel_is_left_for_triggers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    require_free_channel("all_gather", "b2b", 1)
    with pytest.raises(UnavailableError, match="holds 2 streams back, of 2 hardware channels"):
        require_free_channel("all_gather", "pcpy", 2)


def refuse(driver: FakeDriver) -> None:
    """Let the driver refuse the next call."""
    driver.fail_next = "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_refused_trigger_waits_for_what_was_submitted() -> None:
    """The engines' streams have ended when it raises: the caller may free the memory of the program."""
    with world_of(2) as world:
        sliced = Sliced(world, sliced_gather(2, 2, 8))
        epoch = sliced.start()
        assert not world.drivers[0].is_idle(sliced.aside[0])
        refuse(world.drivers[0])
        with pytest.raises(DriverError):
            sliced.triggers[0][1].fire(epoch, (world.streams[0].cuda_stream, False))
        assert world.drivers[0].is_idle(sliced.aside[0])
        assert world.monitor.aborted is not None
        for flags in world.flags:  # to end what rank 1 waits for
            flags[:] = 1 << 20
