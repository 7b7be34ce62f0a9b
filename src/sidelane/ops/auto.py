"""Choice of ``method=`` for the fused operators: fused, split or unfused, agreed by all ranks in a shape's first call.

Sizes by which an operator's times are measured and looked up:

=====================  ==================================================
gemv_all_reduce        rows, columns of all ranks, tokens
all_reduce_rms_norm    tokens, hidden
embedding_all_to_all   batch, tables and pooling (means of the ranks)
gemm_all_to_all        most_rows, columns of x, columns of the result
all_to_all_gemm        most_rows, columns of x, columns of the result
gemm_reduce_scatter    rows, columns of x, columns of the result
gemm_all_reduce        rows, columns of x, columns of the result
all_gather_gemm        rows of a rank, columns of x, columns of the result
=====================  ==================================================

Calls of the two with ``all_to_all`` and several experts are looked up among such calls, also by their number.

A split operator has parts that copy engines move (``split_gemm``). The first call of a shape chooses for eager calls
and for graphs, and makes the resources of both. Columns of ``x`` may differ between ranks, so no rank can tell by them
that a shape is new: their mean in that call counts for all later ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from sidelane.choice.fused import (
    FUSED,
    ORDERED,
    SPLIT,
    UNFUSED,
    FusedTable,
    MethodChoice,
    OrderChoice,
    choose_method,
    choose_order,
    tables_of,
)
from sidelane.choice.fused_heuristic import ROUTED
from sidelane.choice.key import key_here
from sidelane.ops.gemv_tiling import CELLS_BYTES
from sidelane.ops.handle import check_choice, is_captured, telling_refusals
from sidelane.session import Communicator

AUTO = "auto"
MOST_ANSWERS = 1 << 12
"""Largest number of calls that are remembered; layouts that change with every call would be too many."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorWays:
    """Methods of an operator.

    Attributes:
        eager: methods of eager calls.
        captured: methods inside of a graph.
        sizes: number of sizes by which its times are looked up.
    """

    eager: tuple[str, ...] = (FUSED, UNFUSED)
    captured: tuple[str, ...] = (FUSED, UNFUSED)
    sizes: int = 3


_ALL, _PARTS = (FUSED, SPLIT, UNFUSED), (SPLIT, UNFUSED)
OPS = {
    "gemv_all_reduce": OperatorWays(),
    "all_reduce_rms_norm": OperatorWays(sizes=2),
    "embedding_all_to_all": OperatorWays(captured=(FUSED,)),
    "gemm_all_to_all": OperatorWays(_ALL, _ALL),
    "all_to_all_gemm": OperatorWays(_ALL, _ALL),
    "gemm_reduce_scatter": OperatorWays(_PARTS, _PARTS),
    "gemm_all_reduce": OperatorWays(_PARTS, _PARTS),
    "all_gather_gemm": OperatorWays(_PARTS, _PARTS),
}
"""Methods by operator. A graph has none that needs the host, as bags of a table do."""


def method_of(
    comm: Communicator,
    op: str,
    method: str,
    key: Hashable,
    sizes: tuple[int, ...],
    element_bytes: int,
    make: Mapping[str, Callable[[int], object]] | None = None,
    *,
    without: Sequence[str] = (),
    experts: int = 1,
) -> MethodChoice:
    """Choose the method of a call. Collective if a shape is new and ``method`` is ``auto``.

    Args:
        comm: communicator of the ranks.
        op: name of the operator.
        method: one of its methods, or ``auto``; the same on all ranks.
        key: key that distinguishes the shapes of calls on all ranks.
        sizes: sizes of this rank.
        element_bytes: size of an element in bytes, by which times are looked up; alike on all ranks.
        make: function of each method that makes its resources before a capture; it gets the pieces of a split one.
        without: methods that these arguments rule out; ``key`` contains that.
        experts: number of experts of a rank; ``key`` contains it.
    """
    if method != AUTO:
        return MethodChoice(method, "asked for")
    captured = is_captured(comm)
    known: tuple[MethodChoice, MethodChoice] | None = comm.kept.get((method_of, op, key))
    if known is None:
        if captured:
            return MethodChoice(OPS[op].captured[0], "a new shape")  # making it raises the error
        agreed = _agree(comm, op, sizes)
        eager, in_graph = (
            _choice(comm, op, agreed, element_bytes, captured=is_in, without=without, experts=experts)
            for is_in in (False, True)
        )
        known = comm.kept[method_of, op, key] = eager, in_graph
        for found in (eager,) if comm.device.type == "cpu" else known:
            if make and found.method in make:
                make[found.method](found.pieces)
    return known[captured]


def order_of(comm: Communicator, op: str, sizes: tuple[int, ...], element_bytes: int) -> str:
    """Return the order for a shape whose caller leaves it open. Collective, and the same on all ranks.

    Inside of a capture, in which ranks cannot agree, this rank's sizes alone decide: an operator in ``ORDERED`` is
    proved with orders that differ between ranks, too.
    """
    if is_captured(comm):
        return _order(comm, op, sizes, element_bytes, comm.kept.get(_tables) or ()).order
    agreed = _agree(comm, op, sizes)
    return _order(comm, op, agreed, element_bytes, _tables(comm)).order


def asked_of(words: tuple[object, ...], *tensors: object) -> Hashable:
    """Return a key of everything that a call's checks and choice depend on; None if the call has no valid tensors.

    Args:
        words: operator, its ``method`` and all other arguments that are no tensors.
        tensors: tensors, None for missing ones. Properties other than their layout belong into ``words``.
    """
    try:
        return (words, *[t if t is None else (t.dtype, t.device, t.shape, t.stride()) for t in tensors])  # type: ignore[attr-defined]
    except (AttributeError, TypeError, RuntimeError):
        return None


def recalled(comm: Communicator, asked: Hashable) -> MethodChoice | None:
    """Return the choice for a known call, which was checked then; None if it is new. Each call begins here."""
    answers: dict[Hashable, tuple[MethodChoice, MethodChoice]] | None = comm.kept.get(recalled)
    if answers is None or asked is None:
        return None
    try:
        known = answers.get(asked)
    except TypeError:  # a word of another type, such as a list: checks refuse it
        return None
    return None if known is None else known[is_captured(comm)]


def remember(comm: Communicator, asked: Hashable, op: str, key: Hashable, found: MethodChoice, method: str) -> None:
    """Remember the choice for such calls, eager and in graphs, once :func:`method_of` has made it."""
    pair = (found, found) if method != AUTO else comm.kept.get((method_of, op, key))
    if pair is None or asked is None:
        return  # in a capture, before the ranks have agreed
    answers = comm.kept.setdefault(recalled, {})
    if len(answers) >= MOST_ANSWERS:
        answers.clear()
    answers[asked] = pair


def check_method(comm: Communicator, op: str, method: str) -> None:
    """Refuse a method that is unknown, or that a graph cannot have."""
    ways = OPS[op]
    check_choice(op, "method", method, (AUTO, *ways.eager))
    if method not in (AUTO, *ways.captured) and is_captured(comm):
        allowed = ", ".join((AUTO, *ways.captured))
        raise ValueError(f"{op}: method inside of a capture (value={method}, allowed={allowed})")


def explain(
    comm: Communicator,
    op: str,
    *sizes: int,
    captured: bool = False,
    dtype: torch.dtype | None = None,
    without: Sequence[str] = (),
    experts: int = 1,
) -> str:
    """Explain the choice of ``method="auto"`` for a shape, and of ``order="auto"`` if the operator has it. Collective
    the first time, as the times are rank 0's.

    Args:
        comm: communicator of the ranks.
        op: one of ``OPS``, the names of the operators that have a ``method``.
        sizes: rows, columns, tokens; tokens, hidden; batch, tables, pooling; or rows, depth, columns.
        captured: the call is in a graph.
        dtype: dtype of the weight, tables or rows; None for any that was measured.
        without: methods that the call lacks: ``split`` with counts on the device, or with several experts.
        experts: number of experts of a rank, whose rows ``gemm_all_to_all`` and ``all_to_all_gemm`` separate.
    """
    with telling_refusals(comm, "explain"):
        check_choice("explain", "op", op, tuple(OPS))
        wanted = OPS[op].sizes
        if experts != 1 and (experts < 1 or op not in ROUTED):
            allowed = f"1, or more of {', '.join(ROUTED)}"
            raise ValueError(f"explain: experts of {op} (value={experts}, allowed={allowed})")
        if len(sizes) != wanted or min(sizes) < 1:
            raise ValueError(f"explain: sizes of {op} (value={sizes}, allowed={wanted}, each 1 and more)")
    element_bytes = None if dtype is None else dtype.itemsize
    found = _choice(comm, op, sizes, element_bytes, captured=captured, without=without, experts=experts)
    pieces = f", {found.pieces} pieces" if found.pieces > 1 else ""
    if op in ORDERED and found.method == FUSED:
        order = _order(comm, op, sizes, element_bytes, _tables(comm))
        return f"{op}: {found.method}, {order.order} ({found.reason}; order {order.reason})"
    return f"{op}: {found.method}{pieces} ({found.reason})"


def _choice(
    comm: Communicator,
    op: str,
    sizes: tuple[int, ...],
    element_bytes: int | None,
    *,
    captured: bool,
    without: Sequence[str],
    experts: int,
) -> MethodChoice:
    if op == "gemv_all_reduce" and 4 * sizes[0] * sizes[2] > CELLS_BYTES:
        return MethodChoice(UNFUSED, f"fused takes up to {CELLS_BYTES // 4} elements of the result")
    ways = [way for way in (OPS[op].captured if captured else OPS[op].eager) if way not in without]
    return choose_method(
        _tables(comm),
        op,
        comm.world_size,
        sizes,
        ways=ways,
        element_bytes=element_bytes,
        captured=captured,
        device_type=comm.device.type,
        experts=experts,
    )


def _order(
    comm: Communicator, op: str, sizes: tuple[int, ...], element_bytes: int | None, tables: Sequence[FusedTable]
) -> OrderChoice:
    return choose_order(tables, op, comm.world_size, sizes, element_bytes=element_bytes)


def _agree(comm: Communicator, op: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return one list of sizes for all ranks, whose own may differ."""
    _tables(comm)
    own = torch.tensor(sizes, dtype=torch.int64, device=comm.device)
    of_all = torch.empty(comm.world_size * len(sizes), dtype=torch.int64, device=comm.device)
    comm.all_gather(of_all, own)
    comm.synchronize()
    columns = list(zip(*of_all.view(comm.world_size, -1).tolist(), strict=True))
    if op == "gemv_all_reduce":
        return max(columns[0]), sum(columns[1]), max(columns[2])
    return tuple(max(1, round(sum(column) / len(column))) for column in columns)


def _tables(comm: Communicator) -> tuple[FusedTable, ...]:
    """Return rank 0's tables on all ranks; the first time collective."""
    found: tuple[FusedTable, ...] | None = comm.kept.get(_tables)
    if found is None:
        found = comm.kept[_tables] = _tables_of_rank_0(comm)
    return found


def _tables_of_rank_0(comm: Communicator) -> tuple[FusedTable, ...]:
    own = tables_of(comm.config.profile, key_here(comm.device.type, comm.world_size)) if comm.rank == 0 else ()
    text = json.dumps([(table.to_text(), table.where) for table in own]).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, root=0)
    comm.synchronize()
    words = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    if comm.rank == 0:
        words.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    words = words.to(comm.device)
    comm.broadcast(words, root=0)
    comm.synchronize()
    return tuple(FusedTable.parse(*found) for found in json.loads(bytes(words.cpu().tolist()).decode()))
