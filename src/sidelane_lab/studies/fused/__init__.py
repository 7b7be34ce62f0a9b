"""The study of fused operators: each next to its computation followed by a collective."""
