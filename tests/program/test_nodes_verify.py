"""Plans of several nodes are proved, and wrong ones are found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sidelane.integrations.nodes.plan import Copies, Join, Plan, Spread, make_plan, objection
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
        pytest.skip("no steps for nodes of several sizes")
    for count, pieces in ((1, 1), (7, 1), (7, 3), (3, 5)):
        for root in (0, len(layout) - 1):
            assert verify_plans(kind, nodes, count, pieces, root) > 0


@pytest.mark.parametrize("without", [Copies, Spread, Join], ids=lambda step: step.__name__)
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_REDUCE], ids=str)
def test_a_step_that_is_left_out_is_found(kind: Kind, without: type) -> None:
    def make(*arguments: Any) -> Plan:
        plan = make_plan(*arguments)
        if arguments[2] != 1:
            return plan
        lost = next(step for step in reversed(plan.steps) if isinstance(step, without))
        return dataclasses.replace(plan, steps=tuple(step for step in plan.steps if step is not lost))

    with pytest.raises(PlanError):
        verify_plans(kind, Nodes.named("aabb"), 6, 2, make=make)


def test_a_join_that_comes_too_late_is_found() -> None:
    """What has come is copied before it is there."""

    def make(*arguments: Any) -> Plan:
        plan = make_plan(*arguments)
        joins = [step for step in plan.steps if isinstance(step, Join)]
        return dataclasses.replace(plan, steps=(*(step for step in plan.steps if step not in joins), *joins))

    with pytest.raises(PlanError, match="belongs to far step 0 under way"):
        verify_plans(Kind.ALL_GATHER, Nodes.named("aabb"), 6, 2, make=make)
