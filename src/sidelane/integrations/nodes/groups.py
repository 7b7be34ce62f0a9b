"""Nodes of a group's ranks, and the smaller groups that calls among several nodes need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import version
from sidelane.config import Config
from sidelane.errors import PeerError, PeerTimeoutError, UnavailableError
from sidelane.integrations.nodes.topology import Nodes
from sidelane.memory.exchange import Exchange
from sidelane.memory.process import ProcessIdentity
from sidelane.memory.store_values import not_understood, parsed, require_one_version

_NOWHERE = "nowhere"


def find_nodes(store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, config: Config) -> Nodes:
    """Exchange the machines of all ranks of a group. Collective.

    Args:
        store: store of the group alone.
        rank: number of this rank in the group.
        ranks: ranks of the group, in the world.
        timeout: time-out for the last of them.
        config: settings, which may name virtual nodes in place of the machines.

    Raises:
        ValueError: the settings name none for a rank of the group; on all ranks.
        PeerTimeoutError: a rank did not come.
    """
    if len(ranks) == 1:
        return Nodes((0,))
    names = tell_all(store, "sidelane/nodes", rank, len(ranks), own_node(ranks[rank], config), timeout)
    return nodes_named(names, ranks, config)


def own_node(rank: int, config: Config) -> str:
    """Return the name of this process's node; ``rank`` is its rank in the world."""
    named = config.virtual_nodes
    if named is None:
        return ProcessIdentity.own().machine
    return f"virtual {named[rank]}" if rank < len(named) else _NOWHERE


def nodes_named(names: Sequence[str], ranks: Sequence[int], config: Config) -> Nodes:
    """Return the nodes of ranks from the names that :func:`own_node` gave them.

    Raises:
        ValueError: the settings name no virtual node for one of them.
    """
    nameless = [ranks[other] for other, found in enumerate(names) if found == _NOWHERE]
    if nameless:
        raise ValueError(
            f"process group: virtual_nodes (value={config.virtual_nodes}, allowed=a node for each rank of the world, "
            f"{nameless} among them)"
        )
    return Nodes.named(names)


def tell_all(store: dist.Store, what: str, rank: int, size: int, word: str, timeout: timedelta) -> list[str]:
    """Return the words of all ranks, in their order. Collective; once for each ``what`` in a store.

    Raises:
        PeerTimeoutError: a rank did not come. PeerError: it sent another format.
        MismatchError: it runs another version of Sidelane.
    """
    keys = [f"{what}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps((version.VERSION, word)))
    try:
        store.wait(keys, timeout)
        said = store.multi_get(keys)
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise PeerTimeoutError(
            f"process group: ranks {missing} have not said a word of {what}: {error}", missing
        ) from error
    found = []
    for other, text in enumerate(said):
        try:
            number, its = map(str, parsed(text))
        except (ValueError, TypeError) as error:
            raise not_understood(f"process group, {what}", other, text) from error
        found.append((number, its))
    require_one_version("process group", [number for number, _ in found])
    return [its for _, its in found]


def agree_on_a_part(
    store: dist.Store, rank: int, ranks: Sequence[int], name: str, failure: Exception | None, timeout: timedelta
) -> str:
    """Make all ranks go on with a part of a communicator, or none: some may lack what others have. Collective.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        ranks: ranks of the group, in the world.
        name: name of the group and the part.
        failure: error of making the part here; None if it was made, or this rank needs none.
        timeout: time-out for the last rank's answer.

    Returns:
        Name of this attempt, which is unique in this store.

    Raises:
        UnavailableError: a node lacks something; on all ranks alike.
        PeerError, PeerTimeoutError: a rank failed in another way; a rank did not come.
    """
    word = "made" if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = NodeGroup(dist.PrefixStore("all/", store), rank, ranks, name)
    try:
        exchange = Exchange(everyone, timeout.total_seconds(), again=True)
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
    """Ranks of one node, as a control plane for Sidelane: it has a store and no collectives.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in it.
        ranks: its members, in the world.
        name: name of the group, the same on all members and unique.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # see SidelaneGroup
        self._name, self.world_ranks = name, tuple(ranks)
        c10d._world.pg_map[self] = ("sidelane-node", store)

    def getGroupName(self) -> str:
        """Return the name under which its ranks meet."""
        return self._name

    def close(self) -> None:
        """Remove it from torch's table."""
        c10d._world.pg_map.pop(self, None)
