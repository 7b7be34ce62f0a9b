"""The workload of sequence parallelism: every way's step is that of the library, between CPU processes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from marks import long
from ranks import crew
from sweeps import communicator

from sidelane_lab.studies.e2e.attention import WORKLOAD, AttentionSize


def tiny_steps(group: dist.ProcessGroup, is_causal: bool) -> dict[str, list[float]]:
    """Norms of the results of two steps by each way, and of their differences from the first way's."""
    size = dataclasses.replace(WORKLOAD.sizes["tiny"], is_causal=is_causal)
    with communicator(group) as comm:
        prepared = WORKLOAD.prepare(size, group, comm, comm.device)
        right, found = None, {}
        for way, step in prepared.steps.items():
            results = [step() for _ in range(2)]
            right = results[0] if right is None else right
            norm = torch.linalg.vector_norm(right)
            found[way] = [float(torch.linalg.vector_norm(one - right) / norm) for one in results]
            if way != "none":
                assert max(found[way]) <= prepared.tolerance, (way, found[way])
        assert float(norm) > 0 and max(found["none"]) > prepared.tolerance
        n = comm.world_size
        assert prepared.units == 24 and prepared.facts["sent_bytes"] == 2 * 2 * 24 // n * 72 * 8 * 4 * (n - 1) // n
    return found


@pytest.mark.parametrize("n", [2, long(3)])
def test_ways_agree(n: int) -> None:
    with crew(n) as ranks:
        for is_causal in (True, False):
            for found in ranks.run(tiny_steps, n, is_causal, timeout_s=100):
                assert list(found) == ["nccl", "group", "operators", "none"]


def test_parameters_are_those_of_the_published_model() -> None:
    llama = WORKLOAD.sizes["llama-3.1-8b-16k"]
    assert llama.parameters == 4 * 218_112_000
    assert AttentionSize(1, 8, 4, 2, 1, 2, 3, is_causal=False).parameters == 4 * 2 * 6 + 2 * 4 * 3 + 8
