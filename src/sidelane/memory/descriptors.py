"""Transfer of file descriptors to other processes of this machine, by a token, over an abstract Unix socket.

A descriptor is valid in its own process only; the kernel passes it to another one with a message (``SCM_RIGHTS``). A
thread of the owner answers requests, so that both sides need not meet at one moment. Descriptors are made for a request
and closed when they are sent: there may be more of them than a process may have open.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.memory.available import lacking

MOST_AT_ONCE = 64
"""Largest number of descriptors in one message; the kernel allows 253."""

TIMEOUT_S = 10.0
"""Seconds that the owner may take for one message."""

_MOST_BYTES = 1 << 14
_PAUSE_S = 0.05
_CREDENTIALS = struct.Struct("3i")
"""Layout of process, user and group of the peer (``SO_PEERCRED``)."""


class SharedDescriptor(NamedTuple):
    """One part of the memory behind a token.

    Attributes:
        nbytes: size in bytes.
        open: makes a descriptor of the part.
    """

    nbytes: int
    open: Callable[[], int]


class DescriptorServer:
    """Thread that sends descriptors to other processes of this user until this process ends.

    Args:
        parts_of: returns the parts behind a token, or raises SidelaneError with the reason why there are none. Called
            in the threads that answer, one for each client.

    Attributes:
        address: address for :func:`fetch`.
        pid: process that answers; a forked copy has its own server.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self, parts_of: Callable[[str], Sequence[SharedDescriptor]]) -> None:
        self._parts_of = parts_of
        self.pid = os.getpid()
        self.address = f"@sidelane-{self.pid}-{os.urandom(4).hex()}"
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
            parts = self._parts_of(token)
            for first in range(0, len(parts), MOST_AT_ONCE):
                some = parts[first : first + MOST_AT_ONCE]
                left = len(parts) - first - len(some)
                with contextlib.ExitStack() as opened:
                    descriptors: list[int] = []
                    for part in some:
                        descriptors.append(part.open())
                        opened.callback(os.close, descriptors[-1])
                    said = json.dumps({"sizes": [part.nbytes for part in some], "left": left})
                    socket.send_fds(peer, [said.encode()], descriptors)
        except Exception as error:  # the client is told, and this thread goes on
            why = lacking(error) if isinstance(error, OSError) else error
            peer.send(json.dumps({"problem": f"{type(error).__name__}: {why}"}).encode())


def fetch(address: str, token: str) -> Iterator[tuple[int, int]]:
    """Yield size in bytes and descriptor of each part behind a token; each descriptor is closed after its iteration.

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
                    said: dict[str, Any] = json.loads(text) if text else {"problem": "it has ended"}
                    if "problem" in said:
                        raise UnavailableError(f"the owner of {token} does not give it: {said['problem']}")
                    left = said["left"]
                    if len(descriptors) != len(said["sizes"]):  # this process may not have as many open
                        raise UnavailableError(
                            f"descriptors of {token} (value={len(descriptors)}, allowed={len(said['sizes'])})"
                        )
                    yield from zip(said["sizes"], descriptors, strict=True)
    except OSError as error:
        raise UnavailableError(f"the owner of {token} does not answer: {lacking(error)}") from error


def _user_of(peer: socket.socket) -> int:
    """Return the user of the process at the other end of a connection."""
    found: int = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return found


def _bound(address: str) -> str:
    return "\0" + address.removeprefix("@")
