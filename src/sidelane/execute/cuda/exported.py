"""GPU memory that others have allocated and peers map: ``cudaMalloc`` allocations, and memory mapped in pieces.

Torch's allocator uses both (expandable segments are pieces), and so does ``ncclMemAlloc``. The driver numbers
allocations and never reuses a number. Memory that is freed while peers have it mapped stays until they unmap it.

A piece goes to another process as a file descriptor. A descriptor is valid in its own process only; the kernel passes
it to another one with a message (``SCM_RIGHTS``) over an abstract Unix socket. A thread of the owner answers requests,
so that both sides need not meet at one moment. Descriptors are made for a request and closed when they are sent: there
may be more of them than a process may have open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.virtual import VirtualMemory
from sidelane.memory.host_shared import lacking

PREFIX = "@"
"""Prefix of the handles of spans; handles of other memory do not begin with it."""

MOST_AT_ONCE = 64
"""Largest number of descriptors in one message; the kernel allows 253."""

TIMEOUT_S = 10.0
"""Seconds that the owner may take for one message."""

_MOST_BYTES = 1 << 14
_PAUSE_S = 0.05
_CREDENTIALS = struct.Struct("3i")
"""Layout of process, user and group of the peer (``SO_PEERCRED``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of this process that others can map.

    Attributes:
        name: unique name as long as any process has the allocation mapped.
        handle: printable handle by which another process maps it.
        start: address of its first byte in this process.
        nbytes: size in bytes.
        owner: object that must live as long as peers may map it.
    """

    name: str
    handle: str
    start: int
    nbytes: int
    owner: object = dataclasses.field(default=None, repr=False, compare=False)


class PhysicalMemory(NamedTuple):
    """Memory of one ``cuMemCreate``: first byte, size in bytes, and the handle that is retained."""

    start: int
    nbytes: int
    handle: int


class MappedSpan:
    """Adjacent pieces, whose handles are released with the last reference to this object."""

    def __init__(self, memory: VirtualMemory, pieces: tuple[PhysicalMemory, ...]) -> None:
        self.memory, self.pieces = memory, pieces
        self.token = f"s{next(_numbers)}"
        forks.finalize(self, _release, memory, pieces)  # the end of a process releases all


class OpenedMemory:
    """Memory of another process, mapped from ``start`` on; ``close`` unmaps it with the last reference to this."""

    def __init__(self, start: int, close: Callable[..., object], *arguments: object) -> None:
        self.start = start
        forks.finalize(self, close, *arguments)  # the end of a process unmaps all


def span_of(memory: VirtualMemory, address: int, nbytes: int) -> Allocation | str:
    """Return the span that holds ``nbytes`` (> 0) from an address on, or the reason why peers cannot map it."""
    pieces: list[PhysicalMemory] = []
    try:
        end, at = address + nbytes, address
        while at < end:
            found = memory.range_at(at)
            if found is None:
                _release(memory, pieces)
                return "the driver knows no allocation at its address"
            pieces.append(PhysicalMemory(*found, memory.retain(found[0])))
            at = found[0] + found[1]
        key = (memory.index, *pieces)
        with _making:
            span = _spans.get(key)
            if span is not None:
                _release(memory, pieces)  # which the span has retained before
            elif not all(memory.is_shareable(piece.handle) for piece in pieces):
                _release(memory, pieces)
                return (
                    "it was made without file descriptors to share it by (torch: TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1)"
                )
            else:
                span = _spans[key] = MappedSpan(memory, tuple(pieces))
                _by_token[span.token] = span
            handle = f"{_server().address}/{span.token}"
    except DriverError as error:
        _release(memory, pieces)
        return f"the driver does not export its memory, as that of its own pools ({error})"
    except OSError as error:
        return f"its file descriptors cannot be passed: {lacking(error)}"
    start = span.pieces[0].start
    return Allocation(f"{os.getpid()}:{span.token}", handle, start, at - start, owner=span)


def open_span(memory: VirtualMemory, handle: str) -> OpenedMemory:
    """Map a span of another process.

    Raises:
        UnavailableError: its owner does not send it, or the driver cannot map it.
    """
    address, _, token = handle.partition("/")
    # The range is reserved as a whole, so that all sizes must be known first.
    sizes = [size for size, _ in fetch(address, token)]
    try:
        start = memory.reserve(sum(sizes))
        places = list(itertools.accumulate(sizes, initial=start))
        mapped = 0
        try:
            for mapped, (nbytes, descriptor) in enumerate(fetch(address, token)):
                memory.map(places[mapped], nbytes, descriptor)
        except BaseException:
            _close(memory, start, sizes, mapped)
            raise
    except DriverError as error:
        raise UnavailableError(f"{token} cannot be mapped: {error}") from error
    return OpenedMemory(start, _close, memory, start, tuple(sizes), len(sizes))


class DescriptorServer:
    """Thread that sends descriptors of spans to other processes of this user until this process ends.

    Attributes:
        address: address for :func:`fetch`.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self) -> None:
        self.address = f"{PREFIX}sidelane-{os.getpid()}-{os.urandom(4).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forks.in_copies_of(self._socket, socket.socket.close)  # with it open, clients would not notice this one's end
        self._socket.bind(_bound(self.address))
        self._socket.listen(64)
        threading.Thread(target=self._serve, name="sidelane-descriptors", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return  # it was closed
                time.sleep(_PAUSE_S)  # out of descriptors, or the client has gone
                continue
            forks.in_copies_of(peer, socket.socket.close)
            if _user_of(peer) != os.geteuid():
                peer.close()
                continue
            # A client that dies, is stopped or is slow loses its own answer only.
            threading.Thread(target=self._serve_one, args=(peer,), name="sidelane-descriptors", daemon=True).start()

    def _serve_one(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.settimeout(TIMEOUT_S)
            self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        token = peer.recv(_MOST_BYTES).decode()
        try:
            span = _by_token.get(token)
            if span is None:
                raise UnavailableError("it has been freed")
            for first in range(0, len(span.pieces), MOST_AT_ONCE):
                some = span.pieces[first : first + MOST_AT_ONCE]
                left = len(span.pieces) - first - len(some)
                with contextlib.ExitStack() as opened:
                    descriptors: list[int] = []
                    for piece in some:
                        descriptors.append(span.memory.export(piece.handle))
                        opened.callback(os.close, descriptors[-1])
                    answer = json.dumps({"sizes": [piece.nbytes for piece in some], "left": left})
                    socket.send_fds(peer, [answer.encode()], descriptors)
        except Exception as error:  # the client is told, and this thread goes on
            why = lacking(error) if isinstance(error, OSError) else error
            peer.send(json.dumps({"problem": f"{type(error).__name__}: {why}"}).encode())


def fetch(address: str, token: str) -> Iterator[tuple[int, int]]:
    """Yield size in bytes and descriptor of each piece of a span; each descriptor is closed after its iteration.

    Raises:
        UnavailableError: the owner is gone, does not answer, is another user, or does not know the token.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
            forks.in_copies_of(owner, socket.socket.close)
            owner.settimeout(TIMEOUT_S)
            owner.connect(_bound(address))
            if (user := _user_of(owner)) != os.geteuid():  # anyone may take an address whose owner has gone
                raise UnavailableError(f"the owner of {token} is another user (value={user}, allowed={os.geteuid()})")
            owner.send(token.encode())
            left = 1
            while left:
                text, descriptors, _, _ = socket.recv_fds(owner, _MOST_BYTES, MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
                with contextlib.ExitStack() as opened:
                    for descriptor in descriptors:
                        opened.callback(os.close, descriptor)
                    answer: dict[str, Any] = json.loads(text) if text else {"problem": "it has ended"}
                    if "problem" in answer:
                        raise UnavailableError(f"the owner of {token} does not give it: {answer['problem']}")
                    left = answer["left"]
                    if len(descriptors) != len(answer["sizes"]):  # this process may not have as many open
                        raise UnavailableError(
                            f"descriptors of {token} (value={len(descriptors)}, allowed={len(answer['sizes'])})"
                        )
                    yield from zip(answer["sizes"], descriptors, strict=True)
    except OSError as error:
        raise UnavailableError(f"the owner of {token} does not answer: {lacking(error)}") from error


def _user_of(peer: socket.socket) -> int:
    """Return the user of the process at the other end of a connection."""
    found: int = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return found


def _bound(address: str) -> str:
    return "\0" + address.removeprefix(PREFIX)


def _server() -> DescriptorServer:
    global _answering
    if _answering is None:
        _answering = DescriptorServer()
    return _answering


def _release(memory: VirtualMemory, pieces: Sequence[PhysicalMemory]) -> None:
    with contextlib.suppress(DriverError):  # the device has failed before
        for piece in pieces:
            memory.release(piece.handle)


def _close(memory: VirtualMemory, start: int, sizes: Sequence[int], mapped: int) -> None:
    # What may be under way there has ended, as in ``_close_allocation``.
    with contextlib.suppress(DriverError):  # the device has failed before
        places = itertools.accumulate(sizes, initial=start)
        for place, nbytes in itertools.islice(zip(places, sizes, strict=False), mapped):
            memory.unmap(place, nbytes)
        memory.free_range(start, sum(sizes))


_numbers = itertools.count(1)
_spans: weakref.WeakValueDictionary[tuple[object, ...], MappedSpan] = weakref.WeakValueDictionary()
"""Spans of this process, for all lanes, by device and pieces."""
_by_token: weakref.WeakValueDictionary[str, MappedSpan] = weakref.WeakValueDictionary()
_making = forks.lock()
_answering: DescriptorServer | None = None


@forks.in_copies
def _know_nothing() -> None:
    """Forget, in a forked copy, the spans of the parent and the server that sends them."""
    global _answering
    _answering = None
    _spans.clear()
    _by_token.clear()


class ExportedMemory:
    """Memory of this process for peers to map, and theirs.

    Args:
        driver: driver of the device.
        virtual: its calls for memory that is mapped in pieces; None: such memory is not exported.
    """

    def __init__(self, driver: Driver, virtual: VirtualMemory | None) -> None:
        self._driver, self._virtual = driver, virtual

    def number_of(self, address: int) -> int:
        """Return the driver's number of the allocation at an address; later allocations have larger ones."""
        return self._driver.allocation_number(address)

    def allocation_of(self, address: int, nbytes: int) -> Allocation | str:
        """Return the allocation that holds bytes (> 0), or the reason why peers cannot map it."""
        found = self._driver.allocation_at(address)
        if found is not None:
            number, start, size = found
            with contextlib.suppress(DriverError):  # it is composed of pieces
                handle = self._driver.export(start)
                if address + nbytes > start + size:
                    return "it lies in several allocations"
                return Allocation(f"{os.getpid()}:{number}", handle.hex(), start, size)
        if self._virtual is None:
            return "the driver exports no memory that is mapped in pieces"
        return span_of(self._virtual, address, nbytes)

    def map(self, handle: str, name: str) -> OpenedMemory:
        """Map an allocation of another process on this machine, until the last reference to the result is dropped.

        Raises:
            UnavailableError: it cannot be mapped.
        """
        with _opening:
            found = opened.get((self._driver.index, handle, name))
            if found is None:
                try:
                    if handle.startswith(PREFIX):
                        assert self._virtual is not None, "ranks of one machine export spans alike, or none does"
                        found = open_span(self._virtual, handle)
                    else:
                        start = self._driver.open_exported(bytes.fromhex(handle))
                        found = OpenedMemory(start, _close_allocation, self._driver, start)
                except DriverError as error:
                    raise UnavailableError(f"allocation {name} cannot be mapped: {error}") from error
                opened[self._driver.index, handle, name] = found
            return found


def _close_allocation(driver: Driver, start: int) -> None:
    # What may be under way there has ended: its owner has freed it, and waited for its peers' copies before, or the
    # lane is closed.
    try:
        with driver.current():
            driver.close_exported(start)
    except DriverError:  # the device has failed before
        pass


opened: weakref.WeakValueDictionary[tuple[int, str, str], OpenedMemory] = weakref.WeakValueDictionary()
"""Memory of other processes that this one has mapped, for all lanes, by device, handle and name."""

_opening = forks.lock()
