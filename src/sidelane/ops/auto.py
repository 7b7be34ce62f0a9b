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
from typing import Any, NamedTuple

import torch

from sidelane.choice.fused import (
    FUSED,
    ORDERED,
    SPLIT,
    UNFUSED,
    FusedTable,
    Method,
    choose_method,
    choose_order,
    tables_of,
)
from sidelane.choice.fused_heuristic import ROUTED
from sidelane.choice.key import key_here
from sidelane.choice.selection import Selection
from sidelane.errors import UnavailableError, in_no_order
from sidelane.ops.gemv_tiling import CELLS_BYTES
from sidelane.ops.handle import check_choice, is_captured, telling_refusals
from sidelane.session import Communicator
from sidelane.session.answers import measured_by_rank_0, recall, remember
from sidelane.session.own_kernel import RepeatedLaunch

AUTO = "auto"


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


SUMS = ("gemv_all_reduce", "all_reduce_rms_norm", "gemm_reduce_scatter", "gemm_all_reduce")
"""Operators with a sum between ranks, whose bits depend on the method."""


def refuse_split(comm: Communicator, op: str) -> None:
    """Refuse, with ``Config.deterministic``, a method whose parts PyTorch adds up, in an order of its own."""
    if comm.config.deterministic:
        raise in_no_order(op, "split adds the ranks' parts with torch.sum (allowed=unfused, auto)")


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCall:
    """Properties of a checked call by which its method is chosen and made ready.

    Attributes:
        key: key that distinguishes the shapes of calls on all ranks.
        sizes: sizes of this rank, by which times are looked up.
        element_bytes: size of an element in bytes, by which times are looked up; alike on all ranks. None: any.
        make: function of each method that makes its resources before a capture; it gets the pieces of a split one.
        without: names of methods that these arguments rule out.
        experts: number of experts of a rank.
    """

    key: Hashable
    sizes: tuple[int, ...]
    element_bytes: int | None
    make: Mapping[str, Callable[[int], object]] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()
    experts: int = 1


class Ready(NamedTuple):
    """All that is known of calls with one question.

    Attributes:
        method: method of the calls.
        made: resources of the method, which its operator has made.
        again: the launch of equal calls, for an operator that has only one.
    """

    method: Method
    made: Any
    again: RepeatedLaunch


def prepare(comm: Communicator, op: str, method: str, question: Hashable, check: Callable[[], OperatorCall]) -> Ready:
    """Return the method of a call, and what was made for it. Every operator begins here; its method follows.

    A new call is checked. The ranks choose a method together if its shape is new, and make the method's resources; an
    equal call recalls both.

    Args:
        comm: communicator of the ranks.
        op: name of the operator.
        method: name of one of its methods, or ``auto``; the same on all ranks.
        question: result of :func:`question_of`, or None for a call that is checked each time.
        check: function that refuses wrong arguments.
    """
    known: Ready | None = recall(comm, question)
    if known is not None:
        return known
    with telling_refusals(comm, op):
        check_method(comm, op, method)
        if method == SPLIT and op == "gemm_reduce_scatter":
            refuse_split(comm, op)
        call = check()
    found = agree(comm, op, method, call)
    ready = Ready(found, _made(call, found), RepeatedLaunch())
    if method != AUTO or (agree, op, call.key) in comm.kept:  # else in a capture, before the ranks have agreed
        remember(comm, question, ready)
    return ready


def agree(comm: Communicator, op: str, method: str, call: OperatorCall) -> Method:
    """Return the method of a checked call. Collective if its shape is new and ``method`` is ``auto``: then the ranks
    choose for eager calls and for graphs, and make the resources of both.
    """
    if method != AUTO:
        return Method(method)
    if comm.config.deterministic and op in SUMS:  # one way for all shapes
        return Method(UNFUSED)
    captured = is_captured(comm)
    known: tuple[Method, Method] | None = comm.kept.get((agree, op, call.key))
    if known is None:
        if captured:
            return Method(OPS[op].captured[0])  # making it raises the error
        sizes = _mean_sizes(comm, op, call.sizes)
        eager, in_graph = (_choice(comm, op, sizes, call, captured=is_in).candidate for is_in in (False, True))
        _require_legal(comm, op, call, eager, captured=False)
        known = comm.kept[agree, op, call.key] = eager, in_graph
        for found in (eager,) if comm.device.type == "cpu" else known:
            _made(call, found)
    _require_legal(comm, op, call, known[captured], captured=captured)
    return known[captured]


def _require_legal(comm: Communicator, op: str, call: OperatorCall, chosen: Method, *, captured: bool) -> None:
    """Refuse a call that only a kernel can run, which ``auto`` does not take without a measurement here."""
    legal = _legal(op, call, captured=captured)
    if chosen.name not in legal:
        with telling_refusals(comm, op):
            where = "inside of a capture" if captured else "of a call with such arguments"
            text = f"{where}, on GPUs that have never run its kernel (value={AUTO}, allowed={', '.join(legal)})"
            raise UnavailableError(f"{op}: method {text}")


def _legal(op: str, call: OperatorCall, *, captured: bool) -> list[str]:
    return [way for way in (OPS[op].captured if captured else OPS[op].eager) if way not in call.without]


def question_of(comm: Communicator, words: tuple[object, ...], *tensors: object) -> Hashable:
    """Return a key of everything that a call's checks and choice depend on; None if the call has no valid tensors.

    Args:
        comm: communicator of the ranks.
        words: operator, its ``method`` and all other arguments that are no tensors.
        tensors: tensors, None for missing ones. Properties other than their layout belong into ``words``.
    """
    question: tuple[Hashable, ...] = words, is_captured(comm)
    try:
        for t in tensors:  # plainly, since every call comes here
            question += (t,) if t is None else (t.dtype, t.device, t.shape, t.stride())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, RuntimeError):
        return None
    return question


def order_of(comm: Communicator, op: str, sizes: tuple[int, ...], element_bytes: int) -> str:
    """Return the order for a shape whose caller leaves it open. Collective, and the same on all ranks.

    Inside of a capture, in which ranks cannot agree, this rank's sizes alone decide: an operator in ``ORDERED`` is
    proved with orders that differ between ranks, too.
    """
    if is_captured(comm):
        tables = comm.kept.get((measured_by_rank_0, _TABLES)) or ()
        return choose_order(tables, op, comm.world_size, sizes, element_bytes=element_bytes).candidate
    agreed = _mean_sizes(comm, op, sizes)
    return choose_order(_tables(comm), op, comm.world_size, agreed, element_bytes=element_bytes).candidate


def _made(call: OperatorCall, chosen: Method) -> object:
    return call.make[chosen.name](chosen.pieces) if chosen.name in call.make else None


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
    call = OperatorCall((), sizes, element_bytes, without=tuple(without), experts=experts)
    found = _choice(comm, op, sizes, call, captured=captured)
    if op not in ORDERED or found.candidate.name != FUSED:
        return f"{op}: {found}"
    order = choose_order(_tables(comm), op, comm.world_size, sizes, element_bytes=element_bytes)
    return f"{op}: {found}; order {order}"


def _choice(
    comm: Communicator, op: str, sizes: tuple[int, ...], call: OperatorCall, *, captured: bool
) -> Selection[Method]:
    if op == "gemv_all_reduce" and 4 * sizes[0] * sizes[2] > CELLS_BYTES:
        return Selection(Method(UNFUSED), f"fused takes up to {CELLS_BYTES // 4} elements of the result")
    return choose_method(
        _tables(comm),
        op,
        comm.world_size,
        sizes,
        ways=_legal(op, call, captured=captured),
        element_bytes=call.element_bytes,
        captured=captured,
        device_type=comm.device.type,
        experts=call.experts,
        guesses=comm.abilities.kernels_have_run,
    )


def _mean_sizes(comm: Communicator, op: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return one list of sizes for all ranks, whose own may differ. Collective."""
    _tables(comm)
    own = torch.tensor(sizes, dtype=torch.int64, device=comm.device)
    of_all = torch.empty(comm.world_size * len(sizes), dtype=torch.int64, device=comm.device)
    comm.all_gather(of_all, own)
    comm.synchronize()
    columns = list(zip(*of_all.view(comm.world_size, -1).tolist(), strict=True))
    if op == "gemv_all_reduce":
        return max(columns[0]), sum(columns[1]), max(columns[2])
    return tuple(max(1, round(sum(column) / len(column))) for column in columns)


_TABLES = "fused operators"


def _tables(comm: Communicator) -> tuple[FusedTable, ...]:
    """Return rank 0's tables on all ranks; the first time collective."""

    def read() -> str:
        tables = tables_of(comm.config.profile, key_here(comm.device.type, comm.world_size))
        return json.dumps([(table.to_text(), table.where) for table in tables])

    return measured_by_rank_0(comm, _TABLES, read, _parse)


def _parse(text: str) -> tuple[FusedTable, ...]:
    return tuple(FusedTable.parse(*found) for found in json.loads(text))
