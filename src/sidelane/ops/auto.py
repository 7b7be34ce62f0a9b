"""``method=`` of the fused operators: fused or unfused, as all ranks agree in the first call of a shape.

Sizes by which an operator's times are measured and looked up:

=====================  ==================================================
gemv_all_reduce        rows, columns of all ranks, tokens
all_reduce_rms_norm    tokens, hidden
embedding_all_to_all   batch, tables and pooling (means of the ranks)
gemm_all_to_all        most_rows, columns of x, columns of the result
gemm_reduce_scatter    rows, columns of x, columns of the result
gemm_all_reduce        rows, columns of x, columns of the result
all_gather_gemm        rows of a rank, columns of x, columns of the result
=====================  ==================================================
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from sidelane.choice.fused import FUSED, UNFUSED, FusedTime, MethodChoice, choose_method, times_of, to_text
from sidelane.choice.fused import parse as parse_times
from sidelane.choice.key import key_here
from sidelane.collectives import Communicator
from sidelane.ops.handle import check_choice, telling_refusals

AUTO = "auto"
METHODS = (AUTO, FUSED, UNFUSED)
OPS = (
    *("gemv_all_reduce", "all_reduce_rms_norm", "embedding_all_to_all", "gemm_all_to_all"),
    *("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"),
)
MEANS = ("embedding_all_to_all",)
"""Operators whose sizes are means of the ranks' own; of ``gemv_all_reduce`` the columns are added up."""


def is_fused(
    comm: Communicator, op: str, method: str, key: Hashable, sizes: tuple[int, ...], *, unfused_syncs: bool = False
) -> bool:
    """Whether a call goes by the fused kernel. Collective where a shape is new and ``method`` is ``auto``.

    Args:
        comm: the ranks.
        op: the operator.
        method: ``auto``, ``fused`` or ``unfused``, the same on all ranks.
        key: what the shapes of all ranks' calls are told apart by.
        sizes: of this rank.
        unfused_syncs: the unfused way needs the host, so that no graph can have it.
    """
    captured = comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if method != AUTO:
        return method == FUSED
    if captured and unfused_syncs:
        return True
    agreed: tuple[int, ...] | None = comm.kept.get((is_fused, op, key))
    if agreed is None:
        if captured:
            return True  # which says that the shape is new
        agreed = comm.kept[is_fused, op, key] = _agree(comm, op, sizes)
    return _choice(comm, op, agreed, captured=captured).method == FUSED


def check_method(comm: Communicator, op: str, method: str, *, unfused_syncs: bool = False) -> None:
    """Refuse a method that there is not, or that a graph cannot have."""
    check_choice(op, "method", method, METHODS)
    if method == UNFUSED and unfused_syncs and comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{op}: method inside of a capture (value={method}, allowed={AUTO}, {FUSED})")


def explain(comm: Communicator, op: str, *sizes: int, captured: bool = False) -> str:
    """What ``method="auto"`` takes for a shape, and why. Collective the first time, as the times are rank 0's.

    Args:
        comm: the ranks.
        op: one of ``OPS``, the names of the operators that have a ``method``.
        sizes: rows, columns, tokens; tokens, hidden; batch, tables, pooling; or rows, depth, columns.
        captured: in a graph.
    """
    with telling_refusals(comm, "explain"):
        check_choice("explain", "op", op, OPS)
        wanted = 2 if op == "all_reduce_rms_norm" else 3
        if len(sizes) != wanted or min(sizes) < 1:
            raise ValueError(f"explain: sizes of {op} (value={sizes}, allowed={wanted}, each 1 and more)")
    found = _choice(comm, op, sizes, captured=captured)
    return f"{op}: {found.method} ({found.reason})"


def _choice(comm: Communicator, op: str, sizes: tuple[int, ...], *, captured: bool) -> MethodChoice:
    return choose_method(_times(comm), op, comm.world_size, sizes, captured=captured)


def _agree(comm: Communicator, op: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """One list of sizes for all ranks, whose own may differ."""
    _times(comm)
    own = torch.tensor(sizes, dtype=torch.int64, device=comm.device)
    of_all = torch.empty(comm.world_size * len(sizes), dtype=torch.int64, device=comm.device)
    comm.all_gather(of_all, own)
    comm.synchronize()
    columns = list(zip(*of_all.view(comm.world_size, -1).tolist(), strict=True))
    if op == "gemv_all_reduce":
        return max(columns[0]), sum(columns[1]), max(columns[2])
    return tuple(max(1, round(sum(column) / len(column))) for column in columns)


def _times(comm: Communicator) -> tuple[FusedTime, ...]:
    """Those that rank 0 has, on all ranks; the first time collective."""
    found: tuple[FusedTime, ...] | None = comm.kept.get(_times)
    if found is None:
        found = comm.kept[_times] = _times_of_rank_0(comm)
    return found


def _times_of_rank_0(comm: Communicator) -> tuple[FusedTime, ...]:
    key = key_here(comm.device.type, comm.world_size)
    own = times_of(comm.config.profile, key) if comm.rank == 0 else ()
    text = to_text(key, own).encode() if comm.rank == 0 else b""
    length = torch.tensor([len(text)], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, root=0)
    comm.synchronize()
    words = torch.zeros(int(length), dtype=torch.uint8)
    if comm.rank == 0:
        words.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    words = words.to(comm.device)
    comm.broadcast(words, root=0)
    comm.synchronize()
    return parse_times(bytes(words.cpu().tolist()).decode())[1]
