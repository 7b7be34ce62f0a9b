"""Memory of several pieces that another process maps, with a driver whose pieces are files."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys

import pytest

from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.spans import Span, open_span, span_of
from sidelane.memory.descriptors import MOST_AT_ONCE
from sidelane.memory.ordinary import Allocation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no sockets without a file elsewhere")

BYTES, BASE = 4096, 1 << 40


class FilesAsMemory:
    """Pieces of ``BYTES`` from ``BASE`` on. A handle that nobody has any more is given to the next piece."""

    index = 0

    def __init__(self, pieces: int = 0, *, shareable: bool = True, refuses: int = -1) -> None:
        self.files: dict[int, int] = {}  # by handle
        self.counts: dict[int, int] = {}
        self.at: dict[int, int] = {}  # handles by address
        self.mapped: dict[int, bytes] = {}
        self.reserved: dict[int, int] = {}
        self.shareable, self.refuses = shareable, refuses
        for number in range(pieces):
            self.create(BASE + number * BYTES, bytes([number % 251]))

    def create(self, address: int, content: bytes) -> None:
        handle = next(number for number in range(1, 1000) if number not in self.files)
        self.files[handle] = os.memfd_create("piece")
        os.pwrite(self.files[handle], content, 0)
        self.counts[handle], self.at[address] = 1, handle

    def free(self, address: int) -> None:
        self.release(self.at.pop(address))

    def range_at(self, address: int) -> tuple[int, int] | None:
        start = address - (address - BASE) % BYTES
        return (start, BYTES) if start in self.at else None

    def retain(self, address: int) -> int:
        handle = self.at.get(address)
        if handle is None:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "cuMemRetainAllocationHandle")
        self.counts[handle] += 1
        return handle

    def release(self, handle: int) -> None:
        self.counts[handle] -= 1
        if not self.counts[handle]:
            del self.counts[handle]
            os.close(self.files.pop(handle))

    def is_shareable(self, handle: int) -> bool:
        return self.shareable

    def export(self, handle: int) -> int:
        return os.dup(self.files[handle])

    def reserve(self, nbytes: int) -> int:
        self.reserved[BASE] = nbytes
        return BASE

    def map(self, address: int, nbytes: int, descriptor: int) -> None:
        if len(self.mapped) == self.refuses:
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemMap")
        assert self.reserved and nbytes == BYTES and address not in self.mapped
        self.mapped[address] = os.pread(descriptor, 1, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        del self.mapped[address]

    def give_back(self, address: int, nbytes: int) -> None:
        assert not self.mapped
        assert self.reserved.pop(address) == nbytes


def found(memory: FilesAsMemory, address: int, nbytes: int) -> Allocation:
    span = span_of(memory, address, nbytes)
    assert isinstance(span, Allocation), span
    return span


def seen(handle: str) -> list[bytes]:
    memory = FilesAsMemory()
    opened = open_span(memory, handle)
    contents = [content for _, content in sorted(memory.mapped.items())]
    del opened
    assert not memory.mapped and not memory.reserved
    return contents


def open_pieces() -> int:
    """Descriptors of pieces that this process has open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:piece" in link for link in links)


@pytest.mark.parametrize("pieces", [1, 2, MOST_AT_ONCE, 2 * MOST_AT_ONCE + 1])
def test_another_process_maps_all_pieces_in_order(pieces: int) -> None:
    memory = FilesAsMemory(pieces + 2)
    span = found(memory, BASE + BYTES + 5, (pieces - 1) * BYTES + 1)
    assert (span.start, span.nbytes) == (BASE + BYTES, pieces * BYTES)
    before = open_pieces()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        contents = pool.apply_async(seen, (span.handle,)).get(20)
    assert contents == [bytes([number % 251]) for number in range(1, pieces + 1)]
    assert open_pieces() == before, "descriptors are closed when they are sent"


def test_equal_memory_has_one_name_and_other_memory_another() -> None:
    memory = FilesAsMemory(3)
    first, again = found(memory, BASE, 2 * BYTES), found(memory, BASE + 1, 2 * BYTES - 1)
    assert first.name == again.name and first.name != found(memory, BASE, 3 * BYTES).name
    memory.free(BASE + BYTES)
    memory.create(BASE + BYTES, b"n")
    assert found(memory, BASE, 2 * BYTES).name != first.name, "freed, and given out again at the same address"
    assert isinstance(first.kept, Span)
    assert any([first.kept.is_gone(), first.kept.is_gone()]), "each piece is looked at in turn"
    del first, again
    gc.collect()
    for address in list(memory.at):
        memory.free(address)
    assert not memory.counts, "nothing is retained"


def test_what_is_freed_is_not_given_any_more() -> None:
    memory = FilesAsMemory(1)
    span = found(memory, BASE, 8)
    handle = span.handle
    del span
    gc.collect()
    with pytest.raises(UnavailableError, match="it has been freed"):
        open_span(FilesAsMemory(), handle)
    with pytest.raises(UnavailableError, match="does not answer"):
        open_span(FilesAsMemory(), "@sidelane-nobody/s1")


def test_a_driver_that_refuses_leaves_nothing() -> None:
    memory, peer = FilesAsMemory(3), FilesAsMemory(refuses=2)
    span = found(memory, BASE, 3 * BYTES)
    with pytest.raises(UnavailableError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        open_span(peer, span.handle)
    assert not peer.mapped and not peer.reserved


def test_memory_that_cannot_be_exported_says_why() -> None:
    memory = FilesAsMemory(2, shareable=False)
    assert "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC" in str(span_of(memory, BASE, BYTES + 1))
    assert span_of(memory, BASE, 3 * BYTES) == "the driver knows no allocation at its address"
    assert set(memory.counts.values()) == {1}
