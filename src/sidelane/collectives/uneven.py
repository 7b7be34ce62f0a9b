"""The all_to_all with split sizes: in every call the hosts exchange the sizes that each rank sends and expects."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from sidelane.collectives.agreement import Agreement
from sidelane.collectives.arguments import Arguments, Request, check_tensors
from sidelane.collectives.call_forms import CallForm, own_part
from sidelane.collectives.calls import compare
from sidelane.collectives.heap import Location, Region
from sidelane.collectives.pool_places import PLACES
from sidelane.errors import MismatchError
from sidelane.memory.control import ControlBlock
from sidelane.memory.posts import PostedCall
from sidelane.program import collective as define
from sidelane.program.collective import Kind

SplitSizes = tuple[int, ...]
Splits = tuple[tuple[SplitSizes, ...], Location, Location, bool]
"""Bytes from each rank to each other one; places of input and output on every rank that has bytes in them; whether own
parts are copied."""


class UnevenCall(CallForm):
    """An all_to_all as one rank knows it before it has read the posts of its peers.

    Args:
        tensors: output and input.
        splits: numbers of rows (dimension 0) that come from each rank, and that go to each rank.
        copies_own: copy the rows that stay on this rank, too.
        world_size: number of ranks.
    """

    __slots__ = ("_copies_own", "_own", "_rows", "_splits", "_world_size", "tensors")
    name = Kind.ALL_TO_ALL
    tensors: tuple[torch.Tensor, torch.Tensor]
    exchanges = True

    def __init__(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor],
        splits: tuple[Sequence[int] | None, Sequence[int] | None],
        copies_own: bool,
        world_size: int,
    ) -> None:
        self.tensors, self._splits = tensors, splits
        self._copies_own, self._world_size = copies_own, world_size

    @property
    def details(self) -> Hashable:
        check_tensors("all_to_all", *self.tensors)
        if self._splits[0] is None or self._splits[1] is None:
            raise ValueError("all_to_all: give both output_split_sizes and input_split_sizes, or none")
        self._rows = [self._whole(*given) for given in zip(("output", "input"), self._splits, strict=True)]
        return (*self._rows, *(tensor.shape[:1] for tensor in self.tensors), *own_part(self._copies_own))

    def requests(self, arguments: Arguments) -> tuple[Request]:
        """Check the tensors and sizes, and return the places of the tensors, with no bytes to send yet."""
        expected, sent = arguments.split_bytes(self.tensors, self._rows, self._copies_own)
        output, input = map(arguments.locate, self.tensors)
        self._own = json.dumps([sent, expected, _shown(input), _shown(output)], separators=(",", ":"))
        n = self._world_size
        return (Request(define.all_to_all(((0,) * n,) * n), input, output, self.tensors[1].dtype),)

    def posted(self, agreement: Agreement) -> tuple[str, str]:
        signature = f"all_to_all with split sizes of {self.tensors[1].dtype}, variant {agreement.variant}"
        signature += f", beside {agreement.beside}" + ", captured" * agreement.frozen
        return signature + ", own parts stay" * (not self._copies_own), self._own

    def settled(self, control: ControlBlock, number: int, posts: Sequence[PostedCall]) -> SplitCall:
        """Return the call with the split sizes that all ranks have posted.

        Raises:
            PeerError: as ``calls.compare``.
            MismatchError: likewise; also where a rank expects other sizes than its peer sends, or where tensors lie in
                different places.
        """
        compare(control, number, posts)
        own = [json.loads(post.differing.partition(PLACES)[0]) for post in posts]
        sent, expected, inputs, outputs = zip(*own, strict=True)
        for src in range(len(posts)):
            for dst in range(len(posts)):
                if sent[src][dst] != expected[dst][src]:
                    dtype = self.tensors[1].dtype
                    here, there = (nbytes // dtype.itemsize for nbytes in (sent[src][dst], expected[dst][src]))
                    raise MismatchError(
                        f"call {number}, all_to_all: rank {src} sends {here} {str(dtype).removeprefix('torch.')} to "
                        f"rank {dst}, which expects {there}"
                    )
        output_place = _common(number, "output", outputs)
        # If the peers can write into the output, the place of an input does not matter.
        input_place = None if output_place is not None else _common(number, "input", inputs)
        counts = tuple(tuple(row) for row in sent)
        return SplitCall(self.tensors, (counts, input_place, output_place, self._copies_own))

    def _whole(self, name: str, splits: Any) -> SplitSizes:
        try:
            return tuple(operator.index(size) for size in splits)
        except TypeError:
            allowed = f"allowed={self._world_size} whole numbers"
            raise TypeError(f"all_to_all: {name}_split_sizes (value={splits!r}, {allowed})") from None


class SplitCall(CallForm):
    """An all_to_all with the split sizes of all ranks."""

    __slots__ = ("_splits", "tensors")
    name = Kind.ALL_TO_ALL
    tensors: tuple[torch.Tensor, torch.Tensor]

    def __init__(self, tensors: tuple[torch.Tensor, torch.Tensor], splits: Splits) -> None:
        self.tensors, self._splits = tensors, splits

    @property
    def details(self) -> Splits:
        return self._splits

    def requests(self, arguments: Arguments) -> tuple[Request]:
        counts, input_place, output_place, copies_own = self._splits
        output, input = (
            dataclasses.replace(region, block=place[0], offset=place[1]) if place else region
            for region, place in zip(map(arguments.locate, self.tensors), (output_place, input_place), strict=True)
        )
        return (Request(define.all_to_all(counts, copies_own=copies_own), input, output, self.tensors[1].dtype),)


def _shown(region: Region) -> object:
    """Return the place of a tensor as peers read it: None without bytes, 0 for ordinary memory, else block, offset."""
    return None if not region.nbytes else list(region.place) if region.place else 0


def _common(number: int, name: str, shown: Sequence[Any]) -> Location:
    """Return the place of a tensor that is the same on all ranks that have bytes in it."""
    places = {rank: tuple(place) if place else None for rank, place in enumerate(shown) if place is not None}
    first = next(iter(places.items()), (0, None))
    for rank, place in places.items():
        if place != first[1]:
            raise MismatchError(
                f"call {number}, all_to_all: {name} lies in different places: rank {first[0]}: {_words(first[1])}; "
                f"rank {rank}: {_words(place)}"
            )
    return first[1]


def _words(place: Location) -> str:
    return "ordinary memory" if place is None else f"symmetric memory {place[0]}+{place[1]}"
