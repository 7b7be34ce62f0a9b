"""Forms of a call: one tensor or pair, a list, a batch, an uneven exchange. All take the one path of ``call_path``."""

from __future__ import annotations

import abc
import dataclasses
import json
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from sidelane.choice import Abilities
from sidelane.collectives.agreement import Agreement, Request
from sidelane.collectives.arguments import Arguments, check_tensors
from sidelane.collectives.call_cache import Requests
from sidelane.collectives.calls import compare
from sidelane.collectives.plan import check_variant
from sidelane.collectives.pool_offsets import OFFSETS
from sidelane.errors import MismatchError
from sidelane.memory.control import ControlBlock
from sidelane.memory.heap import Location, Region
from sidelane.memory.posts import PostedCall
from sidelane.program import collective as define
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside


def own_part(copied: object) -> tuple[Hashable, ...]:
    """Return the details of an all_to_all: empty if it copies own parts, which is the default and the common case."""
    return () if copied is True else (copied if copied is False else repr(copied),)


def split_sizes(splits: Sequence[Any], world_size: int) -> list[Any]:
    """Return the caller's output and input split sizes of an all_to_all as tuples of integers; None stays None."""
    found: list[tuple[int, ...] | None] = []
    for name, sizes in zip(("output", "input"), splits, strict=True):
        try:
            found.append(None if sizes is None else tuple(map(operator.index, sizes)))
        except TypeError:
            allowed = f"allowed={world_size} whole numbers"
            raise TypeError(f"all_to_all: {name}_split_sizes (value={sizes!r}, {allowed})") from None
    return found


class CallForm(abc.ABC):
    """The interface of a call to ``CallPath``, and what most forms do.

    Attributes:
        exchanges: the ranks exchange more than its signature in each call (:meth:`posted`).
    """

    __slots__ = ()
    exchanges = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Kind of the collective, or ``BATCH``."""

    @property
    @abc.abstractmethod
    def details(self) -> Hashable:
        """All arguments besides tensors and variant. May raise the errors of :meth:`requests`."""

    @property
    @abc.abstractmethod
    def tensors(self) -> tuple[Any, ...]:
        """The caller's tensors; None where this rank has none."""

    @property
    def repeated_as(self) -> SingleCall | None:
        """Key by which compiled code finds the call again; None for one collective on single tensors."""
        return None

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        """Raise ValueError for a variant that does not exist for this kind of call."""
        check_variant(Kind(self.name), variant, abilities)

    @abc.abstractmethod
    def requests(self, arguments: Arguments) -> Requests:
        """Return the checked requests of this rank. Raises TypeError or ValueError for arguments that do not fit."""

    def agreement(self, requests: Requests, variant: str, frozen: bool, beside: Beside) -> Agreement:
        """Return the part of the requests that must be the same on all ranks."""
        return Agreement.of(requests, variant, frozen, beside)

    def posted(self, agreement: Agreement) -> tuple[str, str]:
        """Return the signature of a request that was made, which the ranks compare, and what else they exchange."""
        return agreement.text, ""

    def compared(
        self, control: ControlBlock, number: int, posts: Sequence[PostedCall], requests: Requests
    ) -> tuple[Hashable, Requests]:
        """Compare the posts of all ranks. Return what the call depends on besides its own arguments, and its requests.

        Raises:
            PeerError, MismatchError: as ``calls.compare``.
        """
        compare(control, number, posts)
        return None, requests

    def written(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the call writes."""
        return () if self.tensors[0] is None else (self.tensors[0],)


class SingleCall(CallForm):
    """One collective on a tensor or a pair of tensors: the common case. Making it takes a fraction of a microsecond.

    Args:
        name: kind of the collective.
        tensors: output and input, or the one argument that is both; lists of these as a part of ``ListedCall``.
        details: root or reduction.
    """

    __slots__ = ("details", "name", "tensors")
    name: Kind
    tensors: tuple[Any, ...]
    details: tuple[Hashable, ...]

    def __init__(self, name: Kind, tensors: tuple[Any, ...], details: tuple[Hashable, ...] = ()) -> None:
        self.name, self.tensors, self.details = name, tensors, details

    def requests(self, arguments: Arguments) -> Requests:
        return (getattr(arguments, self.name)(*self.tensors, *self.details),)


class UnevenCall(CallForm):
    """An all_to_all with split sizes: in every call the hosts exchange the sizes that each rank sends and expects.

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
        self._rows = split_sizes(self._splits, self._world_size)
        return (*self._rows, *(tensor.shape[:1] for tensor in self.tensors), *own_part(self._copies_own))

    def requests(self, arguments: Arguments) -> Requests:
        """Check the tensors and sizes, and return the locations of the tensors, with no bytes to send yet."""
        expected, sent = arguments.split_bytes(self.tensors, self._rows, self._copies_own)
        output, input = map(arguments.locate, self.tensors)
        self._own = json.dumps([sent, expected, _shown(input), _shown(output)], separators=(",", ":"))
        n = self._world_size
        return (Request(define.all_to_all(((0,) * n,) * n), input, output, self.tensors[1].dtype),)

    def posted(self, agreement: Agreement) -> tuple[str, str]:
        signature = f"all_to_all with split sizes of {self.tensors[1].dtype}, variant {agreement.variant}"
        signature += f", beside {agreement.beside}" + ", captured" * agreement.frozen
        return signature + ", own parts stay" * (not self._copies_own), self._own

    def compared(
        self, control: ControlBlock, number: int, posts: Sequence[PostedCall], requests: Requests
    ) -> tuple[Hashable, Requests]:
        """Return the split sizes and locations that all ranks have posted, and the request with these.

        Raises:
            PeerError: as ``calls.compare``.
            MismatchError: likewise; also where a rank expects other sizes than its peer sends, or where tensors lie in
                different locations.
        """
        compare(control, number, posts)
        own = [json.loads(post.differing.partition(OFFSETS)[0]) for post in posts]
        sent, expected, inputs, outputs = zip(*own, strict=True)
        (request,) = requests
        for src in range(len(posts)):
            for dst in range(len(posts)):
                if sent[src][dst] != expected[dst][src]:
                    dtype = request.dtype
                    here, there = (nbytes // dtype.itemsize for nbytes in (sent[src][dst], expected[dst][src]))
                    raise MismatchError(
                        f"call {number}, all_to_all: rank {src} sends {here} {str(dtype).removeprefix('torch.')} to "
                        f"rank {dst}, which expects {there}"
                    )
        output = _common(number, "output", outputs)
        # If the peers can write into the output, the location of an input does not matter.
        input = None if output is not None else _common(number, "input", inputs)
        counts = tuple(tuple(row) for row in sent)
        collective = define.all_to_all(counts, copies_own=self._copies_own)
        made = Request(collective, _at(request.input, input), _at(request.output, output), request.dtype)
        return (counts, input, output), (made,)


def _shown(region: Region) -> object:
    """Return the location of a tensor for peers: None without bytes, 0 for ordinary memory, else block, offset."""
    return None if not region.nbytes else list(region.location) if region.location else 0


def _at(region: Region, location: Location) -> Region:
    """Return a region at a location that the ranks have in common; as it is without one."""
    return region if location is None else dataclasses.replace(region, block=location[0], offset=location[1])


def _common(number: int, name: str, shown: Sequence[Any]) -> Location:
    """Return the location of a tensor that is the same on all ranks that have bytes in it."""
    locations = {rank: tuple(where) if where else None for rank, where in enumerate(shown) if where is not None}
    first = next(iter(locations.items()), (0, None))
    for rank, location in locations.items():
        if location != first[1]:
            raise MismatchError(
                f"call {number}, all_to_all: {name} lies in different places: rank {first[0]}: {_words(first[1])}; "
                f"rank {rank}: {_words(location)}"
            )
    return first[1]


def _words(location: Location) -> str:
    return "ordinary memory" if location is None else f"symmetric memory {location[0]}+{location[1]}"
