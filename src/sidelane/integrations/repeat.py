"""Repeated calls: the decisions of an earlier call of Sidelane hold for calls like it, and take no time again.

That applies to a call of the same operation, dtype and device on tensors which a communicator takes as they are; on
CPUs to synchronous ones only, since a thread makes the others. All other decisions (``calls``, ``dispatch``) are made
anew for each call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from sidelane.session import Communicator

Key = tuple[str, Hashable, torch.dtype, torch.device]
"""Key of repeated calls: torch's name of the operation, its reduction or root, dtype and device of all tensors."""

METHODS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Methods of a communicator, by the name of the remembered operation."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """Decisions for calls that are alike.

    Attributes:
        communicator: communicator that makes them.
        method: method of the communicator.
        options: options of each call: its reduction or root.
        rows: keys of the ledger's rows, by the variant that was chosen.
    """

    communicator: Communicator
    method: Callable[..., Any]
    options: dict[str, Any]
    rows: dict[str, tuple[str, str, str, str, str]]

    @classmethod
    def of(cls, communicator: Communicator, operation: str, options: dict[str, Any]) -> Again:
        return cls(communicator, getattr(communicator, METHODS[operation]), options, {})

    def make(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make a call on these tensors, the output first; autograd does not record it, as with all calls."""
        self.method(*[tensor.data for tensor in tensors], **self.options)


def are_plain(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a communicator takes these tensors as they are."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return False
        if tensor.dtype is not dtype or tensor.device != device or tensor.is_neg() or tensor.is_conj():
            return False
    return True
