"""What measures a machine with GPUs, part by part."""
