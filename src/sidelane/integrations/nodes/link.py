"""Link for FSDP2's calls of a group on several machines."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from sidelane.collectives.allocator import MemoryUse
from sidelane.integrations.fsdp_group import FsdpCounts, FsdpGroup
from sidelane.integrations.nodes.choose import FLAT, HIERARCHICAL, choose_steps
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.integrations.nodes.groups import NodeRanks
from sidelane.integrations.ring import Ring
from sidelane.program.collective import Kind


class NodesLink(FsdpGroup):
    """Group on several nodes, with a ring whose buffers are symmetric within each.

    Gradients are reduced from ordinary memory: the steps pack them anyway.

    Args:
        group: group of the shards.
        device: device of the shards.
        ranks: ranks of the group, with a store of this link alone.
        counts: counts of the model.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, ranks: NodeRanks, counts: FsdpCounts) -> None:
        super().__init__(group, device, counts)
        self.nodes = ranks.nodes
        self._lanes: list[NodesCommunicator] = []
        if choose_steps(Kind.ALL_GATHER, sys.maxsize, self.nodes).name == FLAT:
            none: Any = SimpleNamespace(rank=ranks.rank, world_size=group.size())  # no call comes to it
            self.gather, self.scatter = none, none
            self.ring = Ring(functools.partial(torch.empty, dtype=torch.uint8, device=device), device)
            return
        try:
            for name in ("gather", "scatter"):
                self._lanes.append(NodesCommunicator(ranks.within(name), device))
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
