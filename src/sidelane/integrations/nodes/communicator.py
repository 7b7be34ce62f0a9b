"""Collectives among the ranks of several nodes: Sidelane within each, the group's own backend between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidelane import forks
from sidelane.collectives.arguments import op_name
from sidelane.collectives.work import NO_TIMEOUT
from sidelane.errors import PeerError, UnavailableError, anew, in_no_order
from sidelane.integrations.fallback import make_other, nccl_not_ending_the_process
from sidelane.integrations.nodes.collectives import RAIL_OPS, TensorSteps, run_recipe
from sidelane.integrations.nodes.groups import NodeRanks
from sidelane.integrations.nodes.status import NodesStatus, NodesWatchdog
from sidelane.integrations.nodes.topology import count_pieces
from sidelane.integrations.order import HostOrder, StreamOrder
from sidelane.integrations.works import absent_ranks
from sidelane.memory.allocator import MemoryUse
from sidelane.program.collective import REDUCING, Kind, ReduceOp
from sidelane.program.shape import Beside
from sidelane.session import Communicator

ON_STREAMS = ("cuda",)
"""Devices for whose calls along rails streams wait: a thread watches them (``status.py``)."""

SLACK_S = 60.0
"""Seconds by which the time-out of NCCL itself is later."""

Tensor = torch.Tensor
NodeTensors = Tensor | Sequence[Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class NodesCall:
    """A call of one rank.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce (in place), all_to_all or broadcast (in place).
        outputs, inputs: tensors of the caller.
        op: operation of a reduction.
        root: root of a broadcast.
        beside: computation next to the calls within nodes; None for ``Config.beside``.
    """

    kind: Kind
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    op: Any = "sum"
    root: int = 0
    beside: Beside | None = None

    @property
    def adds_floats(self) -> bool:
        """True for a reduction whose bits depend on the order of its terms."""
        adds = self.kind in REDUCING and op_name(self.op) not in ("min", "max")
        return adds and any(tensor.is_floating_point() for tensor in self.outputs)

    def counts(self, rank: int, size: int, device: torch.device) -> list[int]:
        """Check the call, and return the elements of a part of each tensor (all_reduce and broadcast: of the tensor).

        Args:
            rank: this rank in the group.
            size: number of ranks of the group.
            device: the only device whose tensors are accepted.

        Raises:
            ValueError, TypeError: the call cannot be made.
        """
        kind = self.kind
        if op_name(self.op) not in RAIL_OPS:
            raise ValueError(f"{kind}: op (value={self.op!r}, allowed={', '.join(RAIL_OPS)})")
        if not isinstance(self.root, int) or not 0 <= self.root < size:
            raise ValueError(f"{kind}: root (value={self.root!r}, allowed=0..{size - 1})")
        pairs = list(zip(self.outputs, self.inputs, strict=True))
        counts = [self._count(size, device, *pair) for pair in pairs]
        if kind in REDUCING and len({tensor.dtype for tensor in self.outputs}) > 1:
            raise TypeError(f"{kind}: dtypes of a list (value=several, allowed=one)")
        self._check_apart(rank, pairs)
        return counts

    def _count(self, size: int, device: torch.device, output: Tensor, input: Tensor) -> int:
        kind = self.kind
        for tensor in (output, input):
            if tensor.device != device or not tensor.is_contiguous():
                raise ValueError(f"{kind}: tensors must be contiguous, on {device} (value={tensor.device})")
        if output.dtype != input.dtype:
            raise TypeError(f"{kind}: dtypes must be equal (value={output.dtype} and {input.dtype})")
        count = min(output.numel(), input.numel()) if kind is not Kind.ALL_TO_ALL else input.numel() // size
        wanted = {
            Kind.ALL_GATHER: (count * size, count),
            Kind.REDUCE_SCATTER: (count, count * size),
            Kind.ALL_TO_ALL: (count * size, count * size),
        }.get(kind, (count, count))
        if (output.numel(), input.numel()) != wanted:
            sizes = f"{output.numel()} and {input.numel()}"
            raise ValueError(
                f"{kind}: elements of output and input (value={sizes}, allowed={wanted[0]} and {wanted[1]})"
            )
        return count

    def _check_apart(self, rank: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse tensors of which one is written where another one lies, unless the call is in place."""
        touched: list[tuple[int, int, bool]] = []
        for to, given in pairs:
            whole, part = (given, to) if self.kind is Kind.REDUCE_SCATTER else (to, given)
            begin, own = whole.data_ptr(), rank * part.nbytes if part.nbytes < whole.nbytes else 0
            touched.append((begin, begin + whole.nbytes, whole is to or part.data_ptr() == begin + own))
            if part.data_ptr() != begin + own:
                touched.append((part.data_ptr(), part.data_ptr() + part.nbytes, part is to))
        ends = {True: 0, False: 0}  # of those that are written, and of those that are read
        for begin, end, is_written in sorted(each for each in touched if each[0] < each[1]):
            if begin < ends[True] or (is_written and begin < ends[False]):
                raise ValueError(f"{self.kind}: tensors overlap: they lie apart, or the call is in place")
            ends[is_written] = max(ends[is_written], end)


class NodesCommunicator:
    """Collectives among nodes of one size by recipes (``collectives.py``), on contiguous tensors and on lists.

    Every rank of the group makes it, and makes the same calls in one order. Asynchronous calls run on a thread, or on a
    stream of a GPU; all others come behind them, and those that wait query it (``works.HostWork``). A call that fails,
    or that one rank refuses, ends it: some of its steps may have run.

    Args:
        ranks: ranks of the group, on nodes of one size.
        device: device of the tensors.

    Raises:
        UnavailableError: a node lacks something; on all ranks alike.
        PeerError, PeerTimeoutError: a rank failed, or did not come.

    Attributes:
        own: communicator of this node.
        status: its end, and the ranks at fault.
        on_streams: streams wait for the rail's calls, and no host does.
        steps: calls within the node and along the rail.
        owner: process that is the rank.
    """

    def __init__(self, ranks: NodeRanks, device: torch.device) -> None:
        self.rank, self.nodes, self.world_size = ranks.rank, ranks.nodes, len(ranks.nodes.of)
        node, local_rank = ranks.nodes.coordinates(ranks.rank)
        self.on_streams, config = device.type in ON_STREAMS, ranks.config
        store = dist.PrefixStore(f"sidelane/several/{device.type}/", ranks.store)
        ranks = dataclasses.replace(ranks, store=store, name=f"{ranks.name}/{device.type}")
        self._group = ranks.own_node()
        with contextlib.ExitStack() as stack:
            stack.callback(self._group.close)
            make = functools.partial(Communicator, self._group, device=device, config=config)
            made, attempt = ranks.made_by_all(lambda: stack.enter_context(make()))
            ranks = dataclasses.replace(ranks, store=dist.PrefixStore(f"{attempt}/", store))
            rails = ranks.within(f"rail{local_rank}")

            def make_rail() -> dist.ProcessGroup:
                later = timedelta(seconds=config.timeout_s + SLACK_S * self.on_streams)
                with nccl_not_ending_the_process() if self.on_streams else contextlib.nullcontext():
                    return make_other(rails.store, node, len(ranks.nodes.members), later, rails.name, (), None)

            rail = dataclasses.replace(ranks, name=f"{ranks.name}/rails").made_by_all(make_rail)[0]
            stack.pop_all()
        self.own, self.device = made, made.device
        self.calls, self.backend = made.calls, made.backend
        self.status = NodesStatus(ranks, made.close)
        self.steps = TensorSteps(made, rail, self.status, self.nodes, self.rank, self.on_streams)
        self._watchdog = NodesWatchdog(self.status, self._attach, self._let_go)
        # Connections and threads end with this object, not when garbage is collected.
        self._order = StreamOrder(lambda: made) if device.type == "cuda" else HostOrder(weakref.proxy(self))
        self.owner = forks.Owner("communicator of several nodes")

    def all_gather(
        self, output: NodeTensors, input: NodeTensors, *, async_op: bool = False, beside: Beside | None = None
    ) -> dist.Work | None:
        """See ``Communicator.all_gather``."""
        return self._run(Kind.ALL_GATHER, output, input, async_op, beside=beside)

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
        return self._run(Kind.REDUCE_SCATTER, output, input, async_op, op=op, beside=beside)

    def all_reduce(self, tensor: NodeTensors, *, op: str | dist.ReduceOp = "sum") -> None:
        """See ``Communicator.all_reduce``, in place. Each node's sum is rounded to the dtype."""
        self._run(Kind.ALL_REDUCE, tensor, tensor, op=op)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """See ``Communicator.all_to_all``; equal parts."""
        self._run(Kind.ALL_TO_ALL, output, input)

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> None:
        """See ``Communicator.broadcast``."""
        self._run(Kind.BROADCAST, tensor, tensor, root=root)

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
        own, (text, ranks) = self.nodes.members[node], absent_ranks(self.own.control)
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
        self.steps.cached.clear()
        self.own.close()
        self._group.close()
        self.steps.close()
        self._order.close()

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
                self.status.publish(ended.ranks, why)
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
        self.steps.abort()

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

    def _run(
        self, kind: Kind, output: NodeTensors, input: NodeTensors, async_op: bool = False, **options: Any
    ) -> dist.Work | None:
        self.owner.require()  # before anything could tell the others that it has failed
        outputs, inputs = ((side,) if isinstance(side, Tensor) else side for side in (output, input))
        call = NodesCall(kind, outputs, inputs, **options)
        if call.adds_floats and self.calls.config.deterministic:
            raise in_no_order(call.kind, "sums of nodes are rounded and added by the backend between them")
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
        with self.steps.call(dtype, ReduceOp.SUM if divides else op, call.beside):
            run_recipe(self.steps, call.kind, self.nodes, self.rank, pairs, counts, pieces, call.root)
        if divides:
            for output, _ in pairs:
                output.copy_(torch.div(output, self.world_size, rounding_mode="trunc"))


def _always() -> bool:
    return True
