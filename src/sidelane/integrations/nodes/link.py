"""Link for FSDP2's calls of a group on several machines."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from sidelane.collectives.allocator import MemoryUse
from sidelane.collectives.side_stream import SideStream
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.config import COMPUTE, Config
from sidelane.errors import PeerError, UnavailableError
from sidelane.integrations.direct_gather import Tensors
from sidelane.integrations.fallback import Witness
from sidelane.integrations.links import Link
from sidelane.integrations.nodes.choose import FLAT, HIERARCHICAL, choose
from sidelane.integrations.nodes.communicator import NodesCommunicator
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.order import HostOrder, StreamOrder
from sidelane.integrations.ring import Ring
from sidelane.memory.exchange import ranks_of
from sidelane.memory.liveness import Liveness
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside


class NodesLink(Link):
    """Lanes of several nodes, and buffers that are symmetric within each.

    Gradients are reduced from ordinary memory: the steps pack them anyway.

    Args:
        group: group of the shards.
        device: device of the shards.
        config: settings.
        store: store of these ranks and this link alone.
        nodes: nodes of the ranks.
        liveness: liveness of the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        config: Config,
        store: dist.Store,
        nodes: Nodes,
        liveness: Liveness,
    ) -> None:
        super().__init__(group, device)
        self.nodes = nodes
        rank, ranks = group.rank(), ranks_of(group)
        witness = Witness(liveness)
        self._lanes: list[NodesLane] = []
        if choose(Kind.ALL_GATHER, sys.maxsize, nodes).name == FLAT:
            none: Any = SimpleNamespace(rank=rank, world_size=len(ranks))  # no call comes to it
            self.gather, self.scatter = none, none
            self.ring = Ring(functools.partial(torch.empty, dtype=torch.uint8, device=device), device)
            return
        try:
            for name in ("gather", "scatter"):
                made = NodesCommunicator(
                    dist.PrefixStore(f"{name}/", store),
                    *(rank, ranks, nodes),
                    device=device,
                    config=config,
                    witness=witness,
                    name=f"{group.group_name}/fsdp {name}",
                    beside=COMPUTE,
                )
                self._lanes.append(NodesLane(made))
        except BaseException:
            self.close()
            raise
        self.gather, self.scatter = self._lanes
        self.ring = Ring(self._lanes[0].empty, self._lanes[0].comm.device)

    def refusal(self, kind: Kind, nbytes: int) -> str:
        choice = choose(kind, nbytes, self.nodes)
        return f"{FLAT}: {choice.reason}" if choice.name == FLAT else ""

    def reason(self, kind: Kind, nbytes: int) -> str:
        return f"{HIERARCHICAL}: {choose(kind, nbytes, self.nodes).reason}; "

    def gathered_into(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=self.device)

    def scattered_from(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=self.device)

    def is_not_to_come_back(self, tensor: torch.Tensor) -> None:
        """Do nothing: all memory is ordinary."""

    def memory(self) -> MemoryUse:
        return MemoryUse.of_all(lane.comm.own.memory() for lane in self._lanes)

    def close(self) -> None:
        if hasattr(self, "ring"):
            self.ring.clear()
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()


class NodesLane:
    """A :class:`NodesCommunicator` whose calls may be asynchronous. Such calls query it (``order.Guard``).

    Args:
        comm: communicator that makes the calls.
    """

    def __init__(self, comm: NodesCommunicator) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        guard = weakref.proxy(self)  # connections and threads end with a lane, not when garbage is collected
        self._order = StreamOrder(guard) if comm.device.type == "cuda" else HostOrder(guard)

    def all_gather(
        self, output: Tensors, input: Tensors, *, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.all_gather``; ``beside`` was given before."""
        return self._run(output, input, async_op, functools.partial(self.comm.all_gather, output, input))

    def reduce_scatter(
        self, output: Tensors, input: Tensors, *, op: str, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.reduce_scatter``; ``beside`` was given before."""
        return self._run(output, input, async_op, functools.partial(self.comm.reduce_scatter, output, input, op=op))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return bytes that are symmetric in this node; ordinary ones if the node has no more. Collective in a node.

        Nodes need not agree: a call takes either.
        """
        self.comm.owner.require()
        make = functools.partial(self._made, nbytes)
        return self._order.alone(make) if isinstance(self._order, HostOrder) else make()

    def _made(self, nbytes: int) -> torch.Tensor:
        try:
            return self.comm.own.empty(nbytes, dtype=torch.uint8)
        except UnavailableError:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.comm.device)

    def close(self) -> None:
        """End it; calls under way fail. No effect in a forked copy."""
        if not self.comm.owner.is_copied:
            self.comm.close()
            self._order.close()

    def late(self) -> tuple[str, Sequence[int]]:
        """See ``order.Guard``."""
        return self.comm.late()

    def interrupted(self, error: KeyboardInterrupt) -> None:
        """See ``order.Guard``."""
        self.comm.leave(error)

    def ends(self) -> None:
        """See ``order.Guard``."""
        told = PeerError(f"rank {self.rank} ended without waiting for its asynchronous calls", (self.rank,))
        self.comm.leave(told)

    def work_on(self, side: SideStream, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> dist.Work:
        """See ``order.Guard``."""
        backend: Any = self.comm.lane.backend
        work: dist.Work = backend.work_on(side, tensors, tuple(outputs))
        return work

    def _run(self, output: Tensors, input: Tensors, async_op: bool, job: Callable[[], None]) -> dist.Work | None:
        self.comm.owner.require()
        outputs, inputs = ((each,) if isinstance(each, torch.Tensor) else tuple(each) for each in (output, input))
        work = self._order.run(job, (*outputs, *inputs), outputs, async_op, NO_TIMEOUT)
        return work if async_op else None
