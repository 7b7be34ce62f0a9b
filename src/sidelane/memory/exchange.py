"""What the ranks of a communicator tell each other while they make or enlarge what they share.

Objects travel through the store of the process group, never through its collectives: those have one order for everybody
who uses the group, while two communicators of one group, each used by its own thread, have two. Keys name the group,
the place of the communicator among those of this group, the number of the exchange in it, and the rank. So an exchange
meets those of the same communicator with the same number, and what each of them is about is compared.

What becomes of an exchange is decided in the store, once, by the first rank that knows: all have met there, or one has
given up. So ranks never disagree about it, however late they come. A place, which is a first exchange, that was decided
without a rank is none for it: it goes on to the next. That is where the others come again, whatever this process has
made before (docs/decisions/0117). A later exchange that one rank gave up is over for all of them.

A rank that cannot take part says so under its key, and the others raise its reason at once. A rank that does not come
is named within the time-out of the communicator; one that dies, or gives up elsewhere, as soon as that is noticed.

What is in the store is data, never code: JSON, of the form that this rank's own post has. Whoever can write there can
make communicators fail, and no more (docs/internals/trust.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from sidelane import forks, version
from sidelane.errors import MismatchError, PeerError, PeerTimeoutError, UnavailableError
from sidelane.memory.ending import give_up_if_it_ends
from sidelane.memory.process import ProcessIdentity
from sidelane.memory.store_values import (
    SHOWN,
    ExchangeOutcome,
    Post,
    alike,
    gave_up,
    met,
    not_understood,
    post_of,
    require_one_version,
)

Item = TypeVar("Item")

_LIVENESS_INTERVAL_S = 0.1
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 100e-6, 10e-3
_OUTCOME = "outcome"


class Exchange:
    """The exchanges of one communicator, in one order on all of its ranks. Making one costs nothing and is no exchange.

    Args:
        group: made by ``torch.distributed``; its ranks make their communicators in the same order.
        timeout_s: seconds that a rank may take to come.
        again: ranks may still read what an earlier group of this name has left in the store. It costs a round trip.

    Attributes:
        rank, world_size: in the group.
        ranks: of the group, in the world.
        name: the same on all ranks from the first exchange on, and of no other communicator of them.
        store: of the group, for those who need one for themselves.
        peers: who the others are, once that is known: the dead are noticed then.
        look: called while this rank waits; raises what is known to have gone wrong.

    Raises:
        ValueError: this process is not in the group.
        UnavailableError: the group has no store.
        CommunicatorClosedError: this process is a forked copy of a rank of the group.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, *, again: bool = False) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("Communicator: this process is not a rank of the group")
        require_own(group, "Communicator")
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.peers: Sequence[ProcessIdentity] = ()
        self.look: Callable[[], object] | None = None
        self._timeout_s, self._check_group = timeout_s, getattr(group, "check", None)
        self._group = f"{group.group_name}/{hashlib.blake2b(repr(self.ranks).encode(), digest_size=6).hexdigest()}"
        self.store = store_of(group) if self.world_size > 1 else dist.HashStore()
        self._store: dist.Store | None = None
        with _counting:
            self._places = _places.setdefault(group, itertools.count(1))
        self._go_on()
        self._word = secrets.token_hex(8)
        self._posted = Post(version.VERSION)
        self._number = 0
        self._settling, self._again = False, again
        self._self = ProcessIdentity.own()

    def __call__(self, what: str, make: Callable[[], Item]) -> list[Item]:
        """Tell the others what ``make`` returns; what it returned on each rank, in their order. Collective.

        Args:
            what: what it is about, in words: the same on all ranks.
            make: called here. What it raises is raised here, and its text on the others. What it returns is JSON but
                for tuples, and of one form on all ranks: values of the same types, tuples of the same lengths.

        Raises:
            PeerError: a rank could not take part, died, gave up or told something of another form; PeerTimeoutError:
                one did not come.
            MismatchError: on another rank it was about something else, or it runs another version of Sidelane.
        """
        self._number += 1
        try:
            item = make()
        except BaseException as error:
            self._refuse(what, error)
            if isinstance(error, Exception):
                self._raise_if_over(what, error)
            raise
        if self._store is None:
            return [item]
        found = self._meet(what, item) if self._number == 1 else self._follow(what, item)
        self._forget(self._number - 1)  # whoever has posted since has read it
        require_one_version("Communicator", [post.version for post in found])
        refused = [rank for rank, post in enumerate(found) if post.reason]
        if refused:
            named = "; ".join(f"rank {rank}: {found[rank].reason}" for rank in refused)
            raise PeerError(f"{what}: not every rank can take part: {named}", refused)
        other = next((rank for rank, post in enumerate(found) if post.what != what), None)
        if other is not None:
            raise MismatchError(
                f"exchange {self._number} of communicator {self.name}: rank {self.rank} is about: {what}; "
                f"rank {other}: {found[other].what} (allowed=the same calls, in the same order)"
            )
        own = self._posted.item
        unlike = [rank for rank, post in enumerate(found) if not alike(own, post.item)]
        if unlike:
            shown = f"value={found[unlike[0]].item!r:.{SHOWN}}, allowed=as {own!r:.{SHOWN}}"
            raise PeerError(f"{what}: rank {unlike[0]} told something of another form ({shown})", unlike)
        return [post.item for post in found]

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
                if self._number == 1:  # nobody has met
                    named += ": every rank of the group makes its communicators, in one order"
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
            self._refuse("", error)

    def _go_on(self) -> None:
        """Take the next place among the communicators of this group."""
        self.name = f"{self._group}/{next(self._places)}"
        if self.world_size > 1:
            self._store = dist.PrefixStore(f"sidelane/{self.name}", self.store)

    def _meet(self, what: str, item: Any) -> list[Post]:
        """The first exchange, at the first place to which all ranks come."""
        if self._again:
            self._go_past(what)
        while True:
            outcome, failure = self._settle(what, item)
            found = self._read(what) if outcome.met else {}  # others may have seen that all are there, and go on
            if len(found) == self.world_size and outcome == met(_by_rank(found)):
                return _by_rank(found)
            self._forget(1)
            try:
                if failure is not None and outcome == gave_up(failure, self.rank):
                    raise failure
                if not outcome.met and self.rank not in outcome.ranks:
                    raise outcome.error(what) from failure
            finally:
                del failure  # which keeps this frame
            self._go_on()

    def _follow(self, what: str, item: Any) -> list[Post]:
        """A later exchange: of those who have met."""
        outcome, failure = self._settle(what, item)
        if outcome.met:
            return _by_rank(self._read(what))
        try:
            if failure is not None and outcome == gave_up(failure, self.rank):
                raise failure
            raise outcome.error(what) from failure
        finally:
            del failure  # which keeps this frame

    def _settle(self, what: str, item: Any) -> tuple[ExchangeOutcome, PeerError | None]:
        """Post, and wait for the others; what has become of the exchange, and what this rank has against it."""
        self._post(Post(version.VERSION, self._word, what, "", item))
        self._settling = True
        try:
            return self._decide(what, met(self._collect(what))), None
        except (PeerError, KeyboardInterrupt) as error:
            try:
                outcome = self._decide(what, gave_up(error, self.rank))
            except PeerError:
                raise error from None
            if not isinstance(error, PeerError):
                raise
            return outcome, error
        finally:
            self._settling = False

    @property
    def _outcome_key(self) -> str:
        return _OUTCOME if self._number == 1 else f"{self._number}/{_OUTCOME}"

    def _decide(self, what: str, outcome: ExchangeOutcome) -> ExchangeOutcome:
        """Say what becomes of this exchange, unless that is decided; returns what counts."""
        assert self._store is not None
        with self._reaching_the_store(what):
            return ExchangeOutcome.of(self._store.compare_set(self._outcome_key, "", json.dumps(outcome)))

    def _decided(self) -> ExchangeOutcome | None:
        """What has become of this exchange, where that is known."""
        assert self._store is not None
        key = self._outcome_key
        return ExchangeOutcome.of(self._store.get(key)) if self._store.check([key]) else None

    def _raise_if_over(self, what: str, error: Exception) -> None:
        """Raise what the others do where they have given up a later exchange, in which this rank then failed."""
        try:
            if self._store is not None and self._number > 1:
                with contextlib.suppress(RuntimeError):  # then this rank's own error is the one to see
                    decided = self._decided()
                    if decided is not None and not decided.met:
                        error = decided.error(what)
                if isinstance(error, PeerError):
                    raise error
        finally:
            del error  # which keeps this frame

    def _go_past(self, what: str, *, missed: bool = True) -> None:
        """Leave behind what is decided; with ``missed``, also where this rank was missed."""
        with self._reaching_the_store(what):
            while (over := self._decided()) is not None and (missed or self.rank not in over.ranks):
                self._go_on()

    def _refuse(self, what: str, error: BaseException) -> None:
        if self._store is None:
            return
        if self._number == 1:  # where others have given up on this rank, this was its turn
            self._go_past(what, missed=False)
        self._post(Post(version.VERSION, self._word, what, f"{type(error).__name__}: {error}"))

    def _post(self, post: Post) -> None:
        if self._store is not None:
            text = json.dumps(post)
            with self._reaching_the_store(post.what):
                self._store.set(f"{self._number}/{self.rank}", text)
                self._posted = post_of(text)

    def _collect(self, what: str) -> list[Post]:
        """What every rank posted."""
        found: dict[int, Post] = {}

        def read() -> list[int]:
            found.update(self._read(what, found))
            return [rank for rank in range(self.world_size) if rank not in found]

        self.wait_for(what, read)
        return _by_rank(found)

    def _read(self, what: str, known: Container[int] = ()) -> dict[int, Post]:
        """What ranks posted that are not known, as far as it is there.

        Raises:
            PeerError: what is there is no post.
        """
        store = self._store
        assert store is not None
        found = {self.rank: self._posted}
        for rank in range(self.world_size):
            key = f"{self._number}/{rank}"
            if rank == self.rank or rank in known:
                continue
            with self._reaching_the_store(what):
                posted = store.get(key) if store.check([key]) else None
            if posted is not None:
                try:
                    found[rank] = post_of(posted)
                except ValueError as error:
                    raise not_understood(what, rank, posted) from error
        return found

    def _look_around(self, what: str, missing: Sequence[int]) -> None:
        if self.look is not None:
            self.look()
        if self._check_group is not None:
            self._check_group()
        if self._settling:
            with self._reaching_the_store(what):
                decided = self._decided()
            if decided is not None:
                raise PeerError(f"{what}: the others do not wait", missing)
        dead = [rank for rank in missing if self.peers and self.peers[rank].alive(self._self) is False]
        if dead:
            named = ", ".join(f"rank {rank} (pid {self.peers[rank].pid})" for rank in dead)
            raise PeerError(f"{what} (exchange {self._number} of communicator {self.name}): {named} died", dead)

    def _forget(self, number: int) -> None:
        """Delete what this rank posted, and rank 0 what became of a later exchange."""
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # stores that cannot delete keep it
            self._store.delete_key(f"{number}/{self.rank}")
            if self.rank == 0 and number > 1:
                self._store.delete_key(f"{number}/{_OUTCOME}")

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


def require_own(group: dist.ProcessGroup, what: str) -> None:
    """Raise if this process is a forked copy of the rank of a group, and no rank itself.

    Raises:
        CommunicatorClosedError: it is.
    """
    maker = _inherited.get(group)
    if maker is not None:
        raise forks.refusal(what, maker)


def _by_rank(found: Mapping[int, Post]) -> list[Post]:
    return [found[rank] for rank in sorted(found)]


@forks.in_copies
def _inherit() -> None:
    """All groups that there are in a copy are its parent's."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        for group in list(c10d._world.pg_map):
            _inherited.setdefault(group, os.getppid())


_places: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
"""By group, in which communicators are made: ranks that have made other groups before agree on it."""
_counting = forks.rlock()
_inherited: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Groups of the process that this one is a copy of, with its number."""
