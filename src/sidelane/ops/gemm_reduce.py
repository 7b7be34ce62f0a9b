"""gemm_reduce_scatter and gemm_all_reduce: row-parallel linear layers for many tokens.

Equivalent: ``y = x @ weight.T``, then a reduce-scatter of its rows, or an all-reduce (``reference``), which is the
method ``unfused``. The method ``split`` runs the library's GEMM in parts.

Parts before a reduce-scatter travel as those of ``split_gemm`` do. Every rank gets its rows from all ranks and adds
them up in float32, rounded once more. Two ranks::

    compute      rows of 1 | rows of 0           | add rows of 0
    copy engine            | rows of 1 -> 1      |

Parts before an all-reduce are rows, and an asynchronous all-reduce of each runs beside the product of the next one::

    compute       first rows | next rows            | last rows           |
    all-reduce               | of the first rows    | of the next rows    | of the last rows
"""

from __future__ import annotations

import torch

from sidelane.choice.fused import SPLIT, UNFUSED
from sidelane.choice.fused_heuristic import ROW_PARTS
from sidelane.config import COMPUTE, NOTHING
from sidelane.ops import unfused
from sidelane.ops.auto import AUTO, OperatorCall, prepare, question_of, refuse_split
from sidelane.ops.buffer_turn import in_turn
from sidelane.ops.handle import kept, telling_refusals
from sidelane.ops.operands import apart_from, check_operands
from sidelane.ops.split_gemm import DEFAULT_PIECES, SplitGemmAllToAll, check_pieces
from sidelane.program.pieces import row_parts
from sidelane.session import Communicator

SCATTER, ALL = "gemm_reduce_scatter", "gemm_all_reduce"


class SplitGemmScatter:
    """Buffers of :func:`split_gemm_reduce_scatter` for one shape. Collective.

    Args:
        comm: communicator of the ranks.
        rows: M, number of rows of the whole result, a multiple of the ranks.
        columns: H, number of columns of the result.
        dtype: dtype of x, weight and result: float32, float16 or bfloat16.
    """

    def __init__(self, comm: Communicator, rows: int, columns: int, dtype: torch.dtype) -> None:
        n = comm.world_size
        self.comm, self._each = comm, rows // n
        self._table = ((self._each,) * n,) * n
        self._moved = SplitGemmAllToAll(comm, rows, columns, dtype)
        self._in_turn = in_turn(comm)

    def make(self, pieces: int) -> None:
        """Make all resources of a capture. Collective if they are new."""
        self._moved.routings.of(self._table, pieces)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
        """Run the operator. Arguments, result and errors are those of :func:`split_gemm_reduce_scatter`."""
        with self._in_turn:  # until the received parts have been added up
            self.make(pieces)
            came = self._moved(x, weight, self._table, pieces)
            parts = came.view(self.comm.world_size, self._each, weight.shape[0])
            return parts.sum(0, dtype=came.dtype)  # which autocast would take for float32


class SplitGemmAllReduce:
    """Buffer of :func:`split_gemm_all_reduce` for one shape. Collective.

    Args:
        comm: communicator of the ranks.
        rows: M, number of rows of the result.
        columns: H, number of columns of the result.
        dtype: dtype of x, weight and result: float32, float16 or bfloat16.
    """

    def __init__(self, comm: Communicator, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.comm, self._values = comm, comm.empty(rows, columns, dtype=dtype)
        self._parts: dict[int, list[tuple[slice, torch.Tensor]]] = {}
        self._in_turn = in_turn(comm)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
        """Run the operator. Arguments, result and errors are those of :func:`split_gemm_all_reduce`."""
        with torch.no_grad(), self._in_turn:
            x, transposed = apart_from(self._values, x), weight.t()
            *ahead, (last, values) = self._parts_of(pieces)
            works = []
            for rows, part in ahead:
                torch.mm(x[rows], transposed, out=part)
                works.append(self.comm.all_reduce(part, async_op=True, beside=COMPUTE))
            torch.mm(x[last], transposed, out=values)
            # It is asynchronous if others are: a call on another stream than the one before takes the host longer.
            works.append(self.comm.all_reduce(values, async_op=bool(ahead), beside=NOTHING))
            for work in works:
                if work is not None:
                    work.wait()
            return self._values

    def _parts_of(self, pieces: int) -> list[tuple[slice, torch.Tensor]]:
        """Return the rows of each part, and these rows of the result."""
        if pieces not in self._parts:
            with torch.inference_mode(False):
                self._parts[pieces] = [(rows, self._values[rows]) for rows in row_parts(len(self._values), pieces)]
        return self._parts[pieces]


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
    name = f"split_{SCATTER}"
    with telling_refusals(comm, name):
        refuse_split(comm, name)
        check_pieces(name, pieces)
        check_operands(name, comm, x, weight, scatters=True)
    return _handle(comm, x, weight, gathers=False)(x, weight, pieces)


def split_gemm_all_reduce(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, *, pieces: int = ROW_PARTS
) -> torch.Tensor:
    """Compute ``y = x @ weight.T; comm.all_reduce(y)``, part by part. A call of the communicator.

    Arguments, result and errors are those of :func:`gemm_all_reduce`; ``pieces`` is the largest number of parts of the
    rows, the same on all ranks.
    """
    name = f"split_{ALL}"
    with telling_refusals(comm, name):
        check_pieces(name, pieces)
        check_operands(name, comm, x, weight, scatters=False)
    return _handle(comm, x, weight, gathers=True)(x, weight, pieces)


def _reduced(comm: Communicator, x: torch.Tensor, weight: torch.Tensor, method: str, *, gathers: bool) -> torch.Tensor:
    name, default = (ALL, ROW_PARTS) if gathers else (SCATTER, DEFAULT_PIECES)

    def check() -> OperatorCall:
        check_operands(name, comm, x, weight, scatters=not gathers)
        (rows, depth), columns, dtype = x.shape, weight.shape[0], weight.dtype

        def split(pieces: int) -> SplitGemmScatter | SplitGemmAllReduce:
            handle = _handle(comm, x, weight, gathers)
            if isinstance(handle, SplitGemmScatter):
                handle.make(pieces or default)
            return handle

        def alone(pieces: int) -> None:
            unfused.prepare_unfused(comm, name, rows, columns, dtype)

        make = {SPLIT: split, UNFUSED: alone}
        return OperatorCall((name, rows, columns, dtype), (rows, depth, columns), dtype.itemsize, make)

    found, handle, _ = prepare(comm, name, method, question_of(comm, (name, method), x, weight), check)
    if found.name == SPLIT:
        parts: SplitGemmScatter | SplitGemmAllReduce = handle
        return parts(x, weight, found.pieces or default)
    return (unfused.gemm_all_reduce if gathers else unfused.gemm_reduce_scatter)(comm, x, weight)


def _handle(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, gathers: bool
) -> SplitGemmScatter | SplitGemmAllReduce:
    """Return the handle of the split operators for a shape; all ranks make it together if it is new."""
    kind = SplitGemmAllReduce if gathers else SplitGemmScatter
    shape = x.shape[0], weight.shape[0], weight.dtype
    found: SplitGemmScatter | SplitGemmAllReduce = kept(comm, (kind, *shape), lambda: kind(comm, *shape))
    return found
