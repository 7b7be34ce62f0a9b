"""Tensors as a communicator takes them: contiguous, and one where torch has a list. Nothing here talks to a peer.

What is written is handed on under another name (``Tensor.data``), so that autograd does not count it as modified in
place: ``torch.distributed`` does not either, and programs that run with it rely on that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that is read, contiguous; a copy only where it is not."""
    return tensor.data.resolve_conj().resolve_neg().contiguous()


@contextlib.contextmanager
def receiving(tensors: Sequence[torch.Tensor], *, filled: bool = False) -> Iterator[list[torch.Tensor]]:
    """Contiguous tensors for a call to write; what stood in for others is copied into them at the end.

    Args:
        tensors: of the caller, of any strides.
        filled: the call reads them, too.
    """
    direct = [_is_direct(tensor) for tensor in tensors]
    yields = [
        tensor.data if itself else plain(tensor) if filled else torch.empty_like(tensor, memory_format=_CONTIGUOUS)
        for tensor, itself in zip(tensors, direct, strict=True)
    ]
    yield yields
    for tensor, stand_in, itself in zip(tensors, yields, direct, strict=True):
        if not itself:
            tensor.data.copy_(stand_in)


@contextlib.contextmanager
def parted(tensors: Sequence[torch.Tensor], *, apart_from: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """One tensor for a call to write, whose parts are ``tensors``, in their order.

    Args:
        tensors: of the caller; the bytes themselves where they lie in a row.
        apart_from: what the call reads. It must not lie among them: in place is for calls that are so on all ranks.
    """
    whole = _in_a_row(tensors, apart_from)
    if whole is not None:
        yield whole
        return
    whole = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    yield whole
    for tensor, part in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data.copy_(part.view(tensor.shape))


def joined(tensors: Sequence[torch.Tensor], *, apart_from: torch.Tensor) -> torch.Tensor:
    """One tensor for a call to read, whose parts are ``tensors``; see :func:`parted`."""
    whole = _in_a_row(tensors, apart_from)
    return torch.cat([plain(tensor).flatten() for tensor in tensors]) if whole is None else whole


_CONTIGUOUS = torch.contiguous_format


def _is_direct(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not (tensor.is_complex() and tensor.is_conj())


def _in_a_row(tensors: Sequence[torch.Tensor], apart_from: torch.Tensor | None) -> torch.Tensor | None:
    """The bytes of ``tensors`` as one tensor; None where they do not lie in a row, or reach into the other one."""
    first = tensors[0]
    storage, end = first.untyped_storage(), first.data_ptr()
    for tensor in tensors:
        same = tensor.dtype == first.dtype and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not (same and _is_direct(tensor) and tensor.data_ptr() == end):
            return None
        end += tensor.nbytes
    if apart_from is not None and apart_from.numel():
        low = apart_from.data_ptr()
        steps = zip(apart_from.shape, apart_from.stride(), strict=True)
        high = low + apart_from.element_size() * (1 + sum((length - 1) * stride for length, stride in steps))
        if low < end and first.data_ptr() < high:
            return None
    return first.data.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
