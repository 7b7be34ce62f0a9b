"""The study of chains: GEMM, all-gather, GEMM."""
