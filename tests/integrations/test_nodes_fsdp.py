"""FSDP2 and meshes on several nodes: CPU ranks on virtual ones, Gloo between them."""

from __future__ import annotations

from pathlib import Path

import fsdp_cases as machine_cases
import nodes_fsdp_cases as fsdp_cases
import nodes_world as scenarios
import pytest
from group_world import leave
from marks import long
from ranks import RankPool, crew


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ((0, 0, 1, 1), ("mixed precision",)),
        long((0, 1, 1, 0), ("resharded",)),
    ],
    ids=str,
)
def test_shards_among_nodes(pool: RankPool, layout: tuple[int, ...], names: tuple[str, ...]) -> None:
    for told in pool.run(fsdp_cases.as_without, len(layout), layout, names):
        assert told == {name: set() for name in names}


def test_nodes_of_several_sizes_use_the_groups_own_backend(pool: RankPool) -> None:
    assert pool.run(fsdp_cases.flat, 3, (0, 1, 0)) == [None] * 3


@pytest.mark.long
def test_shards_are_gathered_ahead(pool: RankPool) -> None:
    """Layers of 3456 bytes, and one of 3680; without room in symmetric memory, too."""
    (used, flat), *others = pool.run(fsdp_cases.asynchronous, 4, (0, 1, 0, 1), 3500, None)
    assert others == [(used, flat)] * 3 and used > 0
    assert flat == {
        f"{kind}: flat: 2 nodes of 2, 2 ranks; less than 3500: one call is sooner there than three"
        for kind in ("all_gather", "reduce_scatter")
    }
    assert pool.run(fsdp_cases.asynchronous, 4, (0, 1, 0, 1), 1, 1) == [(0, set())] * 4


@pytest.mark.long
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
