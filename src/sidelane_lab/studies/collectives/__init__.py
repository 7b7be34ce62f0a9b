"""The study of collectives by size."""
