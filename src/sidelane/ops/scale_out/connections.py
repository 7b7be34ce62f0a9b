"""Connections between the ranks of different nodes, which carry what their hosts tell each other: lines of JSON.

Notes tell of slices that leave, of calls that begin and that are over, of failures, and of ranks that close. Those from
one rank to another keep their order.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidelane import forks
from sidelane.errors import PeerTimeoutError
from sidelane.memory.store_values import not_understood

STEP_S = 0.05
"""Seconds after which a blocked thread looks whether it should go on."""

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{2 * _TOKEN_BYTES}sq")
_MOST_NOTE_BYTES = 1 << 16
_LISTENS_S = 1.0
_MOST_CALLERS, _HELLO_S = 256, 2.0
"""Largest number of callers that are heard side by side, and seconds in which each has to say who it is: none costs
others time."""


class Gone(Exception):
    """The connection to a rank has ended. ``rank``: its number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(rank)


class InterNodeConnections:
    """Connections with the ranks of other nodes. Collective.

    Args:
        rank: number of this rank in the group.
        remote_ranks: ranks on other nodes.
        meet: sends what it is given to all ranks, and returns what each of them has sent.
        timeout_s: time-out for the last connection, in seconds.

    Attributes:
        sockets: connections by rank.

    Raises:
        PeerTimeoutError: a rank did not come.
        PeerError: it sent something else.
    """

    def __init__(
        self,
        rank: int,
        remote_ranks: Sequence[int],
        meet: Callable[[tuple[str, int, str]], Sequence[Any]],
        timeout_s: float,
    ) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self._texts = dict.fromkeys(remote_ranks, b"")
        self._writing = forks.lock()
        if not remote_ranks:
            return
        with socket.create_server(("", 0), backlog=2 * len(remote_ranks) + _MOST_CALLERS) as server:
            token = secrets.token_hex(_TOKEN_BYTES)
            listening = meet((_own_address(), server.getsockname()[1], token))
            until = time.monotonic() + timeout_s
            try:
                for remote in (remote for remote in remote_ranks if remote < rank):
                    self._connect(rank, remote, listening[remote], until)
                self._accept(server, token, [remote for remote in remote_ranks if remote > rank], until)
            except BaseException:
                self.close()
                raise

    def _connect(self, rank: int, remote: int, listening: Any, until: float) -> None:
        try:
            address, port, token = str(listening[0]), int(listening[1]), str(listening[2]).encode("ascii")
        except (ValueError, TypeError, IndexError) as error:
            raise not_understood("scale-out", remote, str(listening).encode()) from error
        try:
            made = socket.create_connection((address, port), max(STEP_S, until - time.monotonic()))
            made.sendall(_HELLO.pack(token, rank))
        except OSError as error:
            text = f"scale-out: no connection with rank {remote} at {address}: {error}"
            raise PeerTimeoutError(text, [remote]) from error
        self.sockets[remote] = _prepared(made)

    def _accept(self, server: socket.socket, token: str, remote_ranks: Sequence[int], until: float) -> None:
        server.settimeout(STEP_S)
        callers = threading.Semaphore(_MOST_CALLERS)
        while missing := [remote for remote in remote_ranks if remote not in self.sockets]:
            if time.monotonic() > until:
                text = f"scale-out: ranks {missing} of other nodes did not connect in time"
                raise PeerTimeoutError(text, missing)
            try:
                made, _ = server.accept()
            except TimeoutError:
                continue
            except OSError:  # the caller has gone, or this process has no descriptor for it now
                time.sleep(STEP_S / 10)
                continue
            callers.acquire()
            threading.Thread(target=self._receive_hello, args=(made, token, remote_ranks, callers), daemon=True).start()

    def _receive_hello(
        self, made: socket.socket, token: str, remote_ranks: Sequence[int], callers: threading.Semaphore
    ) -> None:
        """Keep the connection of a caller that says in time who it is, and knows the token; close another one's."""
        received, until = b"", time.monotonic() + _HELLO_S
        with contextlib.suppress(OSError):
            while len(received) < _HELLO.size:
                made.settimeout(max(1e-3, until - time.monotonic()))
                received += (more := made.recv(_HELLO.size - len(received)))
                if not more:
                    break
        callers.release()
        found, remote = _HELLO.unpack(received) if len(received) == _HELLO.size else (b"", -1)
        if secrets.compare_digest(found, token.encode("ascii")) and remote in remote_ranks:
            self.sockets[remote] = _prepared(made)
        else:
            made.close()

    def send(self, targets: Sequence[int], note: Mapping[str, Any]) -> None:
        """Send a note; ranks that are gone, or do not listen, do not matter here."""
        words = json.dumps(note).encode() + b"\n"
        with self._writing:
            for target in targets:
                with contextlib.suppress(OSError, ValueError):  # the second one: it was closed here
                    _send_whole(self.sockets[target], words)

    def notes(self, source: int) -> list[dict[str, Any]]:
        """Return what a rank has sent since. Raises :class:`Gone` behind its last note."""
        found, text = self.sockets[source], self._texts[source]
        try:
            while more := found.recv(_MOST_NOTE_BYTES):
                text += more
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
        for made in list(self.sockets.values()):  # a thread may add one that comes late
            with contextlib.suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
            made.close()


def _prepared(made: socket.socket) -> socket.socket:
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    forks.in_copies_of(made, socket.socket.close)  # else a copy keeps the connection after the end of this process
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
