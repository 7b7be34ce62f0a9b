"""Liveness: which ranks of a group have ended, as far as a rank knows, and what it says of those that it waits for.

Ranks tell each other their processes when they first meet (``memory.exchange``): those of a Sidelane group when it is
made, those of another group when they make their first communicator. From then on, every wait notices the end of a
process on this machine by its number, which cannot be mistaken for that of a later process. A rank that leaves a group
and lives on says so in the store, for all machines.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from sidelane import forks, log
from sidelane.memory.store_values import parsed, value_of


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


Member = tuple[tuple[Any, ...], str]
"""A rank's process, as it describes itself, and a random word of its own for this group: names of groups come again."""


class Liveness:
    """The ranks of one group, and what is known of their ends.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        ranks: ranks of the group, in the world.
        wider: liveness of a group that contains this one and has met before, with the numbers of this group's ranks in
            it; None for none.

    Attributes:
        member: this rank, for the others.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        wider: Wider | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self._store, self._rank, self._wider = store, rank, wider
        self._own = ProcessIdentity.own()
        self._connection: dist.Store | None = None
        self.member: Member = (tuple(self._own), os.urandom(8).hex())
        self._members: dict[int, tuple[ProcessIdentity, str]] = {rank: (self._own, self.member[1])}

    def meet(self, members: Sequence[Member]) -> None:
        """Know all ranks from now on: what each has sent of itself."""
        self._connection = _connection_of(self._store)
        self._members = {rank: (ProcessIdentity(*process), word) for rank, (process, word) in enumerate(members)}

    def process(self, rank: int) -> ProcessIdentity:
        """Return the process of a rank. The ranks have met."""
        return self._members[rank][0]

    def alive(self, rank: int) -> bool | None:
        """Return whether the process of a rank still runs; None if this rank cannot know. The ranks have met."""
        return self.process(rank).alive(self._own)

    def dead(self, peers: Sequence[int]) -> list[int]:
        """Return those of ``peers`` whose processes are gone."""
        return [rank for rank in peers if rank != self._rank and self._pid_of_the_dead(rank) is not None]

    def gone(self, peers: Sequence[int], *, within_s: float = 0.0) -> Mapping[int, str]:
        """Return those of ``peers`` that have died; if none has, those that have left. Each has a sentence.

        It asks the store. Ranks may have left because of one that has died.

        Args:
            peers: ranks of the group.
            within_s: seconds in which to look again as long as there is none.
        """
        until = time.monotonic() + within_s
        while True:
            found = {rank: self._end_of(rank) for rank in self.dead(peers) or peers if rank != self._rank}
            if any(found.values()) or time.monotonic() >= until:
                return {rank: how for rank, how in found.items() if how}
            time.sleep(0.05)

    def leave(self, how: str) -> None:
        """Tell the others, in a sentence, that this rank makes no more calls of the group."""
        self._post(_LEFT, how)

    def hand_over(self, text: str) -> None:
        """Tell the others, as long as they have no communicator, which call this rank hands to another library."""
        self._post(_HANDED, text)

    def handed_over(self, ranks: Sequence[int]) -> str:
        """Return, for the end of a text about a wait for ranks, the latest calls that they have handed over."""
        return "".join(f"; rank {rank}: {text}" for rank in ranks if (text := self._posted(_HANDED, rank)))

    def _post(self, subject: str, text: str) -> None:
        if self._connection is not None:
            with contextlib.suppress(RuntimeError):  # the store may have gone with another rank
                self._connection.set(subject + self.member[1], json.dumps(text))

    def _posted(self, subject: str, rank: int) -> str:
        if rank in self._members and self._connection is not None:
            # The store may have gone with another rank, and others write there, too.
            with contextlib.suppress(RuntimeError, ValueError):
                text = value_of(self._connection, subject + self._members[rank][1])
                return "" if text is None else str(parsed(text))
        return ""

    def _end_of(self, rank: int) -> str:
        if (pid := self._pid_of_the_dead(rank)) is not None:
            return f"rank {rank} (rank {self.ranks[rank]} of the world, pid {pid}) died"
        left = self._posted(_LEFT, rank)
        return left or ("" if self._wider is None else self._wider[0]._end_of(self._wider[1][rank]))

    def _pid_of_the_dead(self, rank: int) -> int | None:
        if rank in self._members:
            return self.process(rank).pid if self.alive(rank) is False else None
        return None if self._wider is None else self._wider[0]._pid_of_the_dead(self._wider[1][rank])


Wider = tuple[Liveness, Sequence[int]]
"""Liveness of a group that contains another one, and the numbers of the ranks of that one."""


class LongWaits:
    """Lines of the log for waits that last: one for each.

    Args:
        rank: number of this rank.
        warn_s: seconds after which a wait is a line (``Config.warn_s``).
    """

    def __init__(self, rank: int, warn_s: float) -> None:
        self._rank, self._warn_s, self._reported = rank, warn_s, -1

    def look(self, number: int, waited_s: float, timeout_s: float, describe: Callable[[], tuple[str, str]]) -> None:
        """Write the line of a wait once it is time.

        Args:
            number: number of the wait.
            waited_s: seconds that it has lasted.
            timeout_s: seconds after which it becomes an error.
            describe: returns the call that waits, in the words of its user, and the awaited ranks.
        """
        if waited_s < self._warn_s or number <= self._reported:
            return
        self._reported = number
        call, ranks = describe()
        log.waits.warning(
            "%s: rank %d has waited %.0f s for %s; the time-out is %g s", call, self._rank, waited_s, ranks, timeout_s
        )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> ranks_in_words([1]), ranks_in_words([1, 2])
    ('rank 1', 'ranks 1, 2')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def users_call() -> str:
    """Describe the call of the program that this thread is in: its name, and file and line; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _LIBRARIES:
            break
        function = frame.f_code.co_qualname.removesuffix(".__init__")
        if "<locals>" not in function and not function.rpartition(".")[2].startswith("_"):  # no wrapper
            room, package = _public_room(module, function) or module.rpartition(".")[2], module.partition(".")[0]
            public = (room, *sys.modules["sidelane"].__all__)
            if package == "sidelane" and function[0].islower() and function not in public:
                name = f"{room}.{function}"
            elif package in _LIBRARIES[:2]:
                name = function
        frame = frame.f_back
    if frame is None or not name:
        return ""
    file = frame.f_code.co_filename
    text = linecache.getline(file, frame.f_lineno).strip()
    return f"{name} ({os.path.basename(file)}:{frame.f_lineno}{': ' if text else ''}{text:.{_SHOWN}})"


def _public_room(module: str, function: str) -> str:
    """Return the module by which programs call a function that another one defines; "" if there is none."""
    loaded = ((name, sys.modules.get(f"sidelane.{name}")) for name in list(vars(sys.modules["sidelane"])))
    found = ((name, getattr(room, function)) for name, room in loaded if function in getattr(room, "__all__", ()))
    return next((name for name, public in found if getattr(public, "__module__", None) == module), "")


DYING_S = 2.0
"""Seconds by which a connection may break before its process is gone."""


def liveness_of(group: dist.ProcessGroup, store: dist.Store, rank: int, ranks: Sequence[int]) -> Liveness:
    """Return the liveness of a group, the same for all that its ranks make."""
    with _making:
        found = known(group)
        if found is None:
            found = _known[group] = Liveness(store, rank, ranks)
        return found


def known(group: dist.ProcessGroup) -> Liveness | None:
    """Return the liveness of a group whose ranks have met, or are about to; None for another group."""
    return _known.get(group)


def _connection_of(store: dist.Store) -> dist.Store:
    """Return the store below all prefixes; for a TCPStore this process's own connection, which no wait occupies."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return store
    with _making:
        at = f"{store.host}:{store.port}"
        found = _connections.get(at)
        if found is None:
            with contextlib.suppress(RuntimeError, AttributeError):
                clone: Any = store
                found = _connections[at] = clone.clone()
        return store if found is None else found


def set_liveness(group: dist.ProcessGroup, liveness: Liveness) -> None:
    """Let :func:`liveness_of` return this for a group."""
    _known[group] = liveness


_LEFT, _HANDED = "sidelane/left/", "sidelane/handed/"
_SHOWN = 100
_LIBRARIES = ("sidelane", "torch", "contextlib", "functools", "threading", "concurrent")
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Liveness] = weakref.WeakKeyDictionary()
_connections: weakref.WeakValueDictionary[str, dist.Store] = weakref.WeakValueDictionary()
_making = forks.lock()
forks.in_copies(_connections.clear)  # a socket has one owner
