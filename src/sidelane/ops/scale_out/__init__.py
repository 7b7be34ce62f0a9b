"""The embedding among the ranks of several nodes, fused: slices leave while its kernel computes."""

from sidelane.ops.scale_out.embedding import embedding_all_to_all, embedding_all_to_all_backward
from sidelane.ops.scale_out.ranks import ScaleOut
from sidelane.ops.scale_out.transport import GroupTransport

__all__ = [
    "GroupTransport",
    "ScaleOut",
    "embedding_all_to_all",
    "embedding_all_to_all_backward",
]
