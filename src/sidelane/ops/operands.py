"""What matrices the GEMMs among fused operators take."""

from __future__ import annotations

import torch

from sidelane.collectives import Communicator
from sidelane.ops.handle import FLOATS, ORDERS, REMOTE_FIRST, check_choice, check_tensor

MOST_ELEMENTS = 1 << 40


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
    for what, tensor in (("weight", weight), ("x", x)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: neighbours in a row of {what} lie apart (value={tensor.stride()}, allowed=1)")
