"""Steps of a rank in a collective among several nodes: what the recipes of process groups do, recorded as data.

The recipes (``sidelane.integrations.nodes.collectives``) run here on spans instead of tensors, so what runs and what is
predicted have one description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from sidelane.integrations.nodes import collectives
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

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: slice, /) -> ElementSpan:
        begin, end, _ = at.indices(self.count)
        return ElementSpan(self.buffer, self.offset + begin, max(0, end - begin), self.tensor)


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


@dataclasses.dataclass(slots=True)
class NodePlan:
    """Steps of one rank, as the recipe takes them.

    A step ends before the next begins; a far one goes on until it is joined, beside all steps in between and beside
    other far steps.

    Attributes:
        steps: steps in their order.
        sizes: number of elements of each row of scratch.
        sent: names of those that near steps read, in symmetric memory.
    """

    steps: list[Step] = dataclasses.field(default_factory=list)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    sent: set[str] = dataclasses.field(default_factory=set)
    _begun: int = 0

    def scratch(self, name: str, count: int, /, *, is_sent: bool = False) -> ElementSpan:
        """See ``collectives.Steps``."""
        self.sizes[name] = max(count, self.sizes.get(name, 0))
        if is_sent:
            self.sent.add(name)
        return ElementSpan(name, 0, count)

    def rows(self, whole: ElementSpan, parts: int, begin: int, end: int, /) -> list[ElementSpan]:
        """See ``collectives.Steps``."""
        each = whole.count // parts
        return [whole[part * each + begin : part * each + end] for part in range(parts)]

    def copy(self, pairs: Iterable[tuple[ElementSpan, ElementSpan]], /) -> None:
        """See ``collectives.Steps``."""
        found = tuple(pairs)
        if found:
            self.steps.append(Copies(found))

    def broadcast(self, parts: Iterable[tuple[int, ElementSpan]], /) -> None:
        """See ``collectives.Steps``."""
        self.steps.append(NodeBroadcast(tuple(parts)))

    def within(self, kind: Kind, output: ElementSpan, input: ElementSpan, root: int = 0, /) -> None:
        """See ``collectives.Steps``."""
        self.steps.append(Near(kind, output, input, root))

    def along(self, kind: Kind, output: ElementSpan, input: ElementSpan, root: int = 0, /) -> _Begun:
        """See ``collectives.Steps``."""
        self.steps.append(Far(kind, output, input, root))
        self._begun += 1
        return _Begun(self, self._begun - 1)


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


def make_plan(kind: Kind, nodes: Nodes, rank: int, counts: Sequence[int], pieces: int, root: int = 0) -> NodePlan:
    """Record the steps of a rank; the arguments are those of ``collectives.run``."""
    parts = len(nodes.of)
    many = {Kind.ALL_GATHER: (parts, 1), Kind.REDUCE_SCATTER: (1, parts), Kind.ALL_TO_ALL: (parts, parts)}
    of_output, of_input = many.get(kind, (1, 1))
    pairs = [
        (ElementSpan(OUTPUT, 0, of_output * count, tensor), ElementSpan(INPUT, 0, of_input * count, tensor))
        for tensor, count in enumerate(counts)
    ]
    plan = NodePlan()
    collectives.run_recipe(plan, kind, nodes, rank, pairs, counts, pieces, *(root,) * (kind is Kind.BROADCAST))
    return plan
