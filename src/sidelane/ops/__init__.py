"""Fused operators: kernels that compute, and send what they have computed while they go on. They need Triton."""

from sidelane.ops.gemv import GemvAllReduce, gemv_all_reduce
from sidelane.ops.rms_norm import AllReduceRmsNorm, all_reduce_rms_norm

__all__ = ["AllReduceRmsNorm", "GemvAllReduce", "all_reduce_rms_norm", "gemv_all_reduce"]
