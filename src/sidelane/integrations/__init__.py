"""PyTorch programs use Sidelane from here: the process group, and FSDP2. Nothing is imported before it is used."""
