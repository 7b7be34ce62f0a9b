"""Nodes of a group's ranks, and the smaller groups that calls among several nodes need."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import config as settings
from sidelane.config import DEFAULT_TIMEOUT_S, Config
from sidelane.errors import PeerError, UnavailableError
from sidelane.integrations.nodes.topology import Nodes
from sidelane.memory.exchange import Exchange
from sidelane.memory.liveness import Liveness, Wider, keep
from sidelane.memory.process import ProcessIdentity

_NOWHERE = "nowhere"
_HEARD_S = 10.0  # in which others come and hear of a wrong setting: they have imported what this rank has


class Meeting(NamedTuple):
    """Result of the first meeting of a group's ranks.

    Attributes:
        nodes: nodes of the ranks.
        liveness: liveness of the ranks.
        timeout: time-out of their calls.
    """

    nodes: Nodes
    liveness: Liveness
    timeout: timedelta


def find_nodes(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta | None,
    config: Config | None = None,
    *,
    wider: Wider | None = None,
) -> Meeting:
    """Let the ranks of a group meet: they exchange their machines, and watch each other from now on. Collective.

    Args:
        store: store of the group alone.
        rank: number of this rank in the group.
        ranks: ranks of the group, in the world.
        timeout: time-out for the last of them; None for that of the settings.
        config: settings, which may name virtual nodes in place of the machines; None for those in force.
        wider: see :class:`sidelane.memory.liveness.Liveness`.

    Raises:
        ValueError: the settings name none for a rank of the group, on all ranks; or a setting is not allowed, and then
            the other ranks raise PeerError with the reason.
        UnavailableError: the store keeps no values.
        PeerError, PeerTimeoutError: a rank died, or did not come.
        MismatchError: a rank runs another version of Sidelane.
    """
    everyone = NodeGroup(dist.PrefixStore("sidelane/nodes", store), rank, ranks, "ranks", wider)
    try:
        try:
            config = settings.current() if config is None else config
        except Exception as error:
            Exchange(everyone, DEFAULT_TIMEOUT_S, again=True).refuse(error, grace_s=_HEARD_S)
            raise
        timeout = timedelta(seconds=config.timeout_s) if timeout is None else timeout
        exchange = Exchange(everyone, timeout.total_seconds(), warn_s=config.warn_s, again=True)
        return Meeting(exchanged_nodes(exchange, "process group", config), exchange.liveness, timeout)
    finally:
        everyone.close()


def exchanged_nodes(exchange: Exchange, what: str, config: Config) -> Nodes:
    """Exchange the machines of a group's ranks, or the virtual nodes that the settings name. Collective.

    Raises:
        ValueError: the settings name no virtual node for one of them, on all ranks.
        PeerError, PeerTimeoutError, MismatchError: as ``Exchange``.
    """
    ranks, named = exchange.ranks, config.virtual_nodes

    def own() -> str:
        rank = ranks[exchange.rank]
        if named is None:
            return ProcessIdentity.own().machine
        return f"virtual {named[rank]}" if rank < len(named) else _NOWHERE

    names = exchange(what, own)
    nameless = [ranks[other] for other, found in enumerate(names) if found == _NOWHERE]
    if nameless:
        raise ValueError(
            f"process group: virtual_nodes (value={named}, allowed=a node for each rank of the world, "
            f"{nameless} among them)"
        )
    return Nodes.named(names)


def agree_on_a_part(
    store: dist.Store,
    rank: int,
    liveness: Liveness,
    name: str,
    failure: Exception | None,
    timeout: timedelta,
    warn_s: float,
) -> str:
    """Make all ranks go on with a part of a communicator, or none: some may lack what others have. Collective.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        liveness: liveness of the group.
        name: name of the group and the part.
        failure: error of making the part here; None if it was made, or this rank needs none.
        timeout: time-out for the last rank's answer.
        warn_s: see :class:`sidelane.memory.exchange.Exchange`.

    Returns:
        Name of this attempt, which is unique in this store.

    Raises:
        UnavailableError: a node lacks something; on all ranks alike.
        PeerError, PeerTimeoutError: a rank failed in another way; a rank did not come.
    """
    word = "made" if failure is None else f"{type(failure).__name__}: {failure}"
    ranks = liveness.ranks
    everyone = NodeGroup(dist.PrefixStore("all/", store), rank, ranks, name, (liveness, range(len(ranks))))
    try:
        exchange = Exchange(everyone, timeout.total_seconds(), warn_s=warn_s, again=True)
        words = exchange("communicator of several nodes", lambda: word)
    finally:
        everyone.close()
    failed = [other for other, found in enumerate(words) if found != "made"]
    if not failed:
        return exchange.name
    text = "; ".join(f"rank {other}: {words[other]}" for other in failed)
    if all(words[other].startswith(f"{UnavailableError.__name__}: ") for other in failed):
        raise UnavailableError(text) from failure
    raise PeerError(text, failed) from failure


class NodeGroup(dist.ProcessGroup):
    """Some ranks, such as those of a node, as a control plane for Sidelane: it has a store and no collectives.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in it.
        ranks: its members, in the world.
        name: name of the group, the same on all members and unique.
        wider: see :class:`sidelane.memory.liveness.Liveness`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        name: str,
        wider: Wider | None = None,
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # see SidelaneGroup
        self._name, self.world_ranks = name, tuple(ranks)
        c10d._world.pg_map[self] = ("sidelane-node", store)
        keep(self, Liveness(dist.PrefixStore("sidelane/", store), rank, ranks, wider))

    def getGroupName(self) -> str:
        """Return the name under which its ranks meet."""
        return self._name

    def close(self) -> None:
        """Remove it from torch's table."""
        c10d._world.pg_map.pop(self, None)
