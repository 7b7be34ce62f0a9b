"""Steps of a rank in a collective among several nodes: what the recipes of process groups do, recorded as data.

The recipes (``sidelane.integrations.nodes.collectives``) run here on tensors without memory, so what runs and what is
predicted have one description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sidelane.integrations.nodes.collectives import TensorPair, TensorSteps, run_recipe
from sidelane.integrations.nodes.topology import HIERARCHICAL, Nodes, NodesChoice, count_pieces
from sidelane.program.collective import Kind

INPUT, OUTPUT = "input", "output"
"""Names of the caller's tensors; all others are scratch."""

IN_PLACE = (Kind.ALL_REDUCE, Kind.BROADCAST)
"""Kinds that have one tensor, which is both read and written."""


@dataclasses.dataclass(frozen=True, slots=True)
class ElementSpan:
    """``count`` elements of a tensor.

    Attributes:
        buffer: ``input``, ``output``, or a name of scratch.
        tensor: index in the caller's list; 0 for scratch.
    """

    buffer: str
    offset: int
    count: int
    tensor: int = 0

    @property
    def end(self) -> int:
        """Index behind the last element."""
        return self.offset + self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Copies within this rank, in any order: (to, from), of one size."""

    pairs: tuple[tuple[ElementSpan, ElementSpan], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NodeBroadcast:
    """Broadcasts in one node, as one call: the root's number there, and the elements that the root's replace."""

    parts: tuple[tuple[int, ElementSpan], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Near:
    """A reduce-scatter, an all-to-all or a scatter in one node; ``root`` is of a scatter, a number in the node."""

    kind: Kind
    output: ElementSpan
    input: ElementSpan
    root: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Far:
    """Begin of a collective of this rank's rail; ``root`` is of a broadcast, a node."""

    kind: Kind
    output: ElementSpan
    input: ElementSpan
    root: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """End of the ``number``-th far step of this rank, from 0: the next step begins behind it."""

    number: int


Step = Copies | NodeBroadcast | Near | Far | Join


class NodePlan(TensorSteps):
    """Steps of one rank, as the recipe takes them.

    A step ends before the next begins; a far one goes on until it is joined, beside all steps in between and beside
    other far steps.

    Attributes:
        steps: steps in their order.
        sizes: number of elements of each row of scratch.
        sent: names of those that near steps read, in symmetric memory.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.sizes: dict[str, int] = {}
        self.sent: set[str] = set()
        self._whole: dict[int, tuple[torch.Tensor, str, int]] = {}
        self._scratch: dict[str, torch.Tensor] = {}
        self._far = 0

    def tensor(self, buffer: str, count: int, tensor: int = 0) -> torch.Tensor:
        """Return a tensor without memory that stands for a buffer."""
        made = torch.empty(count, dtype=torch.uint8, device="meta")
        self._whole[made.untyped_storage()._cdata] = made, buffer, tensor
        return made

    def span(self, of: torch.Tensor) -> ElementSpan:
        """Return the elements of a tensor, as a part of its buffer."""
        _, buffer, tensor = self._whole[of.untyped_storage()._cdata]
        return ElementSpan(buffer, int(of.storage_offset()), len(of), tensor)

    def scratch(self, name: str, count: int, *, is_sent: bool = False) -> torch.Tensor:
        self.sizes[name] = max(count, self.sizes.get(name, 0))
        if is_sent:
            self.sent.add(name)
        if name not in self._scratch or len(self._scratch[name]) < count:
            self._scratch[name] = self.tensor(name, count)
        return self._scratch[name][:count]

    def copy(self, pairs: Iterable[TensorPair]) -> None:
        found = tuple((self.span(to), self.span(given)) for to, given in pairs)
        if found:
            self.steps.append(Copies(found))

    def broadcast(self, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        self.steps.append(NodeBroadcast(tuple((root, self.span(row)) for root, row in parts)))

    def within(self, kind: Kind, output: torch.Tensor, input: torch.Tensor, root: int = 0) -> None:
        self.steps.append(Near(kind, self.span(output), self.span(input), root))

    def along(self, kind: Kind, output: torch.Tensor, input: torch.Tensor, root: int = 0) -> Any:
        self.steps.append(Far(kind, self.span(output), self.span(input), root))
        self._far += 1
        return _Begun(self, self._far - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Begun:
    plan: NodePlan
    number: int

    def wait(self) -> None:
        self.plan.steps.append(Join(self.number))


def nodes_of(sizes: Sequence[int]) -> Nodes:
    """Return nodes of so many ranks each, which are neighbours.

    >>> nodes_of([2, 3]).of
    (0, 0, 1, 1, 1)

    Raises:
        ValueError: a node without ranks.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"nodes (value={list(sizes)}, allowed=ranks of each node, 1 and more)")
    return Nodes(tuple(node for node, size in enumerate(sizes) for _ in range(size)))


def rail_of(nodes: Nodes, number: int) -> tuple[int, ...]:
    """Return the ranks of a rail, one for each node."""
    return tuple(ranks[number] for ranks in nodes.members)


def pieces_of(choice: NodesChoice, nbytes: int) -> int:
    """Return the number of pieces of a call of so many bytes that goes the chosen way."""
    return count_pieces(nbytes) if choice.name == HIERARCHICAL else 1


def make_plan(kind: Kind, nodes: Nodes, rank: int, counts: Sequence[int], pieces: int) -> NodePlan:
    """Record the steps of a rank; the arguments are those of ``run_recipe``, and a root is rank 0."""
    parts = len(nodes.of)
    many = {Kind.ALL_GATHER: (parts, 1), Kind.REDUCE_SCATTER: (1, parts), Kind.ALL_TO_ALL: (parts, parts)}
    of_output, of_input = many.get(kind, (1, 1))
    plan = NodePlan()
    pairs = [
        (plan.tensor(OUTPUT, of_output * count, number), plan.tensor(INPUT, of_input * count, number))
        for number, count in enumerate(counts)
    ]
    run_recipe(plan, kind, nodes, rank, pairs, counts, pieces, root=0)
    return plan
