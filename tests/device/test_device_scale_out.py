"""Two GPUs as two nodes: an embedding whose slices go over NCCL, words in pinned memory, and unfused operators.

NCCL uses sockets, as between machines. Four ranks share two GPUs, for the bytes only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from device_pool import Pool

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import fused_cases

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CASES = "scale_out_cases"


class Nodes:
    """Ranks, rank r on GPU r modulo 2 and on the node with that number; replaced for the next test if one failed."""

    def __init__(self, count: int) -> None:
        self.layout = tuple(rank % 2 for rank in range(count))
        self._pool: Pool | None = None

    def pool(self) -> Pool:
        """Processes that reach each other over sockets only."""
        if self._pool is None or self._pool.broken:
            settings = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
            settings |= {"CUDA_VISIBLE_DEVICES": "0,1"}
            self._pool = Pool(len(self.layout), environment=settings)
        return self._pool

    def run(self, name: str, *args: object, timeout_s: float = 120.0) -> list[object]:
        """Run a case of CPU ranks on the GPUs."""
        return self.pool().run(fused_cases.as_on_cpus, CASES, name, self.layout, *args, timeout_s=timeout_s)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    made = Nodes(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Nodes]:
    made = Nodes(4)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["forward_back_to_back", "backward_back_to_back"])
def test_back_to_back(two: Nodes, name: str) -> None:
    assert all(two.run(name, 10))


def test_four_ranks_on_two_gpus(four: Nodes) -> None:
    """Slices only: NCCL makes no all-to-all of ranks that share a GPU."""
    assert all(four.run("forward_back_to_back", 2, timeout_s=150))


def test_many_large_calls(two: Nodes) -> None:
    assert two.run("large", 20) == [20, 20]


def test_layers_are_trained(two: Nodes) -> None:
    two.run("layers")


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("how", ["refused", "late"])
def test_the_rank_at_fault_is_named(how: str, is_fused: bool) -> None:
    nodes = Nodes(2)
    try:
        (other, _), *_ = nodes.run("fails", 1, how, is_fused)  # type: ignore[misc]
        assert other == (1,)
    finally:
        nodes.close()


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
def test_a_rank_that_dies_is_named(is_fused: bool) -> None:
    nodes = Nodes(2)
    try:
        pool = nodes.pool()
        pool.begin(fused_cases.as_on_cpus, CASES, "fails", nodes.layout, 1, "dies", is_fused)
        ((ranks, text),) = pool.finish(90.0, but=(1,))
        assert ranks == (1,), text
    finally:
        nodes.close()
