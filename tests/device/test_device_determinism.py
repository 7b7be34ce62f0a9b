"""Sums in the order of the ranks on GPUs: by copy engines, by every kernel, in graphs and in fused operators."""

from __future__ import annotations

from device_pool import Ranks

CASE = "fused_cases.as_on_cpus"
SIZES = (1, 7, 64, 1000, 40_003, 1 << 20, (8 << 20) + 5)


def test_every_form_of_a_sum(ranks: Ranks) -> None:
    assert min(ranks.run(CASE, "order_cases", "everything", SIZES, timeout_s=170)) > 0


def test_fused_sums(ranks: Ranks) -> None:
    assert min(ranks.run(CASE, "order_cases", "fused", timeout_s=120)) > 0
