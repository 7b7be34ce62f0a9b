"""Calls with many tensors, in lists or collected in a ``with`` block: one program, with one handshake at each end."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from sidelane.choice import Abilities
from sidelane.choice.candidate import everything, reshards
from sidelane.collectives.agreement import BATCH, Agreement, CallPart, Request
from sidelane.collectives.arguments import Arguments, Dimensions
from sidelane.collectives.call_cache import Requests
from sidelane.collectives.call_forms import CallForm, SingleCall, own_part, split_sizes
from sidelane.collectives.call_path import CallPath
from sidelane.collectives.plan import AUTO, check_variant
from sidelane.collectives.work import Work
from sidelane.memory.heap import Region
from sidelane.modes import untraced
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside
from sidelane.session.entry import entry

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""A tensor or a list of tensors: either all tensor arguments of a call are lists, or none."""


class ListedCall(CallForm):
    """Collectives on lists of tensors that run as one call; under the name ``BATCH`` of several kinds.

    Args:
        name: kind of the call, or ``BATCH``.
        single: the collectives; they have no order among each other.
        world_size: number of ranks.
    """

    name = BATCH

    def __init__(self, name: str, singles: Sequence[SingleCall], world_size: int) -> None:
        self.name, self._singles, self._world_size = name, singles, world_size

    @cached_property
    def _lists(self) -> list[list[Sequence[torch.Tensor]]]:
        """The arguments of each collective as lists. Raises TypeError or ValueError for lists of different lengths."""
        return [_lists(each) for each in self._singles]

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for columns in self._lists for column in columns for tensor in column)

    @property
    def details(self) -> Hashable:
        return tuple(
            (each.name, each.details, len(columns[0])) for each, columns in zip(self._singles, self._lists, strict=True)
        )

    @property
    def repeated_as(self) -> SingleCall | None:
        return self._singles[0]

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        for kind in dict.fromkeys(each.name for each in self._singles):
            check_variant(kind, variant, abilities, listed=True)

    def requests(self, arguments: Arguments) -> Requests:
        where, found = self._where, list[Request]()
        for single, columns in zip(self._singles, self._lists, strict=True):
            for row in zip(*columns, strict=True):
                try:
                    found.append(getattr(arguments, single.name)(*row, *single.details))
                except (TypeError, ValueError) as error:
                    number = f" (number {len(found)} in the {where})" if where else ""
                    raise type(error)(f"{error}{number}") from None
        _check_apart(self.name, found, where)
        return tuple(found)

    @property
    def _where(self) -> str:
        """The place of the tensors, for errors; empty if there is no list."""
        if self.name == BATCH:
            return BATCH
        return "lists" if any(isinstance(given, list | tuple) for given in self._singles[0].tensors) else ""

    def agreement(self, requests: Requests, variant: str, frozen: bool, beside: Beside) -> Agreement:
        parts = tuple(map(CallPart.of, requests))
        return Agreement.of_list(self.name, self._world_size, parts, variant, frozen, beside)

    def written(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for columns in self._lists for tensor in columns[0])


class ReshardCall(ListedCall):
    """All-to-alls from one dimension to another one, on a pair of tensors or on lists: always one program.

    Args:
        tensors: output and input, or lists of them.
        dims: the caller's ``scatter_dim`` and ``gather_dim``.
        splits: the caller's ``output_split_sizes`` and ``input_split_sizes``.
        copies_own: copy the part that stays on its rank, too.
        world_size: number of ranks.
    """

    repeated_as = None

    def __init__(
        self,
        tensors: tuple[Tensors, Tensors],
        dims: tuple[object, object],
        splits: tuple[Sequence[int] | None, Sequence[int] | None],
        copies_own: object,
        world_size: int,
    ) -> None:
        self._dims, self._splits, self._copies_own = dims, splits, copies_own
        super().__init__(Kind.ALL_TO_ALL, [SingleCall(Kind.ALL_TO_ALL, tensors)], world_size)

    @property
    def details(self) -> Hashable:
        scatter, gather = (_whole(*each) for each in zip(("scatter_dim", "gather_dim"), self._dims, strict=True))
        gathered, scattered = split_sizes(self._splits, self._world_size)
        dims = Dimensions(scatter, gather, scattered, gathered)
        self._singles = [SingleCall(Kind.ALL_TO_ALL, self._singles[0].tensors, (self._copies_own, dims))]
        shapes = tuple(getattr(tensor, "shape", None) for tensor in self.tensors)
        return ("dimensions", dims, own_part(self._copies_own), shapes)

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        super().check_variant(variant, abilities)
        names = [found.variant for found in everything(Kind.ALL_TO_ALL, abilities) if reshards(found)]
        if variant != AUTO and variant not in names:
            raise ValueError(
                f"all_to_all: variant with scatter_dim and gather_dim (value={variant!r}, "
                f"allowed={', '.join((AUTO, *names))})"
            )


@untraced
class Batched:
    """Collects collectives, and runs all of them as one call when its ``with`` block ends (``Communicator.batch``).

    Its methods take the arguments of the communicator's methods, lists included; they check and return nothing.
    The collectives have no order among each other: none may read or write the bytes that another one writes. A block
    that ends with an error runs none of them.

    Attributes:
        work: with ``async_op=True`` the :class:`Work` of the call, from the end of the block on.
    """

    range_name = BATCH
    """Name of its call in profilers."""

    def __init__(self, path: CallPath, *, variant: str, beside: Beside | None, async_op: bool) -> None:
        self.work: Work | None = None
        self._path, self._calls = path, path.calls
        self._variant, self._beside, self._async_op = variant, beside, async_op
        self._singles: list[SingleCall] = []
        self._is_open = self._has_ended = False

    def all_gather(self, output: Tensors, input: Tensors) -> None:
        """See ``Communicator.all_gather``."""
        self._append(SingleCall(Kind.ALL_GATHER, (output, input)))

    def all_to_all(self, output: Tensors, input: Tensors, *, copy_own_part: bool = True) -> None:
        """See ``Communicator.all_to_all``; equal parts."""
        self._append(SingleCall(Kind.ALL_TO_ALL, (output, input), own_part(copy_own_part)))

    def reduce_scatter(self, output: Tensors, input: Tensors, *, op: str | dist.ReduceOp = "sum") -> None:
        """See ``Communicator.reduce_scatter``."""
        self._append(SingleCall(Kind.REDUCE_SCATTER, (output, input), (op,)))

    def all_reduce(self, tensor: Tensors, *, op: str | dist.ReduceOp = "sum", output: Tensors | None = None) -> None:
        """See ``Communicator.all_reduce``."""
        self._append(SingleCall(Kind.ALL_REDUCE, (tensor if output is None else output, tensor), (op,)))

    def broadcast(self, tensor: Tensors, *, root: int = 0) -> None:
        """See ``Communicator.broadcast``; roots may differ from one to another."""
        self._append(SingleCall(Kind.BROADCAST, (tensor,), (root,)))

    def _append(self, single: SingleCall) -> None:
        if not self._is_open:
            where = "behind the end of the block" if self._has_ended else "without a with block"
            raise RuntimeError(f"batch: {single.name} {where}; calls of a batch are made inside of it")
        self._singles.append(single)

    def __enter__(self) -> Batched:
        if self._is_open or self._has_ended:
            raise RuntimeError("batch: entered a second time; each call has a batch of its own")
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open, self._has_ended = False, True
        self._run(error)

    @entry
    def _run(self, error: BaseException | None) -> Work | None:
        calls = self._calls
        if error is not None:
            # The peers may have ended their blocks without an error: this block takes its place in the order of calls.
            if isinstance(error, Exception) and not calls.closed and calls.failure is None and calls.armed is None:
                calls.refuse(calls.number(), BATCH, error)
            return None
        single = ListedCall(BATCH, self._singles, self._path.arguments.world_size)
        self.work = self._path.run(single, variant=self._variant, beside=self._beside, async_op=self._async_op)
        return self.work


def _lists(single: SingleCall) -> list[Sequence[torch.Tensor]]:
    """Return the arguments as lists, outputs first."""
    lists: list[Sequence[torch.Tensor]] = []
    listed = any(isinstance(argument, list | tuple) for argument in single.tensors)
    for argument in single.tensors:
        if listed and not isinstance(argument, list | tuple):
            raise TypeError(
                f"{single.name}: tensors, or lists of tensors, but not both "
                f"(value={type(argument).__name__} next to a list; the parts of one collective are one tensor here)"
            )
        lists.append(argument if listed else [argument])
    if len(set(map(len, lists))) > 1:
        lengths = ", ".join(str(len(column)) for column in lists)
        raise ValueError(f"{single.name}: lists must be of one length (value={lengths})")
    return lists


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
                    f"{name}: numbers {other} and {number} in the {where} overlap, and one of them is written; "
                    "they must lie apart"
                )
        if region.address + region.nbytes > last.get(written, (0, 0))[0]:
            last[written] = (region.address + region.nbytes, number)


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        text = f"{name} (value={value!r}, allowed=a whole number): scatter_dim and gather_dim go together"
        raise TypeError(f"all_to_all: {text}") from None
