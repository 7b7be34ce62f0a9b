"""Nodes of a group's ranks, and the smaller groups that calls among several nodes need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import config as settings
from sidelane.config import DEFAULT_TIMEOUT_S, Config
from sidelane.errors import PeerError, UnavailableError
from sidelane.integrations.nodes.topology import Nodes
from sidelane.memory.exchange import Exchange
from sidelane.memory.liveness import Liveness, ProcessIdentity, Wider, set_liveness

T = TypeVar("T")

_NOWHERE, _MADE = "nowhere", "made"
_NOTICE_S = 10.0  # in which others come and hear of a wrong setting: they have imported what this rank has


def find_nodes(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta | None,
    config: Config | None = None,
    *,
    name: str = "",
    wider: Wider | None = None,
) -> NodeRanks:
    """Let the ranks of a group meet: they exchange their machines, and watch each other from now on. Collective.

    Args:
        store: store of the group alone.
        rank: number of this rank in the group.
        ranks: ranks of the group, in the world.
        timeout: time-out for the last of them; None for that of the settings.
        config: settings, which may name virtual nodes in place of the machines; None for those in force.
        name: name of the group, the same on all ranks.
        wider: see :class:`sidelane.memory.liveness.Liveness`.

    Returns:
        The ranks, with the settings and the time-out.

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
            Exchange(everyone, DEFAULT_TIMEOUT_S, skips_earlier=True).refuse(error, grace_s=_NOTICE_S)
            raise
        if timeout is not None:
            config = dataclasses.replace(config, timeout_s=timeout.total_seconds())
        exchange = Exchange(everyone, config.timeout_s, warn_s=config.warn_s, skips_earlier=True)
        nodes = exchanged_nodes(exchange, "process group", config)
        return NodeRanks(store, rank, nodes, exchange.liveness, config, name)
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
            node = ProcessIdentity.own().machine
        else:
            node = f"virtual {named[rank]}" if rank < len(named) else _NOWHERE
        return f"{config.beside} {node}"

    besides, names = zip(*(answer.split(" ", 1) for answer in exchange(what, own)), strict=True)
    if len(set(besides)) > 1:
        given = dict(zip(ranks, besides, strict=True))
        raise ValueError(f"process group: Config.beside differs (value={given}, allowed=one value on all ranks)")
    nameless = [ranks[other] for other, found in enumerate(names) if found == _NOWHERE]
    if nameless:
        raise ValueError(
            f"process group: virtual_nodes must name a node for each rank of the world, also {nameless} (value={named})"
        )
    return Nodes.named(names)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRanks:
    """Ranks of a group on several nodes, as one of them knows them.

    Attributes:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        nodes: nodes of the ranks.
        liveness: liveness of the ranks.
        config: settings of their calls.
        name: name of the group, the same on all ranks.
    """

    store: dist.Store
    rank: int
    nodes: Nodes
    liveness: Liveness
    config: Config
    name: str

    def within(self, part: str) -> NodeRanks:
        """Return the same ranks with a store and a name for a part of what they make."""
        return dataclasses.replace(self, store=dist.PrefixStore(f"{part}/", self.store), name=f"{self.name}/{part}")

    def everyone(self) -> NodeGroup:
        """Return all ranks as a group."""
        ranks = self.liveness.ranks
        store = dist.PrefixStore("all/", self.store)
        return NodeGroup(store, self.rank, ranks, self.name, (self.liveness, range(len(ranks))))

    def own_node(self) -> NodeGroup:
        """Return the ranks of this rank's node as a group."""
        node, local_rank = self.nodes.coordinates(self.rank)
        members, here = self.nodes.members[node], self.within(f"node{node}")
        own = [self.liveness.ranks[other] for other in members]
        return NodeGroup(here.store, local_rank, own, here.name, (self.liveness, members))

    def made_by_all(self, make: Callable[[], T]) -> tuple[T, str]:
        """Make a part of a communicator on all ranks, or on none: some may lack what others have. Collective.

        The last rank may take twice the time-out, since ranks of a slower node may need all of it to fail.

        Args:
            make: function that makes the part of this rank. Its caller disposes of the part if this function raises.

        Returns:
            The part, and a name of this attempt that is unique in the store.

        Raises:
            UnavailableError: a node lacks something; on all ranks alike.
            PeerError, PeerTimeoutError: a rank failed in another way; a rank did not come.
        """
        made: list[T] = []
        word, cause = _MADE, None
        try:
            made.append(make())
        except Exception as error:
            word, cause = f"{type(error).__name__}: {error}", error
        everyone = self.everyone()
        try:
            exchange = Exchange(everyone, 2 * self.config.timeout_s, warn_s=self.config.warn_s, skips_earlier=True)
            words = exchange("communicator of several nodes", lambda: word)
        finally:
            everyone.close()
        failed = [other for other, found in enumerate(words) if found != _MADE]
        if not failed:
            return made[0], exchange.name
        made.clear()  # an error keeps this frame
        text = "; ".join(f"rank {other}: {words[other]}" for other in failed)
        if all(words[other].startswith(f"{UnavailableError.__name__}: ") for other in failed):
            raise UnavailableError(text) from cause
        raise PeerError(text, failed) from cause


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
        set_liveness(self, Liveness(dist.PrefixStore("sidelane/", store), rank, ranks, wider))

    def getGroupName(self) -> str:
        """Return the name under which its ranks meet."""
        return self._name

    def close(self) -> None:
        """Remove it from torch's table."""
        c10d._world.pg_map.pop(self, None)
