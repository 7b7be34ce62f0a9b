"""Plans of several nodes are proved, and wrong ones are found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sidelane.integrations.nodes import plan
from sidelane.integrations.nodes.plan import make_plan, objection
from sidelane.integrations.nodes.steps import Copies, Join, Near, Plan, Spread
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.nodes.verify import PlanError, verify_plans
from sidelane.program.collective import Kind

KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST)
LAYOUTS = ("ab", "aabb", "abab", "aab", "abbba", "aaaab", "abccba", "aabbbbc", "aabbccdd", "abbcccdddd", "abcd")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_plans_are_right(kind: Kind, layout: str) -> None:
    nodes = Nodes.named(layout)
    if objection(kind, nodes):
        pytest.skip("no steps for a node that is so much larger")
    lists = [(1,), (7,), (3,), (2, 0, 5)] if kind is not Kind.BROADCAST else [(1,), (7,), (3,)]
    for counts in lists:
        for pieces in (1, 3, 5):
            for root in (0, len(layout) - 1) if kind is Kind.BROADCAST else (0,):
                assert verify_plans(kind, nodes, counts, pieces, root) > 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_large_pieces_begin_at_whole_vectors(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with tensors of 16384 elements and more, whose pieces begin at multiples of 256."""
    monkeypatch.setattr(plan, "_CUT_AT", 4)
    counts = (301,) if kind is Kind.BROADCAST else (301, 5, 257)
    for layout in ("aabb", "aab"):
        for pieces in (3, 8):
            assert verify_plans(kind, Nodes.named(layout), counts, pieces) > 0
    cuts = [cut for piece in plan._cut(counts, 8) for cut in piece]
    assert len(cuts) > 8 - (kind is Kind.BROADCAST)
    assert all(cut.begin % 4 == 0 for cut in cuts if cut.count > 256), cuts


@pytest.mark.parametrize(
    ("kind", "without", "layout"),
    [
        *((kind, step, "aabb") for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE) for step in (Copies, Spread, Join)),
        *((kind, step, "aabbb") for kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) for step in (Copies, Near, Join)),
    ],
    ids=str,
)
def test_a_step_that_is_left_out_is_found(kind: Kind, without: type, layout: str) -> None:
    def make(*arguments: Any) -> Plan:
        plan = make_plan(*arguments)
        if arguments[2] != 1:
            return plan
        lost = next(step for step in reversed(plan.steps) if isinstance(step, without))
        return dataclasses.replace(plan, steps=tuple(step for step in plan.steps if step is not lost))

    with pytest.raises(PlanError):
        verify_plans(kind, Nodes.named(layout), (6,), 2, make=make)


def test_a_join_that_comes_too_late_is_found() -> None:
    """What has come is copied before it is there."""

    def make(*arguments: Any) -> Plan:
        plan = make_plan(*arguments)
        joins = [step for step in plan.steps if isinstance(step, Join)]
        return dataclasses.replace(plan, steps=(*(step for step in plan.steps if step not in joins), *joins))

    with pytest.raises(PlanError, match="belongs to far step 0 under way"):
        verify_plans(Kind.ALL_GATHER, Nodes.named("aabb"), (6,), 2, make=make)
