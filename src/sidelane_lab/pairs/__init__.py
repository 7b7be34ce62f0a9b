"""A computation and a collective, run together under every strategy and judged."""
