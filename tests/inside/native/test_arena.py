"""Memory of pools on GPUs, without a GPU: the compiled allocator, and the pool around it with a made-up torch.cuda."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sidelane.errors import UnavailableError
from sidelane.native import build
from sidelane.native.build import find_compiler
from sidelane.session import pools
from sidelane.session.pools import ARENAS, ArenaLibrary, DevicePlacer, load_arenas, release_pools

pytestmark = pytest.mark.skipif(not find_compiler(), reason="no C compiler")

START, NBYTES, DEVICE, MIB = 1 << 40, 64 << 20, 3, 1 << 20


class Slot:
    """An open arena, called as torch calls it."""

    def __init__(self, library: ArenaLibrary, start: int = START, nbytes: int = NBYTES, device: int = DEVICE) -> None:
        self.library, self.start = library, start
        self.number = library.open(start, nbytes, device)
        names = library.names(self.number)
        functions = ctypes.CDLL(library.path)
        self._malloc, self._free = (getattr(functions, name) for name in names)
        self._malloc.argtypes, self._malloc.restype = (
            [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p],
            ctypes.c_void_p,
        )
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.restype = None

    def malloc(self, nbytes: int, stream: int = 1, device: int = DEVICE) -> int | None:
        """The offset."""
        found: int | None = self._malloc(nbytes, device, stream)
        return None if found is None else found - self.start

    def free(self, offset: int) -> None:
        self._free(self.start + offset, 0, DEVICE, 1)


@pytest.fixture(scope="module")
def library() -> ArenaLibrary:
    return load_arenas()


@pytest.fixture
def slot(library: ArenaLibrary) -> Iterator[Slot]:
    made = Slot(library)
    yield made
    assert library.close(made.number) == 1, "all was given back"


def test_pieces_come_in_order_and_join_again(slot: Slot) -> None:
    offsets = [slot.malloc(2 * MIB) for _ in range(32)]
    assert offsets == [2 * MIB * number for number in range(32)]
    assert slot.malloc(1) is None and slot.library.refused(slot.number) == 1
    assert slot.library.refused(slot.number) == 0, "said once"
    assert slot.library.close(slot.number) == 0, "it is in use"
    for offset in offsets[1::2]:
        slot.free(offset)  # type: ignore[arg-type]
    assert slot.malloc(4 * MIB) is None, "no two of them touch"
    slot.free(0)
    assert slot.malloc(4 * MIB) == 0
    slot.free(0)
    for offset in offsets[2::2]:
        slot.free(offset)  # type: ignore[arg-type]
    assert slot.library.used(slot.number) == 0
    assert slot.malloc(NBYTES) == 0
    slot.free(0)


def test_the_smallest_hole_is_taken(slot: Slot) -> None:
    big, wall, small, end = (slot.malloc(size * MIB) for size in (20, 2, 4, 38))
    assert (big, wall, small, end) == (0, 20 * MIB, 22 * MIB, 26 * MIB)
    slot.free(0), slot.free(22 * MIB)
    assert slot.malloc(3 * MIB) == 22 * MIB
    assert slot.malloc(1000) == 25 * MIB and slot.malloc(1) == 25 * MIB + 1024
    for offset in (20 * MIB, 22 * MIB, 25 * MIB, 25 * MIB + 1024, 26 * MIB):
        slot.free(offset)


def test_what_a_stream_has_used_serves_that_stream(slot: Slot) -> None:
    assert slot.malloc(60 * MIB, stream=1) == 0
    slot.free(0)
    assert slot.malloc(8 * MIB, stream=2) is None, "its work may be under way there"
    assert slot.malloc(4 * MIB, stream=2) == 60 * MIB, "never used"
    assert slot.malloc(8 * MIB, stream=1) == 0
    slot.free(0), slot.free(60 * MIB)


def test_another_device_gets_nothing(slot: Slot) -> None:
    assert slot.malloc(100, device=DEVICE + 1) is None and slot.malloc(0) is None and slot.malloc(-5) is None


def test_a_storm_against_a_list_of_bytes(slot: Slot) -> None:
    draw = random.Random(5)
    taken: dict[int, int] = {}
    refused = 0
    for _ in range(3000):
        if taken and draw.random() < 0.5:
            offset = draw.choice(list(taken))
            slot.free(offset)
            del taken[offset]
            continue
        nbytes = draw.choice((1, 512, 5000, MIB, 7 * MIB))
        offset = slot.malloc(nbytes)  # type: ignore[assignment]
        if offset is None:
            refused += 1
            continue
        assert offset % 512 == 0 and offset + nbytes <= NBYTES
        assert all(other + size <= offset or offset + nbytes <= other for other, size in taken.items())
        taken[offset] = nbytes
    assert refused, "it was full"
    assert slot.library.used(slot.number) == sum(-(-size // 512) * 512 for size in taken.values())
    for offset in taken:
        slot.free(offset)


def test_as_many_as_there_are(library: ArenaLibrary) -> None:
    slots = [Slot(library, start=START * (number + 1)) for number in range(ARENAS)]
    assert library.open(START, NBYTES, 0) == -1
    assert [slot.malloc(4096) for slot in slots] == [0] * ARENAS
    for slot in slots:
        slot.free(0)
        assert library.close(slot.number) == 1


class FakeCuda:
    """torch.cuda as far as a pool asks it: each allocation is a segment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing, self.busy, self.graphs = False, False, 0
        self.active: list[Any] = []
        cuda = self

        class MemPool:
            def __init__(self, allocator: Any) -> None:
                self.malloc, self.free = allocator
                self.id, self.segments = (0, 7), {}

            def use_count(self) -> int:
                return 1 + cuda.graphs

            def snapshot(self) -> list[dict[str, int]]:
                return [{"active_size": nbytes} for nbytes in self.segments.values()]

        class Allocator:
            def __init__(self, path: str, malloc: str, free: str) -> None:
                library = ctypes.CDLL(path)
                self._pair = getattr(library, malloc), getattr(library, free)
                self._pair[0].argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
                self._pair[0].restype = ctypes.c_void_p
                self._pair[1].argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

            def allocator(self) -> Any:
                return self._pair

        @contextlib.contextmanager
        def use_mem_pool(pool: Any, device: Any) -> Iterator[None]:
            assert device == torch.device("cuda", DEVICE)
            self.active.append(pool)
            try:
                yield
            finally:
                self.active.pop()

        monkeypatch.setattr(pools, "_allocators", {})
        monkeypatch.setattr(pools, "_closed", [])
        monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
        monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Allocator)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(pools, "becomes_idle", lambda device: not self.busy)

    def allocate(self, nbytes: int) -> int:
        """As an operation does inside ``with``."""
        pool = self.active[-1]
        address: int | None = pool.malloc(nbytes, DEVICE, None)
        if address is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        pool.segments[address] = nbytes
        return address

    @staticmethod
    def free(pool: Any, address: int) -> None:
        pool.free(address, pool.segments.pop(address), DEVICE, None)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def region(start: int = START) -> Any:
    return SimpleNamespace(device=torch.device("cuda", DEVICE), nbytes=NBYTES, data_ptr=lambda: start)


def test_a_pool_places_what_is_allocated_inside(cuda: FakeCuda) -> None:
    gone: list[str] = []
    placer = DevicePlacer("pool 1", region(), lambda: gone.append("gone"), 1.0)
    with placer.active():
        pool = cuda.active[-1]
        first = cuda.allocate(2 * MIB)
    with placer.active():
        second = cuda.allocate(20 * MIB)
    assert (first, second) == (START, START + 2 * MIB) and placer.used == 22 * MIB
    with (
        pytest.raises(torch.OutOfMemoryError, match=f"pool 1: .* asked for {48 * MIB} bytes.*{NBYTES}"),
        placer.active(),
    ):
        cuda.allocate(48 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"^of another device$"), placer.active():
        raise torch.OutOfMemoryError("of another device")
    placer.close()
    release_pools()
    assert not gone, "tensors live"
    cuda.free(pool, first), cuda.free(pool, second)
    cuda.capturing = True
    release_pools()
    assert not gone, "not in the middle of a capture"
    cuda.capturing, cuda.graphs = False, 1
    release_pools()
    assert not gone, "a graph has it"
    cuda.graphs, cuda.busy = 0, True
    release_pools()
    assert not gone, "what is queued may use it"
    cuda.busy = False
    release_pools()
    assert gone == ["gone"]
    release_pools()
    assert gone == ["gone"]


def test_too_many_pools(cuda: FakeCuda) -> None:
    placers = [DevicePlacer(f"pool {number}", region(START * (number + 1)), int, 1.0) for number in range(ARENAS)]
    with pytest.raises(UnavailableError, match=f"value={ARENAS + 1}, allowed=..{ARENAS}"):
        DevicePlacer("one more", region(), int, 1.0)
    for placer in placers:
        placer.close()
    release_pools()
    again = DevicePlacer("again", region(), int, 1.0)
    again.close()
    release_pools()


def test_a_device_that_never_ends_its_work(cuda: FakeCuda) -> None:
    cuda.busy = True
    with pytest.raises(UnavailableError, match=f"cuda:{DEVICE} has not become idle in 0.01 s"):
        DevicePlacer("pool 1", region(), int, 0.01)


def test_without_a_compiler_it_says_so(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load_arenas.cache_clear()
    monkeypatch.setattr(pools, "find_compiler", lambda: ())
    monkeypatch.setattr(build, "private_cache", lambda: tmp_path)
    try:
        with pytest.raises(UnavailableError, match="cannot be compiled: no C compiler"):
            DevicePlacer("pool 1", region(), int, 1.0)
    finally:
        load_arenas.cache_clear()


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_file_that_was_cut_short_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: float) -> None:
    monkeypatch.setattr(build, "private_cache", lambda: tmp_path)
    load_arenas.cache_clear()
    try:
        load_arenas()
        (file,) = tmp_path.iterdir()
        whole = file.read_bytes()
        file.unlink()  # this process has it loaded
        file.write_bytes(whole[: int(part * len(whole))])
        file.chmod(0o700)
        load_arenas.cache_clear()
        slot = Slot(load_arenas())
        assert slot.malloc(4096) == 0
        slot.free(0)
        assert len(file.read_bytes()) == len(whole)
    finally:
        load_arenas.cache_clear()
