"""Workloads of the end-to-end study: every way's step is that of the library, between CPU processes."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
from marks import long
from on_ranks import on_ranks

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


import torch.distributed as dist
from fused_ops import communicator

from sidelane_lab.studies.e2e.prediction import sizes_of
from sidelane_lab.studies.e2e.workload import Prepared

WAYS = {
    "experts": ["nccl", "nccl, our sums", "nccl, gathered", "copies", "operators", "operators, routed", "none"],
    "mlp": ["nccl", "nccl, halves", "copies", "copies, halves", "none"],
    "recommendation": ["nccl", "nccl, a bag a table", "nccl, our bags", "copies", "operators", "none"],
}


@on_ranks(2, long(3), interpreted=True)
@pytest.mark.parametrize("name", WAYS)
def test_ways_of_a_workload_agree(group: dist.ProcessGroup, name: str) -> None:
    """Ways of a workload, by small size; each way's result is close to the first one's, twice for the first size."""
    workload = importlib.import_module(f"sidelane_lab.studies.e2e.{name}").WORKLOAD
    found = {}
    with communicator(group) as comm:
        for size in sizes_of(workload, (), on_cpu=True):
            prepared = workload.prepare(workload.sizes[size], group, comm, comm.device)
            assert prepared.units > 0
            assert all(value > 0 for value in prepared.facts.values()), prepared.facts
            for _ in range(2 if size == "tiny" else 1):
                compare(prepared, size)
            found[size] = list(prepared.steps)
        comm.synchronize()
    assert found["tiny"] == WAYS[name]
    assert len(found) == {"experts": 7, "mlp": 2, "recommendation": 3}[name]
    assert all(ways[0] == "nccl" and {"operators", "copies, halves"} & set(ways) for ways in found.values())


def compare(prepared: Prepared, size: str) -> None:
    first = None
    for way, step in prepared.steps.items():
        result = step().clone()
        first = result if first is None else first
        if way != "none":
            error = ((result - first).norm() / first.norm()).item()
            assert first.norm() > 0 and error <= prepared.tolerance, (size, way, error)
