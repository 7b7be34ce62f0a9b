"""Fused operators: kernels that compute, and send their results while they go on. They need Triton."""

from sidelane.ops.attention import (
    register_attention,
    reshard,
    sequence_parallel_attention,
    sequence_positions,
)
from sidelane.ops.decode_context import combine_attention
from sidelane.ops.dispatch_gemm import all_to_all_gemm
from sidelane.ops.embedding import embedding_all_to_all
from sidelane.ops.embedding_backward import embedding_all_to_all_backward
from sidelane.ops.experts import ExpertRoutes, combine_tokens, dispatch_tokens, route_experts
from sidelane.ops.gemm import gemm_all_to_all
from sidelane.ops.gemv import gemv_all_reduce
from sidelane.ops.modules import EmbeddingBagAllToAll, RowParallelLinear
from sidelane.ops.operator import explain
from sidelane.ops.pipelined_gemm import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from sidelane.ops.rms_norm import all_reduce_rms_norm
from sidelane.ops.rows import all_to_all_rows
from sidelane.ops.timeline import Timeline

__all__ = [
    "EmbeddingBagAllToAll",
    "ExpertRoutes",
    "RowParallelLinear",
    "Timeline",
    "all_gather_gemm",
    "all_reduce_rms_norm",
    "all_to_all_gemm",
    "all_to_all_rows",
    "combine_attention",
    "combine_tokens",
    "dispatch_tokens",
    "embedding_all_to_all",
    "embedding_all_to_all_backward",
    "explain",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_reduce_scatter",
    "gemv_all_reduce",
    "register_attention",
    "reshard",
    "route_experts",
    "sequence_parallel_attention",
    "sequence_positions",
]
