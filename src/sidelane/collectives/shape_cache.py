"""Cache of calls by shape, for training loops that allocate their tensors anew in every step.

The program of a call follows from the sizes, dtypes and kinds of memory of its tensors, and from their overlap. If only
the addresses are new, the call is not validated, agreed on or planned again. Only the addresses are checked: they must
be ordinary memory of this device, or symmetric memory at the same address as before, and large enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from sidelane.choice import Choice
from sidelane.collectives.arguments import Arguments, Request
from sidelane.collectives.plan import Agreement, Plan
from sidelane.execute.base import Addresses
from sidelane.program.collective import Buffer

UNIT = 16
"""Bytes of which the addresses of one shape differ by multiples: loaded programs depend on no larger alignment."""

_PLAIN = ((True, False), (True,))

MOST_SEEN = 4096
"""Number of calls in one half of ``Seen``, which finds calls that come again at the same addresses."""


class Shape(NamedTuple):
    """A call, separated into its shape and its addresses.

    Attributes:
        key: cache key that all calls of the shape share.
        addresses: addresses of its tensors; 0 for a tensor that this rank does not have.
        distance: bytes from the first tensor to the second, if they overlap; else None.
        ordinary: the rank has all tensors, in ordinary memory; compiled code remembers only such shapes.
    """

    key: Hashable
    addresses: tuple[int, ...]
    distance: int | None
    ordinary: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeEntry:
    """The program that calls of one shape run.

    Attributes:
        program: the program.
        addresses: addresses at which it was loaded first.
        places: pairs of a buffer in these addresses and the number of the tensor that it is.
        request: request of the first call.
        tensors: addresses of the first call's tensors.
        agreement: agreement of all ranks.
        signature: text that the ranks compare.
        choice: candidate that runs it, and the reason.
    """

    program: Plan
    addresses: Addresses
    places: tuple[tuple[tuple[int, str], int], ...]
    request: Request
    tensors: tuple[int, ...]
    agreement: Agreement
    signature: str
    choice: Choice

    def at(self, addresses: Sequence[int]) -> Addresses:
        """Return the addresses of the program for tensors at other addresses."""
        buffers = dict(self.addresses.buffers)
        for place, tensor in self.places:
            buffers[place] = addresses[tensor]
        known = self.addresses
        return Addresses(buffers, known.flags, known.arenas, spread=known.spread)

    def asked(self, addresses: Sequence[int]) -> Request:
        """Return the request for tensors at other addresses."""
        first, request = self.tensors, self.request
        input, output = (
            dataclasses.replace(region, address=addresses[first.index(region.address)]) if region.nbytes else region
            for region in (request.input, request.output)
        )
        return Request(request.collective, input, output, request.dtype)


class Seen:
    """Set of recent keys: the last ``MOST_SEEN`` of them at least, and twice as many at most."""

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._old: set[int] = set()

    def again(self, key: Hashable) -> bool:
        """Return True if a key was added before, and add it."""
        value = hash(key)  # takes little memory; a collision only caches a call after its first time instead of second
        if value in self._new or value in self._old:
            return True
        if len(self._new) >= MOST_SEEN:
            self._new, self._old = set(), self._new
        self._new.add(value)
        return False


def shape_of(arguments: Arguments, key: tuple[Hashable, ...], tensors: Sequence[Any]) -> Shape | None:
    """Return the shape of a call on single tensors, outside of captures; None if the call needs full validation.

    Args:
        arguments: translates tensors for the lane.
        key: cache key of the call, with the identities of the tensors last (``identities``).
        tensors: the caller's tensors.
    """
    identities = key[-1]
    assert isinstance(identities, tuple)
    parts = list(key[:-1])
    addresses: list[int] = []
    end, distance = 0, None  # of the first tensor
    ordinary = True
    for tensor, identity in zip(tensors, identities, strict=True):
        if tensor is None:
            parts.append(None)
            addresses.append(0)
            ordinary = False
            continue
        # Identities of contiguous tensors that are no negated or conjugated views end so.
        if not isinstance(identity, tuple) or identity[3:] not in _PLAIN:
            return None
        address, nbytes, dtype = identity[:3]
        anchor = arguments.anchor(tensor, address, nbytes, dtype) if address and nbytes else None
        if anchor is None:
            return None
        ordinary = ordinary and not anchor
        parts.append((nbytes, dtype, anchor or address % UNIT))
        if end and address < end and addresses[0] < address + nbytes:
            distance = address - addresses[0]
            parts.append(distance)
        addresses.append(address)
        end = address + nbytes
    return Shape(tuple(parts), tuple(addresses), distance, ordinary)


def all_ordinary(arguments: Arguments, tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if contiguous tensors with an address are all ordinary memory, in no pool."""
    if arguments.pooled(tensors) is not None:
        return False
    anchors = (arguments.anchor(tensor, tensor.data_ptr(), tensor.nbytes, tensor.dtype) for tensor in tensors)
    return not any(anchor != 0 for anchor in anchors)


def places_of(request: Request, rank: int, addresses: Sequence[int]) -> tuple[tuple[tuple[int, str], int], ...] | None:
    """Return pairs of a program's buffer and the number of the tensor that it is; None if a buffer is no tensor."""
    places = []
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        region = request.region(buffer)
        if not region.nbytes or region.symmetric:
            continue
        if region.address not in addresses:
            return None
        places.append(((rank, str(buffer)), addresses.index(region.address)))
    return tuple(places)
