"""Fused operators among the ranks of several nodes: slices for other nodes leave while the kernel computes."""

from sidelane.ops.scale_out.embedding import EmbeddingAcrossNodes, embedding_all_to_all
from sidelane.ops.scale_out.embedding_backward import BackwardAcrossNodes, embedding_all_to_all_backward
from sidelane.ops.scale_out.gemm import GemmAcrossNodes, all_to_all_rows, gemm_all_to_all
from sidelane.ops.scale_out.ranks import ScaleOut
from sidelane.ops.scale_out.transport import GroupTransport, SliceTransport, SocketTransport

__all__ = [
    "BackwardAcrossNodes",
    "EmbeddingAcrossNodes",
    "GemmAcrossNodes",
    "GroupTransport",
    "ScaleOut",
    "SliceTransport",
    "SocketTransport",
    "all_to_all_rows",
    "embedding_all_to_all",
    "embedding_all_to_all_backward",
    "gemm_all_to_all",
]
