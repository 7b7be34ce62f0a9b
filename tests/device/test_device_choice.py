"""The proof of what ran, held against a profiler: collectives on copy engines launch no kernel."""

from __future__ import annotations

import pytest
from device_pool import Pool


@pytest.mark.parametrize("numel", [1000, 1 << 20])
def test_copy_engine_collectives_launch_no_kernel(fresh_pool: type[Pool], numel: int) -> None:
    # Ranks of their own: profiling disturbs what a process does later.
    results = fresh_pool().run("choice_cases.profiled", numel, timeout_s=150)
    for seen in results:
        for label, (names, kernels, peer_copies) in seen.items():
            small = "beside compute" in label and numel == 1000  # auto takes a kernel
            if label in ("all_reduce", "all_gather one_shot") or small:
                # What launches kernels is seen to: the profiler works, and the proof is not a constant.
                assert names, label
                assert kernels >= 1, label
                continue
            assert names == [], label
            assert kernels == 0, label
            striped = "striped" in label or ("beside compute" in label and peer_copies >= len(results))  # auto may
            halves = 2 if striped else 1
            assert peer_copies == halves * (len(results) - 1), label
