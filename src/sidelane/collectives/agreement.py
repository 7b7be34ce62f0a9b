"""Comparison of a call between all ranks, through the control block, before any of them moves a byte."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from sidelane.collectives.heap import Region
from sidelane.errors import MismatchError, PeerError
from sidelane.memory.control import ControlBlock
from sidelane.memory.posts import SPLITS, PostedCall

Location = tuple[int, int] | None
"""Number of a symmetric block and offset in it; None for ordinary memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Splits:
    """An uneven all_to_all as all ranks see it.

    Attributes:
        counts: ``counts[i][j]`` bytes go from rank i to rank j.
        input_place, output_place: where the tensors lie on every rank that has bytes in them.
    """

    counts: tuple[tuple[int, ...], ...]
    input_place: Location
    output_place: Location


OFFER = " offer "
"""Separator in a post between the split sizes and the memory that the rank offers (``reach``)."""


def compare(control: ControlBlock, call: int, posts: Sequence[PostedCall]) -> None:
    """Check that all ranks posted the same call.

    Raises:
        PeerError: a rank refused the call; its reason is repeated.
        MismatchError: two ranks made different calls; both are named.
    """
    texts = [post.common for post in posts]
    # The refusal of a rank that compared first (it blames another one) only repeats the cause that is found here.
    refused = [(post.rank, post.refusal) for post in posts if post.refusal is not None and post.blames is None]
    if refused:
        culprit, reason = refused[0]
        found = f"call {call}: rank {culprit} refused it: {reason}"
    elif other := next((rank for rank, text in enumerate(texts) if text != texts[0]), None):
        culprit = other
        found = f"call {call}: ranks made different calls: rank 0: {texts[0]}; rank {other}: {texts[other]}"
    else:
        return
    # A rank that knew the call from before has not compared; it finds the refusal while it waits for this rank.
    control.post_call(call, posts[control.rank].signature, refusal=found, blames=culprit)
    if refused:
        raise PeerError(found, ranks=[rank for rank, _ in refused])
    raise MismatchError(found)


def with_splits(
    head: str, output_bytes: Sequence[int], input_bytes: Sequence[int], output: Region, input: Region
) -> str:
    """Return the signature of an uneven all_to_all: ``head`` is compared, :func:`agree_on_splits` reads the rest."""
    own = [list(input_bytes), list(output_bytes), _shown(input), _shown(output)]
    return head + SPLITS + json.dumps(own, separators=(",", ":"))


def agree_on_splits(control: ControlBlock, call: int, posts: Sequence[PostedCall]) -> Splits:
    """Combine the split sizes and tensor places that all ranks posted, after comparing the calls.

    Raises:
        PeerError: as :func:`compare`.
        MismatchError: as :func:`compare`; also where a rank expects other sizes than its peer sends, or where tensors
            lie in different places.
    """
    compare(control, call, posts)
    sent, expected, inputs, outputs = zip(
        *(json.loads(post.differing.partition(OFFER)[0]) for post in posts), strict=True
    )
    for src in range(len(posts)):
        for dst in range(len(posts)):
            if sent[src][dst] != expected[dst][src]:
                raise MismatchError(
                    f"call {call}, all_to_all: rank {src} sends {sent[src][dst]} bytes to rank {dst}, "
                    f"which expects {expected[dst][src]}"
                )
    output_place = _common(call, "output", outputs)
    # If the peers can write into the output, the place of an input does not matter.
    input_place = None if output_place is not None else _common(call, "input", inputs)
    return Splits(tuple(tuple(row) for row in sent), input_place, output_place)


def _shown(region: Region) -> object:
    """Return the place of a tensor as peers read it: None without bytes, 0 for ordinary memory, else block, offset."""
    return None if not region.nbytes else list(region.place) if region.place else 0


def _common(call: int, name: str, shown: Sequence[Any]) -> Location:
    places = {rank: tuple(place) if place else None for rank, place in enumerate(shown) if place is not None}
    first = next(iter(places.items()), (0, None))
    for rank, place in places.items():
        if place != first[1]:
            raise MismatchError(
                f"call {call}, all_to_all: {name} lies in different places: rank {first[0]}: {_words(first[1])}; "
                f"rank {rank}: {_words(place)}"
            )
    return first[1]


def _words(place: Location) -> str:
    return "ordinary memory" if place is None else f"symmetric memory {place[0]}+{place[1]}"
