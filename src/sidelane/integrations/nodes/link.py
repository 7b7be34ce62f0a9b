"""Link for FSDP2's calls of a group on several machines."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from sidelane.collectives.allocator import MemoryUse
from sidelane.config import Config
from sidelane.integrations.fallback import Witness
from sidelane.integrations.fsdp_group import FsdpCounts, FsdpGroup
from sidelane.integrations.nodes.choose import FLAT, HIERARCHICAL, choose_steps
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.ring import Ring
from sidelane.memory.exchange import ranks_of
from sidelane.memory.liveness import Liveness
from sidelane.program.collective import Kind


class NodesLink(FsdpGroup):
    """Group on several nodes, with a ring whose buffers are symmetric within each.

    Gradients are reduced from ordinary memory: the steps pack them anyway.

    Args:
        group: group of the shards.
        device: device of the shards.
        config: settings.
        store: store of these ranks and this link alone.
        nodes: nodes of the ranks.
        liveness: liveness of the ranks.
        counts: counts of the model.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        config: Config,
        store: dist.Store,
        nodes: Nodes,
        liveness: Liveness,
        counts: FsdpCounts,
    ) -> None:
        super().__init__(group, device, counts)
        self.nodes = nodes
        rank, ranks = group.rank(), ranks_of(group)
        witness = Witness(liveness)
        self._lanes: list[NodesCommunicator] = []
        if choose_steps(Kind.ALL_GATHER, sys.maxsize, nodes).name == FLAT:
            none: Any = SimpleNamespace(rank=rank, world_size=len(ranks))  # no call comes to it
            self.gather, self.scatter = none, none
            self.ring = Ring(functools.partial(torch.empty, dtype=torch.uint8, device=device), device)
            return
        try:
            for name in ("gather", "scatter"):
                lane = NodesCommunicator(
                    dist.PrefixStore(f"{name}/", store),
                    *(rank, ranks, nodes),
                    device=device,
                    config=config,
                    witness=witness,
                    name=f"{group.group_name}/fsdp {name}",
                )
                self._lanes.append(lane)
        except BaseException:
            self.close()
            raise
        self.gather, self.scatter = first, _ = self._lanes
        self.ring = Ring(first.empty, first.device)

    def refusal(self, kind: Kind, nbytes: int) -> str:
        choice = choose_steps(kind, nbytes, self.nodes)
        return f"{FLAT}: {choice.reason}" if choice.name == FLAT else ""

    def reason(self, kind: Kind, nbytes: int) -> str:
        return f"{HIERARCHICAL}: {choose_steps(kind, nbytes, self.nodes).reason}; "

    def memory(self) -> MemoryUse:
        return MemoryUse.of_all(lane.own.memory() for lane in self._lanes)

    def close(self) -> None:
        if hasattr(self, "ring"):
            self.ring.clear()
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
