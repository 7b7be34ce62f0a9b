"""Plans of collectives among several nodes, carried out for all ranks at once, in random orders."""

from __future__ import annotations

import pytest

from common import nodes_oracle
from sidelane.integrations.nodes import plan as plans
from sidelane.integrations.nodes.plan import make_plan
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind

LAYOUTS = [
    *((0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1), (0, 1, 1, 1, 0), (0, 0, 0, 0, 1), (0, 1, 2)),
    *((0, 1, 2, 2, 1, 0), (0, 0, 1, 1, 1, 1, 2), (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2, 2)),
]
KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "".join(map(str, layout)))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_element_arrives(layout: tuple[int, ...], kind: Kind) -> None:
    nodes = Nodes.named([str(node) for node in layout])
    if plans.objection(kind, nodes):
        with pytest.raises(ValueError, match="a node of more than 2 times the ranks of another"):
            make_plan(kind, nodes, 0, (5,), 1)
        return
    size, number = len(layout), 0
    lists = [((1,), 1), ((7,), 1), ((5,), 3), ((8,), 2), ((3,), 5)]
    for counts, pieces in lists if kind is Kind.BROADCAST else [*lists, ((4, 0, 1, 6), 1), ((4, 1, 6), 3)]:
        for root in (0, size - 1) if kind is Kind.BROADCAST else (0,):
            made = [make_plan(kind, nodes, rank, counts, pieces, root) for rank in range(size)]
            number += 1
            form = {"in_place": number % 2 == 0, "average": number % 3 == 0}
            assert nodes_oracle.run(kind, nodes, counts, made, number, root, **form) == "", (counts, pieces, form)


def test_scratch_is_used_again() -> None:
    """Two pieces are under way at once; the third has the memory of the first."""
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL):
        for layout in ("aabb", "aabbb"):
            whole, cut = (make_plan(kind, Nodes.named(layout), 0, (800,), pieces).scratch for pieces in (1, 8))
            assert 4 * sum(cut.values()) <= sum(whole.values()) + 100, (kind, whole, cut)


def test_a_far_step_is_under_way_while_the_near_part_of_another_piece_runs() -> None:
    nodes = Nodes.named("aabb")
    steps = make_plan(Kind.ALL_REDUCE, nodes, 0, (100,), 3).steps
    names = [type(step).__name__ for step in steps]
    assert names.index("Join") > names.index("Near", names.index("Far")), names
    assert names.count("Far") == names.count("Join") == names.count("Near") == 3


def test_nodes_are_those_that_names_say() -> None:
    nodes = Nodes.named(["b", "a", "b", "b", "a"])
    assert nodes.members == ((0, 2, 3), (1, 4)) and nodes.rails == 2 and not nodes.even and nodes.spans
    assert nodes.seat(3) == (0, 2) and nodes.rail(1) == (2, 4) and str(nodes) == "2 nodes of 3, 2 ranks"
    assert not Nodes.named(["x"]).spans
