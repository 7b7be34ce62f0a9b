"""Calls at addresses that no call had before, of a shape that one had: a program that makes its tensors at every step.

What a call runs as follows from its tensors' sizes, dtypes and kinds of memory, and from where they lie to each other.
Only the addresses themselves are new, so that nothing is checked, agreed on or planned again but what they say: that
they are ordinary memory of this device, or symmetric where they were, and that there is memory behind them.
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
"""Addresses of one shape differ by multiples of this (bytes): nothing that is loaded depends on more than that."""

_PLAIN = ((True, False), (True,))

MOST_SEEN = 4096
"""Calls that were made once, and are remembered by their addresses if they are made again."""


class Shape(NamedTuple):
    """A call but for its addresses.

    Attributes:
        key: what it has in common with all that are alike.
        addresses: of its tensors; 0 for one that this rank has not.
        distance: from the first to the second, where they overlap.
        ordinary: all of them are there, in ordinary memory. Compiled code asks for no more than that.
    """

    key: Hashable
    addresses: tuple[int, ...]
    distance: int | None
    ordinary: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeEntry:
    """What calls of one shape run as.

    Attributes:
        program: likewise.
        addresses: where it was loaded first.
        places: of these, which are addresses of which tensors.
        request: what was asked there.
        tensors: where these lay.
        agreement: on which it was.
        signature: what it shows to the other ranks.
        choice: how it runs, and why.
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
        """Where it runs with tensors at other addresses."""
        buffers = dict(self.addresses.buffers)
        for place, tensor in self.places:
            buffers[place] = addresses[tensor]
        known = self.addresses
        return Addresses(buffers, known.flags, known.arenas, spread=known.spread)

    def asked(self, addresses: Sequence[int]) -> Request:
        """What is asked with tensors at other addresses."""
        first, request = self.tensors, self.request
        input, output = (
            dataclasses.replace(region, address=addresses[first.index(region.address)]) if region.nbytes else region
            for region in (request.input, request.output)
        )
        return Request(request.collective, input, output, request.dtype)


class Seen:
    """What was there before, as far as it is remembered: the last ``MOST_SEEN`` and as many before them at most."""

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._old: set[int] = set()

    def again(self, key: Hashable) -> bool:
        """True if it was seen before. Now it has been."""
        value = hash(key)  # a few bytes of each; two of one hash are remembered early, and no worse for it
        if value in self._new or value in self._old:
            return True
        if len(self._new) >= MOST_SEEN:
            self._new, self._old = set(), self._new
        self._new.add(value)
        return False


def shape_of(arguments: Arguments, key: tuple[Hashable, ...], tensors: Sequence[Any]) -> Shape | None:
    """The shape of a call on single tensors, outside of captures; None where that has to be looked at closely.

    Args:
        arguments: of the lane.
        key: what is asked, with the identities of the tensors last (``identities``).
        tensors: of the caller.
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
        # Contiguous, and no view that negates or conjugates; else it has another form.
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
    """True for contiguous tensors with an address of which a shape need say nothing else."""
    if arguments.pooled(tensors) is not None:
        return False
    anchors = (arguments.anchor(tensor, tensor.data_ptr(), tensor.nbytes, tensor.dtype) for tensor in tensors)
    return not any(anchor != 0 for anchor in anchors)


def places_of(request: Request, rank: int, addresses: Sequence[int]) -> tuple[tuple[tuple[int, str], int], ...] | None:
    """Which addresses of a loaded program are those of which tensors; None where one lies elsewhere."""
    places = []
    for buffer in (Buffer.INPUT, Buffer.OUTPUT):
        region = request.region(buffer)
        if not region.nbytes or region.symmetric:
            continue
        if region.address not in addresses:
            return None
        places.append(((rank, str(buffer)), addresses.index(region.address)))
    return tuple(places)
