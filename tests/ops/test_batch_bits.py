"""The bits of a row do not depend on its batch: sums, norms and GEMVs between CPU processes."""

from __future__ import annotations

import importlib.util

import pytest
from marks import long
from ranks import Crew

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import batch_cases


@pytest.mark.parametrize("world_size", [3, long(4)])
def test_sums(four: Crew, world_size: int) -> None:
    assert min(four.run(batch_cases.sums, world_size, (1, 2, 7, 33), 264)) == 3 * 4 * 8


@pytest.mark.parametrize("world_size", [3, long(4)])
def test_norms(four: Crew, world_size: int) -> None:
    assert min(four.run(batch_cases.norms, world_size, (1, 5), 260)) == 3 * 2 * 2 * 3


def test_gemvs(four: Crew) -> None:
    assert min(four.run(batch_cases.gemvs, 3, 20, 48)) == 15
