"""A matrix product that leaves room on the compute units for a collective (overlap paper, 3.1 and 3.4)."""
