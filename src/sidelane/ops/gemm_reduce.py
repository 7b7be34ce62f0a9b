"""gemm_reduce_scatter and gemm_all_reduce: row-parallel linear layers for many tokens.

Equivalent: ``y = x @ weight.T``, then a reduce-scatter of its rows, or an all-reduce (``reference``), which is the
method ``unfused``. The method ``split`` runs the library's GEMM in parts that travel as those of ``split_gemm`` do.
Every rank gets its rows from all ranks, adds them up (in float32, rounded once more) and, for an all-reduce, gathers.
Two ranks::

    compute      rows of 1 | rows of 0           | add rows of 0 | gather
    copy engine            | rows of 1 -> 1      |
"""

from __future__ import annotations

import torch

from sidelane.choice.fused import SPLIT, UNFUSED
from sidelane.ops import unfused
from sidelane.ops.auto import AUTO, OperatorCall, prepare, question_of, refuse_split
from sidelane.ops.buffer_turn import in_turn
from sidelane.ops.handle import kept, telling_refusals
from sidelane.ops.operands import check_operands
from sidelane.ops.split_gemm import DEFAULT_PIECES, SplitGemmAllToAll, check_pieces
from sidelane.session import Communicator

SCATTER, ALL = "gemm_reduce_scatter", "gemm_all_reduce"


class SplitGemmReduce:
    """Buffers of :func:`split_gemm_reduce_scatter` or :func:`split_gemm_all_reduce` for one shape. Collective.

    Args:
        comm: communicator of the ranks.
        rows: M, number of rows of the whole result.
        columns: H, number of columns of the result.
        dtype: dtype of x, weight and result: float32, float16 or bfloat16.
        gathers: every rank gets the whole result: an all-reduce.
    """

    def __init__(self, comm: Communicator, rows: int, columns: int, dtype: torch.dtype, *, gathers: bool) -> None:
        n = comm.world_size
        self.comm, self._rows, self._each = comm, rows, -(-rows // n)
        owned = tuple(max(0, min(self._each, rows - owner * self._each)) for owner in range(n))
        self._table, self._owned = (owned,) * n, owned[comm.rank]
        self._moved = SplitGemmAllToAll(comm, n * self._each, columns, dtype)
        self._gathered = comm.empty(n * self._each, columns, dtype=dtype) if gathers else None
        self._in_turn = in_turn(comm)

    def make(self, pieces: int) -> None:
        """Make all resources of a capture. Collective if they are new."""
        self._moved.routings.of(self._table, pieces)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
        """Run the operator. Arguments, result and errors are those of :func:`split_gemm_reduce_scatter`."""
        with self._in_turn:  # until the received parts have been added up
            return self._run(x, weight, pieces)

    def _run(self, x: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
        comm, owned = self.comm, self._owned
        self.make(pieces)
        came = self._moved(x, weight, self._table, pieces)[: comm.world_size * owned]
        parts = came.view(comm.world_size, owned, weight.shape[0])
        if self._gathered is None:
            return parts.sum(0)
        mine = self._gathered[comm.rank * self._each : (comm.rank + 1) * self._each]
        torch.sum(parts, 0, out=mine[:owned])
        comm.all_gather(self._gathered, mine)
        return self._gathered[: self._rows]


def gemm_reduce_scatter(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, *, method: str = AUTO
) -> torch.Tensor:
    """Compute ``x @ weight.T`` and add its rows up, each rank its share. A call of the communicator.

    The first call of a shape makes its resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        x: columns of this rank, [M, K]; M is a multiple of the ranks, K the same on all.
        weight: columns of this rank, [H, K], of x's dtype: float32, float16 or bfloat16.
        method: ``split``, that is :func:`split_gemm_reduce_scatter` or :func:`split_gemm_all_reduce`; ``unfused``, a
            product and a collective behind it; or ``auto``: the faster one (``ops.explain`` names it, with the reason).

    Returns:
        Rows of this rank, [M / N, H].

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    return _reduced(comm, x, weight, method, gathers=False)


def gemm_all_reduce(comm: Communicator, x: torch.Tensor, weight: torch.Tensor, *, method: str = AUTO) -> torch.Tensor:
    """Compute ``y = x @ weight.T; comm.all_reduce(y)``, for more tokens than ``gemv_all_reduce`` takes.

    Arguments and errors are those of :func:`gemm_reduce_scatter`, with any number of rows.

    Returns:
        Tensor [M, H], the same bits on every rank. The next call of this shape overwrites it.
    """
    return _reduced(comm, x, weight, method, gathers=True)


def split_gemm_reduce_scatter(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, *, pieces: int = DEFAULT_PIECES
) -> torch.Tensor:
    """Compute ``x @ weight.T`` and add its rows up, each rank its share, part by part. A call of the communicator.

    Arguments, result and errors are those of :func:`gemm_reduce_scatter`; ``pieces`` is the number of pieces of the
    rows for each peer, the same on all ranks.
    """
    return _split(comm, x, weight, pieces, gathers=False)


def split_gemm_all_reduce(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, *, pieces: int = DEFAULT_PIECES
) -> torch.Tensor:
    """Compute ``y = x @ weight.T; comm.all_reduce(y)``, part by part. A call of the communicator.

    Arguments, result and errors are those of :func:`gemm_all_reduce`; ``pieces`` is the number of pieces of the rows
    for each peer, the same on all ranks.
    """
    return _split(comm, x, weight, pieces, gathers=True)


def _reduced(comm: Communicator, x: torch.Tensor, weight: torch.Tensor, method: str, *, gathers: bool) -> torch.Tensor:
    name = ALL if gathers else SCATTER

    def check() -> OperatorCall:
        check_operands(name, comm, x, weight, scatters=not gathers)
        (rows, depth), columns, dtype = x.shape, weight.shape[0], weight.dtype

        def split(pieces: int) -> SplitGemmReduce:
            handle = _handle(comm, x, weight, gathers)
            handle.make(pieces or DEFAULT_PIECES)
            return handle

        def alone(pieces: int) -> None:
            unfused.prepare_unfused(comm, name, rows, columns, dtype)

        make = {SPLIT: split, UNFUSED: alone}
        return OperatorCall((name, rows, columns, dtype), (rows, depth, columns), dtype.itemsize, make)

    found, handle, _ = prepare(comm, name, method, question_of(comm, (name, method), x, weight), check)
    if found.name == SPLIT:
        parts: SplitGemmReduce = handle
        return parts(x, weight, found.pieces or DEFAULT_PIECES)
    return (unfused.gemm_all_reduce if gathers else unfused.gemm_reduce_scatter)(comm, x, weight)


def _split(comm: Communicator, x: torch.Tensor, weight: torch.Tensor, pieces: int, *, gathers: bool) -> torch.Tensor:
    name = f"split_{ALL if gathers else SCATTER}"
    with telling_refusals(comm, name):
        refuse_split(comm, name)
        check_pieces(name, pieces)
        check_operands(name, comm, x, weight, scatters=not gathers)
    return _handle(comm, x, weight, gathers)(x, weight, pieces)


def _handle(comm: Communicator, x: torch.Tensor, weight: torch.Tensor, gathers: bool) -> SplitGemmReduce:
    """Return the handle of the split operators for a shape; all ranks make it together if it is new."""
    rows, columns, dtype = x.shape[0], weight.shape[0], weight.dtype
    key = (SplitGemmReduce, gathers, rows, columns, dtype)
    return kept(comm, key, lambda: SplitGemmReduce(comm, rows, columns, dtype, gathers=gathers))
