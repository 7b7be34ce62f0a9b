"""Entry points for PyTorch programs: the process group, DDP and FSDP2. Each part is imported on first use."""
