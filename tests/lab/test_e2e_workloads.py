"""Workloads of the end-to-end study: every way's step is that of the library, between CPU processes."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch.distributed as dist
from fused_ops import communicator
from marks import long
from on_ranks import on_ranks
from ranks import crew

from sidelane.program.collective import Kind
from sidelane_lab.studies.e2e import attention
from sidelane_lab.studies.e2e.attention import AttentionSize
from sidelane_lab.studies.e2e.prediction import sizes_of
from sidelane_lab.studies.e2e.workload import EndToEndWorkload, Prepared

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
    sizes = {size: workload.sizes[size] for size in sizes_of(workload, (), on_cpu=True)}
    found = agree(group, workload, sizes)
    assert found["tiny"] == WAYS[name]
    assert len(found) == {"experts": 7, "mlp": 2, "recommendation": 3}[name]
    assert all(ways[0] == "nccl" and {"operators", "copies, halves"} & set(ways) for ways in found.values())


@pytest.mark.parametrize("n", [2, long(3)])
def test_ways_of_attention_agree(n: int) -> None:
    """Its process group of Sidelane's is of all ranks that there are."""
    tiny = attention.WORKLOAD.sizes["tiny"]
    sizes = {"tiny": tiny, "to all positions": dataclasses.replace(tiny, is_causal=False)}
    with crew(n) as ranks:
        for found in ranks.run(agree, n, attention.WORKLOAD, sizes, timeout_s=100):
            assert found == {size: ["nccl", "group", "operators", "none"] for size in sizes}


def agree(group: dist.ProcessGroup, workload: EndToEndWorkload, sizes: dict[str, Any]) -> dict[str, list[str]]:
    """Compare the ways of a workload at some sizes. Returns their names."""
    found = {}
    with communicator(group) as comm:
        for size, parameters in sizes.items():
            prepared = workload.prepare(parameters, group, comm, comm.device)
            assert prepared.units > 0
            assert all(value > 0 for value in prepared.facts.values()), prepared.facts
            for _ in range(2 if size == "tiny" else 1):
                compare(prepared, size)
            found[size] = list(prepared.steps)
        comm.synchronize()
    return found


def compare(prepared: Prepared, size: str) -> None:
    first = None
    for way, step in prepared.steps.items():
        result = step().clone()
        first = result if first is None else first
        if way != "none" or result.shape == first.shape:
            error = ((result - first).norm() / first.norm()).item()
            assert first.norm() > 0 and (error <= prepared.tolerance) == (way != "none"), (size, way, error)


def test_blocks_of_attention_have_the_published_parameters_and_exchange_every_head() -> None:
    assert attention.WORKLOAD.sizes["llama-3.1-8b-16k"].parameters == 4 * 218_112_000
    assert AttentionSize(1, 8, 4, 2, 1, 2, 3, is_causal=False).parameters == 4 * 2 * 6 + 2 * 4 * 3 + 8
    exchanged = attention.WORKLOAD.sizes["tiny"].collectives(2, 4)
    assert exchanged == [(Kind.ALL_TO_ALL, 12 * 8 * 4 * heads, 4) for heads in (48, 24)]
