"""Collectives among the ranks of several nodes: Sidelane within each, the group's own backend between them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane import forks
from sidelane.collectives.arguments import op_name
from sidelane.config import Config
from sidelane.errors import CommunicatorClosedError, PeerError, in_no_order
from sidelane.integrations.fallback import Witness, make_other, nccl_not_ending_the_process
from sidelane.integrations.nodes.failures import RollCall
from sidelane.integrations.nodes.groups import NodeGroup, agree_on_a_part
from sidelane.integrations.nodes.plan import make_plan
from sidelane.integrations.nodes.scratch import Scratch
from sidelane.integrations.nodes.steps import (
    INPUT,
    OUTPUT,
    Copies,
    ElementSpan,
    Far,
    Join,
    Near,
    NodeBroadcast,
    NodePlan,
)
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.nodes.watchdog import Lookout
from sidelane.integrations.works import OtherWork
from sidelane.memory.liveness import Liveness
from sidelane.program.collective import REDUCING, Kind, ReduceOp
from sidelane.program.shape import Beside
from sidelane.session import Communicator

Tensor = torch.Tensor
Tensors = Tensor | Sequence[Tensor]
ON_STREAMS = ("cuda",)
"""Devices whose far steps streams wait for: a thread watches them (``watchdog.py``)."""

SLACK_S = 60.0
"""Seconds by which the time-out of NCCL itself is later."""

_FEW = 4  # largest number of copies made one by one, by the GPU's copy engines
_FAR_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class NodesCommunicator:
    """Collectives that have steps for several nodes (``plan.py``), on contiguous tensors and on lists.

    Every rank of the group makes it, and makes the same calls in one order. A call that fails, or that one rank
    refuses, ends it: some of its steps may have run.

    Args:
        store: store of these ranks alone.
        rank: number of this rank in the group.
        ranks: ranks of the group, in the world.
        nodes: nodes of the ranks.
        device: device of the tensors.
        config: settings of the near part, and the time-out of the far one.
        witness: knows the processes that have died.
        name: name of the group, the same on all ranks.
        beside: computation next to the near steps; None for ``Config.beside``.

    Raises:
        UnavailableError: a node lacks something; on all ranks alike.
        PeerError, PeerTimeoutError: a rank failed, or did not come.

    Attributes:
        near: communicator of this node.
        pieces: largest number of pieces of the next calls; the same on all ranks.
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
        self.rank, self.world_size, self.nodes, self.pieces = rank, len(ranks), nodes, 1
        self.beside = beside
        node, place = nodes.seat(rank)
        self._node, timeout = node, timedelta(seconds=config.timeout_s)
        self._on_streams = device.type in ON_STREAMS
        store = dist.PrefixStore(f"sidelane/several/{device.type}/", store)
        own = [ranks[other] for other in nodes.members[node]]
        near = (witness.liveness, nodes.members[node])
        near_name = f"{name}/{device.type}/node{node}"
        self._group = NodeGroup(dist.PrefixStore(f"node{node}/", store), place, own, near_name, near)
        self._plan = functools.lru_cache(maxsize=256)(make_plan)
        self._far: Any = None
        self._far_works: Sequence[OtherWork] = ()  # of the call that is under way or has failed
        self._failure: Exception | None = None
        self.near, attempt = self._make_near(store, witness.liveness, f"{name}/{device.type}", device, config)
        store = dist.PrefixStore(f"{attempt}/", store)
        self._roll = RollCall(store, rank, nodes, ranks, witness, timeout)
        self._make_far(store, witness.liveness, name, config)
        self.lane, self.device = self.near.lane, self.near.device
        self._unsaid: PeerError | None = None
        self._telling = forks.rlock()  # the lookout may fail a call while the call itself does
        self.lookout = Lookout(self._roll, timeout, self._attach, self._end)
        self._scratch = Scratch(self.near)
        self.owner = forks.Owner("communicator of several nodes")

    def _make_near(
        self, store: dist.Store, liveness: Liveness, name: str, device: torch.device, config: Config
    ) -> tuple[Communicator, str]:
        made: Communicator | None = None
        failure: Exception | None = None
        try:
            made = Communicator(self._group, device=device, config=config)
        except Exception as error:
            failure = error
        try:
            # The ranks of a slower node may need their whole time-out to fail.
            patience = timedelta(seconds=2 * config.timeout_s)
            attempt = agree_on_a_part(store, self.rank, liveness, name, failure, patience, config.warn_s)
        except BaseException:
            if made is not None:
                made.close()
            self._group.close()
            raise
        assert made is not None
        return made, attempt

    def _make_far(self, store: dist.Store, liveness: Liveness, name: str, config: Config) -> None:
        timeout = timedelta(seconds=config.timeout_s)
        node, place = self.nodes.seat(self.rank)
        failure: Exception | None = None
        if place < self.nodes.rails:
            rail, many = dist.PrefixStore(f"rail{place}/", store), len(self.nodes.members)
            later = timeout + timedelta(seconds=SLACK_S * self._on_streams)
            try:
                with nccl_not_ending_the_process() if self._on_streams else contextlib.nullcontext():
                    self._far = make_other(rail, node, many, later, f"{name}/rail{place}", (), None)
            except Exception as error:
                failure = error
        try:
            agree_on_a_part(store, self.rank, liveness, f"{name}/rails", failure, 2 * timeout, config.warn_s)
        except BaseException:
            self._far = None
            self.near.close()
            self._group.close()
            raise

    def all_gather(self, output: Tensors, input: Tensors) -> None:
        """See ``Communicator.all_gather``."""
        self._each(Kind.ALL_GATHER, output, input)

    def reduce_scatter(self, output: Tensors, input: Tensors, *, op: str | dist.ReduceOp = "sum") -> None:
        """See ``Communicator.reduce_scatter``. Each node's sum is rounded to the dtype."""
        self._each(Kind.REDUCE_SCATTER, output, input, op=op)

    def all_reduce(self, tensor: Tensors, *, op: str | dist.ReduceOp = "sum") -> None:
        """See ``Communicator.all_reduce``, in place. Each node's sum is rounded to the dtype."""
        self._each(Kind.ALL_REDUCE, tensor, tensor, op=op)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        """See ``Communicator.all_to_all``; equal parts."""
        self._each(Kind.ALL_TO_ALL, output, input)

    def broadcast(self, tensor: Tensor, *, root: int) -> None:
        """See ``Communicator.broadcast``."""
        self._each(Kind.BROADCAST, tensor, tensor, root=root)

    def late(self) -> tuple[str, Sequence[int]]:
        """Return text about the ranks of this node that have not come to the current call, and their group ranks."""
        control, own = self.lane.control, self.nodes.members[self._node]
        ranks = [rank for rank in control.absent(control.begun(control.rank)) if rank != control.rank]
        text = "".join(f"; {control.describe(rank)}" for rank in ranks)
        if not ranks:
            return f"; all ranks of node {self._node} have come, and wait for those of other nodes", ()
        return text.replace("; rank", "; rank of the node"), [own[rank] for rank in ranks]

    def fail(self, error: PeerError) -> None:
        """Tell the other ranks, on this node and elsewhere, that this rank takes part in no more calls."""
        with self._telling:
            self._failure = self._failure or error
        self._roll.tell(error.ranks, str(error))
        self.lane.calls.fail(error)

    def close(self) -> None:
        """Release everything; calls under way fail, here and elsewhere. Idempotent. No effect in a forked copy."""
        if self.owner.is_copied:
            return
        if self._failure is None:
            self._failure = PeerError("the communicator was closed")
        self.lookout.close()
        self._scratch.clear()
        self.near.close()
        self._group.close()
        far, self._far = self._far, None
        if far is not None:
            far.abort()
            if not self._on_streams and not all(work.is_completed() for work in self._far_works):
                forks.keep_for_ever(far)  # Gloo aborts nothing, and its end would wait for peers that may never come

    def _each(self, kind: Kind, output: Tensors, input: Tensors, *, op: Any = None, root: int = 0) -> None:
        self.owner.require()  # before anything could tell the others that it has failed
        if kind in REDUCING and self.lane.calls.config.deterministic and op_name(op) not in ("min", "max"):
            tensors = [output] if isinstance(output, Tensor) else output
            if any(tensor.is_floating_point() for tensor in tensors):
                raise in_no_order(kind, "sums of nodes are rounded and added by the backend between them")
        if (unsaid := self._take_unsaid()) is not None:
            raise unsaid
        if self._failure is not None:
            raise CommunicatorClosedError(f"{kind}: the communicator was closed, or has failed: {self._failure}")
        try:
            pairs: Any = [(output, input)] if isinstance(output, Tensor) else list(zip(output, input, strict=True))
            name = None if op is None else op_name(op)
            if name is not None and name not in _FAR_OPS:
                raise ValueError(f"{kind}: op (value={op!r}, allowed={', '.join(_FAR_OPS)})")
            if not isinstance(root, int) or not 0 <= root < self.world_size:
                raise ValueError(f"{kind}: root (value={root!r}, allowed=0..{self.world_size - 1})")
            counts = tuple(self._count(kind, *pair) for pair in pairs)
            if kind in REDUCING and len({to.dtype for to, _ in pairs}) > 1:
                raise TypeError(f"{kind}: dtypes of a list (value=several, allowed=one)")
            self._check_apart(kind, pairs)
        except (ValueError, TypeError) as error:
            self._failure = PeerError(f"rank {self.rank} refused the call: {error}", (self.rank,))
            self._roll.tell((self.rank,), f"refused the call ({error})")
            self.near.close()
            raise
        try:
            with self._looked_after():
                self._run(kind, [(to.view(-1), given.view(-1)) for to, given in pairs], counts, name, root)
        except KeyboardInterrupt as error:
            self.leave(error)
            raise
        except Exception as error:
            raise self._fail(error) from error.__cause__ or error

    def leave(self, error: PeerError | KeyboardInterrupt) -> None:
        """End it because of Ctrl-C on this rank, or its exit. Calls under way fail, here and on the other ranks."""
        why = (
            "was interrupted" if isinstance(error, KeyboardInterrupt) else str(error).removeprefix(f"rank {self.rank} ")
        )
        self._roll.tell((self.rank,), why)
        with self._telling:
            if self._failure is None:
                self._failure = PeerError(f"rank {self.rank} {why}", (self.rank,))
        self.lane.calls.fail(error)

    @contextlib.contextmanager
    def _looked_after(self) -> Iterator[None]:
        """Keep a call of streams registered until its last step has ended there."""
        is_cuda = self.device.type == "cuda"
        if not self._on_streams or (is_cuda and torch.cuda.is_current_stream_capturing()):
            yield  # the replay of the graph is watched by its caller
            return
        ended: list[Any] = []
        begun = torch.cuda.current_stream(self.device).record_event().query if is_cuda else _always
        self.lookout.begin(begun, lambda: bool(ended) and ended[0]())
        try:
            yield
        finally:
            ended.append(torch.cuda.current_stream(self.device).record_event().query if is_cuda else _always)

    def _attach(self) -> None:
        """Prepare a thread that queries events: it must not disturb captures of other threads."""
        if self.device.type == "cuda":
            backend: Any = self.lane.backend
            backend.executor.driver.attach_thread()

    def _end(self, error: PeerError) -> None:
        """Fail the communicator from the watchdog's thread: streams go on, and the next call raises, but only once."""
        with self._telling:
            is_first = self._failure is None
            if is_first:
                self._failure = self._unsaid = error
        if is_first:
            self.lane.calls.fail(PeerError(str(error)))  # without ranks, which would be those of the node
        if self.device.type == "cuda":
            backend: Any = self.lane.backend
            backend.executor.watch.fail(error)
        if self._far is not None:
            self._far.abort()

    def gone(self, peers: Sequence[int]) -> list[int]:
        """Return the ranks at fault, as far as known: for far calls that wait (``works.PeerWatch``)."""
        return self._roll.known()

    def explain(self, error: RuntimeError, peers: Sequence[int]) -> NoReturn:
        """Raise for the error of a far call; the other ranks of this node stop waiting."""
        raise self._settle(error) from error

    def _settle(self, error: Exception, ranks: Sequence[int] = ()) -> PeerError:
        self.near.close()
        return self._roll.settle(error, ranks, calls=self.lookout.calls)

    def _fail(self, error: Exception) -> Exception:
        """End everything; agree with the other ranks on the ranks at fault."""
        if (unsaid := self._take_unsaid()) is not None:  # the thread has failed, and this call is the first to notice
            return unsaid
        if isinstance(error, _NearError):
            own = self.nodes.members[self._node]
            cause = error.args[0]
            failure: Exception = self._settle(cause, [own[rank] for rank in getattr(cause, "ranks", ())])
        else:
            failure = error
            self.near.close()
            if not isinstance(error, PeerError):
                self._roll.tell((self.rank,), f"failed ({type(error).__name__}: {error})")
        # Settling takes seconds, in which the thread may have ended.
        with self._telling:
            if self._failure is None:
                self._failure = failure
        return self._take_unsaid() or failure

    def _take_unsaid(self) -> PeerError | None:
        """Return the error of the thread, if no call has raised it yet: it is raised once."""
        with self._telling:
            unsaid, self._unsaid = self._unsaid, None
        return unsaid

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
        self, kind: Kind, pairs: list[tuple[Tensor, Tensor]], counts: tuple[int, ...], op: str | None, root: int
    ) -> None:
        dtype = pairs[0][0].dtype
        if kind not in REDUCING:
            counts = tuple(count * to.itemsize for count, (to, _) in zip(counts, pairs, strict=True))
            pairs, dtype = [(to.view(torch.uint8), given.view(torch.uint8)) for to, given in pairs], torch.uint8
        plan = self._plan(kind, self.nodes, self.rank, counts, self.pieces, root)
        average = op == ReduceOp.AVG
        weighted = average and dtype.is_floating_point  # the sum of all might not be a number of the dtype
        call = _Call(self, plan, pairs, dtype)
        call.near_op = "sum" if average and not weighted else op or "sum"
        call.far_op = _FAR_OPS[op or "sum"]
        call.weight = len(self.nodes.members[self._node]) / self.world_size if weighted else 1.0
        self._far_works = call.far_works
        call.run()
        self._far_works = ()  # they have tensors of the caller
        if average and not weighted:
            for output, _ in pairs:
                output.copy_(torch.div(output, self.world_size, rounding_mode="trunc"))


class _NearError(Exception):
    """Error of a step within the node, with the ranks' numbers in the node."""


class _Call:
    """One run of a plan.

    Attributes:
        near_op, far_op: operations of a reduction, in a node and between nodes.
        weight: weight of this node's result.
        far_works: works of the far steps that have begun.
    """

    near_op: str
    far_op: Any
    weight: float

    def __init__(
        self, whose: NodesCommunicator, plan: NodePlan, pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> None:
        self._whose, self._plan, self._dtype = whose, plan, dtype
        self.far_works: list[OtherWork] = []
        self._tensors: dict[tuple[str, int], Tensor] = {}
        for number, (output, input) in enumerate(pairs):
            self._tensors |= {(OUTPUT, number): output, (INPUT, number): input}

    def run(self) -> None:
        """Run the steps."""
        try:
            for name, count in self._plan.scratch.items():
                self._tensors[name, 0] = self._whose._scratch.take(name, count, self._dtype)
        except (PeerError, CommunicatorClosedError) as error:
            raise _NearError(error) from error
        do: dict[type, Callable[[Any], None]] = {
            Copies: self._copies,
            NodeBroadcast: self._spread,
            Near: self._near,
            Far: self._begin,
            Join: lambda step: self.far_works[step.number].wait(),
        }
        for step in self._plan.steps:
            try:
                do[type(step)](step)
            except (PeerError, CommunicatorClosedError) as error:
                if isinstance(step, NodeBroadcast | Near):
                    raise _NearError(error) from error
                raise

    def _view(self, span: ElementSpan) -> Tensor:
        return self._tensors[span.buffer, span.tensor].narrow(0, span.offset, span.count)

    def _copies(self, step: Copies) -> None:
        pairs = [(self._view(to), self._view(given)) for to, given in step.pairs]
        pairs = [(to, given) for to, given in pairs if to.data_ptr() != given.data_ptr()]
        if len(pairs) > _FEW:
            torch._foreach_copy_([to for to, _ in pairs], [given for _, given in pairs])  # few kernels on GPUs
        else:
            for to, given in pairs:
                to.copy_(given)

    def _spread(self, step: NodeBroadcast) -> None:
        if self._whose.near.world_size == 1:
            return
        with self._whose.near.batch(beside=self._whose.beside) as batch:
            for root, span in step.parts:
                batch.broadcast(self._view(span), root=root)

    def _near(self, step: Near) -> None:
        near, output, input = self._whose.near, self._view(step.output), self._view(step.input)
        if step.kind is Kind.ALL_TO_ALL:
            near.all_to_all(output, input, beside=self._whose.beside)
            return
        if step.kind is Kind.SCATTER:
            near.scatter(output, input if near.rank == step.root else None, root=step.root, beside=self._whose.beside)
            return
        near.reduce_scatter(output, input, op=self.near_op, beside=self._whose.beside)
        if self.weight != 1:
            output.mul_(self.weight)

    def _begin(self, step: Far) -> None:
        group, output, input = self._whose._far, self._view(step.output), self._view(step.input)
        try:
            work = self._ask(group, step, output, input)
        except RuntimeError as error:
            self._whose.explain(error, ())
        looks = not self._whose._on_streams
        self.far_works.append(OtherWork(work, self._whose, (), looks=looks))

    def _ask(self, group: Any, step: Far, output: Tensor, input: Tensor) -> Any:  # as torch types the results of groups
        if step.kind is Kind.ALL_GATHER:
            return group._allgather_base(output, input, _options(c10d.AllgatherOptions()))
        if step.kind is Kind.ALL_TO_ALL:
            splits = list(step.received), list(step.sent)
            return group.alltoall_base(output, input, *splits, _options(c10d.AllToAllOptions()))
        if step.kind is Kind.BROADCAST:
            options = _options(c10d.BroadcastOptions())
            options.rootRank, options.rootTensor = step.root, 0
            return group.broadcast([output], options)
        if step.kind is Kind.ALL_REDUCE:
            options = _options(c10d.AllreduceOptions())
            options.reduceOp = self.far_op
            return group.allreduce([output], options)
        options = _options(c10d.ReduceScatterOptions())
        options.reduceOp = self.far_op
        return group._reduce_scatter_base(output, input, options)


def _always() -> bool:
    return True


def _options(made: Any) -> Any:
    made.asyncOp = True
    return made
