"""Operators among the ranks of several nodes; the embedding is fused: slices leave while its kernel computes."""

from sidelane.ops.scale_out.embedding import EmbeddingAcrossNodes, embedding_all_to_all
from sidelane.ops.scale_out.ranks import ScaleOut
from sidelane.ops.scale_out.transport import GroupTransport, SliceTransport
from sidelane.ops.scale_out.unfused import all_to_all_rows, embedding_all_to_all_backward, gemm_all_to_all

__all__ = [
    "EmbeddingAcrossNodes",
    "GroupTransport",
    "ScaleOut",
    "SliceTransport",
    "all_to_all_rows",
    "embedding_all_to_all",
    "embedding_all_to_all_backward",
    "gemm_all_to_all",
]
