"""The C3 study: a GEMM next to a collective."""
