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
from sidelane.integrations.ledger import SIDELANE, Ledger
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

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Again:
    """Decisions for calls that are alike.

    Args:
        communicator: communicator that makes them.
        key: key of the calls.
        options: options of each call: its reduction or root.
    """

    def __init__(self, communicator: Communicator, key: Key, options: dict[str, Any]) -> None:
        self._communicator, self._options = communicator, options
        self._operation, _, dtype, device = key
        self._columns = str(dtype).removeprefix("torch."), device.type
        self._kind, names = OPERATIONS[self._operation]
        self._method = getattr(communicator, self._kind)
        self._details = tuple(options[name] for name in names) if self._kind is not Kind.ALL_TO_ALL else own_part(True)
        self._choice: Choice | None = None
        self._row = ("", "", "", "", "")

    def make(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make a call on these tensors, the output first; autograd does not record it, as with all calls."""
        self._method(*[tensor.data for tensor in tensors], **self._options)

    def make_compiled(self, tensors: Sequence[torch.Tensor], aside: int = 0) -> bool:
        """Make a call in compiled code; see :meth:`Communicator.make_again`."""
        given = (tensors[0], tensors[0]) if self._kind is Kind.ALL_REDUCE else tuple(tensors)
        return self._communicator.make_again(self._kind, given, self._details, aside)

    def note(self, ledger: Ledger, nbytes: int) -> None:
        """Count the call that was just made."""
        choice = self._communicator.last_choice()
        assert choice is not None
        if choice is not self._choice:
            self._row = (self._operation, *self._columns, SIDELANE, choice.candidate.variant)
            self._choice = choice
        ledger.note(self._row, choice.reason, nbytes)


def may_be_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return False for tensors that compiled code cannot look at, and does not find out about."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
        if tensor.layout is not torch.strided:
            return False
    return True


def are_plain(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a communicator takes these tensors as they are."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return False
        if tensor.dtype is not dtype or tensor.device != device or tensor.is_neg() or tensor.is_conj():
            return False
    return True
