"""Repeated calls: the decisions of an earlier call of Sidelane hold for calls like it, and take no time again.

That applies to a call of the same operation, dtype and device on tensors which a communicator takes as they are; on
CPUs to synchronous ones only, since a thread makes the others. All other decisions (``calls``, ``dispatch``) are made
anew for each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from sidelane.choice import Choice
from sidelane.collectives.call_forms import own_part
from sidelane.integrations.ledger import SIDELANE
from sidelane.program.collective import Kind
from sidelane.session import Communicator

Key = tuple[str, Hashable, torch.dtype, torch.device]
"""Key of repeated calls: torch's name of the operation, its reduction or root, dtype and device of all tensors."""

OPERATIONS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "all_gather_into_tensor": (Kind.ALL_GATHER, ()),
    "all_reduce": (Kind.ALL_REDUCE, ("op",)),
    "all_to_all_single": (Kind.ALL_TO_ALL, ()),
    "broadcast": (Kind.BROADCAST, ("root",)),
    "reduce_scatter_tensor": (Kind.REDUCE_SCATTER, ("op",)),
}
"""Kinds of the remembered operations, by torch's names, with the option of the communicator's method."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that compiled code can look at."""


class RepeatedCall:
    """Decisions for calls that are alike.

    Args:
        communicator: communicator that makes them.
        key: key of the calls.
        options: options of each call: its reduction or root.

    Attributes:
        communicator: communicator that makes them.
        kind: kind of each call.
        details: its reduction or root, as compiled code compares it.
        calls: calls of the communicator, which have the choice of the last one.
        choice: choice that ``row`` is of; None before the first call.
        row: row of the report for calls of that choice.
    """

    def __init__(self, communicator: Communicator, key: Key, options: dict[str, Any]) -> None:
        self.communicator, self._options = communicator, options
        self._operation, _, dtype, device = key
        self._columns = str(dtype).removeprefix("torch."), device.type
        self._dtype, self._device = dtype, device
        self.kind, names = OPERATIONS[self._operation]
        self._method = getattr(communicator, self.kind)
        self.details = tuple(options[name] for name in names) if self.kind is not Kind.ALL_TO_ALL else own_part(True)
        self.calls = communicator.lane.calls
        self.choice: Choice | None = None
        self.row = ("", "", "", "", "")

    def make(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make a call on these tensors, the output first; autograd does not record it, as with all calls."""
        self._method(*[tensor.data for tensor in tensors], **self._options)

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if the communicator takes these tensors as they are."""
        return are_plain(tensors, self._dtype, self._device)

    def take_choice(self, choice: Choice) -> None:
        """Count calls in the row of another choice from now on."""
        self.choice, self.row = choice, (self._operation, *self._columns, SIDELANE, choice.candidate.variant)


def are_plain(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a communicator takes these tensors as they are."""
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return False
        if tensor.dtype is not dtype or tensor.device != device or tensor.is_neg() or tensor.is_conj():
            return False
    return True
