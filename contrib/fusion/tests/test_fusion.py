"""The compiler pass between CPU processes, by Triton's interpreter, against the program that is not compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from marks import long
from on_ranks import four
from ranks import Crew, crew

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import fusion_cases
import fusion_llama

__all__ = ["four"]

LLAMAS = [  # shape, trains, sequence, bias, dtype, dynamic
    ((8, 1), False, False, False, torch.bfloat16, False),
    ((2, 10), True, False, False, torch.float32, False),
    ((2, 10), True, True, False, torch.float32, False),
    ((2, 10), True, False, True, torch.float32, False),
    ((1, 520), False, False, False, torch.bfloat16, False),
    ((2, 10), False, False, False, torch.float32, True),
]


@pytest.mark.parametrize("world_size", [2, long(4)])
def test_patterns_are_replaced(four: Crew, world_size: int) -> None:
    assert four.run(fusion_cases.replaced, world_size, timeout_s=110) == [7] * world_size


def test_operators_of_the_pass_are_sound(four: Crew) -> None:
    assert four.run(fusion_cases.checked, 2, timeout_s=110) == [2, 2]


def test_a_pass_on_other_ranks_is_refused(four: Crew) -> None:
    told, *_ = four.run(fusion_cases.other_ranks)
    assert told == "Fusion: ranks of the group (value=[0, 2], allowed=[0, 1], the communicator's)"


@pytest.mark.long  # it compiles nine graphs for a pass that only a change of contrib/fusion or of torch can break
def test_norms_are_replaced(four: Crew) -> None:
    assert four.run(fusion_cases.norms, 2, timeout_s=110) == [9, 9]


@pytest.mark.long
def test_batches_are_replaced_and_lowered_by_inductor(four: Crew) -> None:
    cases = 14 if torch.__version__ >= "2.13" else 9
    assert four.run(fusion_cases.batches, 2, timeout_s=110) == [cases, cases]


@pytest.mark.long
@pytest.mark.parametrize("inductor", [False, True])
def test_a_llama_under_tensor_parallelism(four: Crew, inductor: bool) -> None:
    """Which pairs of a public model become one operator; Inductor keeps less for the gradients of norms."""
    once, joined, norm = {"gemm_all_reduce": 1, "all_reduce": 6}, {"all_reduce": 6}, "all_reduce_rms_norm"
    for found in four.run(fusion_llama.trained_llama, 2, inductor, LLAMAS, timeout_s=300):
        decode, train, sequence, bias, prefill, dynamic = found
        gathers = 7 if inductor and torch.__version__ >= "2.13" else 5  # torch 2.11 keeps the rows of others
        assert (decode, dynamic, prefill) == ({norm: 4}, {}, {"gemm_all_reduce": 4}), found
        assert train == ({**once, norm: 3} if inductor else {**joined, "gemm_all_reduce": 4}), found
        assert sequence == {"all_gather_gemm_and_rows": gathers, "gemm_reduce_scatter": 5}, found
        assert bias == ({**joined, norm: 3} if inductor else joined), found


@pytest.mark.long
def test_a_cached_graph_is_found_by_the_number_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time by new processes; a graph with another communicator's number is compiled anew."""
    said = []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for before in (0, 0, 1):
        with crew(2) as ranks:
            said.append(ranks.run(fusion_cases.cached, 2, str(tmp_path), before, timeout_s=110)[0])
    assert said == [(0, 1, ["row_parallel_linear"]), (1, 0, []), (0, 1, ["row_parallel_linear"])]
