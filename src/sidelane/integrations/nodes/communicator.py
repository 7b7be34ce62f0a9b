"""Collectives among the ranks of several nodes: Sidelane within each, the group's own backend between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import forks
from sidelane.collectives.arguments import op_name
from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError, anew, in_no_order
from sidelane.integrations.fallback import Witness, make_other, nccl_not_ending_the_process
from sidelane.integrations.nodes import collectives
from sidelane.integrations.nodes.choose import pieces_of
from sidelane.integrations.nodes.groups import NodeGroup, agree_on_a_part
from sidelane.integrations.nodes.status import NodesStatus, NodesWatchdog
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.works import OtherWork
from sidelane.program.collective import REDUCING, Kind, ReduceOp
from sidelane.program.shape import Beside
from sidelane.session import Communicator

Tensor = torch.Tensor
Tensors = Tensor | Sequence[Tensor]
ON_STREAMS = ("cuda",)
"""Devices for whose calls along rails streams wait: a thread watches them (``status.py``)."""

SLACK_S = 60.0
"""Seconds by which the time-out of NCCL itself is later."""

_FEW = 4  # largest number of copies made one by one, by the GPU's copy engines
_RAIL_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class NodesCommunicator:
    """Collectives among nodes of one size by recipes (``collectives.py``), on contiguous tensors and on lists.

    Every rank of the group makes it, and makes the same calls in one order. A call that fails, or that one rank
    refuses, ends it: some of its steps may have run.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        ranks: ranks of the group, in the world.
        nodes: nodes of the ranks, all of one size.
        device: device of the tensors.
        config: settings of the calls within nodes, and the time-out of those along rails.
        witness: knows the processes that have died.
        name: name of the group, the same on all ranks.
        beside: computation next to the calls within nodes; None for ``Config.beside``.

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
        beside: Beside | None = None,
    ) -> None:
        self.rank, self.world_size, self.nodes, self.beside = rank, len(ranks), nodes, beside
        node, place = nodes.coordinates(rank)
        self._node, self._on_streams = node, device.type in ON_STREAMS
        self._rail: Any = None
        self._begun: list[OtherWork] = []  # calls along the rail of the call that is under way or has failed
        self._scratch: dict[str, Tensor] = {}
        members, liveness, name = nodes.members[node], witness.liveness, f"{name}/{device.type}"
        store = dist.PrefixStore(f"sidelane/several/{device.type}/", store)
        own = [ranks[other] for other in members]
        self._group = NodeGroup(
            dist.PrefixStore(f"node{node}/", store), place, own, f"{name}/node{node}", (liveness, members)
        )
        made: Communicator | None = None
        try:
            # The ranks of a slower node may need their whole time-out to fail.
            patience, failure = timedelta(seconds=2 * config.timeout_s), None
            try:
                made = Communicator(self._group, device=device, config=config)
            except Exception as error:
                failure = error
            attempt = agree_on_a_part(store, rank, liveness, name, failure, patience, config.warn_s)
            store, failure = dist.PrefixStore(f"{attempt}/", store), None
            try:
                self._rail = self._make_rail(store, f"{name}/rail{place}", config)
            except Exception as error:
                failure = error
            agree_on_a_part(store, rank, liveness, f"{name}/rails", failure, patience, config.warn_s)
        except BaseException:
            self._rail = None
            if made is not None:
                made.close()
            self._group.close()
            raise
        assert made is not None
        self.own, self.lane, self.device = made, made.lane, made.device
        self.status = NodesStatus(store, rank, nodes, ranks, witness, config.timeout_s)
        self._watchdog = NodesWatchdog(self.status, self._attach, self._let_go)
        self.owner = forks.Owner("communicator of several nodes")

    def _make_rail(self, store: dist.Store, name: str, config: Config) -> dist.ProcessGroup:
        node, place = self.nodes.coordinates(self.rank)
        store, many = dist.PrefixStore(f"rail{place}/", store), len(self.nodes.members)
        later = timedelta(seconds=config.timeout_s + SLACK_S * self._on_streams)
        with nccl_not_ending_the_process() if self._on_streams else contextlib.nullcontext():
            return make_other(store, node, many, later, name, (), None)

    def all_gather(self, output: Tensors, input: Tensors) -> None:
        """See ``Communicator.all_gather``."""
        self._call(Kind.ALL_GATHER, output, input)

    def reduce_scatter(self, output: Tensors, input: Tensors, *, op: str | dist.ReduceOp = "sum") -> None:
        """See ``Communicator.reduce_scatter``. Each node's sum is rounded to the dtype."""
        self._call(Kind.REDUCE_SCATTER, output, input, op=op)

    def all_reduce(self, tensor: Tensors, *, op: str | dist.ReduceOp = "sum") -> None:
        """See ``Communicator.all_reduce``, in place. Each node's sum is rounded to the dtype."""
        self._call(Kind.ALL_REDUCE, tensor, tensor, op=op)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        """See ``Communicator.all_to_all``; equal parts."""
        self._call(Kind.ALL_TO_ALL, output, input)

    def broadcast(self, tensor: Tensor, *, root: int) -> None:
        """See ``Communicator.broadcast``."""
        self._call(Kind.BROADCAST, tensor, tensor, root=root)

    def late(self) -> tuple[str, Sequence[int]]:
        """Return text about the ranks of this node that have not come to the current call, and their group ranks."""
        control, own = self.lane.control, self.nodes.members[self._node]
        ranks = [rank for rank in control.absent(control.begun(control.rank)) if rank != control.rank]
        text = "".join(f"; {control.describe(rank)}" for rank in ranks)
        if not ranks:
            return f"; all ranks of node {self._node} have come, and wait for those of other nodes", ()
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
        self._scratch.clear()
        self.own.close()
        self._group.close()
        rail, self._rail = self._rail, None
        if rail is not None:
            rail.abort()
            if not self._on_streams and not all(work.is_completed() for work in self._begun):
                forks.keep_for_ever(rail)  # Gloo aborts nothing, and its end would wait for peers that may never come

    def gone(self, peers: Sequence[int]) -> list[int]:
        """Return the ranks at fault, as far as known: for calls along the rail that wait (``works.PeerWatch``)."""
        return self.status.at_fault()

    def explain(self, error: Exception, peers: Sequence[int]) -> NoReturn:
        """Raise for an error of a part of a call; the other ranks of this node stop waiting.

        Args:
            error: the error.
            peers: ranks at fault, if no rank knows better.
        """
        self.own.close()
        raise self.status.agree(error, peers) from error

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
        if self._rail is not None:
            self._rail.abort()

    def _attach(self) -> None:
        """Prepare a thread that queries events: it must not disturb captures of other threads."""
        if self.device.type == "cuda":
            backend: Any = self.lane.backend
            backend.executor.driver.attach_thread()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Keep a call of streams registered until its last step has ended there."""
        is_cuda = self.device.type == "cuda"
        if not self._on_streams or (is_cuda and torch.cuda.is_current_stream_capturing()):
            yield  # the replay of the graph is watched by its caller
            return
        ended: list[Any] = []
        begun = torch.cuda.current_stream(self.device).record_event().query if is_cuda else _always
        self._watchdog.begin(begun, lambda: bool(ended) and ended[0]())
        try:
            yield
        finally:
            ended.append(torch.cuda.current_stream(self.device).record_event().query if is_cuda else _always)

    def _call(self, kind: Kind, output: Tensors, input: Tensors, *, op: Any = None, root: int = 0) -> None:
        self.owner.require()  # before anything could tell the others that it has failed
        if kind in REDUCING and self.lane.calls.config.deterministic and op_name(op) not in ("min", "max"):
            tensors = [output] if isinstance(output, Tensor) else output
            if any(tensor.is_floating_point() for tensor in tensors):
                raise in_no_order(kind, "sums of nodes are rounded and added by the backend between them")
        self.status.require(kind)
        with self._failing():
            pairs: Any = [(output, input)] if isinstance(output, Tensor) else list(zip(output, input, strict=True))
            name = None if op is None else op_name(op)
            if name is not None and name not in _RAIL_OPS:
                raise ValueError(f"{kind}: op (value={op!r}, allowed={', '.join(_RAIL_OPS)})")
            if not isinstance(root, int) or not 0 <= root < self.world_size:
                raise ValueError(f"{kind}: root (value={root!r}, allowed=0..{self.world_size - 1})")
            counts = [self._count(kind, *pair) for pair in pairs]
            if kind in REDUCING and len({to.dtype for to, _ in pairs}) > 1:
                raise TypeError(f"{kind}: dtypes of a list (value=several, allowed=one)")
            self._check_apart(kind, pairs)
            with self._watched():
                self._run(kind, [(to.view(-1), given.view(-1)) for to, given in pairs], counts, name, root)

    def _count(self, kind: Kind, output: Tensor, input: Tensor) -> int:
        """Return the number of elements of a part (for an all_reduce and a broadcast: of the tensor)."""
        size = self.world_size
        for tensor in (output, input):
            if tensor.device != self.device or not tensor.is_contiguous():
                raise ValueError(f"{kind}: tensor (value={tensor.device}, allowed=contiguous, on {self.device})")
        if output.dtype != input.dtype:
            raise TypeError(f"{kind}: dtypes (value={output.dtype} and {input.dtype}, allowed=the same)")
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

    def _check_apart(self, kind: Kind, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse tensors of which one is written where another one lies, unless the call is in place."""
        touched: list[tuple[int, int, bool]] = []
        for to, given in pairs:
            whole, part = (given, to) if kind is Kind.REDUCE_SCATTER else (to, given)
            begin, own = whole.data_ptr(), self.rank * part.nbytes if part.nbytes < whole.nbytes else 0
            touched.append((begin, begin + whole.nbytes, whole is to or part.data_ptr() == begin + own))
            if part.data_ptr() != begin + own:
                touched.append((part.data_ptr(), part.data_ptr() + part.nbytes, part is to))
        ends = {True: 0, False: 0}  # of those that are written, and of those that are read
        for begin, end, is_written in sorted(each for each in touched if each[0] < each[1]):
            if begin < ends[True] or (is_written and begin < ends[False]):
                raise ValueError(f"{kind}: tensors (value=that overlap, allowed=apart, or in place)")
            ends[is_written] = max(ends[is_written], end)

    def _run(
        self, kind: Kind, pairs: list[tuple[Tensor, Tensor]], counts: list[int], op: str | None, root: int
    ) -> None:
        pieces = pieces_of(max(sum(tensor.nbytes for tensor in side) for side in zip(*pairs, strict=True)))
        if kind not in REDUCING:
            counts = [count * to.itemsize for count, (to, _) in zip(counts, pairs, strict=True)]
            pairs = [(to.view(torch.uint8), given.view(torch.uint8)) for to, given in pairs]
        dtype = pairs[0][0].dtype
        average = op == ReduceOp.AVG
        weighted = average and dtype.is_floating_point  # the sum of all might not be a number of the dtype
        steps = _TensorSteps(self, dtype, "sum" if average and not weighted else op or "sum", weighted)
        self._begun = steps.begun
        roots = (root,) if kind is Kind.BROADCAST else ()
        collectives.run(steps, kind, self.nodes, self.rank, pairs, counts, pieces, *roots)
        self._begun = []  # they have tensors of the caller
        if average and not weighted:
            for output, _ in pairs:
                output.copy_(torch.div(output, self.world_size, rounding_mode="trunc"))


class _TensorSteps:
    """The calls of a recipe, on tensors.

    Args:
        whose: communicator of the call.
        dtype: dtype of its elements.
        op: operation of a reduction, within the node.
        weighted: a node's average has the weight of its ranks in the average of all.

    Attributes:
        begun: calls along the rail that have begun.
    """

    def __init__(self, whose: NodesCommunicator, dtype: torch.dtype, op: str, weighted: bool) -> None:
        self._whose, self._dtype, self._op, self._weighted = whose, dtype, op, weighted
        self.begun: list[OtherWork] = []
        self._rows: dict[str, Tensor] = {}

    def scratch(self, name: str, count: int, /, *, is_sent: bool = False) -> Tensor:
        """See ``collectives.Steps``: symmetric memory if it is sent, kept for later calls.

        Calls have one order, and all ranks of a node take the same. If the node has no symmetric memory left, and
        within a capture, it is ordinary memory, too, and calls within the node stage it.
        """
        row = self._rows.get(name)
        if row is None:
            own, kept, nbytes = self._whose.own, self._whose._scratch, count * self._dtype.itemsize
            captured = own.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            held: Tensor | None = None
            if is_sent and own.world_size > 1 and not captured:
                held = kept.get(name)
                if held is None or held.nbytes < nbytes:
                    with self._in_the_node(), contextlib.suppress(UnavailableError):
                        if held is not None:
                            own.synchronize()  # calls under way use it
                            held = None
                            del kept[name]
                        held = kept[name] = own.empty(nbytes, dtype=torch.uint8)
            if held is None:
                row = torch.empty(count, dtype=self._dtype, device=own.device)
            else:
                row = held[:nbytes].view(self._dtype)
            self._rows[name] = row
        return row

    def rows(self, whole: Tensor, parts: int, begin: int, end: int, /) -> Sequence[Tensor]:
        """See ``collectives.Steps``."""
        return whole.view(parts, -1)[:, begin:end].unbind()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], /) -> None:
        """See ``collectives.Steps``."""
        found = [(to, given) for to, given in pairs if to.data_ptr() != given.data_ptr()]
        if len(found) > _FEW:
            torch._foreach_copy_([to for to, _ in found], [given for _, given in found])  # few kernels on GPUs
        else:
            for to, given in found:
                to.copy_(given)

    def broadcast(self, parts: Iterable[tuple[int, Tensor]], /) -> None:
        """See ``collectives.Steps``."""
        if self._whose.own.world_size > 1:
            with self._in_the_node(), self._whose.own.batch(beside=self._whose.beside) as batch:
                for root, row in parts:
                    batch.broadcast(row, root=root)

    def within(self, kind: Kind, output: Tensor, input: Tensor, root: int = 0, /) -> None:
        """See ``collectives.Steps``."""
        own, beside = self._whose.own, self._whose.beside
        with self._in_the_node():
            if kind is Kind.ALL_TO_ALL:
                own.all_to_all(output, input, beside=beside)
            elif kind is Kind.SCATTER:
                own.scatter(output, input if own.rank == root else None, root=root, beside=beside)
            else:
                own.reduce_scatter(output, input, op=self._op, beside=beside)
        if self._weighted:
            output.mul_(own.world_size / self._whose.world_size)

    def along(self, kind: Kind, output: Tensor, input: Tensor, root: int = 0, /) -> OtherWork:
        """See ``collectives.Steps``."""
        try:
            work = _begin(self._whose._rail, kind, output, input, _RAIL_OPS[self._op], root)
        except RuntimeError as error:
            self._whose.explain(error, ())
        self.begun.append(OtherWork(work, self._whose, (), looks=not self._whose._on_streams))
        return self.begun[-1]

    @contextlib.contextmanager
    def _in_the_node(self) -> Iterator[None]:
        """Agree with all ranks on an error of a call within the node, which names ranks by their numbers there."""
        try:
            yield
        except (PeerError, CommunicatorClosedError) as error:
            members = self._whose.nodes.members[self._whose._node]
            self._whose.explain(error, [members[rank] for rank in getattr(error, "ranks", ())])


def _begin(rail: Any, kind: Kind, output: Tensor, input: Tensor, op: Any, root: int) -> Any:
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


def _always() -> bool:
    return True
