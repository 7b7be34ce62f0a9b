"""Rank functions for tests of the end-to-end study's workloads."""

from __future__ import annotations

import importlib

import torch.distributed as dist
from fused_ops import communicator

from sidelane_lab.studies.e2e.prediction import sizes_of
from sidelane_lab.studies.e2e.workload import Prepared


def tiny_steps(group: dist.ProcessGroup, name: str) -> dict[str, list[str]]:
    """Ways of a workload, by small size; each way's result is close to the first one's, twice."""
    workload = importlib.import_module(f"sidelane_lab.studies.e2e.{name}").WORKLOAD
    found = {}
    with communicator(group) as comm:
        for size in sizes_of(workload, (), on_cpu=True):
            prepared = workload.prepare(workload.sizes[size], group, comm, comm.device)
            assert prepared.units > 0
            assert all(value > 0 for value in prepared.facts.values()), prepared.facts
            for _ in range(2):
                compare(prepared, size)
            found[size] = list(prepared.steps)
        comm.synchronize()
    return found


def compare(prepared: Prepared, size: str) -> None:
    first = None
    for way, step in prepared.steps.items():
        result = step().clone()
        first = result if first is None else first
        if way != "none":
            error = ((result - first).norm() / first.norm()).item()
            assert first.norm() > 0 and error <= prepared.tolerance, (size, way, error)
