"""Fused operators: kernels that compute, and send what they have computed while they go on. They need Triton."""

from sidelane.ops.gemv import GemvAllReduce, gemv_all_reduce

__all__ = ["GemvAllReduce", "gemv_all_reduce"]
