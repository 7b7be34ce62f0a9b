"""GEMMs, pairs and the taxonomy, with the numbers of the ConCCL paper and results/notes/hardware.md."""

from __future__ import annotations

import pytest

from sidelane.program.collective import Kind
from sidelane_lab.pairs.workload import (
    CPU_GEMM_FLOPS,
    TABLE_I,
    Bound,
    C3Class,
    Gemm,
    Workload,
    classify,
    format_bytes,
    parse_bytes,
    parse_gemm,
    parse_workload,
)

H200_FLOPS_PER_BYTE = 206.0


def test_the_paper_s_gemms_have_8192_tokens_in_one_dimension() -> None:
    # Forward projections have them as n, weight gradients as k: what tells us the order of the dimensions.
    forward = {tag: parse_gemm(tag) for tag in ("cb2", "cb4", "cb5")}
    gradients = {tag: parse_gemm(tag) for tag in ("cb3", "mb1", "mb2")}
    assert all(gemm.n == 8192 and gemm.k == 16384 for gemm in forward.values())
    assert all(gemm.k == 8192 and gemm.n != 8192 for gemm in gradients.values())
    assert set(forward) | set(gradients) | {"cb1"} == set(TABLE_I)


def test_operations_and_bytes_of_cb1() -> None:
    gemm = parse_gemm("cb1")
    assert gemm.flops == 2 * 8192**3
    assert gemm.nbytes == 3 * 8192**2 * 2
    # 1.41 ms at 770 TFLOP/s on an H200 (results/notes/hardware.md)
    assert gemm.flops / 1.41e-3 / 1e12 == pytest.approx(780, rel=0.02)


def test_bound_follows_the_traffic_that_is_given() -> None:
    gemm = parse_gemm("mb1")
    assert gemm.bound(H200_FLOPS_PER_BYTE) is Bound.COMPUTE
    # The paper calls it memory-bound by measured traffic, which is more than the least possible.
    assert gemm.bound(H200_FLOPS_PER_BYTE, measured_bytes=20 * gemm.nbytes) is Bound.MEMORY
    assert Gemm(1, 8192, 8192).bound(H200_FLOPS_PER_BYTE) is Bound.MEMORY  # a GEMV


@pytest.mark.parametrize(
    ("gemm_us", "comm_us", "expected"),
    [
        (1410.0, 1840.0, C3Class.C_LONG),  # cb1 and 896 MiB on four H200s; C-long in the paper's Table II too
        (11500.0, 1840.0, C3Class.G_LONG),  # mb1 and 896 MiB; G-long in the paper
        (114.9, 100.0, C3Class.GC_EQUAL),  # "more than 115%"
        (115.1, 100.0, C3Class.G_LONG),
        (100.0, 114.9, C3Class.GC_EQUAL),
        (100.0, 115.1, C3Class.C_LONG),
    ],
)
def test_classes(gemm_us: float, comm_us: float, expected: C3Class) -> None:
    assert classify(gemm_us, comm_us) is expected


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_classes_need_times(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        classify(*times)


def test_sizes_are_binary_and_read_back() -> None:
    # 896M is LLaMA-70B's fused gate and up projection in bf16, 3.25G that of LLaMA-405B.
    assert parse_bytes("896M") == 8192 * 57344 * 2
    assert parse_bytes("1.2G") == 1288490192, "whole elements of any dtype"
    assert parse_bytes("0.001K") == 16
    assert parse_bytes("3.25G") == parse_bytes("3.25 GiB") == 16384 * 106496 * 2
    for nbytes in (1, 1000, 1024, 1536, 896 << 20, 13 << 28, (1 << 30) + 1):
        assert parse_bytes(format_bytes(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1K", "1T", "1.3", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="^not a size"):
        parse_bytes(text)


def test_pairs_as_table_ii_writes_them() -> None:
    pair = parse_workload("mb2_3.25G", Kind.ALL_TO_ALL)
    assert pair == Workload(Gemm(16384, 106496, 8192, tag="mb2"), Kind.ALL_TO_ALL, 13 << 28)
    assert pair.name == "mb2_3.25G all_to_all"
    assert parse_workload("512x256x128_64K", dtype="float32").gemm == Gemm(512, 256, 128, "float32")


@pytest.mark.parametrize("text", ["cb1", "cb9_1M", "cb1_", "8x8_1M", "0x8x8_1M", "cb1_0"])
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(ValueError, match=r"^not a (pair|GEMM|size) |Gemm|Workload"):
        parse_workload(text)


def test_dtypes_are_those_of_gemms() -> None:
    with pytest.raises(ValueError, match="allowed=bfloat16"):
        parse_gemm("cb1", "int32")


@pytest.mark.parametrize("tag", sorted(TABLE_I))
def test_cpu_sizes_are_the_largest_that_fit(tag: str) -> None:
    whole = parse_workload(f"{tag}_896M")
    small = whole.scaled_for_cpu()
    divisor = small.gemm.divisor
    assert small.gemm.flops <= CPU_GEMM_FLOPS < whole.gemm.scaled(divisor // 2).flops
    assert small.nbytes == whole.nbytes // divisor
    assert small.gemm.name == f"{tag}/{divisor}"
    assert (small.gemm.m, small.gemm.n, small.gemm.k) == tuple(size // divisor for size in TABLE_I[tag])


def test_what_is_small_stays_as_it_is() -> None:
    small = parse_workload("64x64x64_4K", dtype="float32")
    assert small.scaled_for_cpu() == small
