"""Collectives among the ranks of several nodes: Sidelane within each, the group's own backend between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import forks
from sidelane.collectives.arguments import op_name
from sidelane.collectives.side_stream import SideStream
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError, anew, in_no_order
from sidelane.integrations.fallback import make_other, nccl_not_ending_the_process
from sidelane.integrations.nodes.call import RAIL_OPS, NodesCall, NodeTensors
from sidelane.integrations.nodes.collectives import run_recipe
from sidelane.integrations.nodes.groups import NodeRanks
from sidelane.integrations.nodes.status import NodesStatus, NodesWatchdog
from sidelane.integrations.nodes.topology import count_pieces
from sidelane.integrations.order import HostOrder, StreamOrder
from sidelane.integrations.works import OtherWork
from sidelane.memory.allocator import MemoryUse
from sidelane.program.collective import REDUCING, Kind, ReduceOp
from sidelane.program.shape import Beside
from sidelane.session import Communicator

ON_STREAMS = ("cuda",)
"""Devices for whose calls along rails streams wait: a thread watches them (``status.py``)."""

SLACK_S = 60.0
"""Seconds by which the time-out of NCCL itself is later."""

_FEW = 4  # largest number of copies made one by one, by the GPU's copy engines


class NodesCommunicator:
    """Collectives among nodes of one size by recipes (``collectives.py``), on contiguous tensors and on lists.

    Every rank of the group makes it, and makes the same calls in one order. Asynchronous calls run on a thread, or on a
    stream of a GPU; all others come behind them, and those that wait query it (``works.WaitGuard``). A call that fails,
    or that one rank refuses, ends it: some of its steps may have run.

    Args:
        ranks: ranks of the group, on nodes of one size.
        device: device of the tensors.

    Raises:
        UnavailableError: a node lacks something; on all ranks alike.
        PeerError, PeerTimeoutError: a rank failed, or did not come.

    Attributes:
        own: communicator of this node.
        rail: group of this rank's rail; None once it is closed.
        status: its end, and the ranks at fault.
        on_streams: streams wait for the rail's calls, and no host does.
        scratch: symmetric memory that is kept for later calls.
        begun: calls along the rail of the call that is under way or has failed.
        owner: process that is the rank.
    """

    def __init__(self, ranks: NodeRanks, device: torch.device) -> None:
        self.rank, self.nodes, self.world_size = ranks.rank, ranks.nodes, len(ranks.nodes.of)
        node, place = ranks.nodes.coordinates(ranks.rank)
        self.on_streams, config = device.type in ON_STREAMS, ranks.config
        store = dist.PrefixStore(f"sidelane/several/{device.type}/", ranks.store)
        ranks = dataclasses.replace(ranks, store=store, name=f"{ranks.name}/{device.type}")
        self._group = ranks.own_node()
        with contextlib.ExitStack() as stack:
            stack.callback(self._group.close)
            near = functools.partial(Communicator, self._group, device=device, config=config)
            made, attempt = ranks.made_by_all(lambda: stack.enter_context(near()))
            ranks = dataclasses.replace(ranks, store=dist.PrefixStore(f"{attempt}/", store))
            rails = ranks.within(f"rail{place}")

            def make_rail() -> dist.ProcessGroup:
                later = timedelta(seconds=config.timeout_s + SLACK_S * self.on_streams)
                with nccl_not_ending_the_process() if self.on_streams else contextlib.nullcontext():
                    return make_other(rails.store, node, len(ranks.nodes.members), later, rails.name, (), None)

            self.rail: Any = dataclasses.replace(ranks, name=f"{ranks.name}/rails").made_by_all(make_rail)[0]
            stack.pop_all()
        self.own, self.device = made, made.device
        self.calls, self.backend = made.calls, made.backend
        self.status = NodesStatus(ranks, made.close)
        self.scratch: dict[str, torch.Tensor] = {}
        self.begun: list[OtherWork] = []
        self._watchdog = NodesWatchdog(self.status, self._attach, self._let_go)
        guard = weakref.proxy(self)  # connections and threads end with this object, not when garbage is collected
        self._order = StreamOrder(guard) if device.type == "cuda" else HostOrder(guard)
        self.owner = forks.Owner("communicator of several nodes")

    def all_gather(
        self, output: NodeTensors, input: NodeTensors, *, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.all_gather``."""
        return self._run(NodesCall(Kind.ALL_GATHER, output, input, beside=beside), async_op)

    def reduce_scatter(
        self,
        output: NodeTensors,
        input: NodeTensors,
        *,
        op: str | dist.ReduceOp = "sum",
        async_op: bool = False,
        beside: Beside | None = None,
    ) -> dist.Work | None:
        """See ``Communicator.reduce_scatter``. Each node's sum is rounded to the dtype."""
        return self._run(NodesCall(Kind.REDUCE_SCATTER, output, input, op, beside=beside), async_op)

    def all_reduce(self, tensor: NodeTensors, *, op: str | dist.ReduceOp = "sum") -> None:
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

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time-out of waits for peers on this rank, in seconds."""
        self.own.set_timeout(timeout_s)
        self.status.timeout_s = timeout_s

    def late(self) -> tuple[str, Sequence[int]]:
        """Return text about the ranks of this node that have not come to the current call, and their group ranks."""
        node = self.nodes.of[self.rank]
        control, own = self.own.control, self.nodes.members[node]
        ranks = [rank for rank in control.absent(control.begun(control.rank)) if rank != control.rank]
        text = "".join(f"; {control.describe(rank)}" for rank in ranks)
        if not ranks:
            return f"; all ranks of node {node} have come, and wait for those of other nodes", ()
        return text.replace("; rank", "; rank of the node"), [own[rank] for rank in ranks]

    def leave(self, error: PeerError | KeyboardInterrupt) -> None:
        """End it because of Ctrl-C on this rank, or its exit. Calls under way fail, here and on the other ranks."""
        is_interrupt = isinstance(error, KeyboardInterrupt)
        self.status.leave("was interrupted" if is_interrupt else str(error).removeprefix(f"rank {self.rank} "))
        self.calls.fail(error)

    def close(self) -> None:
        """Release everything; calls under way fail, here and elsewhere. Idempotent. No effect in a forked copy."""
        if self.owner.is_copied:
            return
        self.status.end(PeerError("the communicator was closed"))
        self._watchdog.close()
        self.scratch.clear()
        self.own.close()
        self._group.close()
        rail, self.rail = self.rail, None
        if rail is not None:
            rail.abort()
            if not self.on_streams and not all(work.is_completed() for work in self.begun):
                forks.keep_for_ever(rail)  # Gloo aborts nothing, and its end would wait for peers that may never come
        self._order.close()

    def work_on(self, side: SideStream, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> dist.Work:
        """See ``works.WaitGuard``."""
        backend: Any = self.backend
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
            self.calls.fail(PeerError(str(error)))  # without ranks, which would be those of the node
        if self.device.type == "cuda":
            backend: Any = self.backend
            backend.executor.watch.fail(error)
        if self.rail is not None:
            self.rail.abort()

    def _attach(self) -> None:
        """Prepare a thread that queries events: it must not disturb captures of other threads."""
        if self.device.type == "cuda":
            backend: Any = self.backend
            backend.executor.driver.attach_thread()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Keep a call of streams registered until its last step has ended there."""
        is_cuda = self.device.type == "cuda"
        if not self.on_streams or (is_cuda and torch.cuda.is_current_stream_capturing()):
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
        if call.adds_floats and self.calls.config.deterministic:
            raise in_no_order(call.kind, "sums of nodes are rounded and added by the backend between them")
        outputs, inputs = call.outputs, call.inputs
        work = self._order.run(lambda: self._make(call), (*outputs, *inputs), outputs, async_op, NO_TIMEOUT)
        return work if async_op else None

    def _make(self, call: NodesCall) -> None:
        self.status.require(call.kind)
        with self._failing():
            counts = call.counts(self.rank, self.world_size, self.device)
            with self._watched():
                self._run_steps(call, counts)

    def _run_steps(self, call: NodesCall, counts: Sequence[int]) -> None:
        """Make a call, which was checked. Raises PeerError if a rank failed; the ranks have agreed which."""
        pairs = [(to.view(-1), given.view(-1)) for to, given in zip(call.outputs, call.inputs, strict=True)]
        pieces = count_pieces(max(sum(tensor.nbytes for tensor in side) for side in zip(*pairs, strict=True)))
        if call.kind not in REDUCING:
            counts = [count * to.itemsize for count, (to, _) in zip(counts, pairs, strict=True)]
            pairs = [(to.view(torch.uint8), given.view(torch.uint8)) for to, given in pairs]
        op, dtype = op_name(call.op), pairs[0][0].dtype
        divides = op == ReduceOp.AVG and not dtype.is_floating_point
        steps = TensorSteps(self, dtype, ReduceOp.SUM if divides else op, call.beside)
        roots = (call.root,) if call.kind is Kind.BROADCAST else ()
        run_recipe(steps, call.kind, self.nodes, self.rank, pairs, counts, pieces, *roots)
        self.begun.clear()  # they have tensors of the caller
        if divides:
            for output, _ in pairs:
                output.copy_(torch.div(output, self.world_size, rounding_mode="trunc"))


def _always() -> bool:
    return True


class TensorSteps:
    """The calls of a recipe, on tensors.

    Args:
        comm: communicator of this rank.
        dtype: dtype of the elements.
        op: operation of a reduction. A node's average is weighted before the nodes add theirs: the sum of all might not
            be a number of the dtype.
        beside: see :class:`NodesCall`.
    """

    def __init__(self, comm: NodesCommunicator, dtype: torch.dtype, op: str, beside: Beside | None) -> None:
        self._comm, self._own, self._dtype, self._op, self._beside = comm, comm.own, dtype, op, beside
        self._rows: dict[str, torch.Tensor] = {}

    def scratch(self, name: str, count: int, /, *, is_sent: bool = False) -> torch.Tensor:
        """See ``collectives.Steps``: symmetric memory if it is sent, kept for later calls.

        Calls have one order, and all ranks of a node take the same. If the node has no symmetric memory left, and
        within a capture, it is ordinary memory, too, and calls within the node stage it.
        """
        if name not in self._rows:
            own = self._own
            captured = own.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            held = self._kept(name, count * self._dtype.itemsize) if is_sent and not captured else None
            if held is None:
                self._rows[name] = torch.empty(count, dtype=self._dtype, device=own.device)
            else:
                self._rows[name] = held[: count * self._dtype.itemsize].view(self._dtype)
        return self._rows[name]

    def _kept(self, name: str, nbytes: int) -> torch.Tensor | None:
        """Return symmetric bytes for all calls; None if there are none."""
        own, kept = self._own, self._comm.scratch
        if own.world_size == 1:
            return None
        if name not in kept or kept[name].nbytes < nbytes:
            with self._in_the_node(), contextlib.suppress(UnavailableError):
                if name in kept:
                    own.synchronize()  # calls under way use it
                    del kept[name]
                kept[name] = own.empty(nbytes, dtype=torch.uint8)
        return kept.get(name)

    def rows(self, whole: torch.Tensor, parts: int, begin: int, end: int, /) -> Sequence[torch.Tensor]:
        """See ``collectives.Steps``."""
        return whole.view(parts, -1)[:, begin:end].unbind()

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], /) -> None:
        """See ``collectives.Steps``."""
        found = [(to, given) for to, given in pairs if to.data_ptr() != given.data_ptr()]
        if len(found) > _FEW:
            torch._foreach_copy_([to for to, _ in found], [given for _, given in found])  # few kernels on GPUs
        else:
            for to, given in found:
                to.copy_(given)

    def broadcast(self, parts: Iterable[tuple[int, torch.Tensor]], /) -> None:
        """See ``collectives.Steps``."""
        if self._own.world_size > 1:
            with self._in_the_node(), self._own.batch(beside=self._beside) as batch:
                for root, row in parts:
                    batch.broadcast(row, root=root)

    def within(self, kind: Kind, output: torch.Tensor, input: torch.Tensor, root: int = 0, /) -> None:
        """See ``collectives.Steps``."""
        own, beside = self._own, self._beside
        with self._in_the_node():
            if kind is Kind.ALL_TO_ALL:
                own.all_to_all(output, input, beside=beside)
            elif kind is Kind.SCATTER:
                own.scatter(output, input if own.rank == root else None, root=root, beside=beside)
            else:
                own.reduce_scatter(output, input, op=self._op, beside=beside)
                if self._op == ReduceOp.AVG:
                    output.mul_(own.world_size / self._comm.world_size)

    def along(self, kind: Kind, output: torch.Tensor, input: torch.Tensor, root: int = 0, /) -> OtherWork:
        """See ``collectives.Steps``."""
        comm = self._comm
        try:
            work = _begin(comm.rail, kind, output, input, RAIL_OPS[self._op], root)
        except RuntimeError as error:
            comm.status.explain(error, ())
        comm.begun.append(OtherWork(work, comm.status, (), looks=not comm.on_streams))
        return comm.begun[-1]

    @contextlib.contextmanager
    def _in_the_node(self) -> Iterator[None]:
        """Agree with all ranks on an error of a call within the node, which names ranks by their numbers there."""
        try:
            yield
        except (PeerError, CommunicatorClosedError) as error:
            nodes = self._comm.nodes
            members = nodes.members[nodes.of[self._comm.rank]]
            self._comm.status.explain(error, [members[rank] for rank in getattr(error, "ranks", ())])


def _begin(rail: Any, kind: Kind, output: torch.Tensor, input: torch.Tensor, op: Any, root: int) -> Any:
    """Begin a call of a rail's group; return its work."""
    if kind is Kind.ALL_GATHER:
        return rail._allgather_base(output, input, _options(c10d.AllgatherOptions()))
    if kind is Kind.ALL_TO_ALL:
        return rail.alltoall_base(output, input, [], [], _options(c10d.AllToAllOptions()))
    if kind is Kind.BROADCAST:
        return rail.broadcast([output], _options(c10d.BroadcastOptions(), rootRank=root, rootTensor=0))
    if kind is Kind.ALL_REDUCE:
        return rail.allreduce([output], _options(c10d.AllreduceOptions(), reduceOp=op))
    return rail._reduce_scatter_base(output, input, _options(c10d.ReduceScatterOptions(), reduceOp=op))


def _options(made: Any, **fields: Any) -> Any:
    made.asyncOp = True
    for name, value in fields.items():
        setattr(made, name, value)
    return made
