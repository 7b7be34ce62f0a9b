"""Connections between the ranks of different nodes, and transports, which move the slices of a kernel over them.

A pair of ranks has two connections. On one, each side sends the headers of its slices, in the order of its ring, and
the end of each call behind them; on the other, each tells the other of calls that it begins, of failures, and that it
closes. Bytes follow their header on the same connection (:class:`SocketTransport`), or travel between the processes by
``torch.distributed`` (:class:`GroupTransport`: NCCL between GPUs).

A transport whose kernels reach the network card themselves (IBGDA, the device API of NCCL's GPU-initiated networking)
would have its place here too: its ``send`` would be a function of ``device`` in place of ``send_release``, with the
flag written behind the data by the card, and without ring and proxy. It is not built.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from sidelane import forks
from sidelane.errors import PeerTimeoutError
from sidelane.memory.store_values import not_understood, parsed

STEP_S = 0.05
"""Seconds after which a blocked thread looks whether it should go on."""

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{2 * _TOKEN_BYTES}sqq")
_MOST_NOTE_BYTES = 1 << 16
_LISTENS_S = 1.0


class Header(NamedTuple):
    """Header of a slice, or of the end of a call, for which it has no rows. For the fields see ``Descriptor``."""

    handle: int
    epoch: int
    flag: int
    place: int
    rows: int
    columns: int


_HEADER = struct.Struct(f"<{len(Header._fields)}q")


class Gone(Exception):
    """The connection to a rank has ended. ``rank``: its number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(rank)


class SliceTransport(Protocol):
    """Moves the bytes of slices, for the two threads of a proxy: one sends, one receives.

    Attributes:
        uses_compute_units: it runs kernels on the GPU. Then no program of an operator may wait for it while others
            occupy the GPU: a ring must have room for all slices of a call.
        gives_up: function that returns True once it should wait no longer, and raise :class:`Gone`.
    """

    uses_compute_units: bool
    gives_up: Callable[[], bool]

    def attach(self) -> None:
        """Prepare a thread of the proxy."""
        ...

    def make_ready(self, values: torch.Tensor) -> None:
        """Make ready for values like these, [rows, columns], before any kernel waits: on a GPU, memory is allocated and
        kernels are loaded, which may wait for kernels that run.
        """
        ...

    def send(self, target: int, values: torch.Tensor) -> None:
        """Send contiguous values; return when they may be overwritten."""
        ...

    def receive(self, source: int, values: torch.Tensor) -> None:
        """Receive the next values from a rank, [rows, columns]; return when they are in place for all who look."""
        ...

    def close(self) -> None:
        """Release what it has made. Idempotent."""
        ...


class FarConnections:
    """Connections with the ranks of other nodes. Collective; they meet by a store.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        fars: ranks on other nodes.
        timeout_s: time-out for the last of them, in seconds.

    Attributes:
        data: connection for headers by rank.
        control: connection for notes by rank.
        gives_up: function that returns True once nothing should wait any more.

    Raises:
        PeerTimeoutError: a rank did not come.
        PeerError: it sent something else.
    """

    def __init__(self, store: dist.Store, rank: int, fars: Sequence[int], timeout_s: float) -> None:
        self.data: dict[int, socket.socket] = {}
        self.control: dict[int, socket.socket] = {}
        self.gives_up: Callable[[], bool] = lambda: False
        self._texts = dict.fromkeys(fars, b"")
        self._writing = forks.lock()
        if not fars:
            return
        until = time.monotonic() + timeout_s
        with socket.create_server(("", 0), backlog=2 * len(fars) + 16) as server:
            token = secrets.token_hex(_TOKEN_BYTES)
            store.set(f"at/{rank}", json.dumps((_own_address(), server.getsockname()[1], token)))
            try:
                for far in (far for far in fars if far < rank):
                    self._connect(store, rank, far, until)
                self._accept(server, token, [far for far in fars if far > rank], until)
            except BaseException:
                self.close()
                raise

    def _connect(self, store: dist.Store, rank: int, far: int, until: float) -> None:
        key = f"at/{far}"
        while not store.check([key]):
            _require_time(until, [far])
            time.sleep(STEP_S / 10)
        said = store.get(key)
        try:
            address, port, token = map(str, parsed(said))
            place = address, int(port)
            token_bytes = token.encode("ascii")
        except (ValueError, TypeError) as error:
            raise not_understood("scale-out", far, said) from error
        for number, kind in enumerate((self.data, self.control)):
            try:
                made = socket.create_connection(place, max(STEP_S, until - time.monotonic()))
                made.sendall(_HELLO.pack(token_bytes, rank, number))
            except OSError as error:
                text = f"scale-out: no connection with rank {far} at {address}: {error}"
                raise PeerTimeoutError(text, [far]) from error
            kind[far] = _prepared(made)

    def _accept(self, server: socket.socket, token: str, fars: Sequence[int], until: float) -> None:
        server.settimeout(STEP_S)
        while missing := [far for far in fars if far not in self.data or far not in self.control]:
            _require_time(until, missing)
            try:
                made, _ = server.accept()
            except TimeoutError:
                continue
            try:
                made.settimeout(max(STEP_S, min(5.0, until - time.monotonic())))
                found, far, number = _HELLO.unpack(_exactly(made, _HELLO.size))
            except (OSError, struct.error):
                made.close()
                continue
            if not secrets.compare_digest(found, token.encode("ascii")) or far not in fars or number not in (0, 1):
                made.close()  # a stranger
                continue
            (self.data, self.control)[number][far] = _prepared(made)

    def send_header(self, target: int, header: Header) -> None:
        """Send a header on its way. Raises :class:`Gone`."""
        self.write(target, memoryview(_HEADER.pack(*header)))

    def receive_header(self, source: int) -> Header:
        """Return the next header, of which the first byte is there. Raises :class:`Gone`."""
        words = bytearray(_HEADER.size)
        self.read(source, memoryview(words))
        return Header(*_HEADER.unpack(words))

    def write(self, target: int, given: memoryview) -> None:
        """Write bytes behind a header. Raises :class:`Gone`, also if nothing should wait any more."""
        self._all(target, given, self.data[target].send, select.POLLOUT)

    def read(self, source: int, into: memoryview) -> None:
        """Read the bytes behind a header. Raises as :meth:`write`."""
        self._all(source, into, self.data[source].recv_into, select.POLLIN)

    def _all(self, rank: int, view: memoryview, step: Callable[[memoryview], int], event: int) -> None:
        poll = select.poll()
        try:
            poll.register(self.data[rank], event)
            while view:
                try:
                    moved = step(view)
                except BlockingIOError:
                    if self.gives_up():
                        raise Gone(rank) from None
                    poll.poll(STEP_S * 1000)
                    continue
                if not moved:
                    raise Gone(rank)
                view = view[moved:]
        except (OSError, ValueError) as error:  # the second one: it was closed here
            raise Gone(rank) from error

    def note(self, targets: Sequence[int], note: dict[str, Any]) -> None:
        """Tell ranks something short; those that are gone, or do not listen, do not matter here."""
        words = json.dumps(note).encode() + b"\n"
        with self._writing:
            for target in targets:
                with contextlib.suppress(OSError, ValueError):  # the second one: it was closed here
                    _send_whole(self.control[target], words)

    def notes(self, source: int) -> list[dict[str, Any]]:
        """Return what a rank has told since. Raises :class:`Gone` behind its last note."""
        control, text = self.control[source], self._texts[source]
        try:
            while found := control.recv(_MOST_NOTE_BYTES, socket.MSG_DONTWAIT):
                text += found
            is_gone = True
        except BlockingIOError:
            is_gone = False
        except OSError:
            is_gone = True
        *lines, self._texts[source] = text.split(b"\n")
        if is_gone and not lines:
            raise Gone(source)
        try:
            return [dict(json.loads(line)) for line in lines]
        except ValueError as error:
            raise not_understood("scale-out", source, text) from error

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for made in (*self.data.values(), *self.control.values()):
            with contextlib.suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
            made.close()


class _Staging:
    """Memory of the device for values that arrive, by dtype: rows are copied from there to where they lie apart."""

    def __init__(self) -> None:
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def make_ready(self, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        there = self._by_dtype.get(values.dtype)
        if there is None or there.numel() < values.numel():
            options = {"dtype": values.dtype, "device": values.device}
            self._by_dtype[values.dtype] = torch.zeros(values.numel(), **options)  # type: ignore[call-overload]
        values.copy_(self.like(values))
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """Return contiguous memory for such values, which the next use overwrites."""
        there = self._by_dtype.get(values.dtype)
        if there is None or there.numel() < values.numel():
            there = self._by_dtype[values.dtype] = values.new_empty(values.numel())
        return there[: values.numel()].view(values.shape)


class SocketTransport:
    """Sends slices behind their headers. Values of GPUs are copied by way of the host.

    Args:
        links: connections with the ranks of other nodes.
        device: device of the values.
    """

    def __init__(self, links: FarConnections, device: torch.device) -> None:
        self._links, self._device = links, device
        self.uses_compute_units = device.type == "cuda"  # a kernel copies rows that lie apart
        self.gives_up: Callable[[], bool] = lambda: False  # the links wait
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._staging = _Staging()

    def attach(self) -> None:
        """See :class:`SliceTransport`: the thread copies on a stream of its own."""
        if self._streams:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._streams.pop())

    def make_ready(self, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        self._staging.make_ready(values)

    def send(self, target: int, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        self._links.write(target, _bytes_of(values.cpu()))

    def receive(self, source: int, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        is_direct = values.device.type == "cpu" and values.is_contiguous()
        came = values if is_direct else torch.empty(values.shape, dtype=values.dtype, device="cpu")
        self._links.read(source, _bytes_of(came))
        if values.is_cuda and not values.is_contiguous():
            came = self._staging.like(values).copy_(came)
        if not is_direct:
            values.copy_(came)
            if values.is_cuda:
                torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """See :class:`SliceTransport`. The links are the proxy's."""


class GroupTransport:
    """Sends slices between processes by ``torch.distributed``: NCCL between GPUs, Gloo between CPU ranks.

    Two groups of the same ranks, one for each direction of a pair: NCCL runs the calls of a group between two ranks one
    after the other, so that two ranks that send before they receive would wait for each other.

    Args:
        up: group in which ranks send to those with higher numbers.
        down: group in which they send to those with lower numbers.
        rank: number of this rank.
        device: device of the values.
    """

    def __init__(self, up: dist.ProcessGroup, down: dist.ProcessGroup, rank: int, device: torch.device) -> None:
        self._groups, self._rank, self._device = (up, down), rank, device
        self.uses_compute_units = device.type == "cuda"
        self.gives_up: Callable[[], bool] = lambda: False
        self._staging = _Staging()

    def warm_up(self, fars: Sequence[int]) -> None:
        """Connect every pair in both directions. Collective: memory is allocated, and kernels are loaded, which may not
        wait for an operator that waits for them.
        """
        word = torch.zeros(1, device=self._device)
        for group, is_up in zip(self._groups, (True, False), strict=True):
            works = []
            for far in sorted(fars):
                sends = (far > self._rank) == is_up
                works.append(group.send([word], far, 0) if sends else group.recv([word.clone()], far, 0))
            for work in works:
                work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def attach(self) -> None:
        """See :class:`SliceTransport`: the thread waits for its work on a stream of its own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device, priority=-1))

    def make_ready(self, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        self._staging.make_ready(values)

    def send(self, target: int, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        self._wait(self._groups[target < self._rank].send([values], target, 0), target)

    def receive(self, source: int, values: torch.Tensor) -> None:
        """See :class:`SliceTransport`."""
        is_direct = values.is_contiguous()
        came = values if is_direct else self._staging.like(values)
        self._wait(self._groups[source > self._rank].recv([came], source, 0), source)
        if not is_direct:
            values.copy_(came)
            if values.is_cuda:
                torch.cuda.current_stream(self._device).synchronize()

    def _wait(self, work: Any, rank: int) -> None:
        """Wait for a transfer. The host of a GPU does so by looking: a stream's wait could not be given up."""
        if self._device.type != "cuda":
            try:
                work.wait()
            except RuntimeError as error:
                raise Gone(rank) from error
            return
        while not work.is_completed():
            if self.gives_up():
                raise Gone(rank)
            time.sleep(10e-6)
        work.wait()  # the thread's stream follows: what it copies next is there

    def close(self) -> None:
        """See :class:`SliceTransport`."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # a group that has failed
                group.abort()
        self._groups = ()  # type: ignore[assignment]


def _bytes_of(values: torch.Tensor) -> memoryview:
    found: Any = values.reshape(-1).view(torch.uint8).numpy()
    return memoryview(found)


def _prepared(made: socket.socket) -> socket.socket:
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    forks.closing(made)  # in a copy of the process it would keep the connection after the end of this one
    return made


def _send_whole(made: socket.socket, words: bytes) -> None:
    """Send a note as a whole, or end the connection of a rank that has not listened for a while."""
    poll = select.poll()
    poll.register(made, select.POLLOUT)
    while words:
        try:
            words = words[made.send(words) :]
        except BlockingIOError:
            if not poll.poll(_LISTENS_S * 1000):
                made.shutdown(socket.SHUT_RDWR)
                return


def _exactly(made: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = made.recv(count - len(found))
        if not more:
            break
        found += more
    return found


def _require_time(until: float, missing: Sequence[int]) -> None:
    if time.monotonic() > until:
        raise PeerTimeoutError(f"scale-out: ranks {list(missing)} of other nodes did not connect in time", missing)


def _own_address() -> str:
    """Return an address of this machine under which the others reach it: that from which it reaches rank 0."""
    leader = os.environ.get("MASTER_ADDR")
    for name in (leader, socket.gethostname()):
        if not name:
            continue
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # nothing is sent
            return str(probe.getsockname()[0])
    return "127.0.0.1"
