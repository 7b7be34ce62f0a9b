"""The study of ordinary memory: what collectives cost where the caller's tensors are not symmetric."""
