"""Shapes at which operators are measured, and predicted where nothing else is asked for."""

from __future__ import annotations

MEANING = {
    "gemv_all_reduce": ("rows", "columns of all ranks", "tokens"),
    "all_reduce_rms_norm": ("tokens", "hidden"),
    "embedding_all_to_all": ("batch of all ranks", "tables of a rank", "pooling"),
    "gemm_all_to_all": ("rows of a rank", "depth", "columns"),
    "gemm_reduce_scatter": ("rows", "depth of a rank", "columns"),
    "gemm_all_reduce": ("rows", "depth of a rank", "columns"),
    "all_gather_gemm": ("rows of a rank", "depth", "columns of a rank"),
}
"""What the numbers of a shape are, by operator."""

ON_GPUS: dict[str, tuple[tuple[int, ...], ...]] = {
    "gemv_all_reduce": (
        *((size, size, 1) for size in (4096, 8192, 16384)),
        (65536, 8192, 1),
        (8192, 28672, 1),
        (8192, 8192, 16),
    ),
    "all_reduce_rms_norm": ((6, 6144), (1, 8192), (16, 8192), (128, 8192), (512, 8192)),
    "embedding_all_to_all": (
        *((256, 64, 70), (1024, 64, 1), (1024, 64, 8), (1024, 64, 32), (1024, 64, 70)),
        *((4096, 64, 70), (1024, 256, 32)),
    ),
    "gemm_all_to_all": ((4096, 2048, 4096), (4096, 2048, 7168), (8192, 1536, 4096), (16384, 4096, 7168)),
    "gemm_reduce_scatter": ((4096, 4096, 8192), (4096, 14336, 8192), (8192, 14336, 8192)),
    "gemm_all_reduce": ((64, 4096, 8192), (512, 4096, 8192), (4096, 14336, 8192)),
    "all_gather_gemm": ((2048, 8192, 4096), (2048, 8192, 14336), (4096, 8192, 14336)),
}

ON_CPUS: dict[str, tuple[tuple[int, ...], ...]] = {
    "gemv_all_reduce": ((20, 16, 1),),
    "all_reduce_rms_norm": ((2, 16),),
    "embedding_all_to_all": ((4, 2, 2),),
    "gemm_all_to_all": ((8, 16, 8),),
    "gemm_reduce_scatter": ((8, 16, 8),),
    "gemm_all_reduce": ((6, 16, 8),),
    "all_gather_gemm": ((4, 16, 8),),
}


def half_for_one(rows: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Rows from rank i to rank j: half go to the next rank, the rest to all evenly. Each sends and gets as many.

    >>> half_for_one(8, 2)
    ((2, 6), (6, 2))
    """
    share = rows // (2 * ranks)
    more = rows - ranks * share
    return tuple(tuple(share + more * (to == (rank + 1) % ranks) for to in range(ranks)) for rank in range(ranks))
