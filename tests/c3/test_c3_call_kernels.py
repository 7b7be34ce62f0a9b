"""Which kernel makes a call of one's own under a strategy of kernels: alike on all ranks, and only where one is."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from sidelane.c3 import overlap
from sidelane.c3.launch import described, unsupported_reason, variant_of
from sidelane.c3.strategies import named
from sidelane.choice import Abilities
from sidelane.choice.candidate import DMA, EVERYTHING
from sidelane.program.collective import Kind


def comm_of(n: int, abilities: Abilities = EVERYTHING) -> Any:
    return types.SimpleNamespace(world_size=n, abilities=abilities, profile=types.SimpleNamespace(profile=None))


@pytest.mark.parametrize("n", [1, 2, 8])
def test_all_blocks(n: int) -> None:
    for kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
        found = variant_of(comm_of(n), named("kernels_priority"), kind, 1 << 20, "bfloat16")
        assert found in ("one_shot", "two_shot"), "what needs symmetric memory is for those who ask for it"


def test_what_no_kernel_runs() -> None:
    with pytest.raises(ValueError, match="overlap: kernels_partition: there is no kernel for scatter here"):
        variant_of(comm_of(4), named("kernels_partition"), Kind.SCATTER, 64, "int32")
    with pytest.raises(ValueError, match="there is no kernel for all_reduce here"):
        variant_of(comm_of(4, Abilities((DMA,))), named("kernels_priority"), Kind.ALL_REDUCE, 64, "int32")
    ours = named("kernels_priority")
    assert "CPU ranks" in unsupported_reason(ours, torch.device("cpu")) and not unsupported_reason(
        ours, torch.device("cuda")
    )
    assert {"kernels_partition", "kernels_priority"} < {*overlap.ON_GPUS} and not {*overlap.ON_GPUS} & {*overlap.NAMES}


def test_bytes_of_tensors_and_lists() -> None:
    a, b = torch.zeros(8, dtype=torch.float16), torch.zeros(3, dtype=torch.float16)
    assert described((a, b)) == (16, "float16")
    assert described(([a, b], [b, b])) == (22, "float16")
    assert described((None, a)) == (16, "float16")
