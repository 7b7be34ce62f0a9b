"""Collectives among the ranks of several nodes: Sidelane within each, the group's own backend between them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidelane import forks
from sidelane.collectives.allocator import MemoryUse
from sidelane.collectives.side_stream import SideStream
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.config import Config
from sidelane.errors import PeerError, UnavailableError, anew, in_no_order
from sidelane.integrations.fallback import Witness, make_other, nccl_not_ending_the_process
from sidelane.integrations.nodes.groups import group_of_node, made_by_all
from sidelane.integrations.nodes.status import NodesStatus, NodesWatchdog
from sidelane.integrations.nodes.steps import NodeAndRail, NodesCall, Tensors
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.order import HostOrder, StreamOrder
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside
from sidelane.session import Communicator

ON_STREAMS = ("cuda",)
"""Devices for whose calls along rails streams wait: a thread watches them (``status.py``)."""

SLACK_S = 60.0
"""Seconds by which the time-out of NCCL itself is later."""


class NodesCommunicator:
    """Collectives among nodes of one size by recipes (``collectives.py``), on contiguous tensors and on lists.

    Every rank of the group makes it, and makes the same calls in one order. Asynchronous calls run on a thread, or on a
    stream of a GPU; all others come behind them, and those that wait query it (``works.WaitGuard``). A call that fails,
    or that one rank refuses, ends it: some of its steps may have run.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        ranks: ranks of the group, in the world.
        nodes: nodes of the ranks, all of one size.
        device: device of the tensors.
        config: settings of the calls within nodes, and the time-out of those along rails.
        witness: knows the processes that have died.
        name: name of the group, the same on all ranks.

    Raises:
        UnavailableError: a node lacks something; on all ranks alike.
        PeerError, PeerTimeoutError: a rank failed, or did not come.

    Attributes:
        own: communicator of this node.
        status: its end, and the ranks at fault.
        owner: process that is the rank.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        nodes: Nodes,
        *,
        device: torch.device,
        config: Config,
        witness: Witness,
        name: str,
    ) -> None:
        self.rank, self.world_size, self.nodes = rank, len(ranks), nodes
        node, place = nodes.coordinates(rank)
        on_streams = device.type in ON_STREAMS
        liveness, name = witness.liveness, f"{name}/{device.type}"
        store = dist.PrefixStore(f"sidelane/several/{device.type}/", store)
        self._group = group_of_node(store, rank, ranks, nodes, liveness, name)
        with contextlib.ExitStack() as stack:
            stack.callback(self._group.close)
            near = functools.partial(Communicator, self._group, device=device, config=config)
            made, attempt = made_by_all(lambda: stack.enter_context(near()), store, rank, liveness, name, config)
            store = dist.PrefixStore(f"{attempt}/", store)

            def make_rail() -> dist.ProcessGroup:
                later = timedelta(seconds=config.timeout_s + SLACK_S * on_streams)
                along = dist.PrefixStore(f"rail{place}/", store)
                with nccl_not_ending_the_process() if on_streams else contextlib.nullcontext():
                    return make_other(along, node, len(nodes.members), later, f"{name}/rail{place}", (), None)

            rail, _ = made_by_all(make_rail, store, rank, liveness, f"{name}/rails", config)
            stack.pop_all()
        self.own, self.lane, self.device = made, made.lane, made.device
        self.status = NodesStatus(store, rank, nodes, ranks, witness, config.timeout_s, made.close)
        self._groups = NodeAndRail(nodes, rank, made, rail, self.status, on_streams)
        self._watchdog = NodesWatchdog(self.status, self._attach, self._let_go)
        guard = weakref.proxy(self)  # connections and threads end with this object, not when garbage is collected
        self._order = StreamOrder(guard) if device.type == "cuda" else HostOrder(guard)
        self.owner = forks.Owner("communicator of several nodes")

    def all_gather(
        self, output: Tensors, input: Tensors, *, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.all_gather``."""
        return self._run(NodesCall(Kind.ALL_GATHER, output, input, beside=beside), async_op)

    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        *,
        op: str | dist.ReduceOp = "sum",
        async_op: bool = False,
        beside: Beside | None = None,
    ) -> dist.Work | None:
        """See ``Communicator.reduce_scatter``. Each node's sum is rounded to the dtype."""
        return self._run(NodesCall(Kind.REDUCE_SCATTER, output, input, op, beside=beside), async_op)

    def all_reduce(self, tensor: Tensors, *, op: str | dist.ReduceOp = "sum") -> None:
        """See ``Communicator.all_reduce``, in place. Each node's sum is rounded to the dtype."""
        self._run(NodesCall(Kind.ALL_REDUCE, tensor, tensor, op))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """See ``Communicator.all_to_all``; equal parts."""
        self._run(NodesCall(Kind.ALL_TO_ALL, output, input))

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> None:
        """See ``Communicator.broadcast``."""
        self._run(NodesCall(Kind.BROADCAST, tensor, tensor, root=root))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return bytes that are symmetric in this node; ordinary ones if the node has no more. Collective in a node.

        Nodes need not agree: a call takes either.
        """
        self.owner.require()

        def make() -> torch.Tensor:
            try:
                return self.own.empty(nbytes, dtype=torch.uint8)
            except UnavailableError:
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

        return self._order.alone(make) if isinstance(self._order, HostOrder) else make()

    def memory(self) -> MemoryUse:
        """Return the symmetric memory of this node's communicator."""
        return self.own.memory()

    def late(self) -> tuple[str, Sequence[int]]:
        """Return text about the ranks of this node that have not come to the current call, and their group ranks."""
        node = self.nodes.of[self.rank]
        control, own = self.lane.control, self.nodes.members[node]
        ranks = [rank for rank in control.absent(control.begun(control.rank)) if rank != control.rank]
        text = "".join(f"; {control.describe(rank)}" for rank in ranks)
        if not ranks:
            return f"; all ranks of node {node} have come, and wait for those of other nodes", ()
        return text.replace("; rank", "; rank of the node"), [own[rank] for rank in ranks]

    def leave(self, error: PeerError | KeyboardInterrupt) -> None:
        """End it because of Ctrl-C on this rank, or its exit. Calls under way fail, here and on the other ranks."""
        is_interrupt = isinstance(error, KeyboardInterrupt)
        self.status.leave("was interrupted" if is_interrupt else str(error).removeprefix(f"rank {self.rank} "))
        self.lane.calls.fail(error)

    def close(self) -> None:
        """Release everything; calls under way fail, here and elsewhere. Idempotent. No effect in a forked copy."""
        if self.owner.is_copied:
            return
        self.status.end(PeerError("the communicator was closed"))
        self._watchdog.close()
        groups = self._groups
        groups.scratch.clear()
        self.own.close()
        self._group.close()
        rail, groups.rail = groups.rail, None
        if rail is not None:
            rail.abort()
            if not groups.on_streams and not all(work.is_completed() for work in groups.begun):
                forks.keep_for_ever(rail)  # Gloo aborts nothing, and its end would wait for peers that may never come
        self._order.close()

    def work_on(self, side: SideStream, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> dist.Work:
        """See ``works.WaitGuard``."""
        backend: Any = self.lane.backend
        work: dist.Work = backend.work_on(side, tensors, tuple(outputs))
        return work

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End everything if a call fails, here and on the other ranks."""
        try:
            yield
        except KeyboardInterrupt as error:
            self.leave(error)
            raise
        except Exception as error:
            if isinstance(error, PeerError):  # the ranks have agreed on it
                ended = error
            else:
                is_refusal = isinstance(error, ValueError | TypeError)
                why = f"refused the call ({error})" if is_refusal else f"failed ({type(error).__name__}: {error})"
                ended = PeerError(f"rank {self.rank} {why}", (self.rank,))
                self.status.tell(ended.ranks, why)
            self.own.close()
            first = self.status.end(ended)
            if first is not ended:
                raise anew(first) from error
            raise

    def _let_go(self, error: PeerError) -> None:
        """End it in the watchdog's thread: streams go on, and the next call raises the error."""
        if self.status.end(error, is_raised=False) is error:
            self.lane.calls.fail(PeerError(str(error)))  # without ranks, which would be those of the node
        if self.device.type == "cuda":
            backend: Any = self.lane.backend
            backend.executor.watch.fail(error)
        if self._groups.rail is not None:
            self._groups.rail.abort()

    def _attach(self) -> None:
        """Prepare a thread that queries events: it must not disturb captures of other threads."""
        if self.device.type == "cuda":
            backend: Any = self.lane.backend
            backend.executor.driver.attach_thread()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Keep a call of streams registered until its last step has ended there."""
        is_cuda = self.device.type == "cuda"
        if not self._groups.on_streams or (is_cuda and torch.cuda.is_current_stream_capturing()):
            yield  # the replay of the graph is watched by its caller
            return
        ended: list[Any] = []
        begun = torch.cuda.current_stream(self.device).record_event().query if is_cuda else _always
        self._watchdog.begin(begun, lambda: bool(ended) and ended[0]())
        try:
            yield
        finally:
            ended.append(torch.cuda.current_stream(self.device).record_event().query if is_cuda else _always)

    def _run(self, call: NodesCall, async_op: bool = False) -> dist.Work | None:
        self.owner.require()  # before anything could tell the others that it has failed
        if call.adds_floats and self.lane.calls.config.deterministic:
            raise in_no_order(call.kind, "sums of nodes are rounded and added by the backend between them")
        outputs, inputs = call.outputs, call.inputs
        work = self._order.run(lambda: self._make(call), (*outputs, *inputs), outputs, async_op, NO_TIMEOUT)
        return work if async_op else None

    def _make(self, call: NodesCall) -> None:
        self.status.require(call.kind)
        with self._failing():
            counts = call.counts(self.rank, self.world_size, self.device)
            with self._watched():
                self._groups.run(call, counts)


def _always() -> bool:
    return True
