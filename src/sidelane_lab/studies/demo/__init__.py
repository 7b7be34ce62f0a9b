"""The demo on a machine without GPUs: a proof, real bytes between processes, and predictions."""
