"""One at a time in each of several processes: for what a process can do only once at a time, with peers.

A thread of any process holds the lock of a process by a name among the machine's abstract sockets, which only one
socket can have. The kernel takes it back when its holder closes it or dies, and no file is left behind. Linux only, as
are those who need it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Collection, Iterator

from sidelane import forks

_POLL_S = 500e-6


class LockTimeoutError(Exception):
    """The lock of a process did not become free.

    Attributes:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(f"process {pid} was in the middle of another one")
        self.pid = pid


@contextlib.contextmanager
def alone_in(pids: Collection[int], timeout_s: float) -> Iterator[None]:
    """Hold the locks of processes. Who holds some waits for others in the order of numbers only: there is no circle.

    Raises:
        LockTimeoutError: one did not become free within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        for pid in sorted(set(pids)):
            lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            forks.closing(lock)  # a copy would keep what this process gives back
            while not _took(lock, pid):
                if time.monotonic() > deadline:
                    raise LockTimeoutError(pid)
                time.sleep(_POLL_S)
        yield


def _took(lock: socket.socket, pid: int) -> bool:
    try:
        lock.bind(f"\0sidelane/{pid}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True
