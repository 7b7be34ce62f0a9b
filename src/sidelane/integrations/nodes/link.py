"""Link for FSDP2's calls of a group on several machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sidelane.collectives.allocator import MemoryUse
from sidelane.collectives.call_thread import CallThread
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
from sidelane.integrations.order import StreamOrder
from sidelane.integrations.ring import Ring
from sidelane.integrations.works import HostWork
from sidelane.memory import ending
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
        return MemoryUse.of_all(lane.comm.near.memory() for lane in self._lanes)

    def close(self) -> None:
        if hasattr(self, "ring"):
            self.ring.clear()
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()


class NodesLane:
    """A :class:`NodesCommunicator` whose calls may be asynchronous. Such calls query it (``order.Guard``).

    Asynchronous calls run on a thread, or on a stream of a GPU; all others behind them. After a wait, the thread holds
    no reference to the call's tensors, so a tensor that the caller then drops is freed.

    Args:
        comm: communicator that makes the calls.
    """

    def __init__(self, comm: NodesCommunicator) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self._stream = StreamOrder(self) if comm.device.type == "cuda" else None
        self._thread = CallThread()
        ending.at_exit(self, first=True)

    def all_gather(
        self, output: Tensors, input: Tensors, *, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.all_gather``; ``beside`` was given before."""
        return self._run(Kind.ALL_GATHER, output, input, async_op, lambda to, given: self.comm.all_gather(to, given))

    def reduce_scatter(
        self, output: Tensors, input: Tensors, *, op: str, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.reduce_scatter``; ``beside`` was given before."""

        def make(to: Tensors, given: Tensors) -> None:
            self.comm.reduce_scatter(to, given, op=op)

        return self._run(Kind.REDUCE_SCATTER, output, input, async_op, make)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return bytes that are symmetric in this node; ordinary ones if the node has no more. Collective in a node.

        Nodes need not agree: a call takes either.
        """
        found: list[torch.Tensor] = []

        def make() -> None:
            try:
                found.append(self.comm.near.empty(nbytes, dtype=torch.uint8))
            except UnavailableError:
                found.append(torch.empty(nbytes, dtype=torch.uint8, device=self.comm.device))

        self._behind(make)
        return found[0]

    def close(self) -> None:
        """End it; calls under way fail. No effect in a forked copy."""
        if self.comm.owner.is_copied:
            return
        self.comm.close()
        self._thread.close()
        if self._stream is not None:
            self._stream.close()

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

    def end(self, until: float) -> None:
        """End the thread at exit, as ``order.HostOrder`` does."""
        self._thread.cancel()
        if self._thread.end(until):
            return
        ending.give_up()
        self.ends()
        self._thread.end(time.monotonic() + ending.LEAVING_S)

    def work_on(self, side: SideStream, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> dist.Work:
        """See ``order.Guard``."""
        backend: Any = self.comm.lane.backend
        work: dist.Work = backend.work_on(side, tensors, tuple(outputs))
        return work

    def _run(
        self,
        kind: Kind,
        output: Tensors,
        input: Tensors,
        async_op: bool,
        make: Callable[[Tensors, Tensors], None],
    ) -> dist.Work | None:
        self.comm.owner.require()
        outputs, inputs = _listed(output), _listed(input)
        nbytes = max(sum(tensor.nbytes for tensor in tensors) for tensors in (outputs, inputs))
        pieces = choose(kind, nbytes, self.comm.nodes).pieces

        def job(to: Tensors, given: Tensors) -> None:
            self.comm.pieces = pieces
            make(to, given)

        if self._stream is not None:
            work = self._stream.run(lambda: job(output, input), (*outputs, *inputs), outputs, async_op, NO_TIMEOUT)
            return work if async_op else None
        if not async_op:
            self._behind(lambda: job(output, input))
            return None
        future = self._thread.submit(job, output, input)
        return HostWork(future, outputs, NO_TIMEOUT, self.late, self.interrupted)

    def _behind(self, job: Callable[[], None]) -> None:
        """Run ``job`` here, behind the asynchronous calls."""
        self.comm.owner.require()
        self._thread.settle()
        job()


def _listed(tensors: Tensors) -> Sequence[torch.Tensor]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tensors
