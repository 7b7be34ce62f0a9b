"""Recipes on tensors: a call of several nodes, checked, and its parts within the node and along the rail."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sidelane.collectives.arguments import op_name
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError
from sidelane.integrations.nodes import collectives
from sidelane.integrations.nodes.choose import count_pieces
from sidelane.integrations.nodes.status import NodesStatus
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.works import OtherWork
from sidelane.program.collective import REDUCING, Kind, ReduceOp
from sidelane.program.shape import Beside
from sidelane.session import Communicator

Tensor = torch.Tensor
Tensors = Tensor | Sequence[Tensor]

_FEW = 4  # largest number of copies made one by one, by the GPU's copy engines
_RAIL_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclasses.dataclass(frozen=True, slots=True)
class NodesCall:
    """A call of one rank.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce (in place), all_to_all or broadcast (in place).
        output, input: tensors, or lists of tensors.
        op: operation of a reduction.
        root: root of a broadcast.
        beside: computation next to the calls within nodes; None for ``Config.beside``.
    """

    kind: Kind
    output: Tensors
    input: Tensors
    op: Any = "sum"
    root: int = 0
    beside: Beside | None = None

    @property
    def outputs(self) -> Sequence[Tensor]:
        """The output as a list."""
        return (self.output,) if isinstance(self.output, Tensor) else self.output

    @property
    def inputs(self) -> Sequence[Tensor]:
        """The input as a list."""
        return (self.input,) if isinstance(self.input, Tensor) else self.input

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
        if op_name(self.op) not in _RAIL_OPS:
            raise ValueError(f"{kind}: op (value={self.op!r}, allowed={', '.join(_RAIL_OPS)})")
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
                raise ValueError(f"{kind}: tensor (value={tensor.device}, allowed=contiguous, on {device})")
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
                raise ValueError(f"{self.kind}: tensors (value=that overlap, allowed=apart, or in place)")
            ends[is_written] = max(ends[is_written], end)


@dataclasses.dataclass(slots=True)
class NodeAndRail:
    """The two groups of a rank.

    Attributes:
        nodes: nodes of the whole group.
        rank: number of this rank there.
        own: communicator of its node.
        rail: group of its rail; None once it is closed.
        status: status of both.
        on_streams: streams wait for the rail's calls, and no host does.
        scratch: symmetric memory that is kept for later calls.
        begun: calls along the rail of the call that is under way or has failed.
    """

    nodes: Nodes
    rank: int
    own: Communicator
    rail: Any
    status: NodesStatus
    on_streams: bool
    scratch: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    begun: list[OtherWork] = dataclasses.field(default_factory=list)

    def run(self, call: NodesCall, counts: Sequence[int]) -> None:
        """Make a call, which was checked.

        Raises:
            PeerError: a rank failed; the ranks have agreed which.
        """
        pairs = [(to.view(-1), given.view(-1)) for to, given in zip(call.outputs, call.inputs, strict=True)]
        pieces = count_pieces(max(sum(tensor.nbytes for tensor in side) for side in zip(*pairs, strict=True)))
        if call.kind not in REDUCING:
            counts = [count * to.itemsize for count, (to, _) in zip(counts, pairs, strict=True)]
            pairs = [(to.view(torch.uint8), given.view(torch.uint8)) for to, given in pairs]
        op, dtype = op_name(call.op), pairs[0][0].dtype
        divides = op == ReduceOp.AVG and not dtype.is_floating_point
        steps = TensorSteps(self, dtype, ReduceOp.SUM if divides else op, call.beside)
        roots = (call.root,) if call.kind is Kind.BROADCAST else ()
        collectives.run_recipe(steps, call.kind, self.nodes, self.rank, pairs, counts, pieces, *roots)
        self.begun.clear()  # they have tensors of the caller
        if divides:
            for output, _ in pairs:
                output.copy_(torch.div(output, len(self.nodes.of), rounding_mode="trunc"))


class TensorSteps:
    """The calls of a recipe, on tensors.

    Args:
        groups: groups of this rank.
        dtype: dtype of the elements.
        op: operation of a reduction. A node's average is weighted before the nodes add theirs: the sum of all might not
            be a number of the dtype.
        beside: see :class:`NodesCall`.
    """

    def __init__(self, groups: NodeAndRail, dtype: torch.dtype, op: str, beside: Beside | None) -> None:
        self._groups, self._own, self._dtype, self._op, self._beside = groups, groups.own, dtype, op, beside
        self._rows: dict[str, Tensor] = {}

    def scratch(self, name: str, count: int, /, *, is_sent: bool = False) -> Tensor:
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

    def _kept(self, name: str, nbytes: int) -> Tensor | None:
        """Return symmetric bytes for all calls; None if there are none."""
        own, kept = self._own, self._groups.scratch
        if own.world_size == 1:
            return None
        if name not in kept or kept[name].nbytes < nbytes:
            with self._in_the_node(), contextlib.suppress(UnavailableError):
                if name in kept:
                    own.synchronize()  # calls under way use it
                    del kept[name]
                kept[name] = own.empty(nbytes, dtype=torch.uint8)
        return kept.get(name)

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
        if self._own.world_size > 1:
            with self._in_the_node(), self._own.batch(beside=self._beside) as batch:
                for root, row in parts:
                    batch.broadcast(row, root=root)

    def within(self, kind: Kind, output: Tensor, input: Tensor, root: int = 0, /) -> None:
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
                    output.mul_(own.world_size / len(self._groups.nodes.of))

    def along(self, kind: Kind, output: Tensor, input: Tensor, root: int = 0, /) -> OtherWork:
        """See ``collectives.Steps``."""
        groups = self._groups
        try:
            work = _begin(groups.rail, kind, output, input, _RAIL_OPS[self._op], root)
        except RuntimeError as error:
            groups.status.explain(error, ())
        groups.begun.append(OtherWork(work, groups.status, (), looks=not groups.on_streams))
        return groups.begun[-1]

    @contextlib.contextmanager
    def _in_the_node(self) -> Iterator[None]:
        """Agree with all ranks on an error of a call within the node, which names ranks by their numbers there."""
        try:
            yield
        except (PeerError, CommunicatorClosedError) as error:
            nodes = self._groups.nodes
            members = nodes.members[nodes.of[self._groups.rank]]
            self._groups.status.explain(error, [members[rank] for rank in getattr(error, "ranks", ())])


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
