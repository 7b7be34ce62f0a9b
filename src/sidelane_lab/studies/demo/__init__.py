"""What ``sidelane demo`` shows on a machine without GPUs: a proof, real bytes between processes, and predictions."""
