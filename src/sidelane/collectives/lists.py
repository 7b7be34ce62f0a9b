"""Calls with lists of tensors: many collectives of one kind as one program, with one entry and one exit handshake."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch.autograd.graph import increment_version

from sidelane.choice.candidate import check_beside
from sidelane.collectives.arguments import Arguments, Request, identity
from sidelane.collectives.backend import Work
from sidelane.collectives.calls import Calls
from sidelane.collectives.heap import Region, generation
from sidelane.collectives.listed import LISTED, ListAgreement, ListRequest, Part
from sidelane.collectives.plan import check_variant
from sidelane.collectives.prepare import Preparer
from sidelane.program.collective import Kind

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""A tensor, or a list of them: all tensor arguments of a call are the one or the other."""


def holds_lists(kind: Kind, arguments: Sequence[object]) -> bool:
    """True if a call is one with lists, or meant to be."""
    return kind in LISTED and any(isinstance(argument, list | tuple) for argument in arguments)


def call_lists(
    calls: Calls,
    arguments: Arguments,
    preparer: Preparer,
    kind: Kind,
    call: int,
    given: Sequence[object],
    details: tuple[Hashable, ...],
    *,
    variant: str,
    beside: str | None,
    async_op: bool,
    frozen: bool,
) -> Work | None:
    """Make the call.

    Args:
        calls: runs it.
        arguments: checks each tensor, or pair of tensors.
        preparer: makes it ready.
        kind: which collective.
        call: its number.
        given: the lists, outputs first.
        details: root or operation.
        variant: see ``Communicator.all_gather``.
        beside: likewise.
        async_op: likewise.
        frozen: the caller's work is being captured.

    Raises:
        As ``Communicator.all_gather``.
    """
    config = calls.config
    with calls.telling_refusals(call, kind):
        lists = _lists(kind, given)
        tensors = tuple(tensor for tensors in lists for tensor in tensors)
        key = (kind, variant, beside, details, frozen, generation(), len(lists), tuple(map(identity, tensors)))
        prepared = preparer.recall(key)
        if prepared is None:
            check_variant(kind, variant, calls.backend.abilities, listed=True)
            check_beside(kind, hint := config.beside if beside is None else beside)
            request = ListRequest(tuple(_parts(arguments, kind, lists, details)))
            _check_apart(kind, request.parts)
            parts = tuple(map(Part.of, request.parts))
    if prepared is None:
        agreement = ListAgreement(kind, arguments.world_size, parts, variant, frozen, hint)
        calls.control.post_call(call, agreement.text())
        if config.debug or not preparer.known(agreement):
            calls.agree(call)
        with calls.failing_for_good():
            prepared = preparer.prepare(agreement, request, key)
    else:
        calls.control.post_call(call, prepared.signature)
        if config.debug:
            calls.agree(call)
    # In front of the tensors, None for the single one that a call writes: all of these lists are written.
    work = calls.run(prepared, call, async_op, (None, *tensors))
    increment_version(lists[0])
    return work


def _lists(kind: Kind, given: Sequence[object]) -> list[Sequence[torch.Tensor]]:
    lists: list[Sequence[torch.Tensor]] = []
    for argument in given:
        if not isinstance(argument, list | tuple):
            raise TypeError(
                f"{kind}: tensors, or lists of tensors, but not both (value={type(argument).__name__} next to a list)"
            )
        lists.append(argument)
    if len(set(map(len, lists))) > 1:
        raise ValueError(f"{kind}: lists must be of one length (value={', '.join(str(len(each)) for each in lists)})")
    return lists


def _parts(
    arguments: Arguments, kind: Kind, lists: Sequence[Sequence[torch.Tensor]], details: tuple[Hashable, ...]
) -> list[Request]:
    requests = []
    for index, tensors in enumerate(zip(*lists, strict=True)):
        try:
            requests.append(getattr(arguments, kind)(*tensors, *details))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (number {index} in the lists)") from None
    return requests


def _check_apart(kind: Kind, requests: Sequence[Request]) -> None:
    """Refuse tensors that overlap where one of them is written: nothing orders the tensors of a call."""
    touched: list[tuple[Region, int, bool]] = []
    for index, request in enumerate(requests):
        if request.collective.in_place:
            touched.append((request.whole, index, True))
        else:
            touched += [(request.output, index, True), (request.input, index, False)]
    last: dict[bool, tuple[int, int]] = {}  # of those that are written, and of those that are read: end and index
    for region, index, written in sorted(touched, key=lambda entry: entry[0].address):
        if not region.nbytes:
            continue
        for other_written, (end, other) in last.items():
            if end > region.address and (written or other_written):
                raise ValueError(
                    f"{kind}: numbers {other} and {index} in the lists overlap, and a call writes to one of them "
                    "(allowed=tensors that lie apart)"
                )
        if region.address + region.nbytes > last.get(written, (0, 0))[0]:
            last[written] = (region.address + region.nbytes, index)
