"""all_to_all_rows: an all-to-all with split sizes that only the device knows, as routing of experts gives them.

Equivalent: ``comm.all_to_all`` with ``counts`` as split sizes, for which the host has to wait. The kernel is that of
``gemm``, with unchanged rows, or sums of rows, in place of a product; so are its protocol and its proof.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from sidelane.ops.gemm import ARGUMENT_INDICES, rows_sender
from sidelane.ops.handle import check_tensor, is_captured, reporting_refusals
from sidelane.ops.operands import check_rows
from sidelane.ops.operator import CachedLaunch, cached
from sidelane.session import Communicator
from sidelane.session.own_kernel import RepeatedLaunch

NAME = "all_to_all_rows"


MOST_TERMS = 64
"""Largest number of terms of a sent row."""


def all_to_all_rows(
    comm: Communicator,
    x: torch.Tensor,
    counts: torch.Tensor,
    *,
    most_rows: int,
    terms: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
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
        terms: numbers of the rows of ``x`` whose sum each sent row is, [rows, k], with k alike on all ranks; int32 or
            int64, contiguous; a negative number stands for none. A row without any keeps its place, and is not sent.
            Sums are float32, rounded once.
        factors: factor of each term, float32[rows, k], contiguous.

    Returns:
        Tensor [most_rows, H]: rows from rank 0, from rank 1, and so on; the rows behind them, and those that were not
        sent, are unchanged. The next call of this shape overwrites it.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing has been moved.
        UnavailableError: a new shape inside of a capture; a device that cannot run it.
        MismatchError, PeerError, PeerTimeoutError: see docs/internals/failure.md.
    """

    def sender() -> CachedLaunch:
        return rows_sender(comm, NAME, most_rows, x.shape[1], x.dtype)

    return send_rows(comm, most_rows, sender, (), x, counts, terms, factors)


def send_rows(
    comm: Communicator,
    most_rows: int,
    sender: Callable[[], CachedLaunch],
    words: tuple[object, ...],
    x: torch.Tensor,
    counts: torch.Tensor,
    terms: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> torch.Tensor:
    """Send rows as :func:`all_to_all_rows` does, with a sender of the caller's.

    Args:
        comm: communicator of the ranks.
        most_rows: largest number of rows that any rank gets.
        sender: function that returns the launch of new layouts (``GemmAllToAll.run`` with options).
        words: all on which the launch depends besides the tensors.
        x: argument of :func:`all_to_all_rows`.
        counts: argument of :func:`all_to_all_rows`.
        terms: argument of :func:`all_to_all_rows`.
        factors: argument of :func:`all_to_all_rows`.
    """

    def make() -> CachedLaunch:
        with reporting_refusals(comm, NAME):
            sent = check_terms(comm, x, terms, factors)
            check_rows(NAME, comm, x, counts, most_rows, sent=sent)
        return functools.partial(sender(), repeated=RepeatedLaunch(ARGUMENT_INDICES))

    launch = cached(comm, None if comm.config.debug else (NAME, most_rows, *words), (x, counts, terms, factors), make)
    came: torch.Tensor = launch(x, None, counts, terms=terms, factors=factors)
    return came


def check_terms(comm: Communicator, x: torch.Tensor, terms: object, factors: object) -> int | None:
    """Return the number of sums; None without any. Raises ValueError or TypeError for terms that are none of ``x``."""
    if terms is None:
        if factors is not None:
            raise ValueError(f"{NAME}: factors without terms (value=a tensor, allowed=None)")
        return None
    terms = check_tensor(NAME, "terms", terms, comm.device, (torch.int32, torch.int64), (2,))
    if not 1 <= terms.shape[1] <= MOST_TERMS or not terms.is_contiguous():
        text = f"value={tuple(terms.shape)}, allowed=1..{MOST_TERMS} columns, contiguous"
        raise ValueError(f"{NAME}: shape of terms ({text})")
    if factors is not None:
        factors = check_tensor(NAME, "factors", factors, comm.device, (torch.float32,), (2,))
        if factors.shape != terms.shape or not factors.is_contiguous():
            text = f"value={tuple(factors.shape)}, allowed={tuple(terms.shape)}, contiguous"
            raise ValueError(f"{NAME}: shape of factors ({text})")
    is_checked = comm.config.debug and not is_captured(comm)
    if is_checked and terms.numel() and (most := int(terms.max())) >= len(x):
        raise ValueError(f"{NAME}: terms (value={most}, allowed=less than {len(x)}, the rows of x)")
    return terms.shape[0]
