"""Fused operators among virtual nodes, by Triton's interpreter, against float64."""

from __future__ import annotations

import importlib.util

import pytest
from marks import long
from ranks import Crew

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import scale_out_cases as cases


@pytest.mark.parametrize(
    ("layout", "capacity", "transport"),
    [
        ((0, 1), 1, "sockets"),
        ((0, 0, 1, 1), 64, "sockets"),
        long((0, 0), 64, "sockets"),
        long((0, 1, 1, 0), 2, "sockets"),
        long((0, 1, 0), 2, "group"),
    ],
    ids=str,
)
def test_embeddings_back_to_back(four: Crew, layout: tuple[int, ...], capacity: int, transport: str) -> None:
    found = four.run(cases.forward_back_to_back, len(layout), layout, 2, capacity, transport, timeout_s=110)
    assert found == [6] * len(layout)


@pytest.mark.parametrize("layout", [(0, 1), long((0, 1, 1)), long((0, 0, 1, 1)), long((0, 0))], ids=str)
def test_gradients_of_embeddings(four: Crew, layout: tuple[int, ...]) -> None:
    done = four.run(cases.backward_back_to_back, len(layout), layout, 2, timeout_s=110)
    assert all(found >= 6 for found in done)
