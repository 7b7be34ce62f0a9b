"""The kernels of the collectives, in Triton, made of the functions in ``sidelane.device``."""
