"""The all_to_all with split sizes: what each rank sends and expects is put together at every call, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidelane.collectives.agree import agree_on_splits, with_splits
from sidelane.collectives.arguments import Arguments, check_tensors, identity
from sidelane.collectives.calls import Calls
from sidelane.collectives.heap import generation
from sidelane.collectives.plan import Agreement, check_variant
from sidelane.collectives.prepare import Preparer
from sidelane.collectives.work import Work
from sidelane.program.collective import Kind
from sidelane.program.shape import check_beside


def call_uneven(
    calls: Calls,
    arguments: Arguments,
    preparer: Preparer,
    tensors: tuple[torch.Tensor, torch.Tensor],
    splits: tuple[Sequence[int] | None, Sequence[int] | None],
    *,
    variant: str,
    beside: str | None,
    async_op: bool,
) -> Work | None:
    """Make the call.

    Args:
        calls: numbers it.
        arguments: checks it.
        preparer: makes it ready.
        tensors: output and input.
        splits: rows of dimension 0 from each rank, and for each rank.
        variant: see ``Communicator.all_to_all``.
        beside: likewise.
        async_op: likewise.

    Raises:
        As ``Communicator.all_to_all``.
    """
    output, input = tensors
    call = calls.number()
    backend, config = calls.backend, calls.config
    with calls.telling_refusals(call, Kind.ALL_TO_ALL):
        check_variant(Kind.ALL_TO_ALL, variant, backend.abilities)
        check_beside(Kind.ALL_TO_ALL, hint := config.beside if beside is None else beside)
        check_tensors("all_to_all", output, input)
        if splits[0] is None or splits[1] is None:
            raise ValueError("all_to_all: give both output_split_sizes and input_split_sizes, or none")
        sizes = arguments.split_bytes(output, input, splits[0], splits[1])
        frozen = (place := backend.place())[1]
        head = f"all_to_all with split sizes of {input.dtype}, variant {variant}"
        head += f", beside {hint}" + ", captured" * frozen
        regions = (arguments.heap.locate(output), arguments.heap.locate(input))
    calls.control.post_call(call, with_splits(head, *sizes, *regions))
    agreed = agree_on_splits(calls.control, call, calls.posts(call))
    key = (agreed, variant, hint, frozen, generation(), identity(output), identity(input))
    prepared = preparer.recall(key)
    if prepared is None:
        request = arguments.all_to_all_uneven(output, input, agreed)
        with calls.making_ready():
            prepared = preparer.prepare(Agreement.of(request, variant, frozen, hint), request, key)
    return calls.run(prepared, call, async_op, tensors, (output,), place)
