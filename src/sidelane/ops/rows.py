"""all_to_all_rows: an all-to-all with split sizes that only the device knows, as routing of experts gives them.

Equivalent: ``comm.all_to_all`` with ``counts`` as split sizes, for which the host has to wait. The kernel is that of
``gemm``, with unchanged rows in place of a product; so are its protocol and its proof.
"""

from __future__ import annotations

import torch

from sidelane.choice.fused_heuristic import REMOTE_FIRST
from sidelane.ops.gemm import rows_sender
from sidelane.ops.handle import telling_refusals
from sidelane.ops.operands import check_most_rows, check_rows
from sidelane.session import Communicator

NAME = "all_to_all_rows"


def all_to_all_rows(comm: Communicator, x: torch.Tensor, counts: torch.Tensor, *, most_rows: int) -> torch.Tensor:
    """Send rows to the ranks of ``counts``, without the host. A call of the communicator.

    The first call of a shape makes its resources, with all ranks; later ones may be captured into a graph, with counts
    that change between replays. The way back is the same with ``counts.T.contiguous()``.

    Args:
        comm: communicator of the ranks.
        x: rows for rank 0, for rank 1, and so on, [rows, H]; float32, float16 or bfloat16; neighbours in a row are
            neighbours in memory. Ranks may have different numbers of rows; rows beyond the counts stay.
        counts: number of rows from rank i to rank j in row i, column j; int32 or int64, on the device, the same on all
            ranks. They are checked only with ``Config(debug=True)``.
        most_rows: largest number of rows that any rank gets, the same on all ranks and in all calls of a shape. Rows
            beyond it are left out.

    Returns:
        Tensor [most_rows, H]: rows from rank 0, from rank 1, and so on; the rows behind them are unchanged. The next
        call of this shape overwrites it.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """
    with telling_refusals(comm, NAME):
        check_rows(NAME, comm, x, counts, most_rows, REMOTE_FIRST)
        check_most_rows(NAME, most_rows, x.shape[1])
    return rows_sender(comm, most_rows, x.shape[1], x.dtype)(x, None, counts)
