"""Queues of SDMA engines through a made-up ROCr whose engines are emulated, and the trial of a machine with them."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import sdma_emulator
from sdma_emulator import Engine, Memory

from sidelane.errors import UnavailableError
from sidelane_lab.sdma import Packet
from sidelane_lab.sdma import packets as layout
from sidelane_sdma_trial import trial as module
from sidelane_sdma_trial.queues import SdmaQueue, SdmaRuntime

U64, POINTER, INT = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
CPU, OK, REFUSED = 5, 0, 0x1002
HOST = 0x7F0000000000


class MadeUpRocr:
    """The calls of ROCr that are made, by the C types and the layouts of its headers; GPUs have handles 100, 101 ..."""

    def __init__(self, gpus: int, seed: int = 0) -> None:
        self.gpus, self.draw, self.memory = gpus, random.Random(seed), Memory()
        self.queues: dict[int, SimpleNamespace] = {}
        self.began = self.opened = 0
        self.refuses_engine: int | None = None
        visitor = ctypes.CFUNCTYPE(INT, U64, POINTER)
        for name, types, function in (
            ("hsa_init", (INT,), self.init),
            ("hsa_shut_down", (INT,), self.shut_down),
            ("hsa_iterate_agents", (INT, visitor, POINTER), self.iterate),
            ("hsa_agent_get_info", (INT, U64, INT, POINTER), self.info),
            ("hsa_amd_queue_create", (INT, U64, POINTER, ctypes.c_uint32), self.create),
            ("hsa_queue_destroy", (INT, POINTER), self.destroy),
            ("hsa_queue_load_read_index_scacquire", (U64, POINTER), self.read_index),
            ("hsa_queue_load_write_index_relaxed", (U64, POINTER), lambda queue: self.queues[queue].written),
            ("hsa_signal_store_screlease", (None, U64, ctypes.c_int64), self.ring_doorbell),
        ):
            setattr(self, name, ctypes.CFUNCTYPE(*types)(function))

    def init(self) -> int:
        self.began += 1
        return OK

    def shut_down(self) -> int:
        self.began -= 1
        return OK

    def iterate(self, visit: Callable[[int, None], int], data: object) -> int:
        return next(filter(None, (visit(handle, None) for handle in (CPU, *range(100, 100 + self.gpus)))), OK)

    def info(self, agent: int, attribute: int, place: int) -> int:
        values = {17: int(agent != CPU), 0xA006: 0xC0 + agent - 100 << 8 | 3 << 3 | 1, 0xA00F: 2}
        ctypes.c_uint32.from_address(place).value = values[attribute]
        return OK

    def create(self, agent: int, place: int, count: int) -> int:
        version, flags, engine_type, *_, nbytes, priority = struct.unpack("<HHB3BII", ctypes.string_at(place, 16))
        engine_id = ctypes.c_uint32.from_address(place + 40).value
        assert (version, flags, engine_type, priority, count) == (1, 0, 1, 1, 1)
        assert not any(ctypes.string_at(place + 44, 52)), "reserved"
        if engine_id == self.refuses_engine:
            return REFUSED
        self.opened += 1
        header, ring = ctypes.create_string_buffer(40), ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(header)
        engine = Engine(f"GPU {agent - 100} queue {self.opened}", b"", self.memory, self.draw)
        struct.pack_into("<IIQQIIQ", header, 0, 1, 0, ctypes.addressof(ring), address, nbytes, 0, self.opened)
        self.queues[address] = SimpleNamespace(header=header, ring=ring, nbytes=nbytes, engine=engine, written=0)
        U64.from_address(place + 32).value = address
        return OK

    def destroy(self, queue: int) -> int:
        del self.queues[queue]
        return OK

    def ring_doorbell(self, signal: int, value: int) -> None:
        queue = self.queues[signal]
        ring = queue.ring.raw
        queue.engine.append(bytes(ring[place % queue.nbytes] for place in range(queue.written, value)))
        queue.written = value

    def read_index(self, queue: int) -> int:
        """Engines run while the host looks."""
        for other in self.draw.sample(list(self.queues.values()), len(self.queues)):
            for _ in range(self.draw.randrange(8)):
                if other.engine.ended or not other.engine.step():
                    break
        return 4 * int(self.queues[queue].engine.place)


class MadeUpMemory:
    def __init__(self, memory: Memory, address: int, nbytes: int) -> None:
        self.address, self.bytes = address, np.zeros(nbytes, np.uint8)
        memory.map(address, self.bytes)

    def write(self, data: bytes, offset: int = 0) -> None:
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self) -> bytes:
        return self.bytes.tobytes()


class MadeUpMachine:
    """GPUs with emulated engines."""

    def __init__(self, gpus: int, seed: int = 0) -> None:
        self.rocr = MadeUpRocr(gpus, seed)
        self.runtime = SdmaRuntime(self.rocr)
        self.agents = self.runtime.agents
        self.allocated = 0

    def on_gpu(self, gpu: int, nbytes: int) -> MadeUpMemory:
        self.allocated += 1
        return MadeUpMemory(self.rocr.memory, (gpu + 1 << 40) + (self.allocated << 24), nbytes)

    def on_host(self, nbytes: int) -> MadeUpMemory:
        return self.on_gpu(99, nbytes)


def opened(nbytes: int = 256) -> tuple[MadeUpRocr, SdmaQueue, np.ndarray]:
    rocr = MadeUpRocr(1)
    words = np.zeros(64, np.uint8)
    rocr.memory.map(HOST, words)
    runtime = SdmaRuntime(rocr)
    return rocr, runtime.open(runtime.agents[0], nbytes=nbytes), words


def fence(value: int) -> bytes:
    return Packet.of(layout.FENCE, address=HOST, value=value).to_bytes()


def test_the_ring_goes_round_and_packets_are_never_cut() -> None:
    """16 bytes a fence and 24 a poll, in a ring of 256 bytes: the ends do not meet."""
    _, queue, words = opened()
    poll = Packet.of(layout.POLL, address=HOST, comparison=3, value=0, mask=0, interval=4, retries=0xFFF).to_bytes()
    for value in range(1, 200):
        queue.submit(poll + fence(value) if value % 3 else fence(value))
        if value % 5 == 0:
            while queue.pending:
                pass
            assert words.view(np.uint32)[0] == value
    while queue.pending:
        pass
    assert words.view(np.uint32)[0] == 199


def test_a_full_ring_waits_for_the_engine() -> None:
    rocr, queue, words = opened()
    blocked = Packet.of(layout.POLL, address=HOST + 4, comparison=3, value=1, mask=1, interval=4, retries=0xFFF)
    queue.submit(blocked.to_bytes())
    for value in range(1, 15):
        queue.submit(fence(value))
    with pytest.raises(TimeoutError, match="no room for 16 bytes, 248 bytes are not executed yet"):
        queue.submit(fence(15), timeout_s=0.05)
    rocr.memory.store(HOST + 4, 1)
    queue.submit(fence(16))
    while queue.pending:
        pass
    assert words.view(np.uint32)[0] == 16
    queue.close()
    queue.close()
    assert not rocr.queues


@pytest.mark.parametrize("data", [b"", bytes(6), bytes(132)])
def test_what_a_ring_does_not_take(data: bytes) -> None:
    _, queue, _ = opened()
    with pytest.raises(ValueError, match="allowed=whole words, at most 128"):
        queue.submit(data)


def test_agents_are_the_gpus_by_their_bus_addresses() -> None:
    rocr = MadeUpRocr(2)
    runtime = SdmaRuntime(rocr)
    assert [(a.handle, a.domain, a.bus, a.device) for a in runtime.agents] == [(100, 2, 0xC0, 3), (101, 2, 0xC1, 3)]
    runtime.close()
    assert rocr.began == 0


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="has no hsa_amd_queue_create"):
        SdmaRuntime(SimpleNamespace())
    rocr = MadeUpRocr(1)
    rocr.refuses_engine = 3
    runtime = SdmaRuntime(rocr)
    with pytest.raises(UnavailableError, match="hsa_amd_queue_create returned 0x1002"):
        runtime.open(runtime.agents[0], engine=3)
    with pytest.raises(UnavailableError, match="ROCr is not installed"):
        monkeypatch.setattr("sidelane_sdma_trial.queues.LIBRARY_NAMES", ("libnone.so",))
        SdmaRuntime()


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
def test_a_trial_goes_through_on_made_up_gpus(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    trial = module.Trial(MadeUpMachine(gpus), sizes=(192,))
    assert trial.run(), trial.rows[-1]
    assert len(trial.rows) == (4 if gpus == 1 else 8 + 12)
    engines = {row["step"].partition(" of")[0]: row["engines"] for row in trial.rows[8:]}
    if gpus == 4:
        assert engines["all_gather bcst"] == 4 * 2 and engines["all_to_all swap+prelaunch"] == 6


def test_a_trial_says_what_went_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MadeUpMachine(2)
    monkeypatch.setitem(sdma_emulator.HANDLERS, (1, 9), lambda *_: 7)
    trial = module.Trial(machine, sizes=(192,))
    assert not trial.run()
    assert trial.rows[-1] == {"step": "a swap with a peer", "ok": False, "problem": "wrong bytes"}
    monkeypatch.setitem(sdma_emulator.HANDLERS, (5, 0), lambda *_: 0)
    trial = module.Trial(machine, timeout_s=0.2)
    assert not trial.run()
    assert "not done after 0.2 s:\n0x0000  fence" in trial.rows[-1]["problem"]
