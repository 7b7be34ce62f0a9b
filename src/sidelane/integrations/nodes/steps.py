"""Steps of a rank in a collective among several nodes, as frozen data.

Each value checks itself, as far as that needs no other rank: numbers are whole, none is negative, names and kinds are
known. Errors are :class:`PlanError`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

from sidelane.program.collective import Kind

INPUT, OUTPUT, PACKED, MIDDLE, ARRIVED = "input", "output", "packed", "middle", "arrived"
"""Names of a call's tensors: the caller's, and three of scratch, each of them twice (``packed0``, ``packed1``).
Near steps read ``packed``, far ones read ``middle`` and write ``arrived``."""

SCRATCH = tuple(f"{name}{turn}" for name in (PACKED, MIDDLE, ARRIVED) for turn in (0, 1))
BUFFERS = (INPUT, OUTPUT, *SCRATCH)

NEAR_KINDS = (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.SCATTER)
FAR_KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST)
IN_PLACE = (Kind.ALL_REDUCE, Kind.BROADCAST)
"""Kinds that have one tensor, which is both read and written."""


class PlanError(ValueError):
    """Error in a plan; the text names rank, step and elements."""


@dataclasses.dataclass(frozen=True, slots=True)
class ElementSpan:
    """``count`` elements of a tensor.

    Attributes:
        buffer: one of ``BUFFERS``.
        tensor: index in the caller's list; 0 for scratch.
    """

    buffer: str
    offset: int
    count: int
    tensor: int = 0

    def __post_init__(self) -> None:
        if self.buffer not in BUFFERS:
            raise PlanError(f"Span: buffer (value={self.buffer!r}, allowed={', '.join(BUFFERS)})")
        for name, value in (("offset", self.offset), ("count", self.count), ("tensor", self.tensor)):
            if type(value) is not int or value < 0:  # plans of many ranks have spans by the million
                _set(self, name, whole(f"Span of {self.buffer}: {name}", value))
        if self.tensor and self.buffer in SCRATCH:
            raise PlanError(f"Span of {self.buffer}: tensor (value={self.tensor}, allowed=0, the only one)")

    @property
    def end(self) -> int:
        """Index behind the last element."""
        return self.offset + self.count

    def part(self, offset: int, count: int) -> ElementSpan:
        """Return ``count`` elements of the span from ``offset`` on."""
        if not 0 <= offset <= offset + count <= self.count:
            raise PlanError(f"Span.part: elements (value={offset} to {offset + count} of {self}, allowed=inside of it)")
        return ElementSpan(self.buffer, self.offset + offset, count, self.tensor)

    def __str__(self) -> str:
        of = f" of tensor {self.tensor}" if self.tensor else ""
        return f"{self.buffer}[{self.offset}:{self.end}]{of}"


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Copies within this rank, in any order: (to, from), of one size. No destination overlaps another span."""

    pairs: tuple[tuple[ElementSpan, ElementSpan], ...]

    def __post_init__(self) -> None:
        _set(
            self,
            "pairs",
            tuple(_pair("Copies", pair, ElementSpan, ElementSpan) for pair in _listed("Copies: pairs", self.pairs)),
        )
        for to, given in self.pairs:
            if to.count != given.count:
                raise PlanError(f"Copies: pair (value={given} to {to}, allowed=as many elements)")

    def __str__(self) -> str:
        return f"copies to {_few([to for to, _ in self.pairs])} from {_few([given for _, given in self.pairs])}"


@dataclasses.dataclass(frozen=True, slots=True)
class NodeBroadcast:
    """Broadcasts in one node, as one call: the root's number there, and the elements that the root's replace."""

    parts: tuple[tuple[int, ElementSpan], ...]

    def __post_init__(self) -> None:
        parts = [_pair("Spread", part, object, ElementSpan) for part in _listed("Spread: parts", self.parts)]
        _set(self, "parts", tuple((whole(f"Spread of {span}: root", root), span) for root, span in parts))

    def __str__(self) -> str:
        roots = ", ".join(map(str, sorted({root for root, _ in self.parts})))
        return f"spread of {_few([span for _, span in self.parts])} by {roots}"


@dataclasses.dataclass(frozen=True, slots=True)
class Near:
    """A reduce-scatter, an all-to-all or a scatter in one node.

    Attributes:
        kind: kind of the collective.
        root: rank of the node whose input a scatter reads, and no other's; 0 for other kinds.
    """

    kind: Kind
    output: ElementSpan
    input: ElementSpan
    root: int = 0

    def __post_init__(self) -> None:
        _collective(self, NEAR_KINDS)
        _check_root(self, Kind.SCATTER)

    def __str__(self) -> str:
        root = f" by {self.root}" if self.kind is Kind.SCATTER else ""
        return f"near {self.kind} from {self.input} to {self.output}{root}"


@dataclasses.dataclass(frozen=True, slots=True)
class Far:
    """Begin of a collective of this rank's rail.

    Attributes:
        kind: kind of the collective; for an all-reduce and a broadcast ``input`` is ``output``.
        root: node of a broadcast; 0 for other kinds.
        sent, received: elements to and from each node, for an all-to-all whose parts differ; () for equal ones.
    """

    kind: Kind
    output: ElementSpan
    input: ElementSpan
    root: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _collective(self, FAR_KINDS)
        if self.kind in IN_PLACE and self.input != self.output:
            raise PlanError(f"Far: input of {self.kind} (value={self.input}, allowed={self.output}, its output)")
        _check_root(self, Kind.BROADCAST)
        for name, span in (("sent", self.input), ("received", self.output)):
            title = f"Far: {name}"
            parts = tuple(whole(title, count) for count in _listed(title, getattr(self, name)))
            _set(self, name, parts)
            if parts and (self.kind is not Kind.ALL_TO_ALL or sum(parts) != span.count):
                raise PlanError(f"{title} (value={parts}, allowed=the parts of {span}, of an all_to_all)")
        if len(self.sent) != len(self.received):
            raise PlanError(f"Far: sent and received (value={self.sent}, {self.received}, allowed=both or none)")

    def __str__(self) -> str:
        root = f" by node {self.root}" if self.kind is Kind.BROADCAST else ""
        parts = f" as {self.sent} and {self.received}" if self.sent else ""
        return f"far {self.kind} from {self.input} to {self.output}{root}{parts}"


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """End of the ``number``-th far step of this rank, from 0: the next step begins behind it."""

    number: int

    def __post_init__(self) -> None:
        _set(self, "number", whole("Join: number", self.number))

    def __str__(self) -> str:
        return f"join of far step {self.number}"


Step = Copies | NodeBroadcast | Near | Far | Join


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlan:
    """Steps of one rank.

    A step ends before the next begins; a far one goes on until it is joined, beside all steps in between and beside
    other far steps. The accesses of one step, and those of steps under way beside each other, must not touch
    elements that another of them writes.

    Attributes:
        steps: steps in their order.
        scratch: number of elements of each scratch tensor. Those of ``packed`` are the same, in one order, on all ranks
            of a node, which take them together.
    """

    steps: tuple[Step, ...]
    scratch: dict[str, int]

    def __post_init__(self) -> None:
        _set(self, "steps", tuple(_listed("Plan: steps", self.steps)))
        for number, step in enumerate(self.steps):
            if not isinstance(step, Step):
                raise PlanError(f"Plan: step {number} (value={step!r}, allowed=Copies, Spread, Near, Far or Join)")
        if not isinstance(self.scratch, dict) or not all(name in SCRATCH for name in self.scratch):
            raise PlanError(f"Plan: scratch (value={self.scratch!r}, allowed=elements of {', '.join(SCRATCH)})")
        _set(self, "scratch", {name: whole(f"Plan: scratch {name}", n) for name, n in self.scratch.items()})


@dataclasses.dataclass(frozen=True, slots=True)
class StepGroup:
    """Steps of a piece: those before its far steps, the far steps, those beside them, and those after them."""

    before: tuple[Step, ...]
    far: tuple[Far, ...]
    beside: tuple[Step, ...]
    after: tuple[Step, ...]


def whole(what: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """Return a whole number from ``least`` to ``most`` as an ``int``.

    Raises:
        PlanError: the value is something else.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least or (most is not None and found > most):
        allowed = f"{least} and more" if most is None else f"{least} to {most}"
        raise PlanError(f"{what} (value={value!r}, allowed=whole numbers, {allowed})")
    return found


def _set(value: object, name: str, to: Any) -> None:
    object.__setattr__(value, name, to)


def _listed(what: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, tuple | list):
        raise PlanError(f"{what} (value={value!r}, allowed=a tuple)")
    return value


def _pair(what: str, value: Any, first: type, second: type) -> tuple[Any, Any]:
    pair = tuple(_listed(what, value))
    if len(pair) != 2 or not (isinstance(pair[0], first) and isinstance(pair[1], second)):
        raise PlanError(f"{what} (value={value!r}, allowed=pairs, of spans)")
    return pair


def _collective(step: Near | Far, kinds: tuple[Kind, ...]) -> None:
    """Check kind and spans of a step."""
    name = type(step).__name__
    if step.kind not in kinds:
        raise PlanError(f"{name}: kind (value={step.kind!r}, allowed={', '.join(kinds)})")
    _set(step, "kind", Kind(step.kind))
    if not (isinstance(step.output, ElementSpan) and isinstance(step.input, ElementSpan)):
        raise PlanError(f"{name}: output and input (value={step.output!r}, {step.input!r}, allowed=spans)")
    if not (step.output.count and step.input.count):
        raise PlanError(f"{name}: elements (value={step.input} to {step.output}, allowed=1 and more)")


def _check_root(step: Near | Far, rooted: Kind) -> None:
    """Check the root of a step; ``rooted``: the kind that has one."""
    name = f"{type(step).__name__}: root of {step.kind}"
    _set(step, "root", whole(name, step.root))
    if step.root and step.kind is not rooted:
        raise PlanError(f"{name} (value={step.root}, allowed=0)")


def _few(spans: list[ElementSpan]) -> str:
    shown = ", ".join(map(str, spans[:3]))
    return f"{shown} and {len(spans) - 3} more" if len(spans) > 3 else shown or "nothing"
