"""The proof of what ran, held against a profiler: collectives on copy engines launch no kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_context import Context
from device_pool import Pool

from sidelane import Communicator, Config
from sidelane.choice.candidate import SM
from sidelane_lab.baselines.baselines_cuda import kernels_of

Seen = dict[str, tuple[list[str], int, int]]
"""By label: names of kernels that the profiler saw; kernels and peer copies that the proof counts."""


def profiled(context: Context, numel: int) -> Seen:
    """Each call once to prepare it, once under the profiler."""
    device = context.device
    seen: Seen = {}
    with Communicator(device=device, config=Config(timeout_s=30)) as comm:
        n, rank = comm.world_size, comm.rank
        whole, other = comm.empty(n * numel), comm.empty(n * numel)
        source, shard = torch.ones(n * numel, device=device), torch.ones(numel, device=device)
        part = whole[rank * numel : (rank + 1) * numel]
        whole.zero_()

        def look(label: str, call: Callable[[], object]) -> None:
            for _ in range(3):  # as it is made when it repeats
                call()
            comm.synchronize()
            torch.cuda.synchronize()
            names = kernels_of(call)
            submitted = comm.last_submitted()
            assert submitted is not None
            counts = submitted.counts
            seen[label] = (names, counts.kernels, counts.peer_copies)

        look("all_gather", lambda: comm.all_gather(whole, shard, variant="b2b"))
        look("all_gather in place", lambda: comm.all_gather(whole, part, variant="b2b"))
        look("all_gather beside compute", lambda: comm.all_gather(whole, shard, beside="compute"))
        look("all_to_all", lambda: comm.all_to_all(other, source, variant="b2b"))
        look("all_to_all beside compute", lambda: comm.all_to_all(other, source, beside="compute"))
        look("all_reduce", lambda: comm.all_reduce(source, variant="b2b"))
        if SM in comm.abilities.implementations:
            look("all_gather one_shot", lambda: comm.all_gather(whole, shard, variant="one_shot"))
        for variant in ("b2b", "striped"):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(graph, stream=stream):
                comm.all_gather(whole, part, variant=variant)
            captured = comm.last_submitted()
            assert captured is not None
            assert captured.captured
            graph.replay()
            torch.cuda.synchronize()
            counts, names = captured.counts, kernels_of(graph.replay)
            seen[f"all_gather {variant} in a caller's graph"] = (names, counts.kernels, counts.peer_copies)
    return seen


@pytest.mark.parametrize("numel", [1000, 1 << 20])
def test_copy_engine_collectives_launch_no_kernel(fresh_pool: type[Pool], numel: int) -> None:
    # Ranks of their own: profiling disturbs what a process does later.
    results = fresh_pool().run(profiled, numel, timeout_s=150)
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
