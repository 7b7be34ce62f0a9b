"""Agreement of the ranks of several nodes, after a call has failed, on the ranks at fault.

A rank can check only the processes on its own machine. So a rank that fails writes into the store of the group that
it is present, and the ranks at fault as far as it knows; ranks that wait read the store. If no rank knows, those that
have not written within a few seconds that they are present are named. The first entry counts for all.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from sidelane.errors import PeerError, PeerTimeoutError
from sidelane.integrations.fallback import Witness
from sidelane.integrations.nodes.topology import Nodes
from sidelane.memory.store_values import alike, parsed

_GRACE_S = 2.0
_SLEEP_S = 0.05


class RollCall:
    """Roll call of the ranks after a failure; see the module.

    Args:
        store: store of the group's calls of one kind of device.
        rank: number of this rank in the group.
        nodes: nodes of the group.
        ranks: ranks of the group, in the world.
        witness: knows the processes of this machine.
        timeout: time-out of calls.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        nodes: Nodes,
        ranks: Sequence[int],
        witness: Witness,
        timeout: timedelta,
    ) -> None:
        self._store, self._rank, self._nodes, self._ranks = store, rank, nodes, tuple(ranks)
        self._witness, self._grace_s = witness, min(_GRACE_S, timeout.total_seconds())
        self._has_answered = False
        self._near = tuple(other for other in nodes.members[nodes.of[rank]] if other != rank)

    def known(self) -> list[int]:
        """Return the ranks known to be at fault."""
        told = self._told()
        return list(told[0]) if told is not None else self._witness.dead(self._near)

    def settle(self, error: Exception, ranks: Sequence[int] = (), *, calls: int = 0) -> PeerError:
        """Agree with all ranks left on the ranks at fault; this takes a few seconds if no rank knows.

        Args:
            error: error of this rank.
            ranks: ranks at fault according to the error, if no rank knows better.
            calls: number of calls that this rank has begun, if others may wait in none (:meth:`answer`); 0 queries
                none.
        """
        with contextlib.suppress(RuntimeError):  # the store may have vanished with the rank that died
            self._say_here()
            if calls:
                self._store.compare_set("roll", "", str(calls))
        until = time.monotonic() + self._grace_s
        while (told := self._told()) is None and time.monotonic() < until:
            dead = self._witness.dead(self._near)
            if dead:
                told = self.tell(dead, "died")
                break
            time.sleep(_SLEEP_S)
        if told is None:
            absent = self._absent()
            told = self.tell(absent, "did not answer") if absent else (tuple(ranks), str(error))
        found, why = told
        kind = PeerTimeoutError if isinstance(error, PeerTimeoutError) else PeerError
        return kind(f"{self.name(found)}{why}: {error}" if str(error) != why else f"{self.name(found)}{why}", found)

    def answer(self, calls: int) -> None:
        """Answer that this rank is present, if a rank has called the roll in a call that this rank has begun.

        Args:
            calls: number of calls that it has begun.
        """
        with contextlib.suppress(RuntimeError, ValueError):
            if not self._has_answered and self._store.check(["roll"]) and int(self._store.get("roll")) <= calls:
                self._say_here()

    def _say_here(self) -> None:
        self._store.set(f"here/{self._rank}", "1")
        self._has_answered = True

    def tell(self, ranks: Sequence[int], why: str) -> tuple[tuple[int, ...], str]:
        """Publish the ranks at fault, unless another rank has done so already; return the published entry."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("fault", "", json.dumps((tuple(ranks), why)))
            told = self._told()
            if told is not None:
                return told
        return tuple(ranks), why

    def name(self, ranks: Sequence[int]) -> str:
        """Return ranks as text, with their nodes."""
        return "".join(
            f"rank {rank} (rank {self._ranks[rank]} of the world, node {self._nodes.of[rank]}) " for rank in ranks
        )

    def _told(self) -> tuple[tuple[int, ...], str] | None:
        with contextlib.suppress(RuntimeError, ValueError):  # an entry in another format counts as none
            if self._store.check(["fault"]):
                match parsed(self._store.get("fault")):
                    case (tuple(ranks), str(why)) if alike((0,) * len(ranks), ranks):
                        return ranks, why
        return None

    def _absent(self) -> list[int]:
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(len(self._ranks)) if not self._store.check([f"here/{rank}"])]
        return []
