"""The two lanes, the buffers and the counts for FSDP2's calls of one process group, on one machine or several."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sidelane.config import Config
from sidelane.integrations.buffers import FsdpBuffers
from sidelane.integrations.calls import dtype_name
from sidelane.integrations.ledger import SIDELANE, Ledger
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.integrations.nodes.groups import NodeRanks, exchanged_nodes
from sidelane.integrations.nodes.topology import FLAT, HIERARCHICAL, Nodes, choose_steps
from sidelane.integrations.ring import Ring
from sidelane.memory.allocator import MemoryUse
from sidelane.memory.exchange import Exchange, ranks_of
from sidelane.program.collective import Kind
from sidelane.session import Communicator

FsdpLane = Communicator | NodesCommunicator
LANES = ("gather", "scatter")


@dataclasses.dataclass(slots=True)
class FsdpCounts:
    """Counts of a model's collectives, in all of its groups.

    Attributes:
        calls: number of collectives that Sidelane has made.
        elsewhere: numbers of calls that the groups' own backends have made, by kind and reason.
    """

    calls: int = 0
    elsewhere: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class FsdpGroup:
    """FSDP2's calls of one group: two lanes, a ring of buffers, and counts.

    Args:
        group: group of the shards.
        device: device of the shards.
        counts: counts of the model.
        lanes: lane that gathers, and the one that scatters; empty if the group's own backend makes all calls.
        allocate: function that returns bytes for the ring of buffers that become parameters, a collective; None for
            ordinary memory.
        buffers: pool of all other buffers; None for ordinary memory.
        nodes: nodes of the ranks, if there are several.
        end: functions that release the lanes.

    Attributes:
        group, device: see above.
        rank, world_size: number of this rank in the group, and number of its ranks.
        gather, scatter: lanes of the two collectives.
        ring: ring of buffers that become parameters.
    """

    gather: FsdpLane
    scatter: FsdpLane

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        counts: FsdpCounts,
        lanes: Sequence[FsdpLane] = (),
        *,
        allocate: Callable[[int], torch.Tensor] | None = None,
        buffers: FsdpBuffers | None = None,
        nodes: Nodes | None = None,
        end: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.group, self.device, self.rank, self.world_size = group, device, group.rank(), group.size()
        self._counts, self._ranks = counts, ranks_of(group)
        self._ledger = Ledger(self._ranks)
        self._ledger.group = group.group_name
        self._lanes, self._buffers, self._nodes, self._end = lanes, buffers, nodes, end
        if lanes:
            self.gather, self.scatter = lanes
        self.ring = Ring(allocate or functools.partial(torch.empty, dtype=torch.uint8, device=device), device)

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Return True if the ranks are those of ``group``: FSDP2 may have another one for gradients."""
        return group is self.group or ranks_of(group) == self._ranks

    def refusal(self, kind: Kind, nbytes: int) -> str:
        """Return the reason why the group's own backend makes a call of so many bytes; "" if Sidelane makes it."""
        choice = None if self._nodes is None else choose_steps(kind, nbytes, self._nodes)
        return "" if choice is None or choice.name != FLAT else f"{FLAT}: {choice.reason}"

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer: for gathered parameters, which FSDP2 copies out, or for the gradients to reduce."""
        if self._buffers is None:
            return torch.empty(*size, dtype=dtype, device=self.device)
        return self._buffers.take(size, dtype)

    def memory(self) -> MemoryUse:
        """Return the symmetric memory of the lanes."""
        return MemoryUse.of_all(lane.memory() for lane in self._lanes)

    def close(self) -> None:
        """Release everything."""
        if self._buffers is not None:
            self._buffers.clear()
        self.ring.clear()
        for end in self._end:
            end()

    def made(self, kind: Kind, why: str, dtype: torch.dtype, nbytes: int) -> None:
        """Count a call that Sidelane makes."""
        self._counts.calls += 1
        if self._nodes is not None:
            why = f"{HIERARCHICAL}: {choose_steps(kind, nbytes, self._nodes).reason}; {why}"
        self._note(kind, dtype, SIDELANE, why, nbytes)

    def went_elsewhere(self, group: dist.ProcessGroup, kind: Kind, tensor: torch.Tensor, why: str) -> None:
        """Count a call that the backend of ``group`` makes, on a larger tensor of FSDP2's."""
        if self._buffers is not None:
            self._buffers.is_not_to_come_back(tensor)
        self._counts.elsewhere[f"{kind}: {why}"] += 1
        if (where := dist.get_backend(group)) != SIDELANE:  # a Sidelane group notes its calls itself
            self._note(kind, tensor.dtype, where, why, tensor.nbytes)

    def _note(self, kind: Kind, dtype: torch.dtype, where: str, why: str, nbytes: int) -> None:
        self._ledger.note((f"fsdp {kind}", dtype_name(dtype), self.device.type, where, why), "", nbytes)


def make_fsdp_group(group: dist.ProcessGroup, device: torch.device, config: Config, counts: FsdpCounts) -> FsdpGroup:
    """Make the calls of a group; the ranks find out together whether the group spans machines.

    On one machine buffers are symmetric as long as there is room. On several, those of the ring are symmetric within
    each; gradients are reduced from ordinary memory, since the steps pack them anyway.
    """
    exchange = Exchange(group, config.timeout_s, warn_s=config.warn_s)
    nodes = exchanged_nodes(exchange, "fsdp.enable", config)
    with contextlib.ExitStack() as stack:
        if not nodes.spans:
            first = Communicator(group, device=device, config=config, name=f"fsdp {LANES[0]}")
            stack.callback(first.close)
            lanes = [first, *(Communicator(first, name=f"fsdp {name}") for name in LANES[1:])]
            stack.pop_all()
            allocate, buffers = functools.partial(first.empty, dtype=torch.uint8), FsdpBuffers(first)
            return FsdpGroup(group, device, counts, lanes, allocate=allocate, buffers=buffers, end=[first.close])
        if choose_steps(Kind.ALL_GATHER, sys.maxsize, nodes).name == FLAT:
            return FsdpGroup(group, device, counts, nodes=nodes)
        store = dist.PrefixStore(f"sidelane/fsdp/{exchange.name}/", exchange.store)
        ranks = NodeRanks(store, exchange.rank, nodes, exchange.liveness, config, f"{group.group_name}/fsdp")
        made: list[NodesCommunicator] = []
        for name in LANES:
            lane = NodesCommunicator(ranks.within(name), device)
            stack.callback(lane.close)
            made.append(lane)
        stack.pop_all()
        end = [lane.close for lane in made]
        return FsdpGroup(group, device, counts, made, allocate=made[0].empty, nodes=nodes, end=end)
