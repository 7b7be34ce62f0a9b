"""The kernels of the collectives, in Triton. What they are made of is in ``sidelane.device``."""
