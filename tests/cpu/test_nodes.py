"""Process groups on several nodes: CPU ranks on virtual ones, Gloo between them."""

from __future__ import annotations

import nodes_cases as cases
import pytest
import torch
from ranks import RankPool

FEW = (torch.float32, torch.uint8)


@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 1, 1, 0, 1), (0, 0, 1, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("case", [cases.moves, cases.reduces], ids=lambda case: case.__name__)
def test_every_collective(pool: RankPool, case: object, layout: tuple[int, ...]) -> None:
    few = () if layout == (0, 0, 1, 1) else (FEW[: 1 if case is cases.reduces else 2],)
    pool.run(case, len(layout), layout, *few)  # type: ignore[arg-type]
