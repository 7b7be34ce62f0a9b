"""Process groups on several nodes: CPU ranks on virtual ones, Gloo between them."""

from __future__ import annotations

from pathlib import Path

import nodes_cases as cases
import nodes_world as scenarios
import pytest
import torch
from group_world import leave
from marks import long
from ranks import RankPool, crew

from sidelane.integrations.nodes.topology import Nodes

FEW = (torch.float32, torch.uint8)
LAYOUTS = [(0, 0, 1, 1), (0, 1, 1, 0), (0, 0, 1, 1, 2, 2), (0, 1, 1), long((0, 0, 0, 0, 1, 1, 1, 1))]
"""Nodes of ranks: neighbours and not, three nodes, nodes of several sizes, which go flat, and nodes of four ranks."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", [cases.moves, cases.reduces], ids=lambda case: case.__name__)
def test_every_collective(pool: RankPool, case: object, layout: tuple[int, ...]) -> None:
    few = () if layout == (0, 0, 1, 1) else (FEW[: 1 if case is cases.reduces else 2],)
    pool.run(case, len(layout), layout, *few)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (cases.in_pieces, (0, 0, 1, 1)),
        (cases.listed, (0, 1, 1, 0)),
        (cases.lazy, (0, 0, 1, 1)),
        long(cases.lazy, (0, 1, 2, 2, 1, 0)),  # two nodes are late as well, and three are in test_every_collective
        (cases.small, (0, 1, 1, 0)),
        (cases.refused, (0, 1, 0, 1)),
        (cases.lacking, (0, 0, 1, 1)),
        (cases.half_made, (0, 0, 1, 1)),
        (cases.interrupted, (0, 0, 1, 1)),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_calls(pool: RankPool, case: object, layout: tuple[int, ...]) -> None:
    pool.run(case, len(layout), layout)  # type: ignore[arg-type]


def test_nodes_are_those_that_names_say() -> None:
    nodes = Nodes.named(["b", "a", "b", "b", "a"])
    assert nodes.members == ((0, 2, 3), (1, 4)) and nodes.rails == 2 and not nodes.even and nodes.spans
    assert nodes.coordinates(3) == (0, 2) and str(nodes) == "2 nodes of 3, 2 ranks"
    assert not Nodes.named(["x"]).spans
    for of in ((), (1,), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match=r"Nodes: of .*\(value="):
            Nodes(of)


def test_the_dead_are_named(tmp_path: Path) -> None:
    """Of a whole node nobody on its machine is left to tell."""
    with crew(6) as ranks:
        ranks.run(leave)
        ranks.run(scenarios.stays_away, None, str(tmp_path))
        found = ranks.run(scenarios.dies, None, str(tmp_path), dying=(2, 3, 5))
        assert found == [None, None, 7, 7, None, 7]
