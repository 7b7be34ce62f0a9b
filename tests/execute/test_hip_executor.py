"""The HIP executor on the stand-in runtime: bytes, eager, ahead of time and in graphs; failures and limits."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_driver import Stream
from hip_world import UNITS, HipWorld, StandinDriver, hip_world
from marks import long
from small_programs import programs

from sidelane.collectives.backend_hip import HipBackend
from sidelane.errors import PeerTimeoutError, UnavailableError
from sidelane.execute.boxes import Box
from sidelane.execute.cuda import DriverFeatures, plan, streams
from sidelane.execute.cuda.calls import MemcpyEveryOther
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.trigger import require_free_channel
from sidelane.execute.hip.cu_mask import CuSplit, mask_words
from sidelane.execute.hip.executor import LAST_EPOCH, graph_problem, probe_graphs
from sidelane.program import collective as define
from sidelane.program.builders import build
from sidelane.program.transform import freeze


@pytest.mark.parametrize("peer_writes", [True, False])
@pytest.mark.parametrize("ranks", [*map(long, (2, 4, 5, 6, 7)), 8])
def test_every_builder_moves_the_right_bytes(ranks: int, peer_writes: bool) -> None:
    with hip_world(ranks, peer_writes=peer_writes) as world:
        for seed, program in enumerate(programs(ranks)[:: 1 if ranks < 8 else 5]):
            loaded = world.load(program)
            for repeat in range(3):
                expected = loaded.fill(3 * seed + repeat)
                for pending in loaded.start():
                    pending.wait()
                loaded.check(expected)


def test_copies_within_a_gpu_stay_contiguous_since_a_kernel_copies_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST_SPLIT_BYTES", 1)
    monkeypatch.setattr(streams, "INLINE_BYTES", 0)
    monkeypatch.setattr(StandinDriver, "bind_rows", lambda *_: pytest.fail("rows at a distance"))
    split = 0
    with hip_world(3) as world:
        for program in (dataclasses.replace(one, alone=True) for one in programs(3)[::2]):
            split += any(isinstance(call, MemcpyEveryOther) for call in plan.plan_calls(program, 0).calls())
            loaded = world.load(program)
            expected = loaded.fill(1)
            loaded.start()
            world.synchronize()
            loaded.check(expected)
    assert split > 3, "on an NVIDIA GPU they are split"


def test_a_trigger_needs_one_of_four_hardware_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_MAX_HW_QUEUES", raising=False)
    require_free_channel("all_gather", "pcpy", 3, HipBackend.channels)
    with pytest.raises(UnavailableError, match=r"4 streams back, of 4 hardware channels \(GPU_MAX_HW_QUEUES\)"):
        require_free_channel("all_gather", "pcpy", 4, HipBackend.channels)
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "8")
    require_free_channel("all_gather", "pcpy", 7, HipBackend.channels)


def hang(driver: StandinDriver, *, urgent: bool) -> np.ndarray:
    """Let a stream wait for a word, which is returned."""
    word, ops = driver.array(4).view(np.uint32), driver.memory_ops()
    ops.wait(word.ctypes.data, 1, equal=True)
    driver.submit([driver.bind_memory_ops(ops, driver.create_stream(urgent=urgent))])
    return word


@pytest.mark.parametrize("queues", [None, 1])
def test_a_driver_that_stops_ends_its_streams_and_tells_of_one_that_waits(queues: int | None) -> None:
    threads = {path.name for path in Path("/proc/self/task").iterdir()}
    driver, other = StandinDriver(queues), StandinDriver(queues)
    word, kept = hang(driver, urgent=False), hang(other, urgent=False)
    driver.create_stream(urgent=True)
    with pytest.raises(AssertionError, match="stuck"):
        driver.stop(patience_s=1)
    left = {path.name for path in Path("/proc/self/task").iterdir()} - threads
    assert len(left) == 1, "the other driver's"
    word[0] = 2
    kept[0] = 1
    other.stop()
    assert {path.name for path in Path("/proc/self/task").iterdir()} <= threads


@pytest.mark.parametrize("queues", [None, 1])
def test_a_rank_that_does_not_come_is_named_and_streams_drain(queues: int | None) -> None:
    """With one queue, in which a stream of another program hangs, only the spare stream still gets to the flags."""
    with hip_world(3, timeout_s=0.5, channels=queues) as world:
        others = [hang(driver, urgent=True) for driver in world.drivers]
        loaded = world.load(programs(3)[0])
        loaded.fill(0)
        (first, second) = loaded.start(ranks=[0, 1])
        with pytest.raises(PeerTimeoutError, match="rank 2"):
            first.wait()
        with pytest.raises(PeerTimeoutError):
            second.wait()
        for driver, stream in zip(world.drivers[:2], world.streams[:2], strict=True):
            deadline = time.monotonic() + 10
            while not driver.is_idle(stream.cuda_stream):
                assert time.monotonic() < deadline, "released waits did not end"
                time.sleep(1e-3)
        assert [driver.spares for driver in world.drivers] == [queues or 0, queues or 0, 0]
        for word in others:
            word[0] = 1


@pytest.mark.parametrize("name", ["hipStreamWriteValue32", "hipStreamWaitValue32", "hipMemcpyAsync", "hipEventRecord"])
def test_a_refused_call_is_named_as_hip_names_it(name: str) -> None:
    with hip_world(2) as world:
        loaded = world.load(build(define.all_gather([4096, 4096]), "striped"))
        loaded.fill(0)
        world.drivers[0].library.standin_fail_next(name.encode(), 2)
        with pytest.raises(DriverError, match="hipErrorOutOfMemory"):
            loaded.start(ranks=[0])
        assert world.drivers[0].library.hipGetLastError() == 0, "torch would raise it after its next launch"


def test_flags_do_not_wrap_around() -> None:
    """A wait for "at least" compares unsigned numbers here, so that 5 does not follow 2**32 - 1 as it does on CUDA."""
    driver = StandinDriver()
    stream, word = driver.create_stream(), driver.array(4).view(np.uint32)
    ops = driver.memory_ops()
    ops.wait(word.ctypes.data, 0xFFFFFFFF, equal=False)
    word[0] = 5
    driver.submit([driver.bind_memory_ops(ops, stream)])
    time.sleep(0.05)
    assert not driver.is_idle(stream)
    word[0] = 0xFFFFFFFF
    driver.runtime.call("hipStreamSynchronize", stream)
    with hip_world(2) as world:
        world.executors[0].renew(LAST_EPOCH - 1)
        with pytest.raises(UnavailableError, match="make|Make a new communicator"):
            world.executors[0].renew(LAST_EPOCH)


def test_graphs_are_probed() -> None:
    driver = StandinDriver()
    assert graph_problem(driver) == ""
    driver.library.standin_set_early(1)
    try:
        assert "while it is captured" in graph_problem(driver)
    finally:
        driver.library.standin_set_early(0)
    driver.library.standin_fail_next(b"hipStreamBeginCapture", 801)
    assert "hipErrorNotSupported" in graph_problem(driver)


def test_a_rank_that_cannot_probe_tells_its_peers() -> None:
    told = []

    def exchange(what: str, make: Callable[[], str]) -> list[str]:
        with pytest.raises(UnavailableError, match="no HIP runtime") as caught:
            make()
        told.append(what)
        raise caught.value

    def no_driver(device: object) -> StandinDriver:
        raise UnavailableError("there is no HIP runtime")

    features = DriverFeatures("6.4", 16, stream_memory_ops=True, peer_writes=True)
    with pytest.raises(UnavailableError):
        probe_graphs(torch.device("cuda", 0), features, exchange, no_driver)  # type: ignore[arg-type]
    assert told == ["probe of graphs"]
    found = probe_graphs(
        torch.device("cuda", 0), features, lambda _, make: [make(), "graphs: not there"], lambda _: StandinDriver()
    )  # type: ignore[arg-type]
    assert not found.graphs and found.note == "graphs: not there"


def test_a_capture_is_refused_where_graphs_do_not_work() -> None:
    class WithoutGraphs(HipWorld):
        def features(self, peer_writes: bool) -> DriverFeatures:
            return dataclasses.replace(super().features(peer_writes), graphs=False, note="graphs: not here")

    world = WithoutGraphs(2)
    try:
        with pytest.raises(UnavailableError, match="graphs: not here"):
            world.load(freeze(programs(2)[0]), frozen=True)
    finally:
        world.close()


@pytest.mark.parametrize("units", [1, 31, 32, 33, 100, UNITS - 1])
def test_cu_masks_divide_the_units(units: int) -> None:
    driver = StandinDriver()
    split = driver.split_units(units)
    assert isinstance(split, CuSplit) and (split.taken.units, split.left.units) == (units, UNITS - units)
    taken, left = (mask_of(driver, part.stream) for part in (split.taken, split.left))
    assert mask_of(driver, split.taken.urgent) == taken
    assert taken & left == 0 and taken | left == (1 << UNITS) - 1 and taken.bit_count() == units
    split.close()
    for wrong in (0, UNITS):
        with pytest.raises(UnavailableError, match=f"allowed=1..{UNITS - 1}"):
            driver.split_units(wrong)


def mask_of(driver: StandinDriver, stream: int) -> int:
    words = (ctypes.c_uint32 * 32)()
    count = driver.library.standin_mask(ctypes.c_void_p(stream), words, 32)
    return sum(word << 32 * index for index, word in enumerate(words[:count]))


def test_a_partition_is_spread_over_dies_and_shader_engines() -> None:
    """By the kernel's rule bit i belongs to die i % 8, and there to shader engine (i / 8) % 4 (MI300X)."""
    (low, *_) = mask_words(range(32), UNITS)
    dies = [bit % 8 for bit in range(32) if low >> bit & 1]
    engines = [(bit % 8, bit // 8 % 4) for bit in range(32) if low >> bit & 1]
    assert sorted(map(dies.count, range(8))) == [4] * 8 and len(set(engines)) == 32


def test_rows_and_planes_lie_where_they_may() -> None:
    driver = StandinDriver()
    stream = driver.create_stream()
    random = np.random.default_rng(3)
    src, dst = driver.array(4 * 6 * 10), driver.array(4 * 8 * 12)
    src[:] = random.integers(0, 256, len(src))
    box = Box(dst.ctypes.data + 1, src.ctypes.data + 2, 7, 5, (12, 10), 3, (8 * 12, 6 * 10))
    driver.submit([driver.bind_planes(box, stream)])
    driver.runtime.call("hipStreamSynchronize", stream)
    expected = np.zeros_like(dst)
    for plane in range(3):
        for row in range(5):
            at, to = 2 + plane * 60 + row * 10, 1 + plane * 96 + row * 12
            expected[to : to + 7] = src[at : at + 7]
    assert np.array_equal(dst, expected)
    dst[:] = expected[:] = 0
    driver.submit([driver.bind_rows(dst.ctypes.data, src.ctypes.data, (12, 10), 9, 4, stream)])
    driver.runtime.call("hipStreamSynchronize", stream)
    for row in range(4):
        expected[12 * row : 12 * row + 9] = src[10 * row : 10 * row + 9]
    assert np.array_equal(dst, expected)


def test_what_the_driver_tells_of_memory() -> None:
    driver = StandinDriver()
    first, second = driver.allocate(100), driver.allocate(5000)
    number, start, nbytes = driver.allocation_at(second + 4999) or (0, 0, 0)
    assert number == driver.allocation_number(second) != driver.allocation_number(first)
    assert (start, nbytes) == (second, 5000)
    driver.free(second)
    assert driver.allocation_at(second) is None and driver.allocation_number(second) == 0
    assert driver.allocation_number(driver.allocate(5000)) > number, "numbers are never given twice"
    assert driver.library.hipGetLastError() == 0, "torch would raise it after its next launch"


def test_large_allocations_are_told_whole() -> None:
    """The attribute of a pointer that holds the size of its allocation has 32 bits in HIP."""
    driver = StandinDriver()
    address = driver.allocate((1 << 32) + 4096)  # no page of it is touched
    assert driver.allocation_at(address + (1 << 32)) == (driver.allocation_number(address), address, (1 << 32) + 4096)
    driver.free(address)


def test_versions_read_as_those_of_cuda() -> None:
    assert StandinDriver().version() == 6040  # ROCm 6.4


def test_a_stream_between_other_streams_orders_by_events() -> None:
    driver = StandinDriver()
    streams = [driver.create_stream(urgent=urgent) for urgent in (False, True)]
    assert [driver.has_normal_priority(stream) for stream in streams] == [True, False]
    word, event = driver.array(8).view(np.uint32), driver.create_event(timing=True)
    last = driver.create_event(timing=True)
    ops, after = driver.memory_ops(), driver.memory_ops()
    ops.wait(word.ctypes.data, 1, equal=True)
    after.write(word.ctypes.data + 4, 9)
    driver.submit([driver.bind_memory_ops(ops, streams[0]), driver.bind_record(event, streams[0])])
    driver.submit([driver.bind_wait(event, streams[1]), driver.bind_memory_ops(after, streams[1])])
    driver.submit([driver.bind_record(last, streams[1])])
    time.sleep(0.02)
    assert word[1] == 0 and not driver.has_passed(event)
    word[0] = 1
    driver.runtime.call("hipStreamSynchronize", streams[1])
    assert word[1] == 9 and driver.has_passed(last) and driver.elapsed_us(event, last) >= 0
    assert Stream(streams[0]).cuda_stream == streams[0]
