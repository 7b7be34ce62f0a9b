"""all_gather_gemm: a column-parallel linear layer whose input is spread over the ranks.

Equivalent: ``y = all_gather(x) @ weight.T`` (``reference.all_gather_gemm``), which is the method ``unfused``. The
method ``split`` runs the library's GEMM on each part of the gathered input when copy engines have brought it. No
compute unit moves data. Three ranks; the part that is computed first needs no copy::

    compute      rows of 0 | rows of 2 | rows of 1
    copy engine  rows of 2 | rows of 1 |

Turn t brings the rows of the t-th rank in front of this one, so that every rank sends to one and receives from one
other. All copies are one program; the product of a part waits for its arrival.
"""

from __future__ import annotations

import itertools

import torch

from sidelane.choice.fused import SPLIT, UNFUSED
from sidelane.ops import reference, unfused
from sidelane.ops.auto import AUTO, OperatorCall, prepare, question_of
from sidelane.ops.buffer_turn import in_turn
from sidelane.ops.handle import kept, telling_refusals
from sidelane.ops.operands import check_operands
from sidelane.ops.split_gemm import check_pieces
from sidelane.program.pieces import SPLIT_GATHER, gathering_program, parts_of
from sidelane.session import Communicator

NAME = "all_gather_gemm"


class SplitAllGatherGemm:
    """Buffer and program of :func:`split_all_gather_gemm` for one shape. Collective.

    Args:
        comm: communicator of the ranks.
        rows: M, number of rows of each rank.
        depth: K, number of columns of x.
        dtype: dtype of x.
        pieces: number of pieces of the rows of each rank.
    """

    def __init__(self, comm: Communicator, rows: int, depth: int, dtype: torch.dtype, pieces: int) -> None:
        self.comm = comm
        self._gathered = comm.empty(comm.world_size * rows, depth, dtype=dtype)
        self._in_turn = in_turn(comm)
        self._mine = slice(comm.rank * rows, (comm.rank + 1) * rows)
        self._own = self._gathered[self._mine]
        self._arrivals: list[tuple[slice, torch.Tensor]] = []  # rows of the result, and of the input that arrive
        for turn, part in itertools.product(range(1, comm.world_size), parts_of(rows, pieces)):
            first = (comm.rank - turn) % comm.world_size * rows
            came = slice(first + part.start, first + part.stop)
            self._arrivals.append((came, self._gathered[came]))
        program = gathering_program(comm.world_size, rows, pieces, depth * dtype.itemsize)
        self._program = comm.load(program, {"rows": self._gathered})

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, gathered: torch.Tensor | None = None) -> torch.Tensor:
        """Run the operator. Arguments, result and errors are those of :func:`all_gather_gemm`."""
        with torch.no_grad(), self._in_turn:
            output = self._run(x, weight)
            if gathered is not None:
                gathered.copy_(self._gathered)
            return output

    def _run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output, transposed = x.new_empty(len(self._gathered), weight.shape[0]), weight.t()
        self._own.copy_(x)
        work = self._program(async_op=True)
        torch.mm(x, transposed, out=output[self._mine])
        for number, (rows, came) in enumerate(self._arrivals):
            self._program.wait_for_arrival(number)
            torch.mm(came, transposed, out=output[rows])
        assert work is not None
        work.wait()
        return output


def all_gather_gemm(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    method: str = AUTO,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``all_gather(x) @ weight.T``. A call of the communicator.

    The first call of a shape makes its resources, with all ranks; later ones may be captured into a graph.

    Args:
        comm: communicator of the ranks.
        x: rows of this rank, [M, K]; neighbours in a row are neighbours in memory. As many on each rank.
        weight: rows of this rank, [H, K], of x's dtype: float32, float16 or bfloat16. As many on each rank.
        method: ``split``, that is :func:`split_all_gather_gemm`; ``unfused``, an all-gather and a product; or
            ``auto``: the faster one (``ops.explain`` names it, with the reason).
        gathered: tensor that takes ``all_gather(x)``, [N * M, K], contiguous and of x's dtype; None if nobody needs it.

    Returns:
        Rows of all ranks, [N * M, H].

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def check() -> OperatorCall:
        check_operands(NAME, comm, x, weight)
        if gathered is not None:
            given = list(gathered.shape), gathered.dtype, gathered.device, gathered.is_contiguous()
            allowed = [x.shape[0] * comm.world_size, x.shape[1]], x.dtype, x.device, True
            if given != allowed:
                raise ValueError(
                    f"{NAME}: shape, dtype, device, contiguity of gathered (value={given}, allowed={allowed})"
                )
        sizes, dtype = (*x.shape, weight.shape[0]), weight.dtype

        def alone(pieces: int) -> None:
            if gathered is None:
                unfused.prepare_unfused(comm, NAME, comm.world_size * x.shape[0], x.shape[1], dtype)

        make = {SPLIT: lambda pieces: _handle(comm, x, pieces), UNFUSED: alone}
        return OperatorCall((*sizes, dtype), sizes, dtype.itemsize, make)

    found, handle, _ = prepare(comm, NAME, method, question_of(comm, (NAME, method), x, weight, gathered), check)
    if found.name == SPLIT:
        parts: SplitAllGatherGemm = handle
        return parts(x, weight, gathered)
    if gathered is None:
        return unfused.all_gather_gemm(comm, x, weight)
    with torch.no_grad():  # as the other methods
        return reference.all_gather_gemm(comm, x, weight, gathered=gathered)


def split_all_gather_gemm(
    comm: Communicator, x: torch.Tensor, weight: torch.Tensor, *, pieces: int = 1
) -> torch.Tensor:
    """Return ``all_gather(x) @ weight.T``, computed part by part on arrival. A call of the communicator.

    Arguments, result and errors are those of :func:`all_gather_gemm`; ``pieces`` is the number of pieces of the rows of
    each rank, the same on all ranks.
    """
    with telling_refusals(comm, SPLIT_GATHER):
        check_pieces(SPLIT_GATHER, pieces)
        check_operands(SPLIT_GATHER, comm, x, weight)
    return _handle(comm, x, pieces)(x, weight)


def _handle(comm: Communicator, x: torch.Tensor, pieces: int) -> SplitAllGatherGemm:
    """Return the handle of :func:`split_all_gather_gemm` for a shape; all ranks make it together if it is new."""
    (rows, depth), dtype, pieces = x.shape, x.dtype, pieces or 1
    key = (SPLIT_GATHER, rows, depth, dtype, pieces)
    return kept(comm, key, lambda: SplitAllGatherGemm(comm, rows, depth, dtype, pieces))
