"""Calls with many tensors: collectives that run as one program, with one entry and one exit handshake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sidelane.collectives.arguments import Arguments, Request, identity
from sidelane.collectives.asked import Asked
from sidelane.collectives.calls import Calls
from sidelane.collectives.heap import Region, generation
from sidelane.collectives.listed import BATCH, LISTED, ListAgreement, ListRequest, Part
from sidelane.collectives.plan import check_variant
from sidelane.collectives.prepare import Preparer
from sidelane.collectives.repeat import Repeats
from sidelane.collectives.work import Work
from sidelane.execute.base import Place
from sidelane.program.collective import Kind
from sidelane.program.shape import check_beside

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""A tensor, or a list of them: all tensor arguments of a call are the one or the other."""


def holds_lists(kind: Kind, arguments: Sequence[object]) -> bool:
    """True if a call is one with lists, or meant to be."""
    return kind in LISTED and any(isinstance(argument, list | tuple) for argument in arguments)


def call_lists(
    calls: Calls,
    arguments: Arguments,
    preparer: Preparer,
    name: str,
    call: int,
    asked: Sequence[Asked],
    *,
    variant: str,
    beside: str | None,
    async_op: bool,
    place: Place,
    repeats: Repeats | None = None,
) -> Work | None:
    """Run all that was asked for as one call.

    Args:
        calls: runs it.
        arguments: checks each tensor, or pair of tensors.
        preparer: makes it ready.
        name: of the call: its kind, or ``BATCH``.
        call: its number.
        asked: what to do, in no order.
        variant: see ``Communicator.all_gather``.
        beside: likewise.
        async_op: likewise.
        place: where the caller stands.
        repeats: remembers the call if it is of one kind and comes again.

    Raises:
        As ``Communicator.all_gather``.
    """
    config, frozen = calls.config, place[1]
    with calls.telling_refusals(call, name):
        lists = [_lists(each) for each in asked]
        tensors = tuple(tensor for columns in lists for column in columns for tensor in column)
        shape = tuple((each.kind, each.details, len(columns[0])) for each, columns in zip(asked, lists, strict=True))
        key = (name, variant, beside, shape, frozen, generation(), tuple(map(identity, tensors)))
        prepared = preparer.recall(key)
        if prepared is None:
            for kind in dict.fromkeys(each.kind for each in asked):
                check_variant(kind, variant, calls.backend.abilities, listed=True)
            check_beside(name, hint := config.beside if beside is None else beside)
            where = BATCH if name == BATCH else "lists"
            rows = [(each, row) for each, columns in zip(asked, lists, strict=True) for row in _rows(columns)]
            request = ListRequest(tuple(_requests(arguments, rows, where)))
            _check_apart(name, request.parts, where)
            parts = tuple(map(Part.of, request.parts))
    known = prepared is not None
    if prepared is None:
        agreement = ListAgreement(name, arguments.world_size, parts, variant, frozen, hint)
        calls.control.post_call(call, agreement.text())
        if config.debug or not preparer.known(agreement):
            calls.agree(call)
        with calls.making_ready():
            prepared = preparer.prepare(agreement, request, key)
    else:
        calls.control.post_call(call, prepared.signature)
        if config.debug:
            calls.agree(call)
    written = tuple(tensor for columns in lists for tensor in columns[0])
    work = calls.run(prepared, call, async_op, tensors, written, place)
    if known and repeats is not None:
        repeats.remember(key, prepared, place, asked=asked[0])
    return work


def _lists(asked: Asked) -> list[Sequence[torch.Tensor]]:
    """The arguments as lists, outputs first."""
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
    arguments: Arguments, rows: Sequence[tuple[Asked, tuple[torch.Tensor, ...]]], where: str
) -> Iterator[Request]:
    for number, (asked, row) in enumerate(rows):
        try:
            yield getattr(arguments, asked.kind)(*row, *asked.details)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (number {number} in the {where})") from None


def _check_apart(name: str, requests: Sequence[Request], where: str) -> None:
    """Refuse tensors that overlap where one of them is written: nothing orders the tensors of a call."""
    touched: list[tuple[Region, int, bool]] = []
    for number, request in enumerate(requests):
        if request.collective.in_place:
            touched.append((request.whole, number, True))
        else:
            touched += [(request.output, number, True), (request.input, number, False)]
    last: dict[bool, tuple[int, int]] = {}  # of those that are written, and of those that are read: end and number
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
