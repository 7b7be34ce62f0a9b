"""The all_to_all with split sizes: in every call the hosts exchange the sizes that each rank sends and expects."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from sidelane.choice import Abilities
from sidelane.collectives.agreement import Splits, agree_on_splits, with_splits
from sidelane.collectives.arguments import Arguments, Request, check_tensors, identity
from sidelane.collectives.plan import Agreement, check_variant
from sidelane.memory.control import ControlBlock
from sidelane.memory.posts import PostedCall
from sidelane.program import collective as define
from sidelane.program.collective import Kind
from sidelane.program.shape import Beside


class UnevenCall:
    """The arguments of one rank for an all_to_all with split sizes.

    Args:
        tensors: output and input.
        splits: numbers of rows (dimension 0) that come from each rank, and that go to each rank.
        copies_own: copy the rows that stay on this rank, too.
    """

    name = Kind.ALL_TO_ALL

    def __init__(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor],
        splits: tuple[Sequence[int] | None, Sequence[int] | None],
        copies_own: bool = True,
    ) -> None:
        self.tensors, self._splits, self._copies_own = tensors, splits, copies_own

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        check_variant(self.name, variant, abilities)

    def text(self, arguments: Arguments, variant: str, frozen: bool, beside: Beside) -> str:
        """Return the text that this rank posts for a call.

        Raises:
            TypeError, ValueError: tensors or split sizes are wrong.
        """
        output, input = self.tensors
        check_tensors("all_to_all", output, input)
        sent, expected = self._splits[1], self._splits[0]
        if sent is None or expected is None:
            raise ValueError("all_to_all: give both output_split_sizes and input_split_sizes, or none")
        sizes = arguments.split_bytes(output, input, expected, sent, self._copies_own)
        head = f"all_to_all with split sizes of {input.dtype}, variant {variant}"
        head += f", beside {beside}" + ", captured" * frozen + ", own parts stay" * (not self._copies_own)
        return with_splits(head, *sizes, arguments.locate(output), arguments.locate(input))

    def outline(self, arguments: Arguments) -> Request:
        """Return a request with the places of the tensors, before the split sizes of the peers are known."""
        n = arguments.world_size
        output, input = (arguments.locate(tensor) for tensor in self.tensors)
        return Request(define.all_to_all(((0,) * n,) * n), input, output, self.tensors[1].dtype)

    def settled(self, control: ControlBlock, call: int, posts: Sequence[PostedCall]) -> SettledCall:
        """Return the call with the split sizes that all ranks have posted. Raises as ``agree_on_splits`` does."""
        return SettledCall(self.tensors, agree_on_splits(control, call, posts), self._copies_own)


class SettledCall:
    """An all_to_all with the split sizes of all ranks: a ``CallForm``."""

    name = Kind.ALL_TO_ALL
    repeated_as = None

    def __init__(self, tensors: tuple[torch.Tensor, torch.Tensor], agreed: Splits, copies_own: bool) -> None:
        self.tensors, self._agreed, self._copies_own = tensors, agreed, copies_own

    @property
    def details(self) -> Hashable:
        return self._agreed, self._copies_own

    def identities(self) -> Hashable:
        return tuple(map(identity, self.tensors))

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        check_variant(self.name, variant, abilities)

    def request(self, arguments: Arguments) -> Request:
        return arguments.all_to_all_uneven(*self.tensors, self._agreed, self._copies_own)

    def agreement(self, request: Request, variant: str, frozen: bool, beside: Beside) -> Agreement:
        return Agreement.of(request, variant, frozen, beside)

    def written(self) -> tuple[torch.Tensor, ...]:
        return self.tensors[:1]
