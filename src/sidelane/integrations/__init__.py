"""PyTorch programs use Sidelane from here: the process group. Nothing in it is imported before it is used."""
