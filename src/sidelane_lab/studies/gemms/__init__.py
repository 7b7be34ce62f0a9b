"""The study of GEMMs alone: the projections of language models, on one GPU or a CPU core."""
