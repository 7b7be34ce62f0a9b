"""The bits of a row do not depend on its batch: what CPU ranks do in tests/ops/test_batch_bits.py, and by kernels."""

from __future__ import annotations

import pytest
from device_pool import Ranks

CASE = "fused_cases.as_on_cpus"


@pytest.mark.parametrize("hidden", [264, 4096])
def test_sums(ranks: Ranks, hidden: int) -> None:
    assert min(ranks.run(CASE, "batch_cases", "sums", (1, 2, 7, 64, 512, 2048), hidden, timeout_s=150)) > 0


@pytest.mark.parametrize("hidden", [260, 2048, 4096, 5120, 8192])
def test_norms(ranks: Ranks, hidden: int) -> None:
    assert min(ranks.run(CASE, "batch_cases", "norms", (1, 2, 7, 16, 64, 200, 512), hidden, timeout_s=170)) > 0


@pytest.mark.parametrize(("rows", "columns"), [(4096, 2048), (1001, 515)])
def test_gemvs(ranks: Ranks, rows: int, columns: int) -> None:
    assert min(ranks.run(CASE, "batch_cases", "gemvs", rows, columns, timeout_s=120)) > 0
