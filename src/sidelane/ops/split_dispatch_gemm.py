"""split_all_to_all_gemm: the vendor's GEMM of each part of an all-to-all's rows, as copy engines bring it.

Equivalent: an all-to-all with split sizes, then ``y = came @ weight.T`` (``reference.all_to_all_gemm``). No compute
unit moves data between ranks, and the host has to know how many rows go where. Two ranks, two pieces; what is computed
first is there already::

    compute      rows that stay           | first half of 1 | second half of 1
    copy engine  first half | second half |

All copies are one program, whose parts have the order of ``split_gemm``: turn t brings rows of the t-th rank in front
of this one. What computes a part waits for its arrival.
"""

from __future__ import annotations

import torch

from sidelane.collectives import Communicator
from sidelane.ops.handle import is_captured, kept, telling_refusals
from sidelane.ops.in_turn import in_turn
from sidelane.ops.routings import DEFAULT_PIECES, Counts, Routings, Table, checked
from sidelane.program.pieces import SPLIT_DISPATCH, arriving_program, coming

NAME = SPLIT_DISPATCH


class SplitAllToAllGemm:
    """Buffers of :func:`split_all_to_all_gemm` for some sizes, and programs for some routings. Collective.

    Args:
        comm: the ranks.
        most_rows: that any rank sends or gets.
        depth: K, columns of x.
        dtype: of x: float32, float16 or bfloat16.
    """

    def __init__(self, comm: Communicator, most_rows: int, depth: int, dtype: torch.dtype) -> None:
        self.comm, self._most_rows = comm, most_rows
        self._sent, self._came = (comm.empty(most_rows, depth, dtype=dtype) for _ in range(2))
        self.routings = Routings(comm, arriving_program, self._sent, {"sent": self._sent, "came": self._came})
        self._in_turn = in_turn(comm)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, table: Table, pieces: int) -> torch.Tensor:
        """Run it. Arguments, result and errors as of :func:`split_all_to_all_gemm`."""
        with torch.no_grad(), self._in_turn:
            return self._run(x, weight, table, pieces)

    def _run(self, x: torch.Tensor, weight: torch.Tensor, table: Table, pieces: int) -> torch.Tensor:
        rank = self.comm.rank
        routing = self.routings.of(table, pieces)
        routing.in_a_graph |= is_captured(self.comm)
        output = x.new_empty(self._most_rows, weight.shape[0])
        first, place = sum(table[rank][:rank]), sum(row[rank] for row in table[:rank])
        stays = table[rank][rank]
        for rows in (slice(0, first), slice(first + stays, sum(table[rank]))):
            self._sent[rows] = x[rows]
        work = routing.program(async_op=True)
        torch.mm(x[first : first + stays], weight.t(), out=output[place : place + stays])
        for number, came in enumerate(coming(table, rank, pieces)):
            routing.program.wait_for_arrival(number)
            torch.mm(self._came[came], weight.t(), out=output[came])
        assert work is not None
        work.wait()
        return output


def split_all_to_all_gemm(
    comm: Communicator,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: Counts,
    *,
    most_rows: int,
    pieces: int = DEFAULT_PIECES,
) -> torch.Tensor:
    """Rows go to the ranks that ``counts`` says, and ``came @ weight.T`` there, part by part as it comes. A call of the
    communicator.

    The first call of a shape allocates, and the first one with some counts proves and binds their program (some
    milliseconds), with all ranks; those of eight are kept, and of graphs.

    Args:
        comm: the ranks.
        x: rows for rank 0, for rank 1, and so on, [rows, K]. Ranks may have different numbers of rows; those beyond
            what ``counts`` says stay.
        weight: [H, K], of x's dtype: float32, float16 or bfloat16. H may differ between ranks.
        counts: rows from rank i to rank j in row i, column j; on the host, since the copies are the host's. The same on
            all ranks.
        most_rows: that any rank sends or gets, the same on all ranks and in all calls of a shape.
        pieces: of the rows for each peer, the same on all ranks.

    Returns:
        [most_rows, H]: results of rows from rank 0, from rank 1, and so on; behind them anything.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has moved.
        UnavailableError: inside of a capture: a new shape, or counts that no call before had.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, NAME):
        table = checked(NAME, comm, x, weight, counts, most_rows, pieces)
    return handle_of(comm, most_rows, weight.shape[1], weight.dtype)(x, weight, table, pieces)


def handle_of(comm: Communicator, most_rows: int, depth: int, dtype: torch.dtype) -> SplitAllToAllGemm:
    """What :func:`split_all_to_all_gemm` keeps for a shape, made by all ranks together where it is new."""
    return kept(comm, (NAME, most_rows, depth, dtype), lambda: SplitAllToAllGemm(comm, most_rows, depth, dtype))
