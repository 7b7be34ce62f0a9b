"""The unfused equivalents: what each fused operator does, with PyTorch's operators and a collective behind them.

They are the oracle of the fused operators and their baseline. Each takes the arguments of its fused operator.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sidelane.collectives import Communicator


def gemv_all_reduce(comm: Communicator, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``all_reduce(x @ weight.T)``; see :func:`sidelane.ops.gemv_all_reduce`."""
    result = functional.linear(x, weight)
    comm.all_reduce(result)
    return result


def all_reduce_rms_norm(
    comm: Communicator, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """``all_reduce``, an addition and ``rms_norm``; see :func:`sidelane.ops.all_reduce_rms_norm`."""
    total = x.clone()
    comm.all_reduce(total)
    if residual is not None:
        total += residual
    return functional.rms_norm(total, weight.shape, weight, eps), total
