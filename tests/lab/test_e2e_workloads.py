"""Workloads of the end-to-end study: every way's step is that of the library, between CPU processes."""

from __future__ import annotations

import importlib.util

import pytest
from marks import long
from ranks import Crew

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import e2e_steps

WAYS = {
    "experts": ["nccl", "nccl, our sums", "nccl, gathered", "copies", "operators", "operators, routed", "none"],
    "mlp": ["nccl", "nccl, halves", "copies", "copies, halves", "none"],
    "recommendation": ["nccl", "nccl, a bag a table", "nccl, our bags", "copies", "operators", "none"],
}


@pytest.mark.parametrize(("name", "world_size"), [pair for name in WAYS for pair in ((name, 2), long(name, 3))])
def test_ways_of_a_workload_agree(four: Crew, name: str, world_size: int) -> None:
    for found in four.run(e2e_steps.tiny_steps, world_size, name, timeout_s=110):
        assert found["tiny"] == WAYS[name]
        assert len(found) == {"experts": 7, "mlp": 2, "recommendation": 3}[name]
        assert all(ways[0] == "nccl" and {"operators", "copies, halves"} & set(ways) for ways in found.values())
