"""Memory of several pieces that another process maps, with a driver whose pieces are files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import socket
import sys
from typing import Any

import pytest
from pieces import BYTES, MadeUpPieces

from sidelane.errors import UnavailableError
from sidelane.execute.cuda.exported import MOST_AT_ONCE, Allocation, fetch, open_span, span_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no sockets without a file elsewhere")


def filled(places: int, pieces: int, **options: Any) -> MadeUpPieces:
    """Pieces that begin with their number."""
    memory = MadeUpPieces(places, **options)
    for number in range(pieces):
        memory.create(memory.base + number * BYTES)
        ctypes.memset(memory.base + number * BYTES, number % 251, 1)
    return memory


def found(memory: MadeUpPieces, address: int, nbytes: int) -> Allocation:
    span = span_of(memory, address, nbytes)
    assert isinstance(span, Allocation), span
    return span


def seen(handle: str) -> list[bytes]:
    memory = MadeUpPieces()
    opened = open_span(memory, handle)
    contents = [ctypes.string_at(address, 1) for address in sorted(memory.mapped)]
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


def test_a_client_that_says_nothing_costs_others_no_time() -> None:
    memory = filled(1, 1)
    span = found(memory, memory.base, 7)
    address, _, token = span.handle.partition("/")
    with contextlib.ExitStack() as opened:
        for _ in range(3):  # as a rank that is stopped in the middle
            silent = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect("\0" + address[1:])
        assert [size for size, _ in fetch(address, token)] == [BYTES]


def test_an_address_that_another_user_has_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        address = f"@sidelane-test-{os.getpid()}"
        server.bind("\0" + address[1:])
        server.listen()
        with pytest.raises(UnavailableError, match=r"another user .*allowed=12345"):
            next(fetch(address, "token"))
        stranger, _ = server.accept()
        with stranger:
            assert stranger.recv(100) == b"", "nothing was said"


@pytest.mark.parametrize("pieces", [1, 2, MOST_AT_ONCE, 2 * MOST_AT_ONCE + 1])
def test_another_process_maps_all_pieces_in_order(pieces: int) -> None:
    memory = MadeUpPieces(pieces + 2)
    memory = filled(pieces + 2, pieces + 2)
    span = found(memory, memory.base + BYTES + 5, (pieces - 1) * BYTES + 1)
    assert (span.start, span.nbytes) == (memory.base + BYTES, pieces * BYTES)
    before = open_pieces()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        contents = pool.apply_async(seen, (span.handle,)).get(20)
    assert contents == [bytes([number % 251]) for number in range(1, pieces + 1)]
    assert open_pieces() == before, "descriptors are closed when they are sent"


def test_equal_memory_has_one_name_and_other_memory_another() -> None:
    memory = filled(3, 3)
    first, again = found(memory, memory.base, 2 * BYTES), found(memory, memory.base + 1, 2 * BYTES - 1)
    assert first.name == again.name and first.name != found(memory, memory.base, 3 * BYTES).name
    memory.free(memory.base + BYTES)
    memory.create(memory.base + BYTES)
    assert found(memory, memory.base, 2 * BYTES).name != first.name, "freed, and given out again at the same address"
    del first, again
    gc.collect()
    for number in range(3):
        memory.free(memory.base + number * BYTES)
    assert not memory.counts, "nothing is retained"


def test_what_is_freed_is_not_given_any_more() -> None:
    memory = filled(1, 1)
    span = found(memory, memory.base, 8)
    handle = span.handle
    del span
    gc.collect()
    with pytest.raises(UnavailableError, match="it has been freed"):
        open_span(MadeUpPieces(), handle)
    with pytest.raises(UnavailableError, match="does not answer"):
        open_span(MadeUpPieces(), "@sidelane-nobody/s1")


def test_a_driver_that_refuses_leaves_nothing() -> None:
    memory, peer = filled(3, 3), MadeUpPieces(refuses=2)
    span = found(memory, memory.base, 3 * BYTES)
    with pytest.raises(UnavailableError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        open_span(peer, span.handle)
    assert not peer.mapped and not peer.reserved


def test_memory_that_cannot_be_exported_says_why() -> None:
    memory = filled(3, 2, shareable=False)
    assert "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC" in str(span_of(memory, memory.base, BYTES + 1))
    assert span_of(memory, memory.base, 3 * BYTES) == "the driver knows no allocation at its address"
    assert set(memory.counts.values()) == {1}
