"""Explanation of a call among several nodes: its choice, the reason, and the place of each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from sidelane.integrations.nodes.choose import HIERARCHICAL, NodesChoice, choose
from sidelane.integrations.nodes.plan import make_plan
from sidelane.integrations.nodes.steps import (
    PACKED,
    Copies,
    ElementSpan,
    Far,
    Join,
    Near,
    NodeBroadcast,
    NodePlan,
    Step,
)
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import ELEMENT_BYTES, REDUCING, Kind


@dataclasses.dataclass(frozen=True, slots=True)
class ExplainedStep:
    """A step of a rank.

    Attributes:
        where: place of the step: a node or a rail.
        what: description of the step.
        nbytes: bytes of this rank's side; 0 for none.
    """

    where: str
    what: str
    nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Explained:
    """Result of :func:`explain_nodes`.

    Attributes:
        nodes: nodes of the ranks.
        choice: chosen way of the call, with the reason.
        rank: rank whose steps are listed; the first of the first node.
        steps: steps in their order; none if the call goes flat.
        stays: bytes of scratch in symmetric memory that later calls use again.
        scratch: bytes of other scratch.
    """

    nodes: Nodes
    choice: NodesChoice
    rank: int
    steps: tuple[ExplainedStep, ...]
    stays: int
    scratch: int

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as one JSON object."""
        return {
            "nodes": [len(ranks) for ranks in self.nodes.members],
            "takes": self.choice.name,
            "reason": self.choice.reason,
            "legal": list(self.choice.legal),
            "pieces": self.choice.pieces,
            "rank": self.rank,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "scratch_that_stays_bytes": self.stays,
            "scratch_bytes": self.scratch,
        }


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


def counts_of(kind: Kind, nbytes: int, dtype: str, ranks: int, tensors: int = 1) -> tuple[tuple[int, ...], int]:
    """Return the numbers of elements for :func:`make_plan`, for so many tensors, and the bytes of an element.

    Args:
        kind: kind of the collective.
        nbytes: bytes of the larger side of each tensor; rounded up to whole elements, and to as many for each rank.
        dtype: dtype of reduced elements; elements that only move are bytes.
        ranks: number of ranks of the group.
        tensors: number of tensors of a list.
    """
    item = ELEMENT_BYTES[dtype]
    parts = 1 if kind in (Kind.ALL_REDUCE, Kind.BROADCAST) else ranks
    elements = -(-nbytes // (parts * item))
    each = (elements, item) if kind in REDUCING else (elements * item, 1)
    return (each[0],) * tensors, each[1]


def explain_nodes(kind: Kind, nodes: Nodes, nbytes: int, dtype: str = "bfloat16", tensors: int = 1) -> Explained:
    """Explain a call without making it.

    Args:
        kind: kind of the collective; a broadcast is from rank 0.
        nodes: nodes of the ranks.
        nbytes: gathered bytes of an all_gather, the local buffer of the others; of each tensor.
        dtype: dtype of the elements.
        tensors: number of tensors of a list in one call.
    """
    ranks, rank = len(nodes.of), 0
    steps_for = None if kind in (Kind.SCATTER, Kind.GATHER) else kind
    choice = choose(steps_for, nbytes * tensors, nodes, without=f"{kind}: all of it passes the root's network")
    if choice.name != HIERARCHICAL:
        return Explained(nodes, choice, rank, (), 0, 0)
    counts, item = counts_of(kind, nbytes, dtype, ranks, tensors)
    plan = make_plan(kind, nodes, rank, counts, choice.pieces)
    stays = sum(count for name, count in plan.scratch.items() if name.startswith(PACKED)) * item
    scratch = sum(plan.scratch.values()) * item - stays
    return Explained(nodes, choice, rank, tuple(_told(plan, nodes, rank, item)), stays, scratch)


def _told(plan: NodePlan, nodes: Nodes, rank: int, item: int) -> Iterator[ExplainedStep]:
    node, place = nodes.seat(rank)
    near, rail = f"node {node}", f"rail {place}"
    begun = 0
    for step in plan.steps:
        if isinstance(step, Far):
            yield ExplainedStep(
                rail, f"begin {step.kind} {begun} of ranks {_named(nodes.rail(place))}", step.input.count * item
            )
            begun += 1
        elif isinstance(step, Join):
            yield ExplainedStep(rail, f"wait for {step.number}")
        elif not isinstance(step, Copies) or step.pairs:
            yield ExplainedStep("rank" if isinstance(step, Copies) else near, *_near(step, nodes.members[node], item))


def _near(step: Step, own: Sequence[int], item: int) -> tuple[str, int]:
    if isinstance(step, Copies):
        return f"copy {_counted([span for span, _ in step.pairs])}", sum(span.count for span, _ in step.pairs) * item
    if isinstance(step, NodeBroadcast):
        roots = sorted({root for root, _ in step.parts})
        text = (
            f"broadcast {_counted([span for _, span in step.parts])} of ranks {_named([own[root] for root in roots])}"
        )
        return text, sum(span.count for _, span in step.parts) * item
    assert isinstance(step, Near)
    return f"{step.kind} of ranks {_named(own)}", step.input.count * item


def _counted(spans: Sequence[ElementSpan]) -> str:
    return f"{len(spans)} part{'s' * (len(spans) > 1)}"


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
