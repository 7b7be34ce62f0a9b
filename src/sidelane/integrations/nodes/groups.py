"""Where the ranks of a group are, and the smaller groups that calls among several nodes need."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane.config import Config
from sidelane.errors import PeerTimeoutError
from sidelane.integrations.nodes.topology import Nodes
from sidelane.memory.process import ProcessIdentity

_NOWHERE = "nowhere"


def find_nodes(store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, config: Config) -> Nodes:
    """Ask all ranks of a group on which machine they are. Collective.

    Args:
        store: of the group alone.
        rank: in the group.
        ranks: of the group, in the world.
        timeout: for the last of them.
        config: may name virtual nodes, in place of the machines.

    Raises:
        ValueError: it names none for a rank of the group; on all ranks.
        PeerTimeoutError: a rank did not come.
    """
    if len(ranks) == 1:
        return Nodes((0,))
    named, own = config.virtual_nodes, ranks[rank]
    name = ProcessIdentity.own().machine if named is None else f"virtual {named[own]}" if own < len(named) else _NOWHERE
    keys = [f"sidelane/nodes/{other}" for other in range(len(ranks))]
    store.set(keys[rank], name)
    try:
        store.wait(keys, timeout)
        names = [found.decode() for found in store.multi_get(keys)]
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise PeerTimeoutError(
            f"process group: ranks {missing} have not said where they are: {error}", missing
        ) from error
    nameless = [ranks[other] for other, found in enumerate(names) if found == _NOWHERE]
    if nameless:
        raise ValueError(
            f"process group: virtual_nodes (value={named}, allowed=a node for each rank of the world, "
            f"{nameless} among them)"
        )
    return Nodes.named(names)


class NodeGroup(dist.ProcessGroup):
    """Ranks of one node, as a control plane for Sidelane: it has a store and no collectives.

    Args:
        store: of these ranks alone.
        rank: in it.
        ranks: its members, in the world.
        name: the same on all of them, of no other group.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # see SidelaneGroup
        self._name = name
        c10d._world.pg_map[self] = ("sidelane-node", store)
        c10d._world.pg_group_ranks[self] = {world: number for number, world in enumerate(ranks)}

    def getGroupName(self) -> str:
        """Under which its ranks meet."""
        return self._name

    def close(self) -> None:
        """Have torch forget it."""
        c10d._world.pg_map.pop(self, None)
        c10d._world.pg_group_ranks.pop(self, None)
