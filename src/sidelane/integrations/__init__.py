"""PyTorch programs use Sidelane from here: the process group, and FSDP2. Nothing in it is imported before it is used."""
