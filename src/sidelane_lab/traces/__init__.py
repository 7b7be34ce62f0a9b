"""Execution traces: Chakra's and PyTorch's are read, replayed on described machines, and written."""
