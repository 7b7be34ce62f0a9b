"""Fused operators on GPUs: what CPU ranks do in tests/ops/test_fused.py, and graphs."""

from __future__ import annotations

import importlib.util
import re

import pytest
from device_pool import Pool, Ranks

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import fused_cases


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        ("fused_ops", "gemv_back_to_back", 60),
        ("fused_ops", "rms_norm_back_to_back", 100),
        ("fused_embeddings", "forward_back_to_back", 10),
        ("fused_embeddings", "backward_back_to_back", 10),
        ("fused_gemms", "back_to_back", 60),
        ("fused_gemm_family", "reductions_back_to_back", 60),
        ("fused_gemm_family", "gathers_back_to_back", 60),
        ("fused_gemms", "dispatches_back_to_back", 40),
        ("fused_tokens", "sums_back_to_back", 40),
        ("fused_tokens", "there_and_back", 20),
        ("fused_tokens", "left_out_of_used_buffers", 5),
    ],
)
def test_back_to_back(ranks: Ranks, module: str, name: str, calls: int) -> None:
    assert all(ranks.run(fused_cases.as_on_cpus, module, name, 7, calls, timeout_s=240))


def test_default_tiles(ranks: Ranks) -> None:
    ranks.run(fused_cases.as_on_cpus, "fused_gemm_family", "default_tiles", timeout_s=120)


def test_gemvs_with_default_tilings(ranks: Ranks) -> None:
    ranks.run(fused_cases.as_on_cpus, "fused_ops", "default_tilings", (4096, 2048), (1001, 515), timeout_s=150)


def test_large_norms(ranks: Ranks) -> None:
    sizes = [(1, 8192), (6, 6144), (16, 8192), (3, 16384), (128, 8192), (512, 8192), (512, 16384)]
    for found in ranks.run(fused_cases.as_on_cpus, "fused_ops", "large_norms", sizes, timeout_s=150):
        assert found >= {"cells"}


def test_norms_in_8_bits(ranks: Ranks) -> None:
    sizes = [(1, 8192), (3, 34), (16, 4096), (200, 8192)]
    assert min(ranks.run(fused_cases.as_on_cpus, "fused_ops", "quantized_norms", sizes, timeout_s=150)) == 72
    ranks.run(fused_cases.as_on_cpus, "fused_ops", "norms_of_nan", timeout_s=60)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("fused_ops", "gemv_calls"),
        ("fused_ops", "rms_norm_calls"),
        ("fused_embeddings", "embedding_calls"),
        ("fused_gemms", "wrong_calls"),
        ("fused_gemms", "wrong_splits"),
        ("fused_gemm_family", "wrong_reductions"),
        ("fused_gemm_family", "wrong_gathers"),
        ("fused_gemms", "wrong_dispatches"),
        ("fused_gemms", "wrong_split_dispatches"),
        ("fused_tokens", "wrong_calls"),
    ],
)
def test_what_is_refused(ranks: Ranks, module: str, name: str) -> None:
    *others, own = ranks.run(fused_cases.refusals, module, name, timeout_s=120)
    assert all(re.match(r"(Value|Type)Error: .*(value|allowed)=", line) for line in own), own
    for told in others:
        for line, reason in zip(told, own, strict=True):
            assert line.startswith("PeerError") and reason in line, (line, reason)


NAMES = ["gemv", "rms_norm", "embedding", "embedding_backward", "gemm", "gemm_reduce", "gather_gemm", "split"]
NAMES += ["dispatch_gemm", "counts_of_the_host", "tokens_once"]


@pytest.mark.parametrize("name", [*NAMES, "gemv_of_one_token", "rms_norm_pushed"])
def test_in_a_graph(ranks: Ranks, name: str) -> None:
    ranks.run(fused_cases.in_a_graph, name, 12, timeout_s=120)


@pytest.mark.parametrize("name", ["gemv", "rms_norm", "embedding", "gemm"])
def test_a_default_method_that_is_fused_in_graphs_only(ranks: Ranks, name: str) -> None:
    """Its first launch is the captured one."""
    ranks.run(fused_cases.in_a_graph, name, 4, True, timeout_s=120)


def test_calls_that_c_makes_again(ranks: Ranks) -> None:
    print(ranks.run(fused_cases.repeated_elsewhere, 100, timeout_s=150))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_on_several_streams(ranks: Ranks, captured: bool) -> None:
    assert all(ranks.run(fused_cases.on_several_streams, captured, timeout_s=120))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_experts_of_tokens_are_compiled_whole(ranks: Ranks, backend: str) -> None:
    assert all(ranks.run(fused_cases.as_on_cpus, "fused_tokens", "there_and_back", 5, 1, backend, timeout_s=170))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["linear", "embedding", "norm", "gemms", "reduced"])
def test_layers_are_trained_and_compiled_whole(ranks: Ranks, name: str, backend: str) -> None:
    assert all(ranks.run(fused_cases.as_on_cpus, "fused_modules", name, backend, timeout_s=170))


def test_products_and_collectives_are_replaced(ranks: Ranks) -> None:
    assert all(ranks.run(fused_cases.by_our_group, "replaced", timeout_s=170))


@pytest.mark.parametrize("name", ["norms", "batches"])
def test_patterns_are_replaced(fresh_pool: type[Pool], name: str) -> None:
    """In processes of their own: Dynamo of torch 2.11 skips a function of a gather for good once it has met it outside
    of what it compiles."""
    assert all(fresh_pool().run(fused_cases.by_our_group, name, timeout_s=170))


def test_several_experts_by_every_way(ranks: Ranks) -> None:
    assert all(ranks.run(fused_cases.as_on_cpus, "fused_experts", "back_to_back", 5, 8, timeout_s=170))


def test_tokens_travel_in_float8(ranks: Ranks) -> None:
    assert all(ranks.run(fused_cases.as_on_cpus, "fused_tokens", "by_float8", timeout_s=120))


def test_operators_run_with_reduced_overhead(fresh_pool: type[Pool]) -> None:
    """By a graph that torch.compile captures; in processes of their own, whose graphs end with them."""
    assert all(fresh_pool().run(fused_cases.as_on_cpus, "fused_modules", "reduce_overhead", timeout_s=170))


def test_timelines(ranks: Ranks) -> None:
    assert all(len(found) == 7 for found in ranks.run(fused_cases.as_on_cpus, "fused_timelines", "timelines"))
