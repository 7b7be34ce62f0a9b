"""Shapes at which operators are measured, and predicted where nothing else is asked for."""

from __future__ import annotations

import random

MEANING = {
    "gemv_all_reduce": ("rows", "columns of all ranks", "tokens"),
    "all_reduce_rms_norm": ("tokens", "hidden"),
    "embedding_all_to_all": ("batch of all ranks", "tables of a rank", "pooling"),
    "gemm_all_to_all": ("rows of a rank", "depth", "columns"),
    "all_to_all_gemm": ("rows of a rank", "depth", "columns"),
    "gemm_reduce_scatter": ("rows", "depth of a rank", "columns"),
    "gemm_all_reduce": ("rows", "depth of a rank", "columns"),
    "all_gather_gemm": ("rows of a rank", "depth", "columns of a rank"),
}
"""The meaning of a shape's numbers, by operator."""

ON_GPUS: dict[str, tuple[tuple[int, ...], ...]] = {
    "gemv_all_reduce": (
        *((size, size, 1) for size in (4096, 8192, 16384)),
        (65536, 8192, 1),
        (8192, 28672, 1),
        (8192, 8192, 16),
    ),
    "all_reduce_rms_norm": ((6, 6144), (1, 8192), (16, 8192), (128, 8192), (138, 6144), (512, 8192)),
    "embedding_all_to_all": (
        *((256, 64, 70), (1024, 64, 1), (1024, 64, 8), (1024, 64, 32), (1024, 64, 70)),
        *((4096, 64, 70), (1024, 256, 32)),
    ),
    "gemm_all_to_all": ((4096, 2048, 4096), (4096, 2048, 7168), (8192, 1536, 4096), (16384, 4096, 7168)),
    "all_to_all_gemm": ((4096, 4096, 2048), (4096, 7168, 2048), (8192, 4096, 1536), (16384, 7168, 4096)),
    "gemm_reduce_scatter": ((4096, 4096, 8192), (4096, 14336, 8192), (8192, 14336, 8192)),
    "gemm_all_reduce": (
        *((64, 4096, 8192), (512, 4096, 8192), (2048, 4096, 8192)),
        *((4096, 4096, 8192), (4096, 14336, 8192)),
    ),
    "all_gather_gemm": ((2048, 8192, 4096), (2048, 8192, 14336), (4096, 8192, 14336)),
}

ON_CPUS: dict[str, tuple[tuple[int, ...], ...]] = {
    "gemv_all_reduce": ((20, 16, 1),),
    "all_reduce_rms_norm": ((2, 16),),
    "embedding_all_to_all": ((4, 2, 2),),
    "gemm_all_to_all": ((8, 16, 8),),
    "all_to_all_gemm": ((8, 16, 8),),
    "gemm_reduce_scatter": ((8, 16, 8),),
    "gemm_all_reduce": ((6, 16, 8),),
    "all_gather_gemm": ((4, 16, 8),),
}


HALF, EVENLY, EXPERTS = "half for one peer", "rows to all evenly", "experts by top-k"
"""How a GEMM's rows are spread. Times to choose by are those of the first one, and with several experts of the last."""

ROUTINGS = (HALF, EVENLY, EXPERTS)

EXPERTS_OF_A_RANK, TOP_K = 8, 2
"""Figures of ``EXPERTS``: each token goes to so many experts, of which few are liked more than others."""


def evenly(rows: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Rows from rank i to rank j: as many to each; the first ones get what is left, in turn.

    >>> evenly(7, 2)
    ((4, 3), (3, 4))
    """
    each, more = divmod(rows, ranks)
    return tuple(tuple(each + ((to - rank) % ranks < more) for to in range(ranks)) for rank in range(ranks))


def by_top_k(
    rows: int, ranks: int, experts: int = EXPERTS_OF_A_RANK, top_k: int = TOP_K, seed: int = 0
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows from the experts of rank i to the tokens of rank j, [ranks, ranks, experts]: each token has ``top_k``
    experts, drawn by a popularity that falls as 1 / sqrt(place). No rank has more than ``rows`` rows, sent or got.

    >>> counts = by_top_k(64, 2, experts=4)
    >>> max(sum(map(sum, row)) for row in counts) <= 64, sum(sum(row[1]) for row in counts)
    (True, 64)
    """
    draw = random.Random(seed)
    everyone = [(rank, expert) for rank in range(ranks) for expert in range(experts)]
    draw.shuffle(everyone)
    counts = [[[0] * experts for _ in range(ranks)] for _ in range(ranks)]
    room = [rows] * ranks
    top_k = min(top_k, len(everyone))
    liked = [1 / (1 + place) ** 0.5 for place in range(len(everyone))]
    for token in range(ranks * (rows // top_k)):
        # The largest of random numbers to the power of 1 / weight: draws without putting back.
        keys = sorted(range(len(everyone)), key=lambda one: -(draw.random() ** (1 / liked[one])))
        left = top_k
        for rank, expert in (everyone[one] for one in keys):
            if left and room[rank]:
                counts[rank][token % ranks][expert] += 1
                room[rank], left = room[rank] - 1, left - 1
    return tuple(tuple(tuple(part) for part in row) for row in counts)


def half_for_one(rows: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Rows from rank i to rank j: half go to the next rank, the rest to all evenly. Each sends and gets as many.

    >>> half_for_one(8, 2)
    ((2, 6), (6, 2))
    """
    share = rows // (2 * ranks)
    more = rows - ranks * share
    return tuple(tuple(share + more * (to == (rank + 1) % ranks) for to in range(ranks)) for rank in range(ranks))
