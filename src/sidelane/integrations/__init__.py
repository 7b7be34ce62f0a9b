"""Entry points for PyTorch programs: the process group and what FSDP2 needs. Each part is imported on first use."""
