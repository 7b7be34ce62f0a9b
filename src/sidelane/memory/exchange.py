"""Rendezvous: exchange of values between the ranks of a communicator when shared resources are made or enlarged.

Values are exchanged through the store of the process group, never by its collectives: these have one order for all
users of the group, while two communicators of one group, each used by its own thread, have two. Keys consist of the
group, the slot of the communicator among those of this group, the number of the exchange in it, and the rank. So an
exchange meets those of the same communicator with the same number, and their subjects are compared.

The outcome of an exchange is decided in the store, once, by the first rank that knows it: all ranks have met, or one
has given up. So ranks never disagree about it, however late they come. If the first exchange at a slot was decided
without some rank, this rank goes on to the next slot, where the others come again, whatever this process has made
before (decision 10). A later exchange that one rank gave up has failed for all of them.

A rank that cannot take part posts its reason under its key, and the others raise it at once. A rank that does not come
is named within the time-out of the communicator, after a line of the log; a rank that dies, leaves the group, or gives
up elsewhere, as soon as that is noticed (``memory.liveness``).

The store holds data, never code: JSON, of the form of this rank's own post. A process that can write there can make
communicators fail, and no more (docs/internals/trust.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from sidelane import forks, version
from sidelane.config import DEFAULT_WARN_S
from sidelane.errors import MismatchError, PeerError, PeerTimeoutError, UnavailableError
from sidelane.memory import store_values
from sidelane.memory.ending import give_up_if_it_ends
from sidelane.memory.liveness import DYING_S, Liveness, LongWaits, known, liveness_of, ranks_in_words, users_call

Item = TypeVar("Item")

_LIVENESS_INTERVAL_S = 0.1
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 100e-6, 10e-3
_OUTCOME = "outcome"
_NOTICE_S = 0.2  # in which all others see what one of them has decided
_MANY, _EACH_INTERVAL_S = 16, 1.0
"""Number of posts up to which they are read one by one in each look; seconds between such looks for more."""
_KEEPS_NOTHING = "Not implemented"  # torch's text for an operation that a store written in Python lacks


class Exchange:
    """The exchanges of one communicator, in one order on all of its ranks. Making this object is not collective.

    Args:
        group: group of ``torch.distributed``; its ranks make their communicators in the same order.
        timeout_s: seconds that a rank may take to come.
        warn_s: seconds after which the log names the ranks that have not come.
        skips_earlier: skip values that an earlier group of this name has left in the store. It costs a round trip.

    Attributes:
        rank, world_size: this rank and the number of ranks in the group.
        ranks: see :func:`ranks_of`.
        name: name of the communicator, unique, and the same on all ranks from the first exchange on.
        store: a store of the group for other uses.
        liveness: liveness of the group's ranks.
        warn_s: seconds after which the log names the ranks that have not come.
        look: called while this rank waits; it raises failures that are known.

    Raises:
        UnavailableError: the group has no store.
        CommunicatorClosedError: this process is a forked copy of a rank of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout_s: float, *, warn_s: float = DEFAULT_WARN_S, skips_earlier: bool = False
    ) -> None:
        require_own(group, "Communicator")
        self.rank, self.world_size, self.ranks = group.rank(), group.size(), ranks_of(group)
        self.look: Callable[[], object] | None = None
        self._timeout_s, self.warn_s, self._check_group = timeout_s, warn_s, getattr(group, "check", None)
        self._group = f"{group.group_name}/{hashlib.blake2b(repr(self.ranks).encode(), digest_size=6).hexdigest()}"
        self.store = dist.HashStore() if self.world_size == 1 else store_of(group)
        self.own_store: dist.Store | None = None
        shared = dist.PrefixStore(f"sidelane/{self._group}", self.store)
        self.liveness: Liveness = liveness_of(group, shared, self.rank, self.ranks)
        with _counting:
            self._slots = _slots.setdefault(group, itertools.count(1))
        self._go_on()
        self._word = os.urandom(8).hex()
        self._posted = store_values.Post(version.VERSION)
        self._number = 0
        self._deciding, self._skips_earlier, self._read_each_at = False, skips_earlier, 0.0

    def __call__(self, what: str, make: Callable[[], Item]) -> list[Item]:
        """Send the result of ``make`` to all ranks, and return the results of all ranks in their order. Collective.

        Args:
            what: subject of the exchange in words, the same on all ranks.
            make: makes this rank's value. Its error is raised here, and the text of the error on the other ranks. The
                value is JSON except for tuples, and has one form on all ranks: equal types, tuples of equal lengths.

        Raises:
            PeerError: a rank could not take part, died, gave up or sent a value of another form; PeerTimeoutError: a
                rank did not come.
            MismatchError: another rank has another subject, or runs another version of Sidelane.
        """
        self._number += 1
        try:
            item = make()
        except BaseException as error:
            self._refuse(what, error)
            if isinstance(error, Exception):
                self._raise_if_over(what, error)
            raise
        if self.own_store is None:
            return [item]
        # Ranks that meet say who they are, too.
        found = self._meet(what, (self.liveness.member, item) if self._number == 1 else item)
        self._forget(self._number - 1)  # ranks that have posted this exchange have read the previous one
        store_values.require_one_version(users_call() or what, [post.version for post in found])
        refused = [rank for rank, post in enumerate(found) if post.reason]
        if refused:
            reasons = "; ".join(f"rank {rank}: {found[rank].reason}" for rank in refused)
            raise PeerError(f"{what}: not every rank can take part: {reasons}", refused)
        other = next((rank for rank, post in enumerate(found) if post.what != what), None)
        if other is not None:
            raise MismatchError(
                f"exchange {self._number} of communicator {self.name}: rank {self.rank} is about: {what}; "
                f"rank {other}: {found[other].what}. All ranks make the same calls in the same order"
            )
        own = self._posted.item
        unlike = [rank for rank, post in enumerate(found) if not store_values.alike(own, post.item)]
        if unlike:
            shown = f"value={found[unlike[0]].item!r:.{store_values.SHOWN}}, here={own!r:.{store_values.SHOWN}}"
            raise PeerError(f"{what}: rank {unlike[0]} told something of another form ({shown})", unlike)
        if self._number > 1:
            return [post.item for post in found]
        self.liveness.meet([post.item[0] for post in found])
        return [post.item[1] for post in found]

    def wait_for(self, what: str, missing: Callable[[], Sequence[int]]) -> None:
        """Wait until ``missing`` names no rank any more.

        Raises:
            PeerError: one of them died, or another failure is known; PeerTimeoutError: a rank is late.
        """
        began = looked = time.monotonic()
        waits = LongWaits(self.rank, self.warn_s)

        def describe() -> tuple[str, str]:
            return users_call() or what, f"{ranks_in_words(ranks)} to come{self.liveness.handed_over(ranks)}"

        while ranks := missing():
            give_up_if_it_ends()
            now = time.monotonic()
            if now - looked > _LIVENESS_INTERVAL_S:
                looked = now
                if gone := self._look_around(what, ranks):
                    # It may have come before it ended, behind the back of this rank.
                    if gone := {rank: how for rank, how in gone.items() if rank in missing()}:
                        raise PeerError(self._title(what, "; ".join(gone.values())), tuple(gone))
                    continue
                waits.look(0, now - began, self._timeout_s, describe)
            if now - began > self._timeout_s:
                waited = f"rank {self.rank} waited {now - began:.1f} s until its timeout for {ranks_in_words(ranks)}"
                if self._number == 1:  # the ranks have never met
                    waited += ": all ranks of a group make its communicators and calls, in one order"
                raise PeerTimeoutError(self._title(what, waited + self.liveness.handed_over(ranks)), ranks)
            time.sleep(min(max((now - began) / 8, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))

    def _title(self, what: str, text: str) -> str:
        """Return the text of an error: the user's call, the text, and the slot for those who know the inside."""
        return f"{users_call() or what}: {text} ({what}, exchange {self._number} of communicator {self.name})"

    def refuse(self, error: BaseException, *, grace_s: float = 0.0) -> None:
        """Tell the others that this rank does not take part in the next exchange, and why.

        Args:
            error: the reason.
            grace_s: seconds that the others may take to come and hear it: the store may end with this process.
        """
        self._number += 1
        until = time.monotonic() + grace_s
        with contextlib.suppress(RuntimeError):  # a peer's failure, or the store has gone: this rank's own error counts
            self._refuse("", error)
            while self.own_store is not None and time.monotonic() < until and self._decided() is None:
                time.sleep(_LONGEST_SLEEP_S)
            time.sleep(_NOTICE_S if grace_s else 0)

    def _go_on(self) -> None:
        """Take the next slot among the communicators of this group."""
        self.name = f"{self._group}/{next(self._slots)}"
        if self.world_size > 1:
            self.own_store = dist.PrefixStore(f"sidelane/{self.name}", self.store)

    def _meet(self, what: str, item: Any) -> list[store_values.Post]:
        """Run an exchange: the first one at the first slot where all ranks meet, later ones at that slot."""
        is_first = self._number == 1
        if is_first and self._skips_earlier:
            self._go_past(what)
        while True:
            outcome, failure = self._take_part(what, item)
            try:
                found = self._read(what) if outcome.met else {}
                # In the first one, others may have seen that all are there, and have gone on.
                if outcome.met and (
                    not is_first or (len(found) == self.world_size and outcome == store_values.met(_by_rank(found)))
                ):
                    return _by_rank(found)
                if is_first:
                    self._forget(1)
                if failure is not None and outcome == store_values.gave_up(failure, self.rank):
                    raise failure
                if not is_first or not (outcome.met or self.rank in outcome.ranks):
                    raise outcome.error(what) from failure
            finally:
                del failure  # its traceback refers to this frame: a reference cycle
            self._go_on()

    def _take_part(self, what: str, item: Any) -> tuple[store_values.ExchangeOutcome, PeerError | None]:
        """Post, and wait for the others. Return the outcome of the exchange, and this rank's own error, if any."""
        self._post(store_values.Post(version.VERSION, self._word, what, "", item))
        self._deciding = True
        try:
            return self._decide(what, store_values.met(self._collect(what))), None
        except (PeerError, KeyboardInterrupt) as error:
            try:
                outcome = self._decide(what, store_values.gave_up(error, self.rank))
            except PeerError:
                raise error from None
            if not isinstance(error, PeerError):
                raise
            return outcome, error
        finally:
            self._deciding = False

    @property
    def _outcome_key(self) -> str:
        return _OUTCOME if self._number == 1 else f"{self._number}/{_OUTCOME}"

    def _decide(self, what: str, outcome: store_values.ExchangeOutcome) -> store_values.ExchangeOutcome:
        """Decide the outcome of this exchange, unless another rank has. Return the outcome that counts."""
        assert self.own_store is not None
        with self._reaching_the_store(what):
            return store_values.ExchangeOutcome.of(
                self.own_store.compare_set(self._outcome_key, "", json.dumps(outcome))
            )

    def _decided(self) -> store_values.ExchangeOutcome | None:
        """Return the outcome of this exchange; None if it is not decided yet."""
        assert self.own_store is not None
        value = store_values.value_of(self.own_store, self._outcome_key)
        return None if value is None else store_values.ExchangeOutcome.of(value)

    def _raise_if_over(self, what: str, error: Exception) -> None:
        """Raise the error of the others if they had given up a later exchange before this rank failed in it."""
        try:
            if self.own_store is not None and self._number > 1:
                with contextlib.suppress(RuntimeError):  # then this rank's own error is the one to see
                    decided = self._decided()
                    if decided is not None and not decided.met:
                        error = decided.error(what)
                if isinstance(error, PeerError):
                    raise error
        finally:
            del error  # which keeps this frame

    def _go_past(self, what: str, *, missed: bool = True) -> None:
        """Skip slots that are decided; with ``missed``, also those that were given up for want of this rank."""
        with self._reaching_the_store(what):
            while (over := self._decided()) is not None and (missed or self.rank not in over.ranks):
                self._go_on()

    def _refuse(self, what: str, error: BaseException) -> None:
        if self.own_store is None:
            return
        if self._number == 1:  # a slot that the others gave up for want of this rank is the one that it refuses
            self._go_past(what, missed=False)
        self._post(store_values.Post(version.VERSION, self._word, what, f"{type(error).__name__}: {error}"))

    def _post(self, post: store_values.Post) -> None:
        if self.own_store is not None:
            text = json.dumps(post)
            with self._reaching_the_store(post.what):
                self.own_store.set(f"{self._number}/{self.rank}", text)
                self._posted = store_values.post_of(text)

    def _collect(self, what: str) -> list[store_values.Post]:
        """Wait for the posts of all ranks, and return them."""
        found: dict[int, store_values.Post] = {}

        def read() -> list[int]:
            found.update(self._read(what, found))
            return [rank for rank in range(self.world_size) if rank not in found]

        self.wait_for(what, read)
        return _by_rank(found)

    def _read(self, what: str, known: Container[int] = ()) -> dict[int, store_values.Post]:
        """Return the posts that are in the store, except those of ``known`` ranks.

        Raises:
            PeerError: the value in the store is no post.
        """
        store = self.own_store
        assert store is not None
        found = {self.rank: self._posted}
        absent = [rank for rank in range(self.world_size) if rank != self.rank and rank not in known]
        keys = [f"{self._number}/{rank}" for rank in absent]
        with self._reaching_the_store(what):
            if len(keys) > _MANY and store.check(keys):
                values: Sequence[bytes | None] = store.multi_get(keys)
            elif len(keys) > _MANY and time.monotonic() < self._read_each_at:
                values = [None] * len(keys)
            else:
                self._read_each_at = time.monotonic() + _EACH_INTERVAL_S
                values = [store_values.value_of(store, key) for key in keys]
        for rank, posted in zip(absent, values, strict=True):
            if posted is not None:
                try:
                    found[rank] = store_values.post_of(posted)
                except ValueError as error:
                    raise store_values.not_understood(what, rank, posted) from error
        return found

    def _look_around(self, what: str, missing: Sequence[int]) -> Mapping[int, str]:
        """Raise failures that are known; return those that are missing and have ended, each with a sentence."""
        if self.look is not None:
            self.look()
        if self._check_group is not None:
            self._check_group()
        if self._deciding:
            with self._reaching_the_store(what):
                decided = self._decided()
            if decided is not None:
                raise PeerError(f"{what}: the others do not wait", missing)
        return self.liveness.gone(missing)

    def _forget(self, number: int) -> None:
        """Delete this rank's post; on rank 0 also the outcome of a later exchange."""
        assert self.own_store is not None
        if self.world_size > _MANY:
            return  # others may be reading all posts at once, which waits for a key that is deleted
        with contextlib.suppress(RuntimeError):  # stores that cannot delete keep it
            self.own_store.delete_key(f"{number}/{self.rank}")
            if self.rank == 0 and number > 1:
                self.own_store.delete_key(f"{number}/{_OUTCOME}")

    @contextlib.contextmanager
    def _reaching_the_store(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if _KEEPS_NOTHING in str(error):
                raise UnavailableError(
                    f"{users_call() or what}: the group's store keeps no values, as that of torch's fake groups, whose "
                    "ranks cannot meet (allowed=groups of a TCPStore, FileStore, HashStore)"
                ) from None
            gone = self.liveness.gone(range(self.world_size), within_s=DYING_S)
            why = "".join(f"{how}; " for how in gone.values())
            text = f"{what}: {why}the store of the process group cannot be reached: {error}"
            raise PeerError(text, tuple(gone)) from error


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a process group, with its own connection if the store uses connections.

    Raises:
        UnavailableError: the group has no store.
    """
    from torch.distributed import distributed_c10d

    try:
        store = distributed_c10d._get_process_group_store(group)
    except (KeyError, ValueError) as error:
        raise UnavailableError(
            f"Communicator: the group has no store (allowed=groups of torch.distributed): {error}"
        ) from error
    if store is None:
        raise UnavailableError("Communicator: the group was made without a store, and needs one")
    # Its own connection: a wait for a key occupies a connection as long as it lasts. If the store ended with a rank,
    # attempts to connect take long.
    liveness = known(group)
    if liveness is not None and liveness.dead(range(group.size())):
        return store
    clone: Callable[[], dist.Store] = getattr(store, "clone", lambda: store)
    try:
        return clone()
    except RuntimeError:
        return store


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks that errors name and settings count: the group's ranks in the world of this process.

    They are 0 to size - 1 if the group joins processes of several worlds: torch then knows no such ranks, or knows
    numbers that do not fit this process. For the same reason no rank in a group may be taken from ``dist.get_rank``,
    which looks up the rank in the world.
    """
    from torch.distributed import distributed_c10d

    own: tuple[int, ...] | None = getattr(group, "world_ranks", None)  # of Sidelane's groups
    if own is not None:
        return own
    known = tuple(distributed_c10d._world.pg_group_ranks.get(group, ()))
    world = dist.group.WORLD
    if world is not None and len(known) == group.size() and known[group.rank()] == world.rank():
        return known
    return tuple(range(group.size()))


def require_own(group: dist.ProcessGroup, what: str) -> None:
    """Raise if this process is a forked copy of the rank of a group, and no rank itself.

    Raises:
        CommunicatorClosedError: this process is such a copy.
    """
    maker = _inherited.get(group)
    if maker is not None:
        raise forks.refusal(what, maker)


def _by_rank(found: Mapping[int, store_values.Post]) -> list[store_values.Post]:
    return [found[rank] for rank in sorted(found)]


@forks.in_copies
def _inherit() -> None:
    """Note, in a forked copy, that all existing groups belong to its parent."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        for group in list(c10d._world.pg_map):
            _inherited.setdefault(group, os.getppid())


_slots: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Counters of the slots of communicators, by group: ranks that have made different groups before agree on them."""
_counting = forks.rlock()
_inherited: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Groups that this process has inherited by fork, with the process id of the parent."""
