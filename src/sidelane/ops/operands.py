"""What matrices the GEMMs among fused operators take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sidelane.collectives import Communicator
from sidelane.ops.handle import FLOATS, ORDERS, REMOTE_FIRST, check_choice, check_tensor

MOST_ELEMENTS = 1 << 40

MOST_EXPERTS = 64
"""Of a rank: a block holds their counts in registers."""

Counts = torch.Tensor | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
"""Rows from rank i to rank j in row i, column j; of several experts a rank, one number for each there."""


def check_sizes(name: str, comm: Communicator, rows: int, columns: int, *, scatters: bool) -> None:
    """Refuse sizes that no product has, or that cannot be scattered. Raises ValueError."""
    if rows < 1 or columns < 1 or rows * columns > MOST_ELEMENTS:
        allowed = f"1 and more, {MOST_ELEMENTS} together"
        raise ValueError(f"{name}: rows of x, columns of the result (value={rows}, {columns}, allowed={allowed})")
    if scatters and rows % comm.world_size:
        raise ValueError(f"{name}: rows of x (value={rows}, allowed=multiples of {comm.world_size}, the ranks)")


def check_operands(
    name: str, comm: Communicator, x: object, weight: object, order: str = REMOTE_FIRST, *, scatters: bool = False
) -> None:
    """Refuse matrices that a kernel cannot multiply. Raises ValueError or TypeError."""
    check_choice(name, "order", order, ORDERS)
    check_tensor(name, "weight", weight, comm.device, FLOATS, (2,))
    assert isinstance(weight, torch.Tensor)
    check_tensor(name, "x", x, comm.device, (weight.dtype,), (2,))
    assert isinstance(x, torch.Tensor)
    check_sizes(name, comm, x.shape[0], weight.shape[0], scatters=scatters)
    if x.shape[1] != weight.shape[1] or not x.shape[1]:
        raise ValueError(f"{name}: columns of x (value={x.shape[1]}, allowed={weight.shape[1]}, those of the weight)")
    _check_neighbours(name, "weight", weight)
    _check_neighbours(name, "x", x)


def on_both_sides(name: str, comm: Communicator, counts: Counts) -> tuple[Any, torch.Tensor]:
    """Counts as numbers, None if they are not on the host, and on the device."""
    if isinstance(counts, torch.Tensor) and (counts.device == comm.device or counts.device.type != "cpu"):
        return None, counts
    if comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{name}: counts inside of a capture (value=on the host, allowed=on the device)")
    try:
        there = torch.as_tensor(counts, device="cpu")
    except (ValueError, TypeError, RuntimeError) as problem:
        raise TypeError(f"{name}: counts (value={counts!r}, allowed=a tensor, or lists of numbers)") from problem
    if there.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: counts (value={counts!r}, allowed=whole numbers)")
    return there.tolist(), there.to(comm.device)


def check_most_rows(name: str, most_rows: int, columns: int) -> None:
    """Refuse a result that there is not. Raises ValueError."""
    if most_rows < 1 or columns < 1 or most_rows * columns > MOST_ELEMENTS:
        allowed = f"1 and more, {MOST_ELEMENTS} together"
        raise ValueError(f"{name}: most_rows, columns of the result (value={most_rows}, {columns}, allowed={allowed})")


def check_rows(
    name: str, comm: Communicator, x: object, counts: object, most_rows: int, order: str, experts: int | None = None
) -> None:
    """Refuse rows and counts that cannot be sent. ``experts`` of a rank have counts of their own.

    Raises:
        ValueError, TypeError: wrong arguments.
    """
    check_choice(name, "order", order, ORDERS)
    check_tensor(name, "x", x, comm.device, FLOATS, (2,))
    check_tensor(name, "counts", counts, comm.device, (torch.int32, torch.int64), (2 if experts is None else 3,))
    assert isinstance(x, torch.Tensor)
    assert isinstance(counts, torch.Tensor)
    check_most_rows(name, most_rows, max(1, x.shape[1]))
    n = comm.world_size
    allowed = (n, n) if experts is None else (n, n, experts)
    if counts.shape != allowed or not counts.is_contiguous():
        raise ValueError(f"{name}: shape of counts (value={tuple(counts.shape)}, allowed={allowed}, contiguous)")
    _check_neighbours(name, "x", x)
    if comm.config.debug and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        table = counts.view(n, n, -1).sum(-1).tolist()
        sent, got = sum(table[comm.rank]), max(map(sum, zip(*table, strict=True)))
        if int(counts.min()) < 0 or sent > x.shape[0] or got > most_rows:
            given, room = f"{sent} sent, {got} to one rank", f"up to {x.shape[0]}, up to {most_rows}"
            raise ValueError(f"{name}: counts (value={given}, allowed={room}, none negative)")


def check_weight(name: str, comm: Communicator, x: torch.Tensor, weight: object, most_rows: int) -> None:
    """Refuse a weight that rows cannot be multiplied by. Raises ValueError or TypeError."""
    check_tensor(name, "weight", weight, comm.device, (x.dtype,), (2, 3))
    assert isinstance(weight, torch.Tensor)
    if weight.dim() == 3 and not 1 <= weight.shape[0] <= MOST_EXPERTS:
        raise ValueError(f"{name}: experts of a rank (value={weight.shape[0]}, allowed=1..{MOST_EXPERTS})")
    check_most_rows(name, most_rows, weight.shape[-2])
    if x.shape[1] != weight.shape[-1] or not x.shape[1]:
        raise ValueError(f"{name}: columns of x (value={x.shape[1]}, allowed={weight.shape[-1]}, those of the weight)")
    _check_neighbours(name, "weight", weight)


def _check_neighbours(name: str, what: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: neighbours in a row of {what} lie apart (value={tensor.stride()}, allowed=1)")
