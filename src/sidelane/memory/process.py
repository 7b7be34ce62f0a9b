"""Identity and liveness of peer processes: process ids that cannot be mistaken for those of a later process."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple


class ProcessIdentity(NamedTuple):
    """One process, as it describes itself to its peers: plain values, which JSON holds.

    Attributes:
        pid: process id in its own pid namespace.
        started: start time in clock ticks since boot (Linux); 0 if the system does not tell. Ids are reused,
            (id, start time) pairs are not.
        namespace: inode of its pid namespace; 0 if there are none. Ids mean nothing across namespaces.
        host: name of the machine, for messages.
        boot: random id of this boot of the kernel, equal for all containers of one machine; "" if there is none.
    """

    pid: int
    started: int
    namespace: int
    host: str
    boot: str

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return the identity of the calling process."""
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not Linux, or a /proc that hides them
            namespace, boot = 0, ""
        state = _state_and_start(os.getpid())
        return cls(os.getpid(), state[1] if state else 0, namespace, socket.gethostname(), boot)

    @property
    def machine(self) -> str:
        """Id of the machine, equal for processes that can share memory: the boot id, or else the host name."""
        return self.boot or self.host

    def alive(self, observer: ProcessIdentity) -> bool | None:
        """Return whether the process still runs; None if ``observer`` (the calling process) cannot know.

        A zombie counts as dead: its memory and threads are gone.
        """
        if (self.machine, self.namespace) != (observer.machine, observer.namespace):
            return None
        if self.started:
            state = _state_and_start(self.pid)
            return state is not None and state[0] not in "ZX" and state[1] == self.started
        try:
            os.kill(self.pid, 0)  # signal 0 only checks
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time of a process from /proc; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses, which may hold blanks and parentheses itself: count from the last
    # one. What follows are fields 3 (state) and, 19 further, 22 (start time); see proc(5).
    fields = stat[stat.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])
