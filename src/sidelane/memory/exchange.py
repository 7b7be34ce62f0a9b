"""What the ranks of a communicator tell each other while they make or enlarge what they share.

Objects travel through the store of the process group, never through its collectives: those have one order for everybody
who uses the group, while two communicators of one group, each used by its own thread, have two. Keys name the group,
the communicator among those of its ranks on this group, the number of the exchange in it, and the rank. So an exchange
meets those of the same communicator with the same number, and what each of them is about is compared.

A rank that cannot take part says so under its key, and the others raise its reason at once. A rank that does not come
is named within the time-out of the communicator; one that dies, or gives up elsewhere, as soon as that is noticed.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from sidelane.errors import MismatchError, PeerError, PeerTimeoutError, UnavailableError
from sidelane.memory.ending import give_up_if_it_ends
from sidelane.memory.process import ProcessIdentity

Item = TypeVar("Item")

_LIVENESS_INTERVAL_S = 0.1
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 100e-6, 10e-3


class Exchange:
    """The exchanges of one communicator, in one order on all of its ranks. Making one costs nothing and is no exchange.

    Args:
        group: made by ``torch.distributed``; its ranks make their communicators in the same order.
        timeout_s: seconds that a rank may take to come.

    Attributes:
        rank, world_size: in the group.
        ranks: of the group, in the world.
        name: the same on all ranks, of no other communicator of them.
        store: of the group, for those who need one for themselves.
        peers: who the others are, once that is known: the dead are noticed then.
        look: called while this rank waits; raises what is known to have gone wrong.

    Raises:
        ValueError: this process is not in the group.
        UnavailableError: the group has no store.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("Communicator: this process is not a rank of the group")
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.peers: Sequence[ProcessIdentity] = ()
        self.look: Callable[[], object] | None = None
        self._timeout_s = timeout_s
        self._place = f"{group.group_name}/{hashlib.blake2b(repr(self.ranks).encode(), digest_size=6).hexdigest()}"
        with _counting:
            _made[self._place] += 1
            self._count = _made[self._place]
        self.name = f"{self._place}/{self._count}"
        self.store = store_of(group) if self.world_size > 1 else dist.HashStore()
        self._store = dist.PrefixStore(f"sidelane/{self.name}", self.store) if self.world_size > 1 else None
        self._number = 0
        self._self = ProcessIdentity.own()

    def __call__(self, what: str, make: Callable[[], Item]) -> list[Item]:
        """Tell the others what ``make`` returns; what it returned on each rank, in their order. Collective.

        Args:
            what: what it is about, in words: the same on all ranks.
            make: called here. What it raises is raised here, and its text on the others.

        Raises:
            PeerError: a rank could not take part, died or gave up; PeerTimeoutError: one did not come.
            MismatchError: on another rank it was about something else.
        """
        self._number += 1
        try:
            item = make()
        except BaseException as error:
            self._post((what, f"{type(error).__name__}: {error}", None))
            raise
        if self._store is None:
            return [item]
        self._post((what, "", item))
        try:
            found = [(what, "", item) if rank == self.rank else post for rank, post in enumerate(self._collect(what))]
        except PeerError:
            self._take_back()
            raise
        self._forget(self._number - 1)  # whoever has posted since has read it
        refused = [rank for rank, (_, reason, _) in enumerate(found) if reason]
        if refused:
            named = "; ".join(f"rank {rank}: {found[rank][1]}" for rank in refused)
            raise PeerError(f"{what}: not every rank can take part: {named}", refused)
        other = next((rank for rank, (theirs, _, _) in enumerate(found) if theirs != what), None)
        if other is not None:
            raise MismatchError(
                f"exchange {self._number} of communicator {self.name}: rank {self.rank} is about: {what}; "
                f"rank {other}: {found[other][0]} (allowed=the same calls, in the same order)"
            )
        return [item for _, _, item in found]

    def wait_for(self, what: str, missing: Callable[[], Sequence[int]]) -> None:
        """Wait until ``missing`` names no rank any more.

        Raises:
            PeerError: one of them died, or something else is known to have gone wrong; PeerTimeoutError: it is late.
        """
        began = looked = time.monotonic()
        while ranks := missing():
            give_up_if_it_ends()
            now = time.monotonic()
            if now - looked > _LIVENESS_INTERVAL_S:
                looked = now
                self._look_around(what, ranks)
            if now - began > self._timeout_s:
                named = ", ".join(map(str, ranks))
                raise PeerTimeoutError(
                    f"{what} (exchange {self._number} of communicator {self.name}): rank {self.rank} waited "
                    f"{now - began:.1f} s until its timeout for ranks {named}",
                    ranks,
                )
            time.sleep(min(max((now - began) / 8, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank takes part in nothing, and why."""
        self._number += 1
        with contextlib.suppress(PeerError):
            self._post(("", f"{type(error).__name__}: {error}", None))

    def _post(self, post: tuple[str, str, Any]) -> None:
        if self._store is not None:
            with self._reaching_the_store(post[0]):
                self._store.set(f"{self._number}/{self.rank}", pickle.dumps(post))  # type: ignore[arg-type]  # takes bytes

    def _collect(self, what: str) -> list[tuple[str, str, Any]]:
        """What every rank posted; None for this one's."""
        store = self._store
        assert store is not None
        found: dict[int, Any] = {self.rank: None}

        def read() -> list[int]:
            for rank in range(self.world_size):
                key = f"{self._number}/{rank}"
                with self._reaching_the_store(what):
                    if rank not in found and store.check([key]):
                        found[rank] = pickle.loads(store.get(key))
            return [rank for rank in range(self.world_size) if rank not in found]

        self.wait_for(what, read)
        return [found[rank] for rank in range(self.world_size)]

    def _look_around(self, what: str, missing: Sequence[int]) -> None:
        if self.look is not None:
            self.look()
        dead = [rank for rank in missing if self.peers and self.peers[rank].alive(self._self) is False]
        if dead:
            named = ", ".join(f"rank {rank} (pid {self.peers[rank].pid})" for rank in dead)
            raise PeerError(f"{what} (exchange {self._number} of communicator {self.name}): {named} died", dead)

    def _take_back(self) -> None:
        """Where the ranks have not even met, the next communicator of this rank is the one that the others wait for."""
        if self._number > 1:
            return
        self._forget(1)
        with _counting:
            if _made[self._place] == self._count:
                _made[self._place] -= 1

    def _forget(self, number: int) -> None:
        """Delete what this rank posted."""
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # stores that cannot delete keep it
            self._store.delete_key(f"{number}/{self.rank}")

    @contextlib.contextmanager
    def _reaching_the_store(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"{what}: the store of the process group cannot be reached: {error}") from error


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store through which the ranks of a group met, with a connection of its own where there are any.

    Raises:
        UnavailableError: it has none.
    """
    from torch.distributed import distributed_c10d

    try:
        store = distributed_c10d._get_process_group_store(group)
    except (KeyError, ValueError) as error:
        raise UnavailableError(
            f"Communicator: the group has no store (allowed=groups of torch.distributed): {error}"
        ) from error
    if store is None:
        raise UnavailableError("Communicator: the group has no store (allowed=groups that were made with one)")
    # Of its own: whoever waits for a key keeps a connection to himself as long as he waits.
    clone: Callable[[], dist.Store] = getattr(store, "clone", lambda: store)
    try:
        return clone()
    except RuntimeError:
        return store


_made: collections.Counter[str] = collections.Counter()
_counting = threading.Lock()
