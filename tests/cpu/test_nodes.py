"""Process groups on several nodes: CPU ranks on virtual ones, Gloo between them."""

from __future__ import annotations

from pathlib import Path

import fsdp_cases as machine_cases
import nodes_cases as cases
import nodes_fsdp_cases as fsdp_cases
import nodes_world as scenarios
import pytest
import torch
from group_world import leave
from ranks import RankPool, crew

FEW = (torch.float32, torch.uint8)


@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 1, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("case", [cases.moves, cases.reduces], ids=lambda case: case.__name__)
def test_every_collective(pool: RankPool, case: object, layout: tuple[int, ...]) -> None:
    few = () if layout == (0, 0, 1, 1) else (FEW[: 1 if case is cases.reduces else 2],)
    pool.run(case, len(layout), layout, *few)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (cases.in_pieces, (0, 0, 1, 1)),
        (cases.listed, (0, 1, 1, 0)),
        (cases.listed, (0, 1, 1)),
        (cases.small, (0, 1, 1)),
        (cases.refused, (0, 1, 0, 1)),
        (cases.lacking, (0, 0, 1)),
        (cases.half_made, (0, 0, 1, 2)),
        (cases.interrupted, (0, 0, 1, 1)),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_calls(pool: RankPool, case: object, layout: tuple[int, ...]) -> None:
    pool.run(case, len(layout), layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ((0, 0, 1, 1), ("mixed precision",)),
        ((0, 1, 0), ("resharded",)),
    ],
    ids=str,
)
def test_shards_among_nodes(pool: RankPool, layout: tuple[int, ...], names: tuple[str, ...]) -> None:
    for told in pool.run(fsdp_cases.as_without, len(layout), layout, names):
        assert told == {name: set() for name in names}


def test_shards_are_gathered_ahead(pool: RankPool) -> None:
    """Layers of 3456 bytes, and one of 3680; without room in symmetric memory, too."""
    (used, flat), *others = pool.run(fsdp_cases.asynchronous, 4, (0, 1, 0, 1), 3500, None)
    assert others == [(used, flat)] * 3 and used > 0
    assert flat == {
        f"{kind}: flat: 2 nodes of 2, 2 ranks; less than 3500: one call is sooner there than three"
        for kind in ("all_gather", "reduce_scatter")
    }
    assert pool.run(fsdp_cases.asynchronous, 4, (0, 1, 0, 1), 1, 1) == [(0, set())] * 4


def test_two_buffers_and_scratch_do_for_all_layers(pool: RankPool) -> None:
    """As the guide says: two of a gathered size, and once the gradients of a layer."""
    layer = 512 * 512 * 4
    assert pool.run(fsdp_cases.memory, 4, (0, 1, 1, 0)) == [{True: (2 + 1) * layer, False: (4 + 1) * layer}] * 4


def test_meshes_hsdp_and_smaller_groups(tmp_path: Path) -> None:
    with crew(4) as ranks:
        for elsewhere in ranks.run(machine_cases.in_two_dimensions):
            assert elsewhere.keys() == {"all_gather: another group than that of the shards"}
        ranks.run(leave)
        ranks.run(scenarios.meshes, None, str(tmp_path))
        ranks.run(scenarios.late, None, str(tmp_path))


def test_the_dead_are_named(tmp_path: Path) -> None:
    """Of the last of a node nobody on its machine is left to tell; one of those who live is on no rail."""
    with crew(5) as ranks:
        ranks.run(leave)
        ranks.run(scenarios.stays_away, None, str(tmp_path))
        found = ranks.run(scenarios.dies, None, str(tmp_path), dying=(3, 4))
        assert found == [None, None, None, 7, 7]
