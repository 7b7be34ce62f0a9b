"""reshard: the exchange of sequence parallelism as a function with gradients, whole under ``torch.compile``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from sidelane.ops import library
from sidelane.ops.handle import telling_refusals
from sidelane.session import Communicator

__all__ = ["reshard"]


@overload
def reshard(
    comm: Communicator, tensors: Tensor, *, scatter_dim: int, gather_dim: int, gather_length: int | None = None
) -> Tensor: ...
@overload
def reshard(
    comm: Communicator,
    tensors: Sequence[Tensor],
    *,
    scatter_dim: int,
    gather_dim: int,
    gather_length: int | None = None,
) -> list[Tensor]: ...
def reshard(
    comm: Communicator,
    tensors: Tensor | Sequence[Tensor],
    *,
    scatter_dim: int,
    gather_dim: int,
    gather_length: int | None = None,
) -> Tensor | list[Tensor]:
    """Return tensors that are split along ``scatter_dim``, put together along ``gather_dim``.

    See ``Communicator.all_to_all`` with these arguments; lengths are split as ``torch.tensor_split`` does. The gradient
    goes the way back, by one exchange for all tensors. Under ``torch.compile`` the communicator must have a number
    already, from an earlier call or from ``library.number_of(comm)``.

    Args:
        comm: communicator of the ranks.
        tensors: a tensor, or several (q, k and v) that have the same dimensions, of any dtypes.
        scatter_dim: dimension of which every rank gets a part.
        gather_dim: dimension of which every rank has a part.
        gather_length: its length in the result; None: all ranks have parts of one length.

    Returns:
        New tensors, as many as were given.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    dims = given[0].dim() if given else 0
    telling = contextlib.nullcontext() if torch.compiler.is_compiling() else telling_refusals(comm, "reshard")
    with telling:
        _check(given, dims, scatter_dim, gather_dim, gather_length)
    scatter, gather = (dim % max(1, dims) for dim in (scatter_dim, gather_dim))
    n = comm.world_size
    lengths = [n * tensor.shape[gather] if gather_length is None else gather_length for tensor in given]
    found: list[Tensor] = torch.ops.sidelane.reshard(library.number_of(comm), given, scatter, gather, lengths)
    return found[0] if isinstance(tensors, Tensor) else found


def _check(given: list[Tensor], dims: int, scatter_dim: int, gather_dim: int, gather_length: int | None) -> None:
    if any(tensor.dim() != dims for tensor in given):
        shapes = [list(tensor.shape) for tensor in given]
        raise ValueError(f"reshard: tensors must have the same number of dimensions (value={shapes})")
    for name, dim in (("scatter_dim", scatter_dim), ("gather_dim", gather_dim)):
        if given and not -dims <= dim < dims:
            raise ValueError(f"reshard: {name} (value={dim}, allowed={-dims}..{dims - 1})")
    if gather_length is not None and gather_length < 0:
        raise ValueError(f"reshard: gather_length (value={gather_length}, allowed=0 and more)")
