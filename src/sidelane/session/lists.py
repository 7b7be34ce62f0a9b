"""Calls with many tensors: collectives that run as one program, with one entry and one exit handshake."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

import torch

from sidelane.choice import Abilities
from sidelane.collectives.arguments import Arguments, Request
from sidelane.collectives.call_cache import LIST_PLACES
from sidelane.collectives.call_forms import CallForm, CallRequest
from sidelane.collectives.heap import Region
from sidelane.collectives.list_calls import BATCH, LISTED, ListAgreement, ListEntry, ListRequest
from sidelane.collectives.plan import check_variant
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""A tensor or a list of tensors: either all tensor arguments of a call are lists, or none."""


def holds_lists(kind: Kind, arguments: Sequence[object]) -> bool:
    """Return True if an argument of a call is a list, and calls of this kind take lists."""
    return kind in LISTED and any(isinstance(argument, list | tuple) for argument in arguments)


class ListedCall(CallForm):
    """Collectives on lists of tensors that run as one call; under the name ``BATCH`` of several kinds.

    Args:
        name: kind of the call, or ``BATCH``.
        asked: the collectives; they have no order among each other.
        world_size: number of ranks.
    """

    name = BATCH
    places = LIST_PLACES

    def __init__(self, name: str, asked: Sequence[CallRequest], world_size: int) -> None:
        self.name, self._asked, self._world_size = name, asked, world_size

    @cached_property
    def _lists(self) -> list[list[Sequence[torch.Tensor]]]:
        """The arguments of each collective as lists. Raises TypeError or ValueError for lists of different lengths."""
        return [_lists(each) for each in self._asked]

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for columns in self._lists for column in columns for tensor in column)

    @property
    def details(self) -> Hashable:
        return tuple(
            (each.kind, each.details, len(columns[0])) for each, columns in zip(self._asked, self._lists, strict=True)
        )

    @property
    def repeated_as(self) -> CallRequest | None:
        return self._asked[0]

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        for kind in dict.fromkeys(each.kind for each in self._asked):
            check_variant(kind, variant, abilities, listed=True)

    def request(self, arguments: Arguments) -> ListRequest:
        where = BATCH if self.name == BATCH else "lists"
        rows = [(each, row) for each, columns in zip(self._asked, self._lists, strict=True) for row in _rows(columns)]
        asked = ListRequest(tuple(_requests(arguments, rows, where)))
        _check_apart(self.name, asked.parts, where)
        return asked

    def agreement(self, request: ListRequest, variant: str, frozen: bool, beside: Beside) -> ListAgreement:
        parts = tuple(map(ListEntry.of, request.parts))
        return ListAgreement(self.name, self._world_size, parts, variant, frozen, beside)

    def written(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for columns in self._lists for tensor in columns[0])


def _lists(asked: CallRequest) -> list[Sequence[torch.Tensor]]:
    """Return the arguments as lists, outputs first."""
    lists: list[Sequence[torch.Tensor]] = []
    listed = any(isinstance(argument, list | tuple) for argument in asked.given)
    for argument in asked.given:
        if listed and not isinstance(argument, list | tuple):
            raise TypeError(
                f"{asked.kind}: tensors, or lists of tensors, but not both "
                f"(value={type(argument).__name__} next to a list; the parts of one collective are one tensor here)"
            )
        lists.append(argument if listed else [argument])
    if len(set(map(len, lists))) > 1:
        lengths = ", ".join(str(len(column)) for column in lists)
        raise ValueError(f"{asked.kind}: lists must be of one length (value={lengths})")
    return lists


def _rows(columns: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*columns, strict=True)


def _requests(
    arguments: Arguments, rows: Sequence[tuple[CallRequest, tuple[torch.Tensor, ...]]], where: str
) -> Iterator[Request]:
    for number, (asked, row) in enumerate(rows):
        try:
            yield getattr(arguments, asked.kind)(*row, *asked.details)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (number {number} in the {where})") from None


def _check_apart(name: str, requests: Sequence[Request], where: str) -> None:
    """Refuse tensors that overlap if one of them is written: the tensors of a call have no order."""
    touched: list[tuple[Region, int, bool]] = []
    for number, request in enumerate(requests):
        if request.collective.in_place:
            touched.append((request.whole, number, True))
        else:
            touched += [(request.output, number, True), (request.input, number, False)]
    last: dict[bool, tuple[int, int]] = {}  # end and number of the last written (True) and of the last read region
    for region, number, written in sorted(touched, key=lambda entry: entry[0].address):
        if not region.nbytes:
            continue
        for other_written, (end, other) in last.items():
            if end > region.address and (written or other_written):
                raise ValueError(
                    f"{name}: numbers {other} and {number} in the {where} overlap, and one of them is written "
                    "(allowed=tensors that lie apart)"
                )
        if region.address + region.nbytes > last.get(written, (0, 0))[0]:
            last[written] = (region.address + region.nbytes, number)
