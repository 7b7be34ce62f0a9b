"""The all_to_all with a layout, on one pair of tensors or on lists: always one program for a list of tensors."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

from sidelane.choice import Abilities
from sidelane.choice.candidate import everything, reshards
from sidelane.collectives.arguments import Arguments, Dimensions
from sidelane.collectives.call_cache import Requests
from sidelane.collectives.call_forms import CallRequest
from sidelane.collectives.plan import AUTO, check_variant
from sidelane.program.collective import Kind
from sidelane.program.variant import Variant
from sidelane.session.lists import ListedCall, Tensors


class ReshardCall(ListedCall):
    """All-to-alls from one dimension to another one.

    Args:
        tensors: output and input, or lists of them.
        dims: the caller's ``scatter_dim`` and ``gather_dim``.
        splits: sizes of the parts of these dimensions, one for each rank; None for parts as equal as can be.
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
        self._dims, self._splits, self._copies_own, self._given = dims, splits, copies_own, tensors
        super().__init__(Kind.ALL_TO_ALL, [CallRequest(Kind.ALL_TO_ALL, tensors)], world_size)

    @property
    def details(self) -> Hashable:
        own = self._copies_own if isinstance(self._copies_own, bool) else repr(self._copies_own)
        shapes = tuple(getattr(tensor, "shape", None) for tensor in self.tensors)
        return ("dimensions", self._checked(), own, shapes)

    @property
    def _where(self) -> str:
        return "lists" if any(isinstance(given, list | tuple) for given in self._given) else ""

    def check_variant(self, variant: str, abilities: Abilities) -> None:
        check_variant(Kind.ALL_TO_ALL, variant, abilities, listed=True)
        names = [found.variant for found in everything(Kind.ALL_TO_ALL, abilities) if reshards(found)]
        if variant != AUTO and Variant.of(variant).called not in names:
            raise ValueError(
                f"all_to_all: variant with scatter_dim and gather_dim (value={variant!r}, "
                f"allowed={', '.join((AUTO, *names))})"
            )

    def requests(self, arguments: Arguments) -> Requests:
        self._asked = [CallRequest(Kind.ALL_TO_ALL, self._given, (self._copies_own, self._checked()))]
        return super().requests(arguments)

    def _checked(self) -> Dimensions:
        """Return the caller's dimensions and sizes as numbers. Raises TypeError for anything else."""
        dims = [_whole(*each) for each in zip(("scatter_dim", "gather_dim"), self._dims, strict=True)]
        names = ("output_split_sizes", "input_split_sizes")
        gathered, scattered = (
            _sizes(name, sizes, self._world_size) for name, sizes in zip(names, self._splits, strict=True)
        )
        return Dimensions(dims[0], dims[1], scattered, gathered)


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        allowed = "a whole number: scatter_dim and gather_dim go together"
        raise TypeError(f"all_to_all: {name} (value={value!r}, allowed={allowed})") from None


def _sizes(name: str, sizes: Any, world_size: int) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    try:
        return tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"all_to_all: {name} (value={sizes!r}, allowed={world_size} whole numbers)") from None
